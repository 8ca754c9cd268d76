"""Document and Passage: the nouns of text."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from operator import itemgetter


@dataclass(frozen=True, slots=True)
class Document:
    """The text of one file, with where its pages start when it has pages.

    ``page_starts[i]`` is the character offset at which page ``i + 1`` begins (a slide, a cell of a
    notebook and a chapter of a book count as pages); empty for formats without pages. ``markup``
    says how headings are written: ``"markdown"``, ``"rst"``, ``"code"``, ``"rows"`` (a record a
    line) or ``""``. ``line_numbers[i]`` is the line of the file that line ``i + 1`` of the text was
    made from, where the two differ (HTML, JSON; rows of a sheet, paragraphs); empty when the lines
    are the file's own.
    """

    path: str
    text: str
    title: str = ""
    page_starts: tuple[int, ...] = ()
    markup: str = ""
    line_numbers: tuple[int, ...] = ()

    def page_at(self, offset: int) -> int | None:
        """The 1-based page that holds a character offset; None when there are no pages."""
        return bisect_right(self.page_starts, offset) or None

    def line_at(self, offset: int) -> int:
        """The 1-based line of the file that holds a character offset."""
        line = self.text.count("\n", 0, offset)
        return self.line_numbers[line] if self.line_numbers else line + 1


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: ``document.text[start:end] == text``, exactly.

    ``passage_id`` is stable under re-indexing of an unchanged file. ``page`` and ``line`` are
    1-based and of its first character; a paged format has a page, any other file a line, a
    ready-made collection neither. ``places`` says what they are further on: from each of these
    offsets in the text on, the page or line is the given one (lines go on from there by one each).
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
    places: tuple[tuple[int, int], ...] = ()

    @property
    def citation(self) -> str:
        """Where the passage stands, for people: ``guide.pdf:3``, ``notes.md:12``."""
        return self.citation_at(0)

    def citation_at(self, offset: int) -> str:
        """Where the character at an offset of the text stands: on its own page or line."""
        page, line = self._place_at(offset)
        place = page if page is not None else line
        where = self.path or self.passage_id
        return where if place is None else f"{where}:{place}"

    def cut(self, start: int, end: int) -> Passage:
        """The piece ``text[start:end]``, with the page or line that it stands on.

        Its id is the whole passage's, which is where it is to be found again.
        """
        page, line = self._place_at(start)
        places = tuple((at - start, number) for at, number in self.places if start < at < end)
        return replace(
            self,
            text=self.text[start:end],
            start=self.start + start,
            end=self.start + end,
            page=page,
            line=line,
            places=places,
        )

    def _place_at(self, offset: int) -> tuple[int | None, int | None]:
        last = bisect_right(self.places, offset, key=itemgetter(0)) - 1
        since, number = self.places[last] if last >= 0 else (0, self.page or self.line)
        if self.page is not None:
            return number, None
        if self.line is None or number is None:
            return None, None
        return None, number + self.text.count("\n", since, offset)


@dataclass(frozen=True, slots=True)
class NearestSentence:
    """The sentence of a passage that is nearest to a question: ``passage.text[start:end]``.

    ``score`` is the mean cosine of the sentence, alone and after the passage's title.
    """

    passage: Passage
    start: int
    end: int
    score: float

    @property
    def text(self) -> str:
        """The sentence."""
        return self.passage.text[self.start : self.end]
