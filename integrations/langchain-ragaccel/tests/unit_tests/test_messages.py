import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from ragaccel import ConfigurationError

from langchain_ragaccel.convert import as_template_messages

CALL = {"name": "tide", "args": {"place": "çatı"}, "id": "abc", "type": "tool_call"}


def turn(role, content):
    return {"role": role, "content": content}


def test_every_kind_of_message_has_its_role():
    messages = [
        SystemMessage("a"),
        HumanMessage("b", name="Ann"),
        AIMessage("c", tool_calls=[CALL]),
        ToolMessage("d", tool_call_id="abc", name="tide"),
        FunctionMessage(name="wind", content="e"),
        ChatMessage(role="critic", content="f"),
    ]
    assert as_template_messages(messages) == [
        turn("system", "a"),
        {**turn("user", "b"), "name": "Ann"},
        {
            **turn("assistant", "c"),
            "tool_calls": [
                {
                    "type": "function",
                    "id": "abc",
                    "function": {"name": "tide", "arguments": {"place": "çatı"}},
                }
            ],
        },
        {**turn("tool", "d"), "name": "tide", "tool_call_id": "abc"},
        {**turn("tool", "e"), "name": "wind"},
        turn("critic", "f"),
    ]


def test_text_blocks_are_text_and_calls_and_thoughts_are_not():
    content = [
        "One ",
        {"type": "text", "text": "two"},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "tool_use", "id": "abc", "name": "tide", "input": {}},
        {"type": "text-plain", "text": " three"},
    ]
    assert as_template_messages([AIMessage(content)])[0]["content"] == "One two three"


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "file", "input_audio", None])
def test_blocks_without_text_are_refused(kind):
    with pytest.raises(ConfigurationError, match=f"block of type {kind!r}"):
        as_template_messages([HumanMessage([{"type": kind, "image_url": {"url": "x"}}])])


def test_a_conversation_needs_messages_of_known_kinds():
    with pytest.raises(ConfigurationError, match="no message"):
        as_template_messages([])
    with pytest.raises(ConfigurationError, match="RemoveMessage cannot be part"):
        as_template_messages([RemoveMessage(id="x")])
