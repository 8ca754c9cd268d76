"""Chunking: documents to passages by headings, sentences and token counts."""

from __future__ import annotations

import hashlib
import re
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError
from ragaccel.passage import Document, Passage, fenced_spans, sentence_spans
from ragaccel.retrieval.loaders import title_from_path
from ragaccel.retrieval.loaders.process import MAX_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_HEADING_CHARS = 1_000

# every expression here takes time in proportion to the line, whatever is in it
_ATX = re.compile(r"[ ]{0,3}(#{1,6})([ \t]+)")
_SETEXT = re.compile(r"[ ]{0,3}(=+|-{2,})[ \t]*$")
_MAYBE_HEADING = re.compile(r"^[ ]{0,3}(?:#{1,6}[ \t]|(?:=+|-{2,})[ \t]*$)", re.MULTILINE)
_MARK_LINE = re.compile(r"^([=\-`:.'\"~^_*+#])\1{2,}[ \t]*$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_ANCHOR = re.compile(r"\{#|\[\[|<a\b|</a>")
_ANCHOR_ENDS = {"{#": "}", "[[": "]", "<a": ">"}


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading: its characters in the document, its level (1 is the largest) and its words."""

    start: int
    end: int
    level: int
    words: str


@dataclass(frozen=True, slots=True)
class Section:
    """What stands under one heading: the characters of its body, and the path of headings above."""

    start: int
    end: int
    path: tuple[str, ...]
    heading: Heading | None = None

    @property
    def level(self) -> int:
        """The level of its heading; 0 before the first."""
        return self.heading.level if self.heading else 0


def sections(document: Document) -> Iterator[Section]:
    """Cut a document at its headings; the characters before the first are a section too."""
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
    """Headings of Markdown without fenced code; only lines that may be one are looked at closely.

    What stands above such a line matters back to the last empty line, and no further.
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
            isolated = not previous.strip()  # a heading with an underline is a paragraph of its own
            previous, previous_start = (line if isolated else ""), position
            position = stop + 1


def _atx(line: str) -> tuple[int, str] | None:
    """The level and the words of a heading after ``#``; marks at its end are none of them."""
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
    """Underlined titles of reStructuredText; a style's first use tells its level."""
    styles: list[str] = []
    last_underline = -1  # where the underline of the last heading starts, which is no title
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
    """The start and the characters of the line before the one that starts at a position."""
    start = text.rfind("\n", 0, max(position - 1, 0)) + 1
    return start, text[start : max(position - 1, 0)]


def _plain(words: str) -> str:
    words = _without_anchors(_without_links(words))
    plain = re.sub(r"[*_`]{1,3}(?=\S)|(?<=\S)[*`]{1,3}", "", words).strip() or words.strip()
    return plain[:MAX_HEADING_CHARS]


def _without_links(words: str) -> str:
    """Links and pictures as their text: ``[text](address)``; each character is looked at once."""
    kept: list[str] = []
    done = position = 0
    while (opening := words.find("[", position)) >= 0:
        closing = words.find("]", opening)
        if closing < 0:
            break
        position = closing + 1
        if words.startswith("(", position):
            end = words.find(")", position)
            if end < 0:
                break
            start = opening - words.startswith("!", max(opening - 1, done))
            kept += [words[done:start], words[opening + 1 : closing]]
            done = position = end + 1
    return "".join([*kept, words[done:]])


def _without_anchors(words: str) -> str:
    """A space in place of ``{#anchor}``, ``[[anchor]]`` and ``<a …>`` with what space is around."""
    kept: list[str] = []
    done = 0
    nearest: dict[str, int] = {}  # the end that the last opening of each kind was followed by
    for opening in _ANCHOR.finditer(words):
        if opening.start() < done:
            continue
        end = opening.end()
        closer = _ANCHOR_ENDS.get(opening.group())
        if closer:
            if nearest.get(closer, end) < end or closer not in nearest:
                found = words.find(closer, end)
                nearest[closer] = found if found >= 0 else len(words)
            end = nearest[closer] + 1
            double = opening.group() == "[["
            if end > len(words) or (double and not words.startswith("]", end)):
                continue
            end += double
        kept.append(words[done : opening.start()].rstrip())
        done = len(words) - len(words[end:].lstrip())
    return " ".join([*kept, words[done:]])


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    CountTokens = Callable[[list[str]], list[int]]

CHUNKER_VERSION = 1
DEFAULT_PASSAGE_TOKENS = 128
MAX_TITLE_CHARS = 120
MAX_PASSAGES = 1_000_000
_MAX_TOKEN_CHARS = 16
_COUNT_BATCH = 1024  # what is counted at once: the tokens of a text take a hundred times its size
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
    document: Document,
    count_tokens: CountTokens,
    max_tokens: int = DEFAULT_PASSAGE_TOKENS,
    *,
    max_seconds: float = MAX_SECONDS,
) -> list[Passage]:
    """Cut a document into passages of at most ``max_tokens`` tokens.

    A passage never spans a heading; within a section whole paragraphs are packed, a paragraph that
    is too long is cut between sentences, a sentence that is too long between lines, then words,
    then characters. Headings are not in the text: they are the title, ``Guide > Installing``.
    Time and memory grow with the text alone.

    Args:
        document: What to cut.
        count_tokens: Counts the tokens of texts, special tokens left out.
        max_tokens: The budget of a passage's text; its title is not counted.
        max_seconds: The CPU time that this thread may take, but for counting, which is the
            tokenizer's own and grows with the text alone.

    Returns:
        Passages in order, with ``document.text[p.start:p.end] == p.text``; none is empty. Between
        them lie only white space, headings, rules, front matter and comments (``<!-- -->``).

    Raises:
        DocumentError: It would take more time, or more passages, than a document may.
    """
    splitter = _Splitter(document.text, count_tokens, max_tokens, max_seconds)
    lines = _Lines(document)
    passages: list[Passage] = []
    for name, span in _section_spans(document):
        for start, end in splitter.cut(span, document.markup):
            text = document.text[start:end]
            page = document.page_at(start)
            number = lines.number_at(start)
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
                    locations=tuple(lines.locations(start, end)),
                )
            )
        if len(passages) > MAX_PASSAGES:
            raise DocumentError(f"makes more than {MAX_PASSAGES:,} passages: split it")
    return passages


def document_title(document: Document) -> str:
    """A document's title: its own, else its first heading, else its file's name."""
    if document.title:
        return document.title[:MAX_HEADING_CHARS]
    if document.markup != "code":
        top = next((s.path[0] for s in sections(document) if s.path), "")
        if top:
            return top
    return title_from_path(document.path)


class _Lines:
    """The lines of a document, asked for from its beginning to its end."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.position = 0
        self.line = 0

    def number_at(self, position: int) -> int:
        """The line of the file that holds a position, which is not before the last one asked."""
        self.line += self.document.text.count("\n", self.position, position)
        self.position = position
        numbers = self.document.line_numbers
        return numbers[self.line] if numbers else self.line + 1

    def locations(self, start: int, end: int) -> Iterator[Span]:
        """Yield where the page or line changes within a passage; see :attr:`Passage.locations`."""
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
    """The path of headings, cut in its middle when it is too long to be read as a title."""
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
    """The title and the characters of every section that has something to say.

    A heading with nothing under it stands for itself, unless smaller headings follow: then it is
    in their titles.
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
    """Spans of a text, cut smaller until they fit and packed until they are full.

    Everything here passes spans on one by one: a list of all words takes fifty times their text.
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
        """Spans without the white space around them, and their tokens; blank ones are left out."""
        trimmed = (_trimmed(self.text, *span) for span in spans)
        return self._sized(span for span in trimmed if span[0] < span[1])

    def _sized(self, spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
        """Spans and their tokens, counted many at once but never a whole document."""
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
        """Tokens of spans; at least one for 16 characters, as a word can be unknown as a whole.

        That is all that is said of a span which is too long by this alone.
        """
        if time.thread_time() - self.began > self.max_seconds:
            raise DocumentError(f"takes more than {MAX_SECONDS} s to read: split it")
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
        """A paragraph as it is, or as the sentences or lines it is made of."""
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
        """The words of a text that fit, and the parts of those that do not."""
        known = self.word_sizes
        waiting: list[Span] = []
        for found in _WORD.finditer(self.text, start, end):
            waiting.append(found.span())
            if len(waiting) == _COUNT_BATCH:
                yield from self._fitting_words(waiting)
                waiting = []
                if len(known) > _MAX_CACHED_WORDS:
                    known.clear()
        yield from self._fitting_words(waiting)

    def _fitting_words(self, words: list[Span]) -> Iterator[tuple[Span, int]]:
        known = self.word_sizes
        texts = [self.text[slice(*word)] for word in words]
        new = {text: word for text, word in zip(texts, words, strict=True) if text not in known}
        for word, size in self._sized(new.values()):
            known[self.text[slice(*word)]] = size
        for word, text in zip(words, texts, strict=True):
            if known[text] <= self.max_tokens:
                yield word, known[text]
            else:
                yield from self._bisected(word, known[text])

    def _bisected(self, span: Span, size: int) -> Iterator[tuple[Span, int]]:
        """A run of characters without a space, cut in halves until each fits."""
        start, end = span
        if size <= self.max_tokens or end - start < 2:
            yield span, size
            return
        middle = (start + end) // 2
        halves = [(start, middle), (middle, end)]
        for half, count in zip(halves, self._counts(halves), strict=True):
            yield from self._bisected(half, count)

    def _pack(self, pieces: Iterable[tuple[Span, int]]) -> Iterator[Span]:
        """Join neighbours while they fit."""
        packed: Span | None = None
        total = 0
        for (start, end), size in pieces:
            if packed and total + size <= self.max_tokens:
                packed = (packed[0], end)
                total += size
            else:
                if packed:
                    yield packed
                packed = (start, end)
                total = size
        if packed:
            yield packed

    def _recheck(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Cut again what a joint made too long: white space counts in some vocabularies."""
        for span, size in self._measured(spans):
            if size <= self.max_tokens:
                yield span
            else:
                yield from (_trimmed(self.text, *piece) for piece in self._split_again(span))

    def _split_again(self, span: Span) -> Iterator[Span]:
        """Halve at the white space nearest the middle until every part fits."""
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
    """Where a word begins that is nearest to the middle of a text; the middle if none does."""
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
    """Paragraphs between blank lines; fenced code is one, blank lines and all, a comment none."""
    position = start
    for opening, closing, kept in _fences_and_comments(text, start, end) if markdown else ():
        yield from _between_blank_lines(text, position, opening)
        if kept:
            yield opening, closing
        position = closing
    yield from _between_blank_lines(text, position, end)


def _fences_and_comments(text: str, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Fenced code, to be kept whole, and the comments between, which are no text."""
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


def _trimmed(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    first = start + len(piece) - len(piece.lstrip())
    return first, first + len(piece.strip())
