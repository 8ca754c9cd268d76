"""OpenDocument files read as text: texts, presentations and workbooks of LibreOffice, say."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document
from ragaccel.retrieve.sheet_text import SheetLines
from ragaccel.retrieve.zip_limits import require_modest

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONTENT, _META = "content.xml", "meta.xml"
_CHUNK = 1 << 16
_SKIPPED_TAGS = (
    "tracked-changes annotation annotation-end note-citation table-of-content alphabetical-index"
    " illustration-index table-index forms scripts automatic-styles font-face-decls desc"
)
_SKIPPED = frozenset(_SKIPPED_TAGS.split())
_SPACES = {"s": " ", "tab": " ", "line-break": " "}
_MOST_REPEATED = 1_000  # cells alike, one beside the other; more are not meant to be read


def read_odt(data: bytes, name: str) -> Document:
    """Read an OpenDocument text: headings, lists and tables; its "lines" are its paragraphs."""
    content = _Content()
    title = _parse(data, content)
    return content.document(name, title)


def read_odp(data: bytes, name: str) -> Document:
    """Read an OpenDocument presentation; a slide is a page, its title a heading."""
    content = _Content(has_slides=True)
    title = _parse(data, content)
    return content.document(name, title)


def read_ods(data: bytes, name: str) -> Document:
    """Read an OpenDocument workbook, as an Excel one is read."""
    sheets = _Sheets()
    title = _parse(data, sheets)
    return sheets.lines.document(name, title)


def _parse(data: bytes, target: _Target) -> str:
    """Give the events of a file's content to a target; return the file's title."""
    try:
        from lxml import etree
    except ImportError:
        raise MissingExtraError("lxml, which reads OpenDocument files,", "office") from None
    require_modest(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        if "META-INF/manifest.xml" in names:
            manifest = archive.read("META-INF/manifest.xml")
            if b"encryption-data" in manifest:
                raise DocumentError("is encrypted: save a copy without a password")
        title = _Title()
        events: Any
        for member, events in ((_CONTENT, target), (_META, title)):
            if member in names:
                parser = etree.XMLParser(
                    target=events, resolve_entities=False, no_network=True, load_dtd=False
                )
                with archive.open(member) as file:
                    while chunk := file.read(_CHUNK):
                        parser.feed(chunk)
                    parser.close()
        if _CONTENT not in names:
            raise DocumentError(f"broken file: it has no {_CONTENT}")
    return title.text


class _Target:
    """Takes the events of an XML parser, by names without their namespaces; makes no tree."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """An element begins."""

    def end(self, tag: str) -> None:
        """An element ends."""

    def data(self, text: str) -> None:
        """Text between two tags."""

    def doctype(self, *_: object) -> None:
        """Refuse a document type, with which entities come: no such file needs one."""
        raise DocumentError("broken file: it declares a document type, which such files have not")

    def close(self) -> None:
        """The end."""


class _Title(_Target):
    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._inside = False

    @property
    def text(self) -> str:
        """The title."""
        return "".join(self._pieces).strip()

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:  # noqa: ARG002
        self._inside = _local(tag) == "title"

    def end(self, tag: str) -> None:  # noqa: ARG002
        self._inside = False

    def data(self, text: str) -> None:
        if self._inside:
            self._pieces.append(text)


class _Text(_Target):
    """Collects the text of paragraphs; one inside another, as a note is, comes before it."""

    def __init__(self) -> None:
        self._paragraphs: list[list[str]] = []
        self._skipping = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        name = _local(tag)
        if self._skipping or name in _SKIPPED:
            self._skipping += 1
        elif name in ("p", "h"):
            self._paragraphs.append([])
        elif name in _SPACES and self._paragraphs:
            self._paragraphs[-1].append(_SPACES[name])
        else:
            self.begin(name, {_local(key): value for key, value in attributes.items()})
        if name == "h" and not self._skipping:
            self.begin(name, {_local(key): value for key, value in attributes.items()})

    def end(self, tag: str) -> None:
        name = _local(tag)
        if self._skipping:
            self._skipping -= 1
        elif name in ("p", "h") and self._paragraphs:
            text = " ".join("".join(self._paragraphs.pop()).split())
            self.paragraph(text, is_heading=name == "h")
        else:
            self.finish(name)

    def data(self, text: str) -> None:
        if self._paragraphs and not self._skipping:
            self._paragraphs[-1].append(text)

    def begin(self, name: str, attributes: Mapping[str, str]) -> None:
        """Any other element begins, or a heading."""

    def finish(self, name: str) -> None:
        """Any other element ends."""

    def paragraph(self, text: str, *, is_heading: bool) -> None:
        """A paragraph has ended."""


class _Content(_Text):
    """A text or a presentation as blocks: headings, paragraphs, list items, tables."""

    def __init__(self, *, has_slides: bool = False) -> None:
        super().__init__()
        self._has_slides = has_slides
        self._blocks: list[tuple[str, int]] = []
        self._length = 0
        self._slides: list[int] = []
        self._number = 0
        self._level = 1
        self._lists = 0
        self._is_title = False
        self._cells: list[list[list[str]]] = []  # of rows that are open; a cell is its paragraphs
        self._rows: list[list[str]] = []

    def begin(self, name: str, attributes: Mapping[str, str]) -> None:
        if name == "h":
            level = attributes.get("outline-level", "1")
            self._level = min(6, int(level)) if level.isdecimal() and int(level) else 1
        elif name == "list-item":
            self._lists += 1
        elif name == "page" and self._has_slides:
            self._slides.append(self._length)
        elif name == "frame":
            self._is_title = attributes.get("class") == "title"
        elif name == "table":
            self._rows.append([])
        elif name == "table-row":
            self._cells.append([])
        elif name in ("table-cell", "covered-table-cell") and self._cells:
            self._cells[-1].append([])

    def finish(self, name: str) -> None:
        if name == "list-item":
            self._lists -= 1
        elif name == "frame":
            self._is_title = False
        elif name == "table-row" and self._cells:
            row = " | ".join(" ".join(cell) for cell in self._cells.pop())
            if row.strip(" |") and self._rows:
                self._rows[-1].append(row)
        elif name == "table" and self._rows:
            table = "\n".join(self._rows.pop())
            if table and self._cells:  # a table within a cell
                self._in_cell(table.replace("\n", "; "))
            elif table:
                self._add(table)

    def paragraph(self, text: str, *, is_heading: bool) -> None:
        if not text:
            return
        if self._cells and self._cells[-1]:
            self._in_cell(text)
        elif is_heading:
            self._add(f"{'#' * self._level} {text}")
        elif self._is_title:
            self._add(f"# {text}")
        else:
            self._add(f"- {text}" if self._lists else text)

    def document(self, name: str, title: str) -> Document:
        lines: list[str] = []
        numbers: list[int] = []
        for block, number in self._blocks:
            lines += [*block.split("\n"), ""]
            numbers += [number] * (block.count("\n") + 2)
        return Document(
            path=name,
            text="\n".join(lines),
            title=title,
            markup="markdown",
            page_starts=tuple(self._slides),
            line_numbers=() if self._has_slides else tuple(numbers),
        )

    def _in_cell(self, text: str) -> None:
        self._cells[-1][-1].append(text)

    def _add(self, block: str) -> None:
        self._number += 1
        self._blocks.append((block, self._number))
        self._length += len(block) + 2


class _Sheets(_Text):
    """A workbook's rows; what is repeated is so only as far as it is meant to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = SheetLines()
        self._number = 0
        self._repeated_rows = 1
        self._row: list[str] = []
        self._cell: list[str] | None = None
        self._repeated = 1
        self._tables = 0

    def begin(self, name: str, attributes: Mapping[str, str]) -> None:
        if name == "table":
            self._tables += 1
            if self._tables == 1:
                self._number = 0
                self.lines.begin(attributes.get("name", "Sheet"))
        elif name == "table-row":
            self._row = []
            self._repeated_rows = _count(attributes.get("number-rows-repeated", "1"))
        elif name in ("table-cell", "covered-table-cell"):
            self._cell = []
            self._repeated = _count(attributes.get("number-columns-repeated", "1"))

    def finish(self, name: str) -> None:
        if name == "table":
            self._tables -= 1
        elif name in ("table-cell", "covered-table-cell"):
            text = " ".join(self._cell or ())
            self._row += [text] * min(self._repeated, _MOST_REPEATED)
            self._cell = None
        elif name == "table-row":
            while self._row and not self._row[-1]:
                self._row.pop()
            self.lines.row(min(self._number, 1_000_000) + 1, self._row)
            self._number += self._repeated_rows
            self._row = []

    def paragraph(self, text: str, *, is_heading: bool) -> None:  # noqa: ARG002
        if self._cell is not None and text:
            self._cell.append(text)


def _count(text: str) -> int:
    return max(1, int(text)) if text.isdecimal() and len(text) < 10 else 1


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
