"""Convert LangChain documents to passages and references, and back."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from ragaccel import ConfigurationError, Passage, Reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
