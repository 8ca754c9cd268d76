"""The loader of HTML pages."""

from __future__ import annotations

import re
from contextlib import suppress
from html import unescape
from typing import TYPE_CHECKING

from ragaccel.retrieval.loaders import Lines, collapse_spaces, decode_text
from ragaccel.retrieval.loaders.tabular import table_lines

if TYPE_CHECKING:
    from ragaccel.passage import Document


_SKIPPED_TAGS = "script style noscript template svg nav iframe select button"
_BLOCK_TAGS = (
    "p div section article main header footer aside ul ol dl dt dd figure figcaption blockquote"
    " table thead tbody tr form fieldset address details summary hr body"
)
_SKIPPED = frozenset(_SKIPPED_TAGS.split())
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_LONG_CELL = 300  # characters after which the paragraphs of a table's cell are lines
_CHARSET = re.compile(rb"<meta[^>]+charset=[\"']?\s*([\w-]+)", re.IGNORECASE)
_SPACE = re.compile(r"\s+")
_TAG = re.compile(r"</?([a-zA-Z][^\s/>]*)")
_TAG_END = re.compile(r"""/?>|=\s*["']""")
_COMMENT_END = re.compile(r"--!?>")
_VERBATIM = frozenset("script style xmp iframe noembed noframes title textarea".split())
_WITH_REFERENCES = ("title", "textarea")  # &amp; is one character there, but <b> is not a tag
_SPAN = re.compile(r"\s(?:row|col)span\s*=\s*[\"']?(?!1\b)\d", re.IGNORECASE)
_OVERLONG_REFERENCE = re.compile(r"&#(?:[0-9]{20,}|[xX][0-9a-fA-F]{20,});?")


def read_html(data: bytes, name: str) -> Document:
    """Read an HTML page as Markdown-like text, with the line number of every line."""
    return page_document(_decode(data), name)


def page_document(text: str, name: str) -> Document:
    """Return the document of a page that is decoded; what it says of its encoding is ignored."""
    collector = _LineCollector()
    _scan(text, collector)
    collector.end_line(blank=False)
    return collector.lines.document(name, collapse_spaces("".join(collector.title)))


def _decode(data: bytes) -> str:
    declared = _CHARSET.search(data[:4096])
    if declared:
        encoding = declared.group(1).decode("ascii")
        with suppress(LookupError, UnicodeError):
            if declared.group().decode(encoding).isascii():  # a wrongly declared UTF-16 fails here
                return data.decode(encoding).replace("\r\n", "\n")
    return decode_text(data)[0]


def _scan(text: str, collector: _LineCollector) -> None:
    """Pass the tags and the text of a page to a collector, split as browsers split them.

    The standard library's parser takes quadratic time for unclosed markup (``<!--<!--<!--``).
    Parsers that build a tree take quadratic time for unclosed elements, or stop at deep nesting,
    and do not give line numbers. Here no failed search is repeated, and there is no tree.
    """
    scanner = _Scanner(text)
    position = data = 0  # the scan's position, and the start of the text before it
    while (opening := text.find("<", position)) >= 0:
        end, tag = scanner.markup(opening)
        if end < 0:  # a lone "<" is text
            position = opening + 1
            continue
        _feed_text(collector, text, data, opening)
        collector.line += text.count("\n", data, opening)
        data = position = end
        if tag is not None:
            name, is_start, is_empty = tag
            if is_start:
                collector.start(name)
                if name in ("td", "th") and _SPAN.search(text, opening, end):
                    collector.mark_irregular()
            if is_empty or not is_start:
                collector.end(name)
            elif name in _VERBATIM:
                position = scanner.verbatim(name, end)
                if name in scanner.unclosed:
                    collector.end(name)
                if name in _WITH_REFERENCES:
                    _feed_text(collector, text, end, position)
                end = data = position
        collector.line += text.count("\n", opening, end)
    _feed_text(collector, text, data, len(text))


def _feed_text(collector: _LineCollector, text: str, start: int, end: int) -> None:
    if start < end:
        data = text[start:end]
        if "&" in data:
            data = unescape(_OVERLONG_REFERENCE.sub("\ufffd", data))
        collector.data(data)


class _Scanner:
    """A scanner that finds the ends of a page's markup.

    It never searches again for an end known to be missing, so its time is linear.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.last_end = text.rfind(">")
        self.last_quotes = {quote: text.rfind(quote) for quote in "\"'"}
        self.quotes_close = True
        self.unclosed: set[str] = set()

    def markup(self, opening: int) -> tuple[int, tuple[str, bool, bool] | None]:
        """Return the end of the markup at a ``<``, and (name, is start tag, is empty) for a tag.

        The end is -1 if the ``<`` does not begin markup.
        """
        text = self.text
        if text.startswith("<!--", opening):
            closing = None
            if "--" not in self.unclosed:
                closing = _COMMENT_END.search(text, opening + 2)
            if closing is None:  # browsers hide the rest of the page, but here it stays searchable
                self.unclosed.add("--")
                return -1, None
            return closing.end(), None
        if opening > self.last_end:
            return -1, None
        tag = _TAG.match(text, opening)
        if tag:
            end = self._tag_end(tag.end())
            return end, (tag.group(1).lower(), text[opening + 1] != "/", self._is_empty(tag, end))
        if text.startswith("<![CDATA[", opening) and "]]" not in self.unclosed:
            end = text.find("]]>", opening)
            if end >= 0:
                return end + 3, None
            self.unclosed.add("]]")
        if text.startswith(("<!", "<?", "</"), opening):
            return text.find(">", opening) + 1, None
        return -1, None

    def _tag_end(self, position: int) -> int:
        """Return the end of a tag, ignoring ``>`` in quoted values unless the quote is unclosed."""
        first = self.text.find(">", position) + 1
        while self.quotes_close:
            found = _TAG_END.search(self.text, position)
            if found is None:
                self.quotes_close = False
            elif found.group().endswith(">"):
                return found.end()
            else:
                quote = found.group()[-1]
                position = found.end()
                if position <= self.last_quotes[quote]:
                    position = self.text.find(quote, position) + 1
        return first

    def _is_empty(self, tag: re.Match[str], end: int) -> bool:
        """Return whether a tag ends in ``/>`` that is not part of a value: ``<a href=b/>``."""
        if self.text[end - 2] != "/":
            return False
        last = self.text[tag.end() : end - 2].rsplit(None, 1)[-1:]
        return not last or "=" not in last[0] or last[0].endswith(("'", '"'))

    def verbatim(self, name: str, start: int) -> int:
        """Return the start of the end tag of an element that contains no tags, such as script."""
        if name not in self.unclosed:
            end = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(self.text, start)
            if end:
                return end.start()
            self.unclosed.add(name)
        return start if name in _WITH_REFERENCES else len(self.text)


class _LineCollector:
    """A collector of a page's ``lines``: the texts of blocks and table rows."""

    def __init__(self) -> None:
        self.line = 1
        self.lines = Lines()
        self.title: list[str] = []
        self._pieces: list[str] = []
        self._first_line = 0
        self._skipped: list[str] = []
        self._preformatted = 0
        self._in_title = False
        self._in_row = 0
        self._cell_size = 0  # characters
        self._starts: list[int] = []  # of a row's cells, in the pieces
        self._num_heads = 0  # of these cells
        self._tables: list[_Table] = []  # that are open, innermost last

    def start(self, tag: str) -> None:
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
            if self._in_row or self._pieces:
                self._add(" | ")
            self._in_row += 1
            self._starts.append(len(self._pieces))
            self._num_heads += tag == "th"
            self._cell_size = 0
        elif tag == "br" and self._in_short_cell():
            self.data(" ")
        elif tag == "br":
            self.end_line(blank=False)
        elif tag in _BLOCKS:
            self._start_block(tag)

    def mark_irregular(self) -> None:
        """Note that the rows of the innermost table are no grid: a cell spans, or has lines."""
        if self._tables:
            self._tables[-1].is_grid = False

    def _start_block(self, tag: str) -> None:
        if tag == "table":
            if self._in_row:
                self.end_line(blank=False)  # no whole row of the table around
            self._tables.append(_Table())
        if tag == "tr":
            self._in_row = 0
        if self._in_short_cell():
            self.data(" ")
        elif self._pieces != ["- "] or tag == "tr":
            self.end_line(blank=tag not in ("tr", "dt", "dd", "ul", "ol", "tbody", "thead"))

    def end(self, tag: str) -> None:
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
        elif tag == "table" and self._tables:
            self._in_row = 0
            self.end_line(blank=False)
            self._tables.pop().name_columns(self.lines)
            self.end_line(blank=True)
        elif tag == "li":
            self.end_line(blank=False)
        elif tag in _BLOCKS and self._in_row:
            self.data(" ")
        elif tag in _HEADINGS or tag in _BLOCKS:
            self.end_line(blank=tag not in ("tbody", "thead", "dt", "dd"))

    def _in_short_cell(self) -> bool:
        """Return whether a cell goes on in its row: one of a layout may hold all of a page."""
        return bool(self._in_row) and not self._preformatted and self._cell_size < _LONG_CELL

    def data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif self._skipped:
            return
        elif self._preformatted:
            self._add_preformatted(data)
        elif self._pieces:
            self._add(_SPACE.sub(" ", data))
        elif text := data.lstrip():
            self._add(_SPACE.sub(" ", text))
            self._first_line += data.count("\n", 0, len(data) - len(text))

    def _add_preformatted(self, data: str) -> None:
        first, *rest = data.split("\n")
        self._add(first)
        for offset, line in enumerate(rest, 1):
            self._line("".join(self._pieces))
            self._pieces = [line]
            self._first_line = self.line + offset

    def _add(self, text: str) -> None:
        if not self._pieces:
            self._first_line = self.line
        self._pieces.append(text)
        self._cell_size += len(text)

    def _line(self, text: str) -> None:
        self.lines.add(text.rstrip(), self._first_line or self.line)

    def end_line(self, *, blank: bool) -> None:
        """End the current line; with ``blank`` an empty line follows, which ends the paragraph."""
        text = "".join(self._pieces)
        text = text if self._preformatted else re.sub(r" {2,}", " ", text).strip()
        if text not in ("", "-") and not set(text) <= set("#| "):
            self._line(text)
            if self._tables and self._starts:
                self._tables[-1].add(len(self.lines.texts) - 1, self._row(), self._num_heads)
        if self._starts and (self._in_row or self._preformatted or self._starts[0]):
            self.mark_irregular()
        self._pieces, self._starts = [], []
        self._first_line = self._num_heads = 0
        if blank and self.lines.texts and self.lines.texts[-1]:
            self.lines.add("", self.line)

    def _row(self) -> list[str]:
        """Return the cells of the current line, without the bars before them."""
        ends = [start - 1 for start in self._starts[1:]] + [len(self._pieces)]
        pairs = zip(self._starts, ends, strict=True)
        return ["".join(self._pieces[start:end]) for start, end in pairs]


class _Table:
    """The rows of a table, by their places among a page's lines."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._rows: list[list[str]] = []
        self._has_header = False
        self.is_grid = True

    def add(self, place: int, cells: list[str], num_heads: int) -> None:
        """Add the row in a line; ``num_heads`` of its cells are heads."""
        if num_heads == len(cells):
            self.is_grid &= not self._rows  # a second header may name other columns
            self._has_header = True
        self._places.append(place)
        self._rows.append(cells)

    def name_columns(self, lines: Lines) -> None:
        """Write the rows as ``table_lines`` has them if nothing stands between or within them."""
        first = self._places[0] if self._places else 0
        if not self.is_grid or self._places != [*range(first, first + len(self._places))]:
            return
        named = table_lines(self._rows, has_header=self._has_header)
        if len(named) == len(self._rows) - 1:
            lines.replace_rows(first, named)
