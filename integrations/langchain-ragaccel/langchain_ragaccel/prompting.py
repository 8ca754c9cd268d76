"""Prompting: from a text or a conversation to the prompt that a model is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError, Passage, acceptable_turns, build_prompt, take_apart

from langchain_ragaccel.checking import DEFAULT_MAX_TOKENS
from langchain_ragaccel.references import as_references

if TYPE_CHECKING:
    from ragaccel import LLM, SharedModel

    from langchain_ragaccel.calls import Call
    from langchain_ragaccel.messages import Turn


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given."""

    turns: list[Turn]
    documents: tuple[Passage, ...] = ()
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


def write_prompt(model: SharedModel, call: Call, asked: str | Conversation) -> Any:
    """Turn a text or a conversation into what ``LLM.generate`` takes.

    A text stays as it is, and a conversation goes through the chat template. Documents go where
    that has a place for them, or numbered into the last message, as many as fit. A model that
    reads documents and one question and nothing else, as the bundled reader does, is given the
    passages, registered or given as references, that stand in the text, and its question.

    Raises:
        ConfigurationError: the chat template has no place for something.
        CapacityError: not one document fits.
    """
    llm = model.load()
    if isinstance(asked, str):
        return _apart(llm, call, asked) if model.reads_apart else asked
    if not asked.tools and not asked.template_options:
        if asked.documents:
            return _with_documents(llm, call, asked)
        if model.reads_apart:
            return _apart(llm, call, asked.turns)
    turns, inputs = _laid_out(model, asked)
    return llm.tokenizer.chat(turns, **inputs) if inputs else turns


def count_tokens(model: SharedModel, asked: Conversation) -> int:
    """How many tokens the chat template makes of a conversation."""
    turns, inputs = _laid_out(model, asked)
    return len(model.tokenizer.chat(turns, **inputs))


def _apart(llm: LLM, call: Call, asked: str | list[Turn]) -> Any:
    return take_apart(
        asked,
        llm.tokenizer,
        call.visible,
        given=as_references(call.references),
        namespace=call.namespace,
        max_tokens=_room(llm, call),
    )


def _with_documents(llm: LLM, call: Call, asked: Conversation) -> Any:
    *history, last = asked.turns
    if last["role"] != "user":
        raise ConfigurationError("documents go with a question: end with a message of the human's")
    return build_prompt(
        llm.tokenizer,
        last["content"],
        asked.documents,
        history=history,
        max_tokens=_room(llm, call),
    )


def _room(llm: LLM, call: Call) -> int | None:
    """How long a prompt may be, beside its answer."""
    if llm.context_length is None:
        return None
    answer: int = call.settings.get("max_new_tokens", DEFAULT_MAX_TOKENS)
    return llm.context_length - answer


def _laid_out(model: SharedModel, asked: Conversation) -> tuple[list[Turn], dict[str, Any]]:
    """Turns that the chat template accepts, and what goes in beside them."""
    inputs = _inputs(model, asked)
    turns = acceptable_turns(asked.turns, lambda some: model.tokenizer.chat_text(some, **inputs))
    return turns, inputs


def _inputs(model: SharedModel, asked: Conversation) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    if asked.documents:
        if not model.tokenizer.takes_documents:
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
