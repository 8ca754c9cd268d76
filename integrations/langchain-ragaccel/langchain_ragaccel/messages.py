"""Messages: LangChain's messages as the dicts that chat templates read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from ragaccel import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Turn = dict[str, Any]

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}
_TEXT = frozenset({"text", "text-plain"})
_NO_TEXT = frozenset({
    "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call",
    "reasoning", "thinking", "redacted_thinking", "reasoning_content",
})  # fmt: skip
"""Blocks that are left out: calls stand in ``tool_calls``, and thoughts are not read again."""


def as_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    """Turn messages into the dicts that chat templates read.

    Raises:
        ConfigurationError: a message that is no text, or of no role.
    """
    if not messages:
        raise ConfigurationError("there is no message to answer")
    return [_as_turn(message) for message in messages]


def text_of(messages: Sequence[BaseMessage]) -> str:
    """All text of the messages, in order: where references are looked for."""
    return "\n\n".join(filter(None, (_text(message) for message in messages)))


def _as_turn(message: BaseMessage) -> Turn:
    turn: Turn = {"role": _role(message), "content": _text(message)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ConfigurationError(f"a {type(message).__name__} has no place in a prompt")


def _text(message: BaseMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(map(_text_of_block, content))


def _text_of_block(block: str | Mapping[str, Any]) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in _TEXT:
        return str(block.get("text") or "")
    if kind in _NO_TEXT:
        return ""
    raise ConfigurationError(
        f"a message holds a block of type {kind!r}: this model reads text only, so leave it out or "
        "say in words what it holds"
    )
