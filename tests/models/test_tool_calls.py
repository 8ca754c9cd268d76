"""Tool calls are parsed as templates write them; other text raises no error."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from tool_templates import TEMPLATES, tokenizer_with, tool_tokenizer

from ragaccel.errors import ConfigurationError
from ragaccel.models import (
    Tokenizer,
    ToolCall,
    ToolFormat,
    detect_tool_format,
    resolve_tool_choice,
    tool_calls,
)

ARGUMENTS = {
    "place": 'the "mole" \\ pier, {north} [1]\nsecond line; né',
    "count": 3,
    "ratio": -0.5,
    "deep": {"list": [1, None, "x", True], "empty": {}},
    "flag": False,
}
TYPES = {"place": "string", "count": "integer", "ratio": "number", "deep": "object",
         "flag": "boolean"}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Tells it.", "parameters": PARAMETERS},
    }
    for name in ("wind", "tide")
]
ASKED = {"role": "user", "content": "Wind?"}
THOUGHT = "<think>\n\n</think>"
# Templates that write one call per answer, or no text beside calls.
ONE_CALL = {"llama"}
NO_TEXT = {"llama", "mistral old", "mistral new", "mistral ids"}

HERMES = ToolFormat(markers=("<tool_call>",), closers=("</tool_call>",), special_tokens=("<end>",))
LLAMA = ToolFormat(markers=("<|python_tag|>",), is_bare=True, special_tokens=("<|python_tag|>",))
BOTH = ToolFormat(markers=("<tool_call>", "[TOOL_CALLS]"), closers=("</tool_call>",), is_bare=True)


@pytest.fixture(params=TEMPLATES)
def name(request):
    return request.param


def answer(name, calls, content=""):
    """Return the answer that calls these tools, as the template writes it."""
    tokenizer = tool_tokenizer(name)
    made = [
        {
            "type": "function",
            "id": f"call0000{number}",
            "function": {"name": tool, "arguments": arguments},
        }
        for number, (tool, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": made}
    asked = tokenizer.chat_text([ASKED], tools=TOOLS)
    text = tokenizer.chat_text([ASKED, message], add_generation_prompt=False, tools=TOOLS)
    assert text.startswith(asked)
    return text[len(asked) :]


def brief(calls):
    return [(call.name, call.arguments, call.is_valid) for call in calls]


def test_calls_are_read_back_in_order_as_the_template_writes_them(name):
    found = detect_tool_format(tool_tokenizer(name))
    calls = [("wind", ARGUMENTS), ("tide", {}), ("wind", {"place": "]</tool_call"})]
    if name == "glm":
        calls[1] = ("tide", {"place": ""})  # without arguments it has no tag of its own
    for some in (calls[:1], calls) if name not in ONE_CALL else (calls[:1],):
        content, parsed = found.parse(answer(name, some), TOOLS)
        assert brief(parsed) == [(*call, True) for call in some]
        assert content in ("", THOUGHT)


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - NO_TEXT))
def test_text_beside_calls_is_the_content(name):
    found = detect_tool_format(tool_tokenizer(name))
    said = "Let me see [1].\nThe answer {is} near."
    text = answer(name, [("wind", {"place": "x"})], said if name != "pythonic" else said + "\n")
    content, calls = found.parse(text, TOOLS)
    assert content.removeprefix(f"{THOUGHT}\n\n") == said
    assert brief(calls) == [("wind", {"place": "x"}, True)]


def test_an_answer_without_calls_is_its_content_and_shown_at_once(name):
    found = detect_tool_format(tool_tokenizer(name))
    text = "The wind [1] is north (see {this}).\n[2] says `f(x)`: \n{ok}\n```json\n[1]\n```\n"
    end = tool_tokenizer(name).eos_tokens[0]
    assert found.parse(text + end, TOOLS) == (text, ())
    assert found.parse(text) == (text, ())
    text = "The wind [1] is north.\n[2] says `f(x)`.\n```python\nf()\n```\nEnd"
    assert found.stable_content(text) == found.stable_content(text + " \n") == text
    assert found.stable_content("caf\ufffd") == "caf"  # an incomplete character


def test_an_opening_forces_the_call_and_no_part_of_one_is_shown(name):
    tokenizer = tool_tokenizer(name)
    found = detect_tool_format(tokenizer)
    text = answer(name, [("wind", {"place": "x"})]).removeprefix(f"{THOUGHT}\n\n")
    assert text.startswith(found.opening("wind"))
    assert found.opening("wind").startswith(found.opening())
    assert "sentinel" not in found.opening("wind")
    special = [token for token in found.special_tokens if token in found.opening()]
    ids = tokenizer.encode(found.opening())
    assert [i for i in ids if i in tokenizer.tokenizer.all_special_ids] == (
        tokenizer.tokenizer.convert_tokens_to_ids(special)
    )
    for end in range(len(text)):
        assert found.stable_content(f"Well.\n{text[:end]}") == "Well."


def test_a_call_that_is_cut_off_is_invalid_and_not_half_read(name):
    found = detect_tool_format(tool_tokenizer(name))
    arguments = {"place": "the mole", "count": 12345}
    whole = answer(name, [("wind", arguments)])
    for size in range(60):
        text = whole[: max(0, len(whole) - size)]
        _, calls = found.parse(text, TOOLS)
        assert len(calls) <= 1
        for call in calls:
            assert call.arguments == (arguments if call.is_valid else {})
            assert call.name == "wind" if call.is_valid else "wind".startswith(call.name)
            assert call.text in text


@pytest.mark.parametrize("name", ["mistral old", "marked pythonic", "llama"])
def test_tokens_without_special_ones_still_show_bare_calls_of_known_tools(name):
    found = detect_tool_format(tool_tokenizer(name))
    text = answer(name, [("wind", ARGUMENTS)])
    for token in found.special_tokens:
        text = text.replace(token, "")
    assert brief(found.parse(text, TOOLS)[1]) == [("wind", ARGUMENTS, True)]
    assert found.parse(text.replace("wind", "unknown"), TOOLS)[1] == ()


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ('\n{"name": "wind", "arguments": {"a": }}\n</tool_call>', "wind", "not JSON"),
        ('{"name": "wind", "arguments": [1]}</tool_call>', "wind", "not a JSON object"),
        ('{"name": "wind", "arguments": "nonsense"}</tool_call>', "wind", "not JSON"),
        ('{"name": "wind", "arguments": {"a": NaN}}</tool_call>', "wind", "not JSON"),
        ('{"name": "wind", "arguments": {"a": 1e999}}</tool_call>', "wind", "not JSON"),
        ('{"arguments": {}}</tool_call>', "", "names no function"),
        ('{"name": 3, "arguments": {}}</tool_call>', "", "names no function"),
        ("{'name': 'wind'}</tool_call>", "", "not JSON"),
        ("nothing</tool_call>", "", "no call"),
        ("", "", "no call"),
        ('{"name": "wind", "argu', "wind", "not JSON"),
        ('{"name": "wi', "", "not JSON"),
        ('{"a":' * 5000, "", "not JSON"),
        ("[wind(a=b)]</tool_call>", "wind", "not literals"),
        ("[wind(__import__('os').system('x'))]</tool_call>", "wind", "no names"),
        ("[wind(a=__import__('os').getcwd())]</tool_call>", "wind", "not literals"),
        ("[wind(**{'a': 1})]</tool_call>", "wind", "no names"),
        ("[wind(a=1]</tool_call>", "wind", "not a Python call"),
        ("[wind(a=1, a=2)]</tool_call>", "wind", "given twice"),
        ("[wind(a={[1]: 2})]</tool_call>", "wind", "not literals"),
        ("[wind(a=b'x')]</tool_call>", "wind", "not JSON"),
        ("[wind(a=" + "(" * 5000 + ")" * 5000 + ")]</tool_call>", "wind", "Python"),
        ("[wind(a='x</tool_call>", "wind", "end is missing"),
        ("<function=wind><parameter=a>1</function></tool_call>", "wind", "end is missing"),
        ("<function=wind><parameter=a>1</parameter>", "wind", "end is missing"),
        ("wind<arg_key>a</arg_key><arg_value>1</arg_value>", "wind", "end is missing"),
        ("call:wind{a:1", "wind", "end is missing"),
        ("call:wind{a:[1}}", "wind", "not JSON"),
        ("wind[ARGS]{", "wind", "not JSON"),
        ("wind[ARGS]3", "wind", "not a JSON object"),
    ],
)
def test_malformed_calls_are_reported(text, name, error):
    content, (call,) = HERMES.parse(f"First.\n<tool_call>{text}<end>")
    assert content == "First."
    assert not call.is_valid
    assert (call.name, call.arguments) == (name, {})
    assert error in call.error
    assert call.text in text
    assert call.text or not text


def test_a_malformed_call_does_not_hide_adjacent_calls():
    good = '<tool_call>\n{"name": "wind", "arguments": {}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "tide", "arguments": {"a"}}\n</tool_call>'
    content, calls = HERMES.parse(f"A{good}B{bad}C{good}D<end>")
    assert content == "A\nB\nC\nD"
    assert brief(calls) == [("wind", {}, True), ("tide", {}, False), ("wind", {}, True)]
    unclosed = '<tool_call>\n{"name": "tide", "arg\n'
    assert [c.is_valid for c in HERMES.parse(f"{unclosed}{good}")[1]] == [False, True]


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
def test_arguments_may_be_an_object_or_its_text(key):
    for arguments in ('{"a": 1}', '"{\\"a\\": 1}"', '{\n "a":\n 1}'):
        spelled = f'{{"name": "wind", "{key}": {arguments}}}'
        nested = f'{{"type": "function", "function": {spelled}, "id": "c1"}}'
        for text in (spelled, nested):
            ((call,)) = HERMES.parse(f"<tool_call>{text}</tool_call>")[1]
            assert (call.name, call.arguments) == ("wind", {"a": 1})
        assert call.call_id == "c1"
    for empty in ('{"name": "wind"}', f'{{"name": "wind", "{key}": null}}'):
        assert brief(HERMES.parse(f"<tool_call>{empty}")[1]) == [("wind", {}, True)]


def test_thoughts_call_nothing():
    call = '<tool_call>{"name": "wind", "arguments": {}}</tool_call>'
    thought = f"<think>I might {call} it.</think>\n"
    assert HERMES.parse(thought + "No.") == (thought + "No.", ())
    assert HERMES.parse(f"<think>{call}") == (f"<think>{call}", ())
    content, calls = HERMES.parse(thought + call + thought + call)
    assert content == thought.strip() + "\n" + thought.strip()
    assert len(calls) == 2
    begun = "It was asked.</think>\n"  # where the prompt holds the beginning
    assert HERMES.parse(begun + call)[0] == begun.rstrip()
    pondered = 'Perhaps\n{"name": "wind", "parameters": {}}\n</think>\nNo.'
    assert LLAMA.parse(pondered, TOOLS) == (pondered, ())
    spelled = '<tool_call>{"name": "wind", "arguments": {"a": "</think> <think>"}}</tool_call>'
    assert HERMES.parse(spelled)[1][0].arguments == {"a": "</think> <think>"}


TAGGED = (
    "<function=wind><parameter=place>12</parameter><parameter=count>\n12\n</parameter>"
    "<parameter=other>[1]</parameter></function>"
)
LITERALS = "[wind(a=true, b=null, c=(1, -2), d={'k': [False]}, e='''x]\n)''', f=\"\\d\")]"


@pytest.mark.parametrize(
    ("call", "tools", "arguments"),
    [
        ('{"name": "wind", "arguments": {"a": "x\n\ty"}}', None, {"a": "x\n\ty"}),
        (TAGGED, TOOLS, {"place": "12", "count": 12, "other": [1]}),
        (TAGGED, None, {"place": 12, "count": 12, "other": [1]}),
        ('<invoke name="wind"><parameter name="place">a\nb</parameter></invoke>', None,
         {"place": "a\nb"}),
        ("[wind('x', 3, flag=True)]", TOOLS, {"place": "x", "count": 3, "flag": True}),
        ("[wind('x', 3, flag=True)]", None, None),
        (LITERALS, None, {"a": True, "b": None, "c": [1, -2], "d": {"k": [False]},
                          "e": "x]\n)", "f": "\\d"}),
        ('brave_search.call(query="wind today")', None, {"query": "wind today"}),
        ("print(1 + 1)", None, None),
    ],
)  # fmt: skip
def test_values_are_read_with_the_types_and_names_of_the_tool(call, tools, arguments):
    ((found,)) = HERMES.parse(f"<tool_call>{call}</tool_call>", tools)[1]
    assert found.is_valid == (arguments is not None)
    assert found.arguments == (arguments or {})


@pytest.mark.parametrize("tag", ["", "<|python_tag|>", "\n ", "I look.\n"])
def test_llama_may_call_with_its_tag_and_without(tag):
    one = '{"name": "wind", "parameters": {"place": "a; b"}}'
    content, calls = LLAMA.parse(f"{tag}{one}; {one}")
    assert brief(calls) == [("wind", {"place": "a; b"}, True)] * 2
    assert content == ("I look." if "look" in tag else "")


@pytest.mark.parametrize(
    "text",
    [
        '{"wind": "north"}', '{"name": "the lamp"}', '{"name": "the lamp", "age": 3}',
        "[1] says so.", "[see(this), and that]", '```json\n{"name": "the lamp"}\n```',
        "The call f(a=1) is code.", '{"name": "the lamp", "arguments"',
    ],
)  # fmt: skip
def test_json_that_is_an_answer_is_no_call(text):
    assert LLAMA.parse(text, TOOLS) == (text, ())
    if not text.endswith('"arguments"') and "see(" not in text:
        assert LLAMA.parse(text) == (text, ())


@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("found", [HERMES, LLAMA, ToolFormat()])
def test_calls_in_a_code_fence_are_read(found, tools):
    call = '{"name": "wind", "arguments": {"place": "x"}}'
    for body in (call, f"[{call}]"):
        text = f"I call it.\n```json\n{body}\n```\nDone."
        content, calls = found.parse(text, tools)
        assert brief(calls) == [("wind", {"place": "x"}, True)]
        assert content.startswith("I call it.\n")
        assert "wind" not in content
    assert found.parse(f"```json\n{call}\nand more\n```".replace("wind", "gale"), TOOLS)[1] == ()
    code = "```tool_code\nwind(place='x')\n```"
    assert brief(found.parse(code, tools)[1]) == [("wind", {"place": "x"}, True)]


def test_closers_may_stand_on_lines_of_their_own():
    found = detect_tool_format(tool_tokenizer("deepseek"))
    text = answer("deepseek", [("wind", {"place": "x"}), ("tide", {})])
    spaced = text.replace("<｜tool▁calls▁end｜>", "\n<｜tool▁calls▁end｜>")
    assert spaced != text
    assert found.parse(spaced) == ("", found.parse(text)[1])


# Templates of other shapes


def test_a_prompt_that_begins_a_thought_is_closed_before_a_forced_call():
    template, special = TEMPLATES["hermes"]
    thinking = template.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    found = detect_tool_format(tokenizer_with(thinking, special))
    assert found.opening() == '\n</think>\n\n<tool_call>\n{"name": "'
    text = found.opening("wind") + ' {"place": "x"}}\n</tool_call><|im_end|>'
    assert brief(found.parse(text)[1]) == [("wind", {"place": "x"}, True)]


def test_templates_without_tools_have_no_format():
    from tiny_llm import TEMPLATE, tiny_tokenizer

    assert detect_tool_format(Tokenizer(tiny_tokenizer())) is None
    assert detect_tool_format(Tokenizer(tiny_tokenizer(None))) is None
    lists_only = "{{ tools | tojson if tools }}" + TEMPLATE
    found = detect_tool_format(tokenizer_with(lists_only, ("<turn>",)))
    for text in ('<tool_call>{"name": "wind"}</tool_call>', '{"name": "wind", "parameters": {}}'):
        assert brief(found.parse(text)[1]) == [("wind", {}, True)]


def test_arguments_before_the_name_are_read_and_the_name_forced_first():
    order = "{{ {'arguments': c.arguments, 'name': c.name} | tojson }}"
    template, special = TEMPLATES["marked list"]
    call = "{{ {'name': c.name, 'arguments': c.arguments} | tojson }}"
    found = detect_tool_format(tokenizer_with(template.replace(call, order), special))
    assert found.opening("wind") == '<|tool_call|>[{"name": "wind", "arguments":'
    text = '<|tool_call|>[{"arguments": {"a": 1}, "name": "wind"}]'
    assert brief(found.parse(text)[1]) == [("wind", {"a": 1}, True)]


# Hostile answers: endless calls, and text that becomes a call at its last character


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]a(" * 3000, "<tool_call>{" * 3000, "```json\n{" * 3000,
        '{"name": "tide", "arguments": \n' * 3000, '{"name": "other", "arguments": {}}\n' * 300,
        "[\n" * 20000, "{\n" * 20000, '{"name"\n' * 5000, "[wind(\n" * 5000,
    ],
)  # fmt: skip
def test_calls_are_parsed_a_bounded_number_of_times(monkeypatch, text):
    tries, read_calls = [], ToolFormat._calls
    monkeypatch.setattr(ToolFormat, "_calls", lambda *given: tries.append(1) or read_calls(*given))
    BOTH.stable_content(text)
    content, calls = BOTH.parse(text, TOOLS)
    assert len(tries) <= 2 * tool_calls._MAX_MALFORMED + 1
    assert not any(call.is_valid for call in calls)
    assert bool(calls) != bool(content)  # no text is lost or returned twice


def test_text_after_too_many_malformed_calls_is_one_malformed_call():
    whole = '<tool_call>{"name": "tide", "arguments": {}}</tool_call>'
    few = "<tool_call>{" * (tool_calls._MAX_MALFORMED - 1)
    assert BOTH.parse(few + whole, TOOLS)[1][-1].is_valid
    content, calls = BOTH.parse(few + "<tool_call>{" * 2 + whole, TOOLS)
    assert content == ""
    assert "more than 32 malformed calls" in calls[-1].error
    assert calls[-1].text.endswith(whole)


def pieces(name):
    spelled = answer(name, [("wind", {"place": "x", "count": 3})])
    half = spelled[: len(spelled) // 2]
    words = [spelled, half, "Hello ", "[1] ", "{", '{"name"', "\n", "```json\n", "```", "<tool"]
    words += ["<think>", "</think>", '{"a": 1}', "[wind(", "]", ")", "\n[", "x", "<|"]
    return st.lists(st.sampled_from(words), max_size=8).map("".join)


@settings(max_examples=30, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", TEMPLATES)
def test_streamed_content_is_part_of_the_final_content(kind, data):
    found = detect_tool_format(tool_tokenizer(kind))
    text = data.draw(pieces(kind))
    content, calls = found.parse(text, TOOLS)
    assert all(isinstance(call, ToolCall) for call in calls)
    json.dumps([call.arguments for call in calls])
    shown = ""
    for end in range(len(text) + 1):
        stable_content = found.stable_content(text[:end])
        assert stable_content.startswith(shown)
        shown = stable_content
    assert content.startswith(shown)


@pytest.mark.parametrize(
    "spelled",
    [
        "<function=tide><parameter=place>\nq\n</parameter></function>",
        '<invoke name="tide"></invoke>', "tide[ARGS]{}", "call:tide{place:1}", "tide(place='x')",
        '{"name": "tide", "arguments": {}}',
    ],
)  # fmt: skip
def test_streamed_text_of_a_fence_is_never_taken_back(spelled):
    text = f"Well.\n```json\n{spelled}\n```"
    content, calls = BOTH.parse(text, TOOLS)
    assert [call.name for call in calls] == ["tide"]
    for end in range(len(text)):
        assert content.startswith(BOTH.stable_content(text[:end]))


def test_a_fence_without_calls_is_streamed_as_it_grows():
    for text in ('```json\n{"height": 4, "place": "mole"}', "```json\nthe tide rises"):
        assert BOTH.stable_content(text) == text


# Which tool a choice means


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (None, None), (False, None), ("auto", None), ("none", "none"), ("any", ""), (True, ""),
        ("wind", "wind"), ({"name": "wind"}, "wind"),
        ({"type": "function", "function": {"name": "wind"}}, "wind"),
        ({"type": "function", "function": "wind"}, "wind"),
    ],
)  # fmt: skip
def test_a_choice_is_read_however_it_is_written(choice, chosen):
    assert resolve_tool_choice(TOOLS, choice) == chosen


@pytest.mark.parametrize("choice", ["rain", 7, {"function": "rain"}, {"type": "any"}, ["wind"]])
def test_a_choice_of_no_tool_is_refused_as_it_was_given(choice):
    message = "is not one of the tools: choose one of wind, tide"
    with pytest.raises(ConfigurationError, match=message) as refused:
        resolve_tool_choice(TOOLS, choice)
    assert repr(choice) in str(refused.value)
