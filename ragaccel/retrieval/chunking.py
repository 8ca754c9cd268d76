"""Chunking: split documents into passages by headings, sentences and token counts."""

from __future__ import annotations

import hashlib
import re
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError
from ragaccel.passage import Document, Passage, fenced_spans, sentence_spans, trimmed
from ragaccel.retrieval.loaders import title_from_path
from ragaccel.retrieval.loaders.process import MAX_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    CountTokens = Callable[[list[str]], list[int]]


MAX_HEADING_CHARS = 1_000

# these expressions, but for links and anchors, take time proportional to the line's length
_ATX = re.compile(r"[ ]{0,3}(#{1,6})([ \t]+)")
_SETEXT = re.compile(r"[ ]{0,3}(=+|-{2,})[ \t]*$")
_MAYBE_HEADING = re.compile(r"^[ ]{0,3}(?:#{1,6}[ \t]|(?:=+|-{2,})[ \t]*$)", re.MULTILINE)
_MARK_LINE = re.compile(r"^([=\-`:.'\"~^_*+#])\1{2,}[ \t]*$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ANCHOR = re.compile(r"\s*(?:\{#[^}]*\}|\[\[[^\]]*\]\]|<a\b[^>]*>|</a>)\s*")
_EMPHASIS = re.compile(r"[*_`]{1,3}(?=\S)|(?<=\S)[*`]{1,3}")


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading: its span in the document, its level (1 is the highest) and its text."""

    start: int
    end: int
    level: int
    words: str


@dataclass(frozen=True, slots=True)
class Section:
    """The text under one heading: its span without the heading, and the headings above it.

    ``path`` holds their texts, from the highest level to this section's own heading.
    """

    start: int
    end: int
    path: tuple[str, ...]
    heading: Heading | None = None

    @property
    def level(self) -> int:
        """The level of the section's heading; 0 for the text before the first heading."""
        return self.heading.level if self.heading else 0


def sections(document: Document) -> Iterator[Section]:
    """Yield the sections of a document, beginning with the text before the first heading."""
    text = document.text
    front = _FRONT_MATTER.match(text) if document.markup == "markdown" else None
    start = front.end() if front else 0
    path: list[Heading] = []
    for heading in _headings(text, start, document.markup):
        yield Section(start, heading.start, _words(path), path[-1] if path else None)
        while path and path[-1].level >= heading.level:
            path.pop()
        path.append(heading)
        start = heading.end
    yield Section(start, len(text), _words(path), path[-1] if path else None)


def _words(path: list[Heading]) -> tuple[str, ...]:
    return tuple(heading.words for heading in path)


def _headings(text: str, start: int, markup: str) -> Iterator[Heading]:
    if markup == "markdown":
        return _markdown_headings(text, start)
    return _underlined_headings(text) if markup in ("rst", "") else iter(())


def _markdown_headings(text: str, start: int) -> Iterator[Heading]:
    for opening, closing in fenced_spans(text, start):
        yield from _headings_between(text, start, opening)
        start = closing + 1
    yield from _headings_between(text, start, len(text))


def _headings_between(text: str, position: int, end: int) -> Iterator[Heading]:
    """Yield the headings of Markdown text without fenced code, parsing only candidate lines.

    An underlined heading must be a paragraph of one line, so the lines above a candidate are read
    too, back to the last empty line.
    """
    previous, previous_start = "", position
    while position < end and (found := _MAYBE_HEADING.search(text, position, end)):
        blank = text.rfind("\n\n", position, found.start())
        if blank >= 0:
            previous, position = "", blank + 2
        while position <= found.start():
            stop = text.find("\n", position, end)
            stop = end if stop < 0 else stop
            line = text[position:stop]
            atx = _atx(line)
            underline = _SETEXT.match(line)
            if atx:
                yield Heading(position, stop, *atx)
            elif underline and _can_be_title(previous):
                level = 1 if underline.group(1)[0] == "=" else 2
                yield Heading(previous_start, stop, level, _plain(previous))
            isolated = not previous.strip()  # an underlined heading is a one-line paragraph
            previous, previous_start = (line if isolated else ""), position
            position = stop + 1


def _atx(line: str) -> tuple[int, str] | None:
    """Return the level and text of a ``#`` heading without its closing marks, or None."""
    opening = _ATX.match(line)
    if not opening:
        return None
    rest = line[opening.end() :]
    if not rest and len(opening.group(2)) < 2:
        return None
    words = rest.rstrip(" \t").rstrip("#").rstrip(" \t") or rest[:1]
    return len(opening.group(1)), _plain(words)


def _can_be_title(line: str) -> bool:
    return bool(line.strip()) and line.lstrip()[0] not in "|>-*+#"


def _underlined_headings(text: str) -> Iterator[Heading]:
    """Yield underlined reStructuredText titles; the first style used is level 1, the next 2."""
    styles: list[str] = []
    last_underline = -1  # the position of the last heading's underline, which is not a title
    for mark in _MARK_LINE.finditer(text):
        start, previous = _line_before(text, mark.start())
        title = previous.strip()
        underline = mark.group().rstrip()
        if (
            not title
            or start == last_underline
            or previous[0].isspace()
            or len(underline) < len(title)
        ):
            continue
        over_start, over = _line_before(text, start)
        overlined = over_start != last_underline and over.rstrip() == underline
        style = mark.group(1) * (2 if overlined else 1)
        if style not in styles:
            styles.append(style)
        last_underline = mark.start()
        begin = over_start if overlined else start
        yield Heading(begin, mark.end(), styles.index(style) + 1, _plain(title))


def _line_before(text: str, position: int) -> tuple[int, str]:
    """Return the start and text of the line before the one that starts at a position."""
    start = text.rfind("\n", 0, max(position - 1, 0)) + 1
    return start, text[start : max(position - 1, 0)]


def _plain(words: str) -> str:
    """Return a heading's words without links, pictures, anchors and emphasis."""
    words = words[:MAX_HEADING_CHARS]  # two of the expressions take square time
    words = _ANCHOR.sub(" ", _LINK.sub(r"\1", words))
    return _EMPHASIS.sub("", words).strip() or words.strip()


CHUNKER_VERSION = 1
DEFAULT_PASSAGE_TOKENS = 128
MAX_TITLE_CHARS = 120
MAX_PASSAGES = 1_000_000
_MAX_TOKEN_CHARS = 16
_COUNT_BATCH = 1024  # texts per call: their tokens take a hundred times their size in memory
_COUNT_BATCH_CHARS = 1 << 18
_MAX_CACHED_WORDS = 1 << 16

_PARAGRAPH_END = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_COMMENT = re.compile(r"^[ ]{0,3}<!--", re.MULTILINE)
_WORD = re.compile(r"\S+\s*")
_SPACE = re.compile(r"\s+")
_VISIBLE = re.compile(r"\S")
_SEPARATOR = " > "

Span = tuple[int, int]


def split_document(
    document: Document, count_tokens: CountTokens, max_tokens: int = DEFAULT_PASSAGE_TOKENS
) -> list[Passage]:
    """Return the passages of a document as a list; see ``iter_passages``."""
    return list(iter_passages(document, count_tokens, max_tokens))


def iter_passages(
    document: Document,
    count_tokens: CountTokens,
    max_tokens: int = DEFAULT_PASSAGE_TOKENS,
    *,
    max_seconds: float = MAX_SECONDS,
) -> Iterator[Passage]:
    """Split a document into passages of at most ``max_tokens`` tokens.

    A passage never spans a heading. Within a section whole paragraphs are packed together; a
    paragraph that is too long is split between sentences, a sentence between lines, then words,
    then characters. Headings are not part of the text but of the title, ``Guide > Installing``.
    Time and memory are linear in the length of the text.

    Args:
        document: The document.
        count_tokens: Counts the tokens of texts, without special tokens.
        max_tokens: The maximum number of tokens of a passage's text, without its title.
        max_seconds: The CPU time that this thread may use, without counting tokens and without the
            caller's time between two passages.

    Yields:
        Passages in order, none empty, with ``document.text[p.start:p.end] == p.text``. Between them
        are only white space, headings, rules, front matter and comments (``<!-- -->``).

    Raises:
        DocumentError: The document takes more time or has more passages than allowed.
    """
    splitter = _Splitter(document.text, count_tokens, max_tokens, max_seconds)
    lines = _Lines(document)
    spans = (
        (name, *span)
        for name, section in _section_spans(document)
        for span in splitter.cut(section, document.markup)
    )
    for number, (name, start, end) in enumerate(spans):
        if number == MAX_PASSAGES:
            raise DocumentError(f"has more than {MAX_PASSAGES:,} passages: split the file")
        text = document.text[start:end]
        page = document.page_at(start)
        line = lines.number_at(start)
        passage = Passage(
            passage_id=_passage_id(document.path, start, text),
            text=text,
            title=name,
            path=document.path,
            start=start,
            end=end,
            page=page,
            line=line if page is None else None,
            locations=tuple(lines.locations(start, end)),
        )
        paused = time.thread_time()
        yield passage
        splitter.began += time.thread_time() - paused


def document_title(document: Document) -> str:
    """Return a document's title: its own, else its first heading, else its file name."""
    if document.title:
        return document.title[:MAX_HEADING_CHARS]
    if document.markup != "code":
        top = next((s.path[0] for s in sections(document) if s.path), "")
        if top:
            return top
    return title_from_path(document.path)


class _Lines:
    """The line numbers of a document, for positions in ascending order."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.position = 0
        self.line = 0

    def number_at(self, position: int) -> int:
        """Return the line number of a position, which must not precede the last one asked for."""
        self.line += self.document.text.count("\n", self.position, position)
        self.position = position
        numbers = self.document.line_numbers
        return numbers[self.line] if numbers else self.line + 1

    def locations(self, start: int, end: int) -> Iterator[Span]:
        """Yield (offset in a passage, new page or line number); see ``Passage.locations``."""
        starts = self.document.page_starts
        for page in range(bisect_right(starts, start), bisect_left(starts, end)):
            yield starts[page] - start, page + 1
        if starts or not self.document.line_numbers:
            return
        numbers, line = self.document.line_numbers, self.line
        newline = self.document.text.find("\n", start, end)
        while newline >= 0:
            if numbers[line + 1] != numbers[line] + 1:
                yield newline + 1 - start, numbers[line + 1]
            line += 1
            newline = self.document.text.find("\n", newline + 1, end)


def _passage_title(title: str, section: Section) -> str:
    """Join a document's title and a section's headings; drop middle ones until the result fits."""
    parts = [title, *section.path]
    if len(parts) > 1 and parts[0].casefold() == parts[1].casefold():
        parts.pop(0)
    parts = [_truncated(part, MAX_TITLE_CHARS // 2) for part in parts]
    while len(_SEPARATOR.join(parts)) > MAX_TITLE_CHARS and len(parts) > 2:
        parts.pop(len(parts) // 2)
    return _truncated(_SEPARATOR.join(parts), MAX_TITLE_CHARS)


def _truncated(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def _passage_id(path: str, start: int, text: str) -> str:
    name = f"{path}\0{start}\0{text}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(name).hexdigest()[:16]


def _section_spans(document: Document) -> Iterator[tuple[str, Span]]:
    """Yield the title and span of every section that is not blank.

    A heading without a body is a section itself, unless lower headings follow, whose titles
    include it.
    """
    title = document_title(document)
    found = sections(document)
    section = next(found)
    for following in chain(found, [None]):
        heading = section.heading
        if _VISIBLE.search(document.text, section.start, section.end):
            yield _passage_title(title, section), (section.start, section.end)
        elif heading and not (following and following.level > section.level):
            yield _passage_title(title, section), (heading.start, heading.end)
        if following:
            section = following


class _Splitter:
    """A splitter: cuts spans of a text until they fit the token limit, and packs small ones.

    Methods yield their results: a list of all words would take fifty times the memory of the text.
    """

    def __init__(
        self, text: str, count_tokens: CountTokens, max_tokens: int, max_seconds: float
    ) -> None:
        self.text = text
        self.count_tokens = count_tokens
        self.max_tokens = max(max_tokens, 1)
        self.max_seconds = max_seconds
        self.began = time.thread_time()
        self.word_sizes: dict[str, int] = {}

    def cut(self, span: Span, markup: str) -> Iterator[Span]:
        if markup == "rows":
            units = _lines_of(self.text, *span)
        else:
            units = _paragraphs(self.text, *span, markdown=markup == "markdown")
        fitting = (
            piece for unit, size in self._measured(units) for piece in self._fit(unit, size, markup)
        )
        return self._recheck(self._pack(fitting))

    def _measured(self, spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
        """Strip white space from spans; yield (span, number of tokens) for those not blank."""
        found = (trimmed(self.text, *span) for span in spans)
        return self._sized(span for span in found if span[0] < span[1])

    def _sized(self, spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
        """Yield (span, number of tokens); the tokens are counted in batches."""
        batch: list[Span] = []
        space_left = _COUNT_BATCH_CHARS
        for span in spans:
            batch.append(span)
            space_left -= span[1] - span[0]
            if space_left <= 0 or len(batch) == _COUNT_BATCH:
                yield from zip(batch, self._counts(batch), strict=True)
                batch, space_left = [], _COUNT_BATCH_CHARS
        yield from zip(batch, self._counts(batch), strict=True)

    def _counts(self, spans: list[Span]) -> list[int]:
        """Count the tokens of spans, at least one per 16 characters.

        The minimum is for tokenizers that map a long unknown word to one token. Spans that exceed
        the limit by the minimum alone are not tokenized.
        """
        if time.thread_time() - self.began > self.max_seconds:
            raise DocumentError(f"takes more than {self.max_seconds:g} s to read: split the file")
        least = [(end - start) // _MAX_TOKEN_CHARS for start, end in spans]
        texts = [
            self.text[slice(*span)]
            for span, size in zip(spans, least, strict=True)
            if size <= self.max_tokens
        ]
        before = time.thread_time()
        counts = iter(self.count_tokens(texts) if texts else ())
        self.began += time.thread_time() - before
        return [max(next(counts), size) if size <= self.max_tokens else size for size in least]

    def _fit(self, span: Span, size: int, markup: str) -> Iterator[tuple[Span, int]]:
        """Yield (span, number of tokens) of a paragraph, or of its parts if it is too long.

        Parts are sentences or lines, and words joined up to the limit if these are too long, too.
        """
        if size <= self.max_tokens:
            yield span, size
            return
        lined = markup in ("code", "rows") or self.text.startswith(("```", "~~~", "|"), span[0])
        split = _lines_of if lined else _sentences_of
        for piece, count in self._measured(split(self.text, *span)):
            if count <= self.max_tokens:
                yield piece, count
            elif not lined and self.text.find("\n", *piece) >= 0:
                yield from self._fit(piece, count, "code")
            else:
                yield from self._measured(self._pack(self._words(*piece)))

    def _words(self, start: int, end: int) -> Iterator[tuple[Span, int]]:
        """Yield (span, number of tokens) of each word, or of its parts if it is too long."""
        known = self.word_sizes
        words = (found.span() for found in _WORD.finditer(self.text, start, end))
        while batch := list(islice(words, _COUNT_BATCH)):
            if len(known) > _MAX_CACHED_WORDS:
                known.clear()
            texts = [self.text[slice(*word)] for word in batch]
            new = {text: word for text, word in zip(texts, batch, strict=True) if text not in known}
            for word, size in self._sized(new.values()):
                known[self.text[slice(*word)]] = size
            for text, word in zip(texts, batch, strict=True):
                yield from self._bisected(word, known[text])

    def _bisected(self, span: Span, size: int) -> Iterator[tuple[Span, int]]:
        """Halve a word until every part fits; yield (span, number of tokens) of the parts."""
        start, end = span
        if size <= self.max_tokens or end - start < 2:
            yield span, size
            return
        middle = (start + end) // 2
        halves = [(start, middle), (middle, end)]
        for half, count in zip(halves, self._counts(halves), strict=True):
            yield from self._bisected(half, count)

    def _pack(self, pieces: Iterable[tuple[Span, int]]) -> Iterator[Span]:
        """Join adjacent spans as long as the sum of their tokens fits the limit."""
        packed: Span | None = None
        total = 0
        for (start, end), size in pieces:
            total += size
            if packed and total <= self.max_tokens:
                packed = (packed[0], end)
                continue
            if packed:
                yield packed
            packed, total = (start, end), size
        if packed:
            yield packed

    def _recheck(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield joined spans; split those too long, as some tokenizers count the space between."""
        for span, size in self._measured(spans):
            if size <= self.max_tokens:
                yield span
            else:
                yield from (trimmed(self.text, *piece) for piece in self._split_again(span))

    def _split_again(self, span: Span) -> Iterator[Span]:
        """Split a span at the white space nearest to its middle until every part fits."""
        start, end = span
        cut = _nearest_gap(self.text, start, end)
        if cut in (start, end):
            yield span
            return
        for part, size in self._measured([(start, cut), (cut, end)]):
            if size <= self.max_tokens:
                yield part
            else:
                yield from self._split_again(part)


def _nearest_gap(text: str, start: int, end: int) -> int:
    """Return the word start nearest to the middle of a text, or the middle if there is none."""
    middle = (start + end) // 2
    before = text[start:middle]
    if before[-1:].isspace() and not text[middle].isspace():
        return middle
    words = before.rsplit(None, 1)
    gap = _SPACE.search(text, middle, end)
    found = [start + len(before.rstrip()) - len(words[1])] if len(words) == 2 else []
    found += [gap.end()] if gap and gap.end() < end else []
    return min(found, key=lambda cut: abs(cut - middle), default=middle)


def _paragraphs(text: str, start: int, end: int, *, markdown: bool) -> Iterator[Span]:
    """Yield paragraphs; fenced code counts as one, and comments are skipped."""
    position = start
    for opening, closing, kept in _fences_and_comments(text, start, end) if markdown else ():
        yield from _between_blank_lines(text, position, opening)
        if kept:
            yield opening, closing
        position = closing
    yield from _between_blank_lines(text, position, end)


def _fences_and_comments(text: str, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, is fenced code) for fenced code and for the comments outside it."""
    for opening, closing in chain(fenced_spans(text, start, end), [(end, end)]):
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
