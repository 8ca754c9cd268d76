"""Storing: documents made ready to be stored, and what is stored as documents."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from ragaccel import ConfigurationError, auto_references_enabled

from langchain_ragaccel.collecting import callbacks_here, keep_found_by_hand
from langchain_ragaccel.documents import as_document
from langchain_ragaccel.filtering import Filter, as_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from langchain_core.documents import Document
    from ragaccel import ReferenceRegistry, Stored


def as_where(
    filter: Filter | None = None,  # noqa: A002
    **more: object,
) -> Callable[[Stored], bool] | None:
    """Turn a filter on documents into a condition on what is stored.

    Raises:
        TypeError: Something else was given to a search.
    """
    if more:
        raise TypeError(f"this search takes no {', '.join(sorted(more))}: beside k there is filter")
    holds = as_condition(filter)
    return (
        None
        if holds is None
        else lambda item: bool(holds(as_document(item.passage, item.metadata)))
    )


def register(found: Iterable[Stored], registry: ReferenceRegistry | None, namespace: str) -> None:
    """Register what was found: where a store says, or else where its context or run collects."""
    if not auto_references_enabled():
        return
    passages = [item.passage for item in found]
    if registry is not None:
        registry.register(passages, namespace)
    else:
        keep_found_by_hand(passages, callbacks_here(), namespace)


def _id(given: object, document: Document) -> str:
    """An id as a text: 0 is one, and what is empty is none."""
    return next(
        (str(name) for name in (given, document.id) if name not in (None, "")), str(uuid4())
    )


def with_ids(documents: Iterable[Document], ids: Sequence[str | None] | None) -> list[Document]:
    """Give every document an id: the one given for it, else its own, else a new one.

    Raises:
        ConfigurationError: There are not as many ids as documents, or a text is no Unicode.
    """
    documents = list(documents)
    for document in documents:
        _require_unicode(document.page_content)
    if ids is not None and len(ids) != len(documents):
        raise ConfigurationError(f"{len(ids)} ids for {len(documents)} documents: one each")
    given = ids or [None] * len(documents)
    return [
        document.model_copy(update={"id": _id(name, document)})
        for name, document in zip(given, documents, strict=True)
    ]


def _require_unicode(text: str) -> None:
    """Refuse what cannot be stored before it is embedded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"a text holds {text[error.start]!r}, half a character, as broken PDFs do: replace it,"
            " e.g. by text.encode(errors='replace').decode()"
        ) from None


def list_of_ids(ids: Sequence[str]) -> list[str]:
    """A list of ids, as texts; one alone is meant as well: not its letters."""
    return [ids] if isinstance(ids, str) else [str(name) for name in ids]


def refuse_arguments(more: Mapping[str, object]) -> None:
    """Refuse what a vector store may be given and this one does not know, as Python itself would.

    Raises:
        TypeError: With its name.
    """
    if more:
        raise TypeError(f"unexpected keyword argument {next(iter(more))!r}")


def text_batches(documents: Sequence[Document], size: int | None) -> Iterator[list[str]]:
    """Yield the texts of documents, so many at a time; all at once without a size.

    Raises:
        ConfigurationError: The size is none.
    """
    if size is not None and size < 1:
        raise ConfigurationError(f"batch_size is {size}: give 1 or more, or None for all at once")
    size = size or max(1, len(documents))
    for first in range(0, len(documents), size):
        yield [document.page_content for document in documents[first : first + size]]
