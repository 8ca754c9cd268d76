"""Messages: chat messages as the dicts that chat templates read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as plain_prompt
from llama_index.core.llms import ChatMessage, MessageRole

from llama_index.llms.ragaccel.tools import calls_of
from ragaccel import ConfigurationError, acceptable_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel import SharedModel

Turn = dict[str, Any]

# What a tool answered is told as text to a model whose template has no place for it.
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
_RESULTS = frozenset({"tool", "function"})
_NO_TEXT = frozenset({"thinking", "cache", "tool_call"})
_NESTED = {"citable": "content", "citation": "cited_content"}


class TemplatePrompt:
    """The default ``messages_to_prompt``: the model's chat template, plain lines without one."""

    def __init__(self, model: SharedModel) -> None:
        self.model = model

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """Write messages out as the text that the model reads."""
        tokenizer = self.model.tokenizer
        if not tokenizer.has_chat_template:
            return plain_text(as_turns(messages))
        turns = turns_for(self.model, messages)
        return tokenizer.chat_text(acceptable_turns(turns, tokenizer.chat_text))


def turns_for(
    model: SharedModel, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None
) -> list[Turn]:
    """Turn messages into what a model's chat template reads.

    Calls and results become text where it has no place for them.
    """
    turns = as_turns(messages)
    is_plain = all(
        message.role.value not in _RESULTS and not calls_of(message) for message in messages
    )
    if is_plain or not model.is_chat_model or not model.takes_tools:
        return turns
    native = _native_turns(messages)
    try:
        return acceptable_turns(
            native, lambda some: model.tokenizer.chat_text(some, tools=tools or None)
        )
    except ConfigurationError:
        return turns


def as_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Turn messages into role and text, calls of tools and their results included.

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
    return [
        {
            "role": _ROLES[message.role.value],
            "content": "\n".join(filter(None, (_text(message), *_written_calls(message)))),
        }
        for message in messages
    ]


def text_of(turns: Sequence[Turn]) -> str:
    """All text of some turns: where retrieved passages are looked for."""
    return "\n\n".join(turn["content"] for turn in turns)


def lay_out(
    messages: Sequence[ChatMessage],
    to_prompt: Any,
    model: SharedModel,
    tools: list[dict[str, Any]] | None = None,
) -> str | list[Turn]:
    """Write messages as the caller's own function does, or as turns for the model's template.

    Raises:
        ConfigurationError: there are tools, which the caller's own function has no place for.
    """
    if not is_own_template(to_prompt):
        if tools:
            raise ConfigurationError(
                "messages_to_prompt writes the prompt and has no place for tools: leave it out, "
                "and the model's chat template writes it"
            )
        written: str = to_prompt(messages)
        return written
    if not model.is_chat_model:
        return plain_text(as_turns(messages))
    return turns_for(model, messages, tools)


def is_own_template(to_prompt: Any) -> bool:
    """Whether messages are laid out by the model's own template, and not by a caller's function."""
    return to_prompt is None or isinstance(to_prompt, TemplatePrompt)


def plain_text(turns: Sequence[Turn]) -> str:
    """Turns as lines that a model without a chat template may continue."""
    return plain_prompt(
        [ChatMessage(role=MessageRole(turn["role"]), content=turn["content"]) for turn in turns]
    )


def _native_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Turns with calls and results in the places that templates have for them."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for message in messages:
        turn: Turn = {"role": _ROLES[message.role.value], "content": _text(message)}
        if calls := calls_of(message):
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.tool_id,
                    "function": {"name": call.tool_name, "arguments": call.tool_kwargs},
                }
                for call in calls
            ]
            names.update((call.tool_id, call.tool_name) for call in calls)
        if message.role.value in _RESULTS:
            told = message.additional_kwargs
            answered = str(told.get("tool_call_id") or "")
            turn |= {"role": "tool", "tool_call_id": answered or None}
            turn["name"] = told.get("name") or names.get(answered)
        turns.append(turn)
    return turns


def _written_calls(message: ChatMessage) -> list[str]:
    return [
        f"{call.tool_name}({json.dumps(call.tool_kwargs, default=str)})"
        for call in calls_of(message)
    ]


def _text(message: ChatMessage) -> str:
    return "\n".join(filter(None, map(_text_of_block, message.blocks)))


def _text_of_block(block: Any) -> str:
    kind = block.block_type
    if kind == "text":
        return str(block.text)
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
