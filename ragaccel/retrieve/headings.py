"""Headings: where the sections of a document start, and what each is called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragaccel.sentences import fenced_spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragaccel.passage import Document

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
            elif underline and _titles(previous):
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


def _titles(line: str) -> bool:
    return bool(line.strip()) and line.lstrip()[0] not in "|>-*+#"


def _underlined_headings(text: str) -> Iterator[Heading]:
    """Underlined titles of reStructuredText; a style's first use tells its level."""
    styles: list[str] = []
    taken = -1  # where the underline of the last heading starts, which is no title
    for mark in _MARK_LINE.finditer(text):
        start, previous = _line_before(text, mark.start())
        title = previous.strip()
        underline = mark.group().rstrip()
        if not title or start == taken or previous[0].isspace() or len(underline) < len(title):
            continue
        over_start, over = _line_before(text, start)
        overlined = over_start != taken and over.rstrip() == underline
        style = mark.group(1) * (2 if overlined else 1)
        if style not in styles:
            styles.append(style)
        taken = mark.start()
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
