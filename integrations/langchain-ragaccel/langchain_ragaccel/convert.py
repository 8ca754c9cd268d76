"""Convert LangChain documents and messages to those of ragaccel, and find references."""

from __future__ import annotations

import hashlib
import sys
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

AnyReference = str | Passage | Reference

_MAX_PAGE_DIGITS = 9  # longer numbers are not pages, and int() refuses very long ones


def as_passage(document: Document) -> Passage:
    """Convert a document to a passage, with its position in the source if metadata has one.

    Read ``source`` and ``start_index``, as LangChain's text splitters write them: the source
    document, and the character at which the passage starts. Ignore metadata with invalid values.
    """
    text, metadata = document.page_content, document.metadata
    start = _non_negative_int(metadata, "start_index") or 0
    return Passage(
        passage_id=document.id or content_id(text),
        text=text,
        title=str(metadata.get("title") or ""),
        path=str(metadata.get("source") or ""),
        start=start,
        end=start + len(text),
        page=_page(metadata),
        line=_non_negative_int(metadata, "line"),
        score=_score(metadata),
    )


def as_document(passage: Passage, metadata: dict[str, Any]) -> Document:
    """Convert a passage to a document with the same id."""
    return Document(id=passage.passage_id, page_content=passage.text, metadata=metadata)


def passage_metadata(passage: Passage) -> dict[str, Any]:
    """Return a passage's position and score as document metadata."""
    metadata: dict[str, Any] = {
        "score": passage.score,
        "citation": passage.citation,
        "source": passage.path,
        "start_index": passage.start,
        "title": passage.title,
        "page": passage.page,
        "line": passage.line,
    }
    return {name: value for name, value in metadata.items() if value not in ("", None)}


def as_list(value: Any, name: str) -> tuple[Any, ...]:
    """Return a list argument as a tuple; raise ConfigurationError for a bare string or object."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigurationError(
            f"{name} must be a list of texts, documents or passages, not "
            f"{type(value).__name__}: wrap it in a list"
        )
    return tuple(value)


def as_references(values: Iterable[Any]) -> list[AnyReference]:
    """Convert a caller's objects to references.

    Raises:
        ConfigurationError: An object is not a str, Document, Passage or Reference.
    """
    made = [as_passage(one) if isinstance(one, Document) else one for one in values]
    for one in made:
        if not isinstance(one, AnyReference):
            raise ConfigurationError(
                "a reference must be a str, Document, Passage or Reference, not "
                + type(one).__name__
            )
    return made


def as_passages(documents: Any) -> list[Passage]:
    """Convert the ``documents=`` of a call to passages.

    Raises:
        ConfigurationError: The value is not a list, or an item has no text.
    """
    passages = []
    for one in as_references(as_list(documents, "documents")):
        if isinstance(one, Reference):
            raise ConfigurationError(
                "a document must be a str, Document or Passage: a Reference has no text, so pass "
                "it as references="
            )
        passages.append(
            Passage(content_id(one), one, end=len(one)) if isinstance(one, str) else one
        )
    return passages


def content_id(text: str) -> str:
    """Return an id derived from a text: the same text always has the same id."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _page(metadata: Mapping[str, Any]) -> int | None:
    """Return the page, counted from 1; loaders that count from 0 also write a label."""
    label = metadata.get("page_label")
    if isinstance(label, str) and label.isdecimal() and len(label) <= _MAX_PAGE_DIGITS:
        return int(label)
    if (
        label is None and "total_pages" not in metadata
    ):  # PDF loaders write it and count pages from 0
        return _non_negative_int(metadata, "page_number") or _non_negative_int(metadata, "page")
    return None


def _non_negative_int(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= sys.maxsize else None


def _score(metadata: Mapping[str, Any]) -> float:
    value = metadata.get("score")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value <= sys.float_info.max else 0.0  # an int can exceed any float


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
