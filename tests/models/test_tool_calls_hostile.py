"""Hostile answers: endless calls, and text that becomes a call at its last character."""

import pytest

from ragaccel.models import ToolFormat, tool_calls

TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
FORMAT = ToolFormat(
    markers=("<tool_call>", "[TOOL_CALLS]"), closers=("</tool_call>",), is_bare=True
)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]a(" * 3000,
        "<tool_call>{" * 3000,
        '{"name": "tide", "arguments": \n' * 3000,
        '{"name": "other", "arguments": {}}\n' * 300,
        "```json\n{" * 3000,
    ],
)
def test_calls_are_parsed_a_bounded_number_of_times(monkeypatch, text):
    tries, read_calls = [], ToolFormat._calls
    monkeypatch.setattr(ToolFormat, "_calls", lambda *given: tries.append(1) or read_calls(*given))
    content, calls = FORMAT.parse(text, [TIDE])
    assert len(tries) <= 2 * tool_calls._MAX_MALFORMED + 1
    assert not any(call.is_valid for call in calls)
    assert bool(calls) != bool(content)  # no text is lost or returned twice


def test_text_after_too_many_malformed_calls_is_one_malformed_call():
    whole = '<tool_call>{"name": "tide", "arguments": {}}</tool_call>'
    few = "<tool_call>{" * (tool_calls._MAX_MALFORMED - 1)
    assert FORMAT.parse(few + whole, [TIDE])[1][-1].is_valid
    content, calls = FORMAT.parse(few + "<tool_call>{" * 2 + whole, [TIDE])
    assert content == ""
    assert "more than 32 malformed calls" in calls[-1].error
    assert calls[-1].text.endswith(whole)


@pytest.mark.parametrize(
    "spelled",
    [
        "<function=tide><parameter=place>\nq\n</parameter></function>",
        '<invoke name="tide"></invoke>',
        "tide[ARGS]{}",
        "call:tide{place:1}",
        "tide(place='x')",
        '{"name": "tide", "arguments": {}}',
    ],
)
def test_streamed_text_of_a_fence_is_never_taken_back(spelled):
    text = f"Well.\n```json\n{spelled}\n```"
    content, calls = FORMAT.parse(text, [TIDE])
    assert [call.name for call in calls] == ["tide"]
    for end in range(len(text)):
        assert content.startswith(FORMAT.stable_content(text[:end]))


def test_a_fence_without_calls_is_streamed_as_it_grows():
    text = '```json\n{"height": 4, "place": "mole"}'
    assert FORMAT.stable_content(text) == text
    assert FORMAT.stable_content("```json\nthe tide rises") == "```json\nthe tide rises"
