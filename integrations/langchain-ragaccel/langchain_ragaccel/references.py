"""References: what an answer may be copied from, given or found by what its prompt holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from ragaccel import ConfigurationError, Passage, Prompt, Reference, gather_references

from langchain_ragaccel.calls import as_list
from langchain_ragaccel.documents import as_passage, content_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from ragaccel import LLM

    from langchain_ragaccel.calls import Call

AnyReference = str | Passage | Reference


def as_references(given: Iterable[Any]) -> list[AnyReference]:
    """Turn what a caller gave into references.

    Raises:
        ConfigurationError: something that is neither str, Document, Passage nor Reference.
    """
    made: list[AnyReference] = []
    for one in given:
        if isinstance(one, Document):
            made.append(as_passage(one))
        elif isinstance(one, AnyReference):
            made.append(one)
        else:
            raise ConfigurationError(
                "a reference is a str, Document, Passage or Reference, not " + type(one).__name__
            )
    return made


def as_passages(documents: Any) -> tuple[Passage, ...]:
    """Turn the list of documents that a model is to be shown into passages.

    Raises:
        ConfigurationError: no list, or something in it without a text.
    """
    made = [
        Passage(content_id(one), one, end=len(one)) if isinstance(one, str) else one
        for one in as_references(as_list(documents, "documents"))
    ]
    passages = tuple(one for one in made if isinstance(one, Passage))
    if len(passages) < len(made):
        raise ConfigurationError(
            "a document is a str, Document or Passage: a Reference has no text"
        )
    return passages


def references_of(messages: Iterable[BaseMessage]) -> list[AnyReference]:
    """What messages carry: documents that a tool gave back, and references that a human gave.

    Artifacts of tools are other people's objects, so what is no reference there is passed over.
    """
    found: list[AnyReference] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            artifact = message.artifact
            parts = artifact if isinstance(artifact, list | tuple) else [artifact]
            found += as_references(
                part for part in parts if isinstance(part, Document | Passage | Reference)
            )
        elif isinstance(message, HumanMessage):
            found += as_references(
                as_list(message.additional_kwargs.get("references"), "references")
            )
    return found


def beside(prompt: Any, references: Sequence[AnyReference]) -> list[AnyReference]:
    """The references that a prompt does not bring itself."""
    own = {one.passage_id for one in prompt.passages} if isinstance(prompt, Prompt) else set()
    return [one for one in references if not isinstance(one, Passage) or one.passage_id not in own]


def gather(
    llm: LLM,
    call: Call,
    text: str,
    given: Sequence[AnyReference] = (),
    *,
    run_id: UUID | None = None,
) -> list[AnyReference]:
    """Everything that an answer to this text may be copied from, the surest first.

    ``run_id`` is the answer's own run, where it is known.
    """
    explicit = [*as_references(call.references), *given]
    if call.follows_runs:
        from langchain_ragaccel.run_tree import retrieved_for

        explicit += map(as_passage, retrieved_for(text, run_id))
    if call.registry is None and not explicit:
        return []
    return gather_references(
        text,
        explicit,
        registry=call.registry,
        namespace=call.namespace,
        tokenizer=llm.tokenizer,
        neighbours=call.neighbours,
        max_tokens=call.max_reference_tokens,
    )
