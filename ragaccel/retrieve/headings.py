"""Headings: where the sections of a document start, and what each is called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragaccel.sentences import fenced_spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragaccel.passage import Document

_ATX = re.compile(r"[ ]{0,3}(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$")
_SETEXT = re.compile(r"[ ]{0,3}(=+|-{2,})[ \t]*$")
_RST_UNDERLINE = re.compile(r"([=\-`:.'\"~^_*+#])\1{2,}[ \t]*$")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ANCHOR = re.compile(r"\s*(?:\{#[^}]*\}|\[\[[^\]]*\]\]|<a\b[^>]*>|</a>)\s*")


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


def _lines(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, text[start:end]
        start = end + 1


def _markdown_headings(text: str, start: int) -> Iterator[Heading]:
    fences = list(fenced_spans(text, start))
    previous, previous_start = "", start
    for position, line in _lines(text, start):
        while fences and fences[0][1] <= position:
            fences.pop(0)
        if fences and fences[0][0] <= position:
            previous = ""
            continue
        atx = _ATX.match(line)
        underline = _SETEXT.match(line)
        if atx:
            level = len(atx.group(1))
            yield Heading(position, position + len(line), level, _plain(atx.group(2)))
        elif underline and _titles(previous):
            level = 1 if underline.group(1)[0] == "=" else 2
            yield Heading(previous_start, position + len(line), level, _plain(previous))
        isolated = not previous.strip()  # a heading with an underline is a paragraph of its own
        previous, previous_start = (line if isolated else ""), position


def _titles(line: str) -> bool:
    return bool(line.strip()) and line.lstrip()[0] not in "|>-*+#"


def _underlined_headings(text: str) -> Iterator[Heading]:
    """Underlined titles of reStructuredText; a style's first use tells its level."""
    styles: list[str] = []
    previous, previous_start, over, over_start = "", 0, "", 0
    for position, line in _lines(text):
        underline = _RST_UNDERLINE.match(line)
        title = previous.strip()
        if underline and title and len(line.rstrip()) >= len(title) and not previous[0].isspace():
            overlined = over == line.rstrip()
            style = underline.group(1) * (2 if overlined else 1)
            if style not in styles:
                styles.append(style)
            start = over_start if overlined else previous_start
            yield Heading(start, position + len(line), styles.index(style) + 1, _plain(title))
            previous, over = "", ""
            continue
        was_mark = bool(_RST_UNDERLINE.match(previous))
        over, over_start = (previous.rstrip(), previous_start) if was_mark else ("", 0)
        previous, previous_start = line, position


def _plain(words: str) -> str:
    words = _ANCHOR.sub(" ", _LINK.sub(r"\1", words))
    return re.sub(r"[*_`]{1,3}(?=\S)|(?<=\S)[*`]{1,3}", "", words).strip() or words.strip()
