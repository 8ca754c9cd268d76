"""Chunking: a document cut into passages at headings, paragraphs and sentences, offsets exact."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from ragaccel.passage import Document, Passage
from ragaccel.retrieve.headings import Section, sections
from ragaccel.retrieve.plain_text import spoken_name
from ragaccel.sentences import fenced_spans, sentence_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    CountTokens = Callable[[list[str]], list[int]]

CHUNKER_VERSION = 1
DEFAULT_PASSAGE_TOKENS = 128
MAX_TITLE_CHARS = 120
_MAX_TOKEN_CHARS = 16

_PARAGRAPH_END = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_COMMENT = re.compile(r"^[ ]{0,3}<!--", re.MULTILINE)
_WORD = re.compile(r"\S+\s*")
_SEPARATOR = " > "

Span = tuple[int, int]


def split_document(
    document: Document, count_tokens: CountTokens, max_tokens: int = DEFAULT_PASSAGE_TOKENS
) -> list[Passage]:
    """Cut a document into passages of at most ``max_tokens`` tokens.

    A passage never spans a heading; within a section whole paragraphs are packed, a paragraph that
    is too long is cut between sentences, a sentence that is too long between lines, then words,
    then characters. Headings are not in the text: they are the title, ``Guide > Installing``.

    Args:
        document: What to cut.
        count_tokens: Counts the tokens of texts, special tokens left out.
        max_tokens: The budget of a passage's text; its title is not counted.

    Returns:
        Passages in order, with ``document.text[p.start:p.end] == p.text``; none is empty. Between
        them lie only white space, headings, rules, front matter and comments (``<!-- -->``).
    """
    cutter = _Cutter(document.text, count_tokens, max_tokens)
    newlines = [found.start() for found in re.finditer("\n", document.text)]
    passages = []
    for name, span in _bodies(document):
        for start, end in cutter.cut(span, document.markup):
            text = document.text[start:end]
            page = document.page_at(start)
            line = bisect_right(newlines, start - 1)
            number = document.line_numbers[line] if document.line_numbers else line + 1
            passages.append(
                Passage(
                    passage_id=_passage_id(document.path, start, text),
                    text=text,
                    title=name,
                    path=document.path,
                    start=start,
                    end=end,
                    page=page,
                    line=number if page is None else None,
                    places=tuple(_places(document, newlines, start, end)),
                )
            )
    return passages


def document_title(document: Document) -> str:
    """A document's title: its own, else its first heading, else its file's name."""
    if document.title:
        return document.title
    if document.markup != "code":
        top = next((s.path[0] for s in sections(document) if s.path), "")
        if top:
            return top
    return spoken_name(document.path)


def _places(document: Document, newlines: list[int], start: int, end: int) -> Iterator[Span]:
    """Where the page or line changes inside a passage, as :attr:`Passage.places` says it."""
    starts = document.page_starts
    for page in range(bisect_right(starts, start), bisect_left(starts, end)):
        yield starts[page] - start, page + 1
    if starts or not document.line_numbers:
        return
    numbers = document.line_numbers
    for line in range(bisect_left(newlines, start), bisect_left(newlines, end)):
        if numbers[line + 1] != numbers[line] + 1:
            yield newlines[line] + 1 - start, numbers[line + 1]


def _passage_title(title: str, section: Section) -> str:
    """The path of headings, cut in its middle when it is too long to be read as a title."""
    parts = [title, *section.path]
    if len(parts) > 1 and parts[0].casefold() == parts[1].casefold():
        parts.pop(0)
    parts = [_shortened(part, MAX_TITLE_CHARS // 2) for part in parts]
    while len(_SEPARATOR.join(parts)) > MAX_TITLE_CHARS and len(parts) > 2:
        parts.pop(len(parts) // 2)
    return _shortened(_SEPARATOR.join(parts), MAX_TITLE_CHARS)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def _passage_id(path: str, start: int, text: str) -> str:
    name = f"{path}\0{start}\0{text}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(name).hexdigest()[:16]


def _bodies(document: Document) -> Iterator[tuple[str, Span]]:
    """The title and the characters of every section that has something to say.

    A heading with nothing under it stands for itself, unless smaller headings follow: then it is
    in their titles.
    """
    title = document_title(document)
    found = list(sections(document))
    for section, following in zip(found, [*found[1:], None], strict=True):
        name = _passage_title(title, section)
        heading = section.heading
        if document.text[section.start : section.end].strip():
            yield name, (section.start, section.end)
        elif heading and not (following and following.level > section.level):
            yield name, (heading.start, heading.end)


class _Cutter:
    """Spans of a text, cut smaller until they fit and packed until they are full."""

    def __init__(self, text: str, count_tokens: CountTokens, max_tokens: int) -> None:
        self.text = text
        self.count_tokens = count_tokens
        self.max_tokens = max(max_tokens, 1)

    def cut(self, span: Span, markup: str) -> list[Span]:
        if not self.text[slice(*span)].strip():
            return []
        if markup == "rows":
            units = self._measured(_lines_of(self.text, *span))
        else:
            units = self._measured(_paragraphs(self.text, *span, markdown=markup == "markdown"))
        fitting = [piece for unit, size in units for piece in self._fit(unit, size, markup)]
        return self._checked(self._pack(fitting))

    def _measured(self, spans: Iterable[Span]) -> list[tuple[Span, int]]:
        spans = [_trimmed(self.text, *span) for span in spans]
        spans = [span for span in spans if span[0] < span[1]]
        counts = self._counts(spans)
        return list(zip(spans, counts, strict=True))

    def _counts(self, spans: list[Span]) -> list[int]:
        """Tokens of spans; at least one for 16 characters, as a word can be unknown as a whole."""
        counts = self.count_tokens([self.text[slice(*span)] for span in spans]) if spans else []
        lengths = [(end - start) // _MAX_TOKEN_CHARS for start, end in spans]
        return [max(count, length) for count, length in zip(counts, lengths, strict=True)]

    def _fit(self, span: Span, size: int, markup: str) -> Iterator[tuple[Span, int]]:
        """A paragraph as it is, or as the sentences or lines it is made of."""
        if size <= self.max_tokens:
            yield span, size
            return
        lined = markup in ("code", "rows") or self.text.startswith(("```", "~~~", "|"), span[0])
        split = _lines_of if lined else _sentences_of
        for piece, count in self._measured(split(self.text, *span)):
            if count <= self.max_tokens:
                yield piece, count
            elif not lined and "\n" in self.text[slice(*piece)]:
                yield from self._fit(piece, count, "code")
            else:
                yield from self._measured(self._cut_words(*piece))

    def _cut_words(self, start: int, end: int) -> list[Span]:
        words = [found.span() for found in _WORD.finditer(self.text, start, end)]
        sizes = self._counts(words)
        pieces: list[tuple[Span, int]] = []
        for word, size in zip(words, sizes, strict=True):
            if size <= self.max_tokens:
                pieces.append((word, size))
            else:
                pieces += self._halved(word, size)
        return self._pack(pieces)

    def _halved(self, span: Span, size: int) -> list[tuple[Span, int]]:
        """A run of characters without a space, cut in halves until each fits."""
        start, end = span
        if size <= self.max_tokens or end - start < 2:
            return [(span, size)]
        middle = (start + end) // 2
        halves = [(start, middle), (middle, end)]
        sizes = self._counts(halves)
        return [
            piece
            for half, count in zip(halves, sizes, strict=True)
            for piece in self._halved(half, count)
        ]

    def _pack(self, pieces: Sequence[tuple[Span, int]]) -> list[Span]:
        """Join neighbours while they fit; a heavy remainder is not left with a tiny last piece."""
        packed: list[Span] = []
        total = 0
        for (start, end), size in pieces:
            if packed and total + size <= self.max_tokens:
                packed[-1] = (packed[-1][0], end)
                total += size
            else:
                packed.append((start, end))
                total = size
        return packed

    def _checked(self, spans: list[Span]) -> list[Span]:
        """Cut again what a joint made too long: white space counts in some vocabularies."""
        checked: list[Span] = []
        for span, size in self._measured(spans):
            if size <= self.max_tokens:
                checked.append(span)
            else:
                checked += [_trimmed(self.text, *piece) for piece in self._cut_again(span)]
        return checked

    def _cut_again(self, span: Span) -> list[Span]:
        """Halve at the white space nearest the middle until every part fits."""
        start, end = span
        middle = (start + end) // 2
        spaces = [found.end() for found in re.finditer(r"\s+", self.text[start:end])]
        inner = [start + space for space in spaces if start + space < end]
        cut = min(inner, key=lambda space: abs(space - middle), default=middle)
        parts = [(start, cut), (cut, end)]
        if cut in (start, end):
            return [span]
        return [
            piece
            for part, size in self._measured(parts)
            for piece in ([part] if size <= self.max_tokens else self._cut_again(part))
        ]


def _paragraphs(text: str, start: int, end: int, *, markdown: bool) -> Iterator[Span]:
    """Paragraphs between blank lines; fenced code is one, blank lines and all, a comment none."""
    position = start
    for opening, closing, kept in _set_apart(text, start, end) if markdown else ():
        yield from _between_blank_lines(text, position, opening)
        if kept:
            yield opening, closing
        position = closing
    yield from _between_blank_lines(text, position, end)


def _set_apart(text: str, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Fenced code, to be kept whole, and the comments between, which are no text."""
    for opening, closing in [*fenced_spans(text, start, end), (end, end)]:
        while comment := _COMMENT.search(text, start, opening):
            start = text.find("-->", comment.end(), opening) + 3
            if start < 3:
                break
            yield comment.start(), start, False
        yield opening, closing, True
        start = closing


def _between_blank_lines(text: str, start: int, end: int) -> Iterator[Span]:
    position = start
    for gap in _PARAGRAPH_END.finditer(text, start, end):
        yield position, gap.start()
        position = gap.end()
    yield position, end


def _lines_of(text: str, start: int, end: int) -> Iterator[Span]:
    while start < end:
        newline = text.find("\n", start, end)
        stop = end if newline < 0 else newline
        yield start, stop
        start = stop + 1


def _sentences_of(text: str, start: int, end: int) -> Iterator[Span]:
    for first, last in sentence_spans(text[start:end]):
        yield start + first, start + last


def _trimmed(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    first = start + len(piece) - len(piece.lstrip())
    return first, first + len(piece.strip())
