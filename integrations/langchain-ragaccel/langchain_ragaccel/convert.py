"""Convert LangChain messages to the messages of chat templates, and find their references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from ragaccel import ConfigurationError, Passage, Reference

from langchain_ragaccel.documents import as_list, as_references

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from langchain_ragaccel.documents import AnyReference

TemplateMessage = dict[str, Any]

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}
_TEXT_BLOCKS = frozenset({"text", "text-plain"})
_SKIPPED_BLOCKS = frozenset({
    "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call",
    "reasoning", "thinking", "redacted_thinking", "reasoning_content",
})  # fmt: skip
"""Blocks that are skipped: ``tool_calls`` holds the calls, and thoughts are not repeated."""


def as_template_messages(messages: Sequence[BaseMessage]) -> list[TemplateMessage]:
    """Convert messages to the dicts that chat templates take.

    Raises:
        ConfigurationError: There are no messages, or one has no text or no role.
    """
    if not messages:
        raise ConfigurationError("there is no message to answer: pass at least one")
    return [_as_template_message(message) for message in messages]


def _as_template_message(message: BaseMessage) -> TemplateMessage:
    template_message: TemplateMessage = {"role": _role(message), "content": _text(message)}
    if message.name:
        template_message["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        template_message["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        template_message["tool_call_id"] = message.tool_call_id
    return template_message


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ConfigurationError(f"a {type(message).__name__} cannot be part of a prompt: leave it out")


def _text(message: BaseMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(map(_text_of_block, content))


def _text_of_block(block: str | Mapping[str, Any]) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in _TEXT_BLOCKS:
        return str(block.get("text") or "")
    if kind in _SKIPPED_BLOCKS:
        return ""
    raise ConfigurationError(
        f"a message contains a block of type {kind!r}, but this model reads text only: leave it "
        "out or describe it in words"
    )


def explicit_references(messages: Iterable[BaseMessage]) -> list[AnyReference]:
    """Return the references in human messages' ``additional_kwargs``."""
    found: list[AnyReference] = []
    for message in messages:
        if isinstance(message, HumanMessage):
            given = message.additional_kwargs.get("references")
            found += as_references(as_list(given, "references"))
    return found


def tool_references(messages: Sequence[BaseMessage]) -> list[AnyReference]:
    """Return the documents in tool messages' artifacts, those of the latest tool first.

    Skip artifacts of other types.
    """
    found: list[AnyReference] = []
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            artifact = message.artifact
            parts = artifact if isinstance(artifact, list | tuple) else [artifact]
            found += as_references(
                part for part in parts if isinstance(part, Document | Passage | Reference)
            )
    return found
