"""Prompting: from a conversation to the prompt that the model's chat template makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError, Passage, build_prompt

from langchain_ragaccel.messages import acceptable

if TYPE_CHECKING:
    from ragaccel import LLM

    from langchain_ragaccel.messages import Turn

_ANSWER_TOKENS = 256  # of an answer, where nothing else is asked for


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given."""

    turns: list[Turn]
    documents: tuple[Passage, ...] = ()
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


def write_prompt(llm: LLM, asked: Conversation, max_new_tokens: int | None) -> Any:
    """Turn a conversation into what ``LLM.generate`` takes.

    Documents go where the chat template has a place for them, or numbered into the last message,
    as many as fit.

    Raises:
        ConfigurationError: the chat template has no place for something.
        CapacityError: not one document fits.
    """
    if asked.documents and not asked.tools and not asked.template_options:
        return _with_documents(llm, asked, max_new_tokens)
    turns, inputs = _laid_out(llm, asked)
    return llm.tokenizer.chat(turns, **inputs) if inputs else turns


def count_tokens(llm: LLM, asked: Conversation) -> int:
    """How many tokens the chat template makes of a conversation."""
    turns, inputs = _laid_out(llm, asked)
    return len(llm.tokenizer.chat(turns, **inputs))


def _with_documents(llm: LLM, asked: Conversation, max_new_tokens: int | None) -> Any:
    *history, last = asked.turns
    if last["role"] != "user":
        raise ConfigurationError("documents go with a question: end with a message of the human's")
    room = llm.context_length
    return build_prompt(
        llm.tokenizer,
        last["content"],
        asked.documents,
        history=history,
        max_tokens=None if room is None else room - (max_new_tokens or _ANSWER_TOKENS),
    )


def _laid_out(llm: LLM, asked: Conversation) -> tuple[list[Turn], dict[str, Any]]:
    """Turns that the chat template accepts, and what goes in beside them."""
    inputs = _inputs(llm, asked)
    return acceptable(asked.turns, lambda some: llm.tokenizer.chat_text(some, **inputs)), inputs


def _inputs(llm: LLM, asked: Conversation) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    if asked.documents:
        if not llm.tokenizer.takes_documents:
            raise ConfigurationError(
                "this model's chat template has no place for documents beside tools or template "
                "options: write them into a message"
            )
        inputs["documents"] = [_as_document(passage) for passage in asked.documents]
    if asked.tools:
        inputs["tools"] = asked.tools
    if asked.template_options:
        inputs["template_options"] = asked.template_options
    return inputs


def _as_document(passage: Passage) -> dict[str, str]:
    return {"title": passage.title, "text": passage.text}
