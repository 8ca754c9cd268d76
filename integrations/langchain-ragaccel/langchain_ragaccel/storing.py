"""Storing: documents made ready to be stored, and what is stored as documents."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from langchain_core.documents import Document
from ragaccel import ConfigurationError

from langchain_ragaccel.filtering import Filter, as_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ragaccel import Stored


def as_document(item: Stored) -> Document:
    """Turn what is stored back into the document that it was, with its id."""
    passage = item.passage
    return Document(id=passage.passage_id, page_content=passage.text, metadata=item.metadata)


def as_where(filter: Filter | None = None) -> Callable[[Stored], bool] | None:  # noqa: A002
    """Turn a filter on documents into a condition on what is stored."""
    holds = as_condition(filter)
    return None if holds is None else lambda item: bool(holds(as_document(item)))


def with_ids(documents: Iterable[Document], ids: Sequence[str | None] | None) -> list[Document]:
    """Give every document an id: the one given for it, else its own, else a new one.

    Raises:
        ConfigurationError: There are not as many ids as documents.
    """
    documents = list(documents)
    if ids is not None and len(ids) != len(documents):
        raise ConfigurationError(f"{len(ids)} ids for {len(documents)} documents: one each")
    given = ids or [None] * len(documents)
    return [
        document.model_copy(update={"id": str(name or document.id or uuid4())})
        for name, document in zip(given, documents, strict=True)
    ]


def list_of_ids(ids: Sequence[str]) -> Sequence[str]:
    """A list of ids, where one alone is meant as well: not its letters."""
    return [ids] if isinstance(ids, str) else ids


def refuse_arguments(more: Mapping[str, object]) -> None:
    """Refuse what a vector store may be given and this one does not know, as Python itself would.

    Raises:
        TypeError: With its name.
    """
    if more:
        raise TypeError(f"unexpected keyword argument {next(iter(more))!r}")


def text_batches(documents: Sequence[Document], size: int | None) -> Iterator[list[str]]:
    """Yield the texts of documents, so many at a time; all at once without a size."""
    size = size or max(1, len(documents))
    for first in range(0, len(documents), size):
        yield [document.page_content for document in documents[first : first + size]]
