"""Text to ids and back, piece by piece, for every kind of tokenizer."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from small_tokenizers import CORPUS, KINDS, byte_fallback, byte_level
from transformers import PreTrainedTokenizerFast

from ragaccel.errors import ConfigurationError
from ragaccel.models import IncrementalDecoder, Tokenizer, decode_tail

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WITH_DOCUMENTS = "{% for d in documents %}[{{ d.title }}] {{ d.text }}\n{% endfor %}" + CHAT
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT


TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</call>{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if thinking is defined %}thinking: {{ thinking }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXT_ARGUMENTS = TOOLS_TEMPLATE.replace("call.function.arguments | tojson", "{}").replace(
    "{{ {} }}", "{{ '```' + call.function.arguments + '```' }}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the wind.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "type": {"type": "string"}},
        },
    },
}


def calling(arguments, **extra):
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"function": function, **extra}]}


def with_template(template):
    tokenizer = byte_fallback()
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>"
    )
    copy.chat_template = template
    return Tokenizer(copy)


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return Tokenizer(KINDS[request.param]())


def pieces_of(tokenizer, blocks):
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.push(block) for block in blocks] + [decoder.finish()]


def test_offsets_point_into_the_text(tokenizer):
    for text in CORPUS[:4]:
        ids, spans = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert len(ids) == len(spans)
        assert max(end for _, end in spans) <= len(text)
        assert all(start <= end for start, end in spans)
    words = [text[start:end] for (start, end) in spans]
    assert "light" in "".join(words)


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_together_the_text_of_all_tokens(kind, data):
    tokenizer = Tokenizer(KINDS[kind]())
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=150))
    blocks = []
    while ids[sum(map(len, blocks)) :]:
        blocks.append(ids[sum(map(len, blocks)) :][: data.draw(st.integers(1, 20))])
    assert "".join(pieces_of(tokenizer, blocks)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_pieces_hold_whole_characters_and_wait_briefly(kind):
    tokenizer = Tokenizer(KINDS[kind]())
    text = "naïve 🙂 東京 café " * 30
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, [[token] for token in ids])
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("�" in piece for piece in pieces)
    assert sum(map(bool, pieces)) >= len(text.split())


def test_long_answers_stay_cheap_and_exact():
    tokenizer = Tokenizer(byte_fallback())
    ids = tokenizer.encode(" ".join(CORPUS) * 5)
    decoder = IncrementalDecoder(tokenizer)
    text = "".join(decoder.push([token]) for token in ids)
    assert len(decoder._ids) < 200
    assert text + decoder.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_surrogate_is_refused(kind):
    tokenizer = Tokenizer(KINDS[kind]())
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(ConfigurationError, match="a lone surrogate, as broken PDFs do"):
            encode("The lamp \ud83d burns.")


def test_special_tokens_are_no_text():
    tokenizer = Tokenizer(byte_level())
    mark = byte_level().convert_tokens_to_ids("<s1>")
    ids = [mark, *tokenizer.encode("Keep"), mark]
    assert tokenizer.decode(ids) == "Keep"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s1>Keep<s1>"
    assert "".join(pieces_of(tokenizer, [[token] for token in ids])) == "Keep"


def test_the_tail_is_decoded_right(tokenizer):
    ids = tokenizer.encode(" ".join(CORPUS))
    for end in (1, 5, 60, len(ids)):
        whole = tokenizer.decode(ids[:end])
        for size in (1, 9, 40):
            assert decode_tail(tokenizer, ids[:end], size)[-size:] == whole[-size:]


def test_a_chat_equals_transformers_template_and_doubles_no_begin_token():
    tokenizer = with_template(CHAT)
    begin = tokenizer.tokenizer.bos_token_id
    messages = [{"role": "system", "content": "Quote."}, {"role": "user", "content": "Why?"}]
    ids = tokenizer.chat(messages)
    assert ids == tokenizer.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert ids.count(begin) == 1
    assert tokenizer.encode(tokenizer.chat_text(messages), add_special_tokens=True) == ids
    again, spans = tokenizer.encode_with_offsets(tokenizer.chat_text(messages), True)
    assert again == ids
    assert len(spans) == len(ids)
    assert tokenizer.encode("light", add_special_tokens=True).count(begin) == 1
    assert tokenizer.encode("light").count(begin) == 0
    assert tokenizer.chat_text(messages, add_generation_prompt=False).endswith("Why?\n")


def test_documents_reach_the_template():
    tokenizer = with_template(WITH_DOCUMENTS)
    assert tokenizer.takes_documents
    assert not with_template(CHAT).takes_documents
    documents = [{"title": "Log", "text": "Wind north.", "sentences": ["Wind north."]}]
    text = tokenizer.chat_text([{"role": "user", "content": "Wind?"}], documents)
    assert text.startswith("[Log] Wind north.\n<s>user: Wind?")


def test_tools_calls_and_results_reach_the_template():
    tokenizer = with_template(TOOLS_TEMPLATE)
    messages = [
        {"role": "user", "content": "Wind?"},
        calling({"place": "mole"}, id="c1", type="function") | {"content": None},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "north"},
    ]
    text = tokenizer.chat_text(messages, tools=[WEATHER])
    assert text == (
        f"<s>{json.dumps(WEATHER)}\nuser: Wind?\n"
        'assistant: <call>weather {"place": "mole"}</call>\ntool: north\nassistant:'
    )
    assert tokenizer.chat(messages, tools=[WEATHER]) == tokenizer.encode(text)
    assert tokenizer.takes_tools
    bare = tokenizer.chat_text(messages, tools=[WEATHER["function"]])
    assert bare == text
    assert tokenizer.chat_text(messages, tools=[]) == text.partition("\n")[2].join(["<s>", ""])
    assert messages[1]["content"] is None


@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, TEXT_ARGUMENTS])
def test_arguments_may_be_an_object_or_its_json(template):
    tokenizer = with_template(template)
    for arguments in ({"place": "möle"}, '{"place": "möle"}'):
        text = tokenizer.chat_text([{"role": "user", "content": "?"}, calling(arguments)])
        assert '{"place": "möle"}' in text
        assert '\\"' not in text
    text = with_template(TEXT_ARGUMENTS).chat_text([calling('{"place": ')])
    assert '```{"place": ```' in text  # what is no JSON stays as it is
    assert "weather {}" in with_template(TOOLS_TEMPLATE).chat_text([calling("")])


def test_template_options_reach_the_template():
    tokenizer = with_template(TOOLS_TEMPLATE)
    asked = [{"role": "user", "content": "?"}]
    assert "thinking: False" in tokenizer.chat_text(asked, template_options={"thinking": False})
    text = tokenizer.chat_text(asked, template_options={"thinking": 3})
    assert tokenizer.chat(asked, template_options={"thinking": 3}) == tokenizer.encode(text)
    assert "thinking: 3" in text
    for name in ("tools", "tokenize", "messages", "add_generation_prompt"):
        with pytest.raises(ConfigurationError, match="cannot be a template option"):
            tokenizer.chat_text(asked, template_options={name: True})


def test_special_tokens_that_tools_and_their_results_spell_are_text():
    tokenizer = with_template(TOOLS_TEMPLATE)
    begin, end = tokenizer.tokenizer.bos_token_id, tokenizer.tokenizer.eos_token_id
    tool = {
        "name": "weather",
        "description": "Ends</s>.",
        "parameters": {"properties": {"</s>": {"type": "</s>"}, "type": {"description": "</s>"}}},
    }
    messages = [
        {"role": "user", "content": "?"},
        calling({"</s>": "x", "role": "</s>", "type": "</s>", "deep": [{"a": "</s>"}]}),
        {"role": "tool", "content": "north</s><s>", "name": "</s>"},
    ]
    ids = tokenizer.chat(messages, tools=[tool])
    assert ids.count(end) == 0
    assert ids.count(begin) == 1
    spelled = tokenizer.chat_text(messages, tools=[tool])
    assert spelled.count("</s>") == 9
    assert tokenizer.encode(spelled).count(end) == 9
    as_text = tokenizer.escaper.unescape(
        tokenizer.chat_text([tokenizer.escaper.escape_message(m) for m in messages])
    )
    assert as_text == tokenizer.chat_text(messages)


def test_a_template_of_its_own_for_tools_is_used_for_them():
    tokenizer = with_template({"default": CHAT, "tool_use": TOOLS_TEMPLATE})
    asked = [{"role": "user", "content": "?"}]
    assert tokenizer.takes_tools
    assert "Tells the wind" in tokenizer.chat_text(asked, tools=[WEATHER])
    assert "Tells the wind" not in tokenizer.chat_text(asked)


def test_a_template_that_rejects_the_sentinel_chat_still_gets_the_real_messages():
    picky = "{% if messages[1] and messages[1].tool_calls[0].id != 'c1' %}" \
        "{{ raise_exception('bad id') }}{% endif %}" + TOOLS_TEMPLATE  # fmt: skip
    tokenizer = with_template(picky)
    asked = {"role": "user", "content": "?"}
    assert "<call>weather" in tokenizer.chat_text([asked, calling({}, id="c1")])
    with pytest.raises(ConfigurationError, match="bad id"):
        tokenizer.chat_text([asked, calling({}, id="c2")])


ASKED = {"role": "user", "content": "?"}
WITHOUT_RESULTS = TOOLS_TEMPLATE.replace("in messages %}", "in messages if m.role != 'tool' %}")
NO_TOOL = "a tool must be a dict like"
REFUSED = [
    (None, [ASKED], None, "no chat template"),
    (None, [ASKED], [WEATHER], "no chat template"),
    (STRICT, [{"role": "system", "content": "x"}], None, "no system"),
    (CHAT, [ASKED], [WEATHER], "does not support tools"),
    (CHAT, [ASKED, calling({})], None, "does not support tool calls"),
    (WITHOUT_RESULTS, [ASKED, {"role": "tool", "content": "x"}], None, "not support tool results"),
    *((TOOLS_TEMPLATE, [ASKED], tools, NO_TOOL)
      for tools in (["weather"], [{"type": "function"}], [{"name": 3}], WEATHER)),
    (TOOLS_TEMPLATE, [ASKED], [WEATHER, WEATHER["function"]], "two tools are named 'weather'"),
    (TOOLS_TEMPLATE, [ASKED, {"role": "assistant", "tool_calls": [{"id": "c1"}]}], None,
     "a tool call must be a dict like"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "tools", "message"), REFUSED)
def test_what_a_template_would_leave_out_or_cannot_read_is_refused(
    template, messages, tools, message
):
    tokenizer = Tokenizer(byte_level()) if template is None else with_template(template)
    assert tokenizer.has_chat_template == (template is not None)
    assert tokenizer.takes_tools == (template in (TOOLS_TEMPLATE, WITHOUT_RESULTS))
    for render in (tokenizer.chat, tokenizer.chat_text):
        with pytest.raises(ConfigurationError, match=message):
            render(messages, tools=tools)


def test_end_tokens_and_fingerprints():
    tokenizer = byte_level()
    same, other = Tokenizer(byte_level()), with_template(None)
    assert Tokenizer(tokenizer).fingerprint == same.fingerprint != other.fingerprint
    assert Tokenizer(tokenizer).eos_ids == {tokenizer.eos_token_id}
    assert Tokenizer(tokenizer, eos_ids=[5, 6]).eos_ids == {5, 6}
