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


def given_in(messages: Iterable[BaseMessage]) -> list[AnyReference]:
    """The references that a human gave with messages."""
    found: list[AnyReference] = []
    for message in messages:
        if isinstance(message, HumanMessage):
            given = message.additional_kwargs.get("references")
            found += as_references(as_list(given, "references"))
    return found


def retrieved_in(messages: Sequence[BaseMessage]) -> list[AnyReference]:
    """The documents that tools gave back, the latest tool's first.

    Artifacts of tools are other people's objects, so what is no reference there is passed over.
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


def beside(prompt: Any, references: Sequence[AnyReference]) -> list[AnyReference]:
    """The references that a prompt does not bring itself; two passages may have one id."""
    own = {_known_by(one) for one in prompt.passages} if isinstance(prompt, Prompt) else set()
    return [one for one in references if not isinstance(one, Passage) or _known_by(one) not in own]


def _known_by(passage: Passage) -> tuple[str, str]:
    return passage.passage_id, passage.text


def gather(
    llm: LLM,
    call: Call,
    text: str,
    given: Sequence[AnyReference] = (),
    *,
    retrieved: Sequence[AnyReference] = (),
) -> list[AnyReference]:
    """Everything that an answer to this text may be copied from, the surest first.

    What is ``retrieved`` for it counts like what is found, and ``given`` before all.
    """
    explicit, retrieved = [*as_references(call.references), *given], list(retrieved)
    if call.follows_runs:
        from langchain_ragaccel.run_tree import retrieved_for

        retrieved += map(as_passage, retrieved_for(call.caller.run))
    visible = call.visible
    if visible is None and not explicit:
        return []
    return gather_references(
        text,
        explicit,
        retrieved=retrieved,
        registry=visible,
        namespace=call.namespace,
        tokenizer=llm.tokenizer,
        neighbours=call.neighbours,
        max_tokens=call.max_reference_tokens,
    )
