"""Tool calls are parsed as templates write them; other text raises no error."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from tool_templates import TEMPLATES, tokenizer_with, tool_tokenizer

from ragaccel.models import Tokenizer, ToolCall, ToolFormat, detect_tool_format

ARGUMENTS = {
    "place": 'the "mole" \\ pier, {north} [1]\nsecond line; né',
    "count": 3,
    "ratio": -0.5,
    "deep": {"list": [1, None, "x", True], "empty": {}},
    "flag": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tells it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "deep": {"type": "object"},
                    "flag": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("wind", "tide")
]
ASKED = {"role": "user", "content": "Wind?"}
# Templates that write one call per answer, or no text beside calls.
ONE_CALL = {"llama"}
NO_TEXT = {"llama", "mistral old", "mistral new", "mistral ids"}


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


def test_calls_are_read_back_as_the_template_writes_them(name):
    found = detect_tool_format(tool_tokenizer(name))
    content, (call,) = found.parse(answer(name, [("wind", ARGUMENTS)]), TOOLS)
    assert (call.name, call.arguments, call.error) == ("wind", ARGUMENTS, "")
    assert content in ("", "<think>\n\n</think>")


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - ONE_CALL))
def test_several_calls_are_read_back_in_order(name):
    found = detect_tool_format(tool_tokenizer(name))
    calls = [("wind", ARGUMENTS), ("tide", {}), ("wind", {"place": "]</tool_call"})]
    if name == "glm":
        calls[1] = ("tide", {"place": ""})  # without arguments it has no tag of its own
    content, parsed = found.parse(answer(name, calls), TOOLS)
    assert brief(parsed) == [(*call, True) for call in calls]
    assert content in ("", "<think>\n\n</think>")


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - NO_TEXT))
def test_text_beside_calls_is_the_content(name):
    found = detect_tool_format(tool_tokenizer(name))
    said = "Let me see [1].\nThe answer {is} near."
    text = answer(name, [("wind", {"place": "x"})], said if name != "pythonic" else said + "\n")
    content, calls = found.parse(text, TOOLS)
    assert content.removeprefix("<think>\n\n</think>\n\n") == said
    assert brief(calls) == [("wind", {"place": "x"}, True)]


def test_an_answer_without_calls_is_its_content(name):
    found = detect_tool_format(tool_tokenizer(name))
    text = "The wind [1] is north (see {this}).\n[2] says `f(x)`: \n{ok}\n```json\n[1]\n```\n"
    end = tool_tokenizer(name).eos_tokens[0]
    assert found.parse(text + end, TOOLS) == (text, ())
    assert found.parse(text) == (text, ())


def test_an_opening_forces_the_call(name):
    tokenizer = tool_tokenizer(name)
    found = detect_tool_format(tokenizer)
    text = answer(name, [("wind", {"place": "x"})]).removeprefix("<think>\n\n</think>\n\n")
    assert text.startswith(found.opening())
    assert text.startswith(found.opening("wind"))
    assert found.opening("wind").startswith(found.opening())
    assert "sentinel" not in found.opening("wind")
    special = [token for token in found.special_tokens if token in found.opening()]
    ids = tokenizer.encode(found.opening())
    assert [i for i in ids if i in tokenizer.tokenizer.all_special_ids] == (
        tokenizer.tokenizer.convert_tokens_to_ids(special)
    )


def test_tokens_without_special_ones_still_show_bare_calls_of_known_tools():
    for name in ("mistral old", "marked pythonic", "llama"):
        found = detect_tool_format(tool_tokenizer(name))
        text = answer(name, [("wind", ARGUMENTS)])
        for token in found.special_tokens:
            text = text.replace(token, "")
        assert brief(found.parse(text, TOOLS)[1]) == [("wind", ARGUMENTS, True)]
        assert found.parse(text.replace("wind", "unknown"), TOOLS)[1] == ()


@pytest.mark.parametrize("size", range(0, 60, 3))
def test_a_call_that_is_cut_off_is_invalid_and_not_half_read(name, size):
    found = detect_tool_format(tool_tokenizer(name))
    whole = answer(name, [("wind", {"place": "the mole", "count": 12345})])
    text = whole[: max(0, len(whole) - size)]
    _, calls = found.parse(text, TOOLS)
    for call in calls:
        if call.is_valid:
            assert call.arguments == {"place": "the mole", "count": 12345}
        else:
            assert call.name in ("", "wind") or "wind".startswith(call.name)
            assert call.arguments == {}
            assert call.text in text
            assert call.error
    assert len(calls) <= 1


HERMES = ToolFormat(markers=("<tool_call>",), closers=("</tool_call>",), special_tokens=("<end>",))


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ('<tool_call>\n{"name": "wind", "arguments": {"a": }}\n</tool_call>', "wind", "not JSON"),
        ('<tool_call>{"name": "wind", "arguments": [1]}</tool_call>', "wind", "not a JSON object"),
        ('<tool_call>{"name": "wind", "arguments": "nonsense"}</tool_call>', "wind", "not JSON"),
        ('<tool_call>{"name": "wind", "arguments": {"a": NaN}}</tool_call>', "wind", "not JSON"),
        ('<tool_call>{"name": "wind", "arguments": {"a": 1e999}}</tool_call>', "wind", "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "", "names no function"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", "names no function"),
        ("<tool_call>{'name': 'wind'}</tool_call>", "", "not JSON"),
        ("<tool_call>nothing</tool_call>", "", "no call"),
        ("<tool_call>", "", "no call"),
        ('<tool_call>{"name": "wind", "argu', "wind", "not JSON"),
        ('<tool_call>{"name": "wi', "", "not JSON"),
        ("<tool_call>" + '{"a":' * 5000, "", "not JSON"),
        ("<tool_call>[wind(a=b)]</tool_call>", "wind", "not literals"),
        ("<tool_call>[wind(__import__('os').system('x'))]</tool_call>", "wind", "no names"),
        ("<tool_call>[wind(a=__import__('os').getcwd())]</tool_call>", "wind", "not literals"),
        ("<tool_call>[wind(**{'a': 1})]</tool_call>", "wind", "no names"),
        ("<tool_call>[wind(a=1]</tool_call>", "wind", "not a Python call"),
        ("<tool_call>[wind(a=1, a=2)]</tool_call>", "wind", "given twice"),
        ("<tool_call>[wind(a={[1]: 2})]</tool_call>", "wind", "not literals"),
        ("<tool_call>[wind(a=b'x')]</tool_call>", "wind", "not JSON"),
        ("<tool_call>[wind(a=" + "(" * 5000 + ")" * 5000 + ")]</tool_call>", "wind", "Python"),
        ("<tool_call>[wind(a='x</tool_call>", "wind", "end is missing"),
        (
            "<tool_call><function=wind><parameter=a>1</function></tool_call>",
            "wind",
            "end is missing",
        ),
        ("<tool_call><function=wind><parameter=a>1</parameter>", "wind", "end is missing"),
        ("<tool_call>wind<arg_key>a</arg_key><arg_value>1</arg_value>", "wind", "end is missing"),
        ("<tool_call>call:wind{a:1", "wind", "end is missing"),
        ("<tool_call>call:wind{a:[1}}", "wind", "not JSON"),
        ("<tool_call>wind[ARGS]{", "wind", "not JSON"),
        ("<tool_call>wind[ARGS]3", "wind", "not a JSON object"),
    ],
)
def test_malformed_calls_are_reported(text, name, error):
    content, (call,) = HERMES.parse("First.\n" + text + "<end>")
    assert content == "First."
    assert not call.is_valid
    assert (call.name, call.arguments) == (name, {})
    assert error in call.error
    assert call.text in text
    assert call.text or text.endswith("<tool_call>")


def test_a_malformed_call_does_not_hide_adjacent_calls():
    good = '<tool_call>\n{"name": "wind", "arguments": {}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "tide", "arguments": {"a"}}\n</tool_call>'
    content, calls = HERMES.parse(f"A{good}B{bad}C{good}D<end>")
    assert content == "A\nB\nC\nD"
    assert brief(calls) == [("wind", {}, True), ("tide", {}, False), ("wind", {}, True)]
    unclosed = '<tool_call>\n{"name": "tide", "arg\n'
    assert [c.is_valid for c in HERMES.parse(f"{unclosed}{good}")[1]] == [False, True]


@pytest.mark.parametrize(
    "arguments", ['{"a": 1}', '"{\\"a\\": 1}"', '{\n "a":\n 1}'], ids=["object", "text", "spaced"]
)
@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
def test_arguments_may_be_an_object_or_its_text(key, arguments):
    spelled = f'{{"name": "wind", "{key}": {arguments}}}'
    nested = f'{{"type": "function", "function": {spelled}, "id": "c1"}}'
    for text in (spelled, nested):
        ((call,)) = HERMES.parse(f"<tool_call>{text}</tool_call>")[1]
        assert (call.name, call.arguments) == ("wind", {"a": 1})
    assert call.call_id == "c1"
    for empty in ('{"name": "wind"}', '{"name": "wind", "arguments": null}'):
        assert brief(HERMES.parse(f"<tool_call>{empty}")[1]) == [("wind", {}, True)]


def test_raw_line_breaks_in_strings_are_read():
    text = '<tool_call>{"name": "wind", "arguments": {"a": "x\n\ty"}}</tool_call>'
    assert HERMES.parse(text)[1][0].arguments == {"a": "x\n\ty"}


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


def test_values_in_tags_have_the_types_of_the_tool():
    text = (
        "<tool_call><function=wind><parameter=place>12</parameter>"
        "<parameter=count>\n12\n</parameter><parameter=other>[1]</parameter></function></tool_call>"
    )
    assert HERMES.parse(text, TOOLS)[1][0].arguments == {"place": "12", "count": 12, "other": [1]}
    assert HERMES.parse(text)[1][0].arguments == {"place": 12, "count": 12, "other": [1]}
    invoked = '<tool_call><invoke name="wind"><parameter name="place">a\nb</parameter></invoke>'
    assert HERMES.parse(invoked)[1][0].arguments == {"place": "a\nb"}


LLAMA = ToolFormat(markers=("<|python_tag|>",), is_bare=True, special_tokens=("<|python_tag|>",))


@pytest.mark.parametrize("tag", ["", "<|python_tag|>", "\n ", "I look.\n"])
def test_llama_may_call_with_its_tag_and_without(tag):
    one = '{"name": "wind", "parameters": {"place": "a; b"}}'
    content, calls = LLAMA.parse(f"{tag}{one}; {one}")
    assert brief(calls) == [("wind", {"place": "a; b"}, True)] * 2
    assert content == ("I look." if "look" in tag else "")


def test_llama_built_in_tools_are_read():
    text = '<|python_tag|>brave_search.call(query="wind today")'
    assert brief(LLAMA.parse(text)[1]) == [("brave_search", {"query": "wind today"}, True)]
    assert not LLAMA.parse("<|python_tag|>print(1 + 1)")[1][0].is_valid


@pytest.mark.parametrize(
    "text",
    [
        '{"wind": "north"}',
        '{"name": "the lamp"}',
        '{"name": "the lamp", "age": 3}',
        "[1] says so.",
        "[see(this), and that]",
        '```json\n{"name": "the lamp"}\n```',
        "The call f(a=1) is code.",
        '{"name": "the lamp", "arguments"',
    ],
)
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


def test_arguments_without_names_take_those_of_the_tool():
    text = "[wind('x', 3, flag=True)]"
    found = ToolFormat(is_bare=True)
    assert found.parse(text, TOOLS)[1][0].arguments == {"place": "x", "count": 3, "flag": True}
    assert not found.parse(text)[1][0].is_valid
    literals = "[wind(a=true, b=null, c=(1, -2), d={'k': [False]}, e='''x]\n)''', f=\"\\d\")]"
    assert found.parse(literals)[1][0].arguments == {
        "a": True, "b": None, "c": [1, -2], "d": {"k": [False]}, "e": "x]\n)", "f": "\\d",
    }  # fmt: skip


def test_closers_may_stand_on_lines_of_their_own():
    found = detect_tool_format(tool_tokenizer("deepseek"))
    text = answer("deepseek", [("wind", {"place": "x"}), ("tide", {})])
    spaced = text.replace("<｜tool▁calls▁end｜>", "\n<｜tool▁calls▁end｜>")
    assert spaced != text
    assert found.parse(spaced) == ("", found.parse(text)[1])


def test_a_prompt_that_begins_a_thought_is_closed_before_a_forced_call():
    template, special = TEMPLATES["hermes"]
    thinking = template.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    assert thinking != template
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
    assert call in template
    found = detect_tool_format(tokenizer_with(template.replace(call, order), special))
    assert found.opening("wind") == '<|tool_call|>[{"name": "wind", "arguments":'
    text = '<|tool_call|>[{"arguments": {"a": 1}, "name": "wind"}]'
    assert brief(found.parse(text)[1]) == [("wind", {"a": 1}, True)]


def test_long_answers_of_brackets_are_read_in_time():
    for text in ("[\n" * 20000, "{\n" * 20000, '{"name"\n' * 5000, "[wind(\n" * 5000):
        for found in (HERMES, LLAMA):
            found.stable_content(text)
            assert not any(call.is_valid for call in found.parse(text, TOOLS)[1])


def pieces(name):
    calls = [("wind", {"place": "x", "count": 3})]
    spelled = answer(name, calls)
    half = spelled[: len(spelled) // 2]
    words = [spelled, half, "Hello ", "[1] ", "{", '{"name"', "\n", "```json\n", "```", "<tool"]
    words += ["<think>", "</think>", '{"a": 1}', "[wind(", "]", ")", "\n[", "x", "<|"]
    return st.lists(st.sampled_from(words), max_size=8).map("".join)


@settings(max_examples=40, deadline=None)
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


def test_plain_text_is_shown_at_once_and_calls_never(name):
    found = detect_tool_format(tool_tokenizer(name))
    text = "The wind [1] is north.\n[2] says `f(x)`.\n```python\nf()\n```\nEnd"
    assert found.stable_content(text) == text
    assert found.stable_content(text + " \n") == text
    assert found.stable_content("caf\ufffd") == "caf"  # an incomplete character
    spelled = answer(name, [("wind", {"place": "x"})]).removeprefix("<think>\n\n</think>\n\n")
    for end in range(len(spelled)):
        assert found.stable_content(f"Well.\n{spelled[:end]}") == "Well."
