"""Messages: chat messages as the dicts that chat templates read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as plain_prompt
from llama_index.core.llms import ChatMessage, MessageRole

from ragaccel import ConfigurationError, acceptable_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel import SharedModel

Turn = dict[str, Any]

# What a tool answered is told to the model as text: only some templates have a place for it.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function": "user",
    "tool": "user",
}
_NO_TEXT = frozenset({"thinking", "cache"})
_NESTED = {"citable": "content", "citation": "cited_content"}


class TemplatePrompt:
    """The default ``messages_to_prompt``: the model's chat template, plain lines without one."""

    def __init__(self, model: SharedModel) -> None:
        self.model = model

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """Write messages out as the text that the model reads."""
        turns, tokenizer = as_turns(messages), self.model.tokenizer
        if not tokenizer.has_chat_template:
            return plain_text(turns)
        return tokenizer.chat_text(acceptable_turns(turns, tokenizer.chat_text))


def as_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Turn messages into role and text.

    Raises:
        ConfigurationError: there is none, something is no message, or one holds something else
            than text.
    """
    if not messages:
        raise ConfigurationError("there is no message to answer")
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise ConfigurationError(
                f"chat takes ChatMessages, not {type(message).__name__}: ChatMessage(role=..., "
                "content=...); a text goes to complete"
            )
    return [{"role": _ROLES[message.role.value], "content": _text(message)} for message in messages]


def text_of(turns: Sequence[Turn]) -> str:
    """All text of some turns: where retrieved passages are looked for."""
    return "\n\n".join(turn["content"] for turn in turns)


def lay_out(
    messages: Sequence[ChatMessage], to_prompt: Any, model: SharedModel
) -> str | list[Turn]:
    """Write messages as the caller's own function does, or as turns for the model's template."""
    if to_prompt is not None and not isinstance(to_prompt, TemplatePrompt):
        written: str = to_prompt(messages)
        return written
    turns = as_turns(messages)
    return turns if model.is_chat_model else plain_text(turns)


def plain_text(turns: Sequence[Turn]) -> str:
    """Turns as lines that a model without a chat template may continue."""
    return plain_prompt(
        [ChatMessage(role=MessageRole(turn["role"]), content=turn["content"]) for turn in turns]
    )


def _text(message: ChatMessage) -> str:
    return "\n".join(filter(None, map(_text_of_block, message.blocks)))


def _text_of_block(block: Any) -> str:
    kind = block.block_type
    if kind == "text":
        return str(block.text)
    if kind == "tool_call":
        arguments = block.tool_kwargs
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
        return f"{block.tool_name}({written})"
    if kind in _NO_TEXT:
        return ""
    if kind in _NESTED:
        inner = getattr(block, _NESTED[kind])
        parts = inner if isinstance(inner, list) else [inner]
        return "\n".join(filter(None, map(_text_of_block, parts)))
    raise ConfigurationError(
        f"a message holds a block of type {kind!r}: this model reads text only, so leave it out or "
        "say in words what it holds"
    )
