"""Document and Passage: the nouns of text."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """The text of one file, with where its pages start when it has pages.

    ``page_starts[i]`` is the character offset at which page ``i + 1`` begins; empty for formats
    without pages.
    """

    path: str
    text: str
    title: str = ""
    page_starts: tuple[int, ...] = ()

    def page_at(self, offset: int) -> int | None:
        """The 1-based page that holds a character offset; None when there are no pages."""
        return bisect_right(self.page_starts, offset) or None

    def line_at(self, offset: int) -> int:
        """The 1-based line that holds a character offset."""
        return self.text.count("\n", 0, offset) + 1


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: ``document.text[start:end] == text``, exactly.

    ``passage_id`` is stable under re-indexing of an unchanged file. ``page`` and ``line`` are
    1-based; a paged format has a page, any other file a line, a ready-made collection neither.
    """

    passage_id: str
    text: str
    title: str = ""
    path: str = ""
    start: int = 0
    end: int = 0
    page: int | None = None
    line: int | None = None
    score: float = 0.0

    @property
    def citation(self) -> str:
        """Where the passage stands, as a person would look it up: ``guide.pdf:3``, ``notes.md:12``."""
        place = self.page if self.page is not None else self.line
        where = self.path or self.passage_id
        return where if place is None else f"{where}:{place}"
