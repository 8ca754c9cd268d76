"""HTML read as text: headings, paragraphs, lists and tables kept, scripts and chrome left out."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from ragaccel.passage import Document
from ragaccel.retrieve.plain_text import decode_text

_SKIPPED_TAGS = "script style noscript template svg nav iframe select button"
_BLOCK_TAGS = (
    "p div section article main header footer aside ul ol dl dt dd figure figcaption blockquote"
    " table thead tbody tr form fieldset address details summary hr body"
)
_SKIPPED = frozenset(_SKIPPED_TAGS.split())
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_CHARSET = re.compile(rb"<meta[^>]+charset=[\"']?\s*([\w-]+)", re.IGNORECASE)
_SPACE = re.compile(r"\s+")


def read_html(data: bytes, name: str) -> Document:
    """Read an HTML page as Markdown-like text, every line with its line number in the file."""
    reader = _Reader()
    reader.feed(_decode(data))
    reader.close()
    reader.end_line(blank=False)
    lines = reader.lines
    return Document(
        path=name,
        text="\n".join(line for line, _ in lines),
        title=_SPACE.sub(" ", "".join(reader.title)).strip(),
        markup="markdown",
        line_numbers=tuple(number for _, number in lines),
    )


def _decode(data: bytes) -> str:
    declared = _CHARSET.search(data[:4096])
    if declared:
        try:
            return data.decode(declared.group(1).decode("ascii")).replace("\r\n", "\n")
        except (LookupError, UnicodeDecodeError):
            pass
    return decode_text(data)[0]


class _Reader(HTMLParser):
    """Collects (line of text, line in the file); a line is a block or a table row."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[tuple[str, int]] = []
        self.title: list[str] = []
        self._pieces: list[str] = []
        self._started = 0
        self._skipped: list[str] = []
        self._preformatted = 0
        self._in_title = False
        self._in_row = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in _SKIPPED:
            self._skipped.append(tag)
        elif tag == "title":
            self._in_title = True
        elif tag in _HEADINGS:
            self.end_line(blank=True)
            self._add(_HEADINGS[tag])
        elif tag == "li":
            self.end_line(blank=False)
            self._add("- ")
        elif tag == "pre":
            self.end_line(blank=True)
            self._line("```")
            self._preformatted += 1
        elif tag in ("td", "th"):
            if self._in_row:
                self._add(" | ")
            self._in_row += 1
        elif tag == "br":
            self.end_line(blank=False)
        elif tag in _BLOCKS:
            self._start_block(tag)

    def _start_block(self, tag: str) -> None:
        if tag == "tr":
            self._in_row = 0
        inside = bool(self._in_row) or self._pieces == ["- "]
        if not inside or tag == "tr":
            self.end_line(blank=tag not in ("tr", "dt", "dd", "ul", "ol", "tbody", "thead"))

    def handle_endtag(self, tag: str) -> None:
        if self._skipped and tag == self._skipped[-1]:
            self._skipped.pop()
        elif tag == "title":
            self._in_title = False
        elif tag == "pre" and self._preformatted:
            self.end_line(blank=False)
            self._preformatted -= 1
            self._line("```")
            self.end_line(blank=True)
        elif tag == "tr":
            self._in_row = 0
            self.end_line(blank=False)
        elif tag == "li":
            self.end_line(blank=False)
        elif tag in _HEADINGS or (tag in _BLOCKS and not self._in_row):
            self.end_line(blank=tag not in ("tbody", "thead", "dt", "dd"))

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif self._skipped:
            return
        elif self._preformatted:
            self._add_preformatted(data)
        elif data.strip() or self._pieces:
            self._add(_SPACE.sub(" ", data))

    def _add_preformatted(self, data: str) -> None:
        first, *rest = data.split("\n")
        self._add(first)
        for offset, line in enumerate(rest, 1):
            self._line("".join(self._pieces))
            self._pieces = [line]
            self._started = self.getpos()[0] + offset

    def _add(self, text: str) -> None:
        if not self._pieces:
            self._started = self.getpos()[0]
        self._pieces.append(text)

    def _line(self, text: str) -> None:
        self.lines.append((text.rstrip(), self._started or self.getpos()[0]))

    def end_line(self, *, blank: bool) -> None:
        """End the line under way; ``blank`` sets what follows apart as a new paragraph."""
        text = "".join(self._pieces)
        text = text if self._preformatted else re.sub(r" {2,}", " ", text).strip()
        if text and text not in ("-", "|") and not set(text) <= {"#", " "}:
            self._line(text)
        self._pieces = []
        self._started = 0
        if blank and self.lines and self.lines[-1][0]:
            self.lines.append(("", self.getpos()[0]))
