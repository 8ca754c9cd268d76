"""Documents: LangChain's documents as passages, and back."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from ragaccel import Passage

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_PAGE_DIGITS = 9  # of a page's number: longer ones are none, and of some Python makes no number


def as_passage(document: Document) -> Passage:
    """Turn a document into a passage, with its place in its source where metadata tells it.

    Metadata is other people's: what means nothing there is passed over.

    ``source`` names the document that the passage is a piece of and ``start_index`` where in it
    the piece begins, as LangChain's text splitters write them.
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
    """Turn a passage into a document with its id."""
    return Document(id=passage.passage_id, page_content=passage.text, metadata=metadata)


def passage_metadata(passage: Passage) -> dict[str, Any]:
    """What is known of a found passage's place, and its score, as a document's metadata."""
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


def content_id(text: str) -> str:
    """An id for a text that has none: the same for the same text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _page(metadata: Mapping[str, Any]) -> int | None:
    """The page, counted from 1: loaders that count from 0 give a label beside it."""
    label = metadata.get("page_label")
    if isinstance(label, str) and label.isdecimal() and len(label) <= _MAX_PAGE_DIGITS:
        return int(label)
    if label is None and "total_pages" not in metadata:  # as PDF loaders write, which count from 0
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
    return float(value) if 0 < value <= sys.float_info.max else 0.0  # of integers there are larger
