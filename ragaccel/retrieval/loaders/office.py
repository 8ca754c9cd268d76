"""The loaders of office files: Word, Excel, PowerPoint, OpenDocument, RTF and EPUB."""

from __future__ import annotations

import datetime
import io
import posixpath
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document
from ragaccel.retrieval.loaders import title_from_path
from ragaccel.retrieval.loaders.html import read_html
from ragaccel.retrieval.loaders.process import MAX_TEXT_BYTES
from ragaccel.retrieval.loaders.tabular import collapse_spaces, is_header, named_cells, record_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


MAX_UNPACKED_BYTES = 200_000_000
_OLE_SIGNATURE = b"\xd0\xcf\x11\xe0"  # old formats, and the container of encrypted new files


def require_small_archive(data: bytes) -> None:
    """Refuse an archive that unpacks to more than 200 MB, before unpacking anything.

    The sizes in its directory suffice, since no member is read beyond the size given there.
    """
    if data.startswith(_OLE_SIGNATURE):
        raise DocumentError(
            "is encrypted, or in a format from before 2007: save a copy in the current format"
            " without a password"
        )
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > MAX_UNPACKED_BYTES:
        raise DocumentError(
            f"unpacks to more than {MAX_UNPACKED_BYTES / 1e6:.0f} MB: split the file"
        )


_HEADING_STYLE = re.compile(r"(?i)heading (\d)")
_SPACE = re.compile(r"\s+")
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_WORD_SPACES = frozenset({f"{_WORD}tab", f"{_WORD}ptab", f"{_WORD}cr"})


def read_docx(data: bytes, name: str) -> Document:
    """Read a Word file; a line number is that of a paragraph or table, since it has no lines."""
    try:
        import docx
    except ImportError:
        raise MissingExtraError("python-docx, which reads Word files,", "office") from None
    require_small_archive(data)
    file = docx.Document(io.BytesIO(data))
    body = _WordBody(file.styles)
    lines: list[str] = []
    numbers: list[int] = []
    for number, block in enumerate(body.blocks(file.element.body), 1):
        if block:
            lines += [*block.split("\n"), ""]
            numbers += [number] * (block.count("\n") + 2)
    return Document(
        path=name,
        text="\n".join(lines),
        title=(file.core_properties.title or "").strip(),
        markup="markdown",
        line_numbers=tuple(numbers),
    )


class _WordBody:
    """An extractor of the text of a Word file's elements, in linear time.

    python-docx would search all styles for each paragraph, and repeat a cell as often as its
    ``gridSpan`` says, which may be a hundred million times.
    """

    def __init__(self, styles: Any) -> None:
        from docx.enum.style import WD_STYLE_TYPE

        kind = WD_STYLE_TYPE.PARAGRAPH
        self.styles = {style.style_id: style.name or "" for style in styles if style.type == kind}
        default = styles.default(kind)
        self.default = (default.name or "") if default is not None else ""

    def blocks(self, body: Any) -> Iterator[str]:
        for element in body:
            if element.tag == _WORD + "p":
                yield self._paragraph(element)
            elif element.tag == _WORD + "tbl":
                yield self._table(element)

    def _paragraph(self, paragraph: Any) -> str:
        text = _word_text(paragraph)
        if not text:
            return ""
        style = self.styles.get(_value(paragraph, "pPr", "pStyle"), self.default)
        level = _HEADING_STYLE.match(style)
        if level or style == "Title":
            return f"{'#' * (int(level.group(1)) if level else 1)} {text}"
        return f"- {text}" if style.startswith("List") else text

    def _table(self, table: Any) -> str:
        above: dict[int, str] = {}
        rows = (self._row(row, above) for row in table.iterchildren(_WORD + "tr"))
        return "\n".join(row for row in rows if row.strip(" |"))

    def _row(self, row: Any, above: dict[int, str]) -> str:
        """Join a row's cells; a cell that spans columns is written once.

        A cell merged with the one above it repeats that cell's text; ``above`` holds it by column.
        """
        cells = []
        column = _number(_value(row, "trPr", "gridBefore"), 0)
        for cell in row.iterchildren(_WORD + "tc"):
            merged = _value(cell, "tcPr", "vMerge", missing="restart") != "restart"
            paragraphs = cell.iterchildren(_WORD + "p")
            text = (
                above.get(column, "")
                if merged
                else _collapse_spaces(" ".join(map(_word_text, paragraphs)))
            )
            above[column] = text
            cells.append(text)
            column += _number(_value(cell, "tcPr", "gridSpan"), 1)
        return " | ".join(cells)


def _value(element: Any, properties: str, name: str, *, missing: str = "") -> str:
    """Return the ``w:val`` of a property, or ``missing`` if there is no such property."""
    found = element.find(f"{_WORD}{properties}/{_WORD}{name}")
    return missing if found is None else found.get(_WORD + "val", "")


def _number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


def _word_text(paragraph: Any) -> str:
    texts: list[str] = []
    for element in paragraph:
        if element.tag == _WORD + "r":
            texts += _run_text(element)
        elif element.tag == _WORD + "hyperlink":
            for run in element.iterchildren(_WORD + "r"):
                texts += _run_text(run)
    return _collapse_spaces("".join(texts))


def _run_text(run: Any) -> Iterator[str]:
    for element in run:
        if element.tag == _WORD + "t":
            yield element.text or ""
        elif element.tag in _WORD_SPACES:
            yield " "
        elif element.tag == _WORD + "noBreakHyphen":
            yield "-"
        elif element.tag == _WORD + "br":  # page and column breaks are not spaces
            yield " " if element.get(_WORD + "type", "textWrapping") == "textWrapping" else ""


def read_pptx(data: bytes, name: str) -> Document:
    """Read a presentation: slides are pages, titles are headings, notes come last."""
    try:
        import pptx
    except ImportError:
        raise MissingExtraError("python-pptx, which reads PowerPoint files,", "office") from None
    require_small_archive(data)
    file = pptx.Presentation(io.BytesIO(data))
    pieces: list[str] = []
    starts, size = [], 0
    for slide in file.slides:
        starts.append(size)
        content = "\n\n".join(block for block in _slide(slide) if block)
        pieces.append(f"{content}\n\n" if content else "")
        size += len(pieces[-1])
    text = "".join(pieces)
    title = (file.core_properties.title or "").strip()
    title = "" if title == "PowerPoint Presentation" else title
    return Document(path=name, text=text, title=title, markup="markdown", page_starts=tuple(starts))


def _slide(slide: Any) -> Iterator[str]:
    heading = slide.shapes.title
    if heading is not None and _collapse_spaces(heading.text_frame.text):
        yield f"# {_collapse_spaces(heading.text_frame.text)}"
    for shape in _flattened(slide.shapes):
        if heading is not None and shape.shape_id == heading.shape_id:
            continue
        if shape.has_text_frame:
            yield "\n".join(_bullets(shape.text_frame.paragraphs))
        elif getattr(shape, "has_table", False):
            yield _table(shape.table)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        yield _collapse_spaces(slide.notes_slide.notes_text_frame.text)


def _flattened(shapes: Any) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _flattened(shape.shapes)
        else:
            yield shape


def _bullets(paragraphs: Any) -> Iterator[str]:
    texts = [_collapse_spaces("".join(run.text for run in item.runs)) for item in paragraphs]
    texts = [text for text in texts if text]
    yield from texts if len(texts) == 1 else (f"- {text}" for text in texts)


def _table(table: Any) -> str:
    rows = (" | ".join(_collapse_spaces(cell.text) for cell in row.cells) for row in table.rows)
    return "\n".join(row for row in rows if row.strip(" |"))


def _collapse_spaces(text: str) -> str:
    return _SPACE.sub(" ", text).strip()


_MAX_ROWS = 1_048_576  # the format's limit for a sheet
_MAX_CELLS = 5_000_000


class SheetLines:
    """The lines of a workbook's sheets, each with the number of its row in the sheet.

    The first row with several words is a header, and so is a row after an empty one if it uses
    other columns than the table above. A row with one cell is a caption.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._numbers: list[int] = []
        self._name = ""
        self._size = 0
        self._cells = 0
        self._columns: list[str] = []
        self._used_columns: list[int] = []
        self._after_gap = True

    def begin(self, name: str) -> None:
        """Start a sheet; its name becomes a heading above its first row."""
        self._name = collapse_spaces(name)
        self._columns, self._used_columns, self._after_gap = [], [], True

    def row(self, number: int, cells: list[str]) -> None:
        """Add a row of a sheet, ``number`` counted from 1."""
        self._cells += len(cells)
        if number > _MAX_ROWS or self._cells > _MAX_CELLS:
            raise DocumentError(
                f"has more than {_MAX_ROWS:,} rows or {_MAX_CELLS:,} cells: export what matters as"
                " CSV"
            )
        used = [position for position, cell in enumerate(cells) if cell.strip()]
        if not used:
            self._after_gap = True
            return
        if self._name:
            self._add(f"# {self._name}\n", number)
            self._name = ""
        if len(used) == 1 and (self._after_gap or not self._columns):
            self._add(f"{record_line([('', collapse_spaces(cells[used[0]]))])}\n", number)
        elif self._names_columns(cells, used):
            self._columns = [collapse_spaces(cell.replace("_", " ")) for cell in cells]
            self._used_columns = used
        else:
            self._add(record_line(named_cells(self._columns, cells)), number)
        self._after_gap = False

    def document(self, name: str, title: str = "") -> Document:
        """Return all lines as a document."""
        return Document(
            path=name,
            text="\n".join(self._lines),
            title=title or title_from_path(name),
            markup="markdown",
            line_numbers=tuple(self._numbers),
        )

    def _names_columns(self, cells: list[str], used: list[int]) -> bool:
        is_new = not self._columns or (self._after_gap and used != self._used_columns)
        return is_new and len(used) > 1 and is_header(cells)

    def _add(self, text: str, number: int) -> None:
        self._size += len(text)
        if self._size > MAX_TEXT_BYTES:  # a long column name is repeated in every row
            raise DocumentError(
                f"holds more than {MAX_TEXT_BYTES / 1e6:.0f} MB of text: split the file"
            )
        for line in text.split("\n"):
            self._lines.append(line)
            self._numbers.append(number)


def read_xlsx(data: bytes, name: str) -> Document:
    """Read an Excel workbook, with the saved values of its formulas."""
    try:
        import openpyxl
    except ImportError:
        raise MissingExtraError("openpyxl, which reads Excel files,", "office") from None
    require_small_archive(data)
    book = openpyxl.load_workbook(
        io.BytesIO(data), read_only=True, data_only=True, keep_links=False
    )
    lines = SheetLines()
    for sheet in book.worksheets:
        lines.begin(sheet.title)
        sheet.reset_dimensions()  # the file may declare a wrong size
        for number, row in enumerate(sheet.iter_rows(), 1):
            lines.row(number, _texts(row))
    return lines.document(name, (book.properties.title or "").strip())


def _texts(row: Iterable[Any]) -> list[str]:
    return ["" if cell.value is None else _text(cell) for cell in row]


def _text(cell: Any) -> str:
    """Format a cell's value as people write it."""
    value = cell.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        percent = "%" in str(cell.number_format)
        return f"{value * 100:.12g}%" if percent else f"{value:.15g}"
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return str(value)


_CONTENT, _META = "content.xml", "meta.xml"
_CHUNK = 1 << 16
_SKIPPED_TAGS = (
    "tracked-changes annotation annotation-end note-citation table-of-content alphabetical-index"
    " illustration-index table-index forms scripts automatic-styles font-face-decls desc"
)
_SKIPPED = frozenset(_SKIPPED_TAGS.split())
_SPACES = {"s": " ", "tab": " ", "line-break": " "}
_MAX_REPEATED = 1_000  # adjacent equal cells; longer runs only fill the sheet


def read_odt(data: bytes, name: str) -> Document:
    """Read an OpenDocument text; a line number is that of a paragraph or other block."""
    content = _ContentHandler()
    title = _parse(data, content)
    return content.document(name, title)


def read_odp(data: bytes, name: str) -> Document:
    """Read an OpenDocument presentation: slides are pages, titles are headings."""
    content = _ContentHandler(has_slides=True)
    title = _parse(data, content)
    return content.document(name, title)


def read_ods(data: bytes, name: str) -> Document:
    """Read an OpenDocument workbook, with the same lines as for an Excel workbook."""
    sheets = _SheetsHandler()
    title = _parse(data, sheets)
    return sheets.lines.document(name, title)


def _parse(data: bytes, target: _XmlHandler) -> str:
    """Pass the XML events of a file's content to a target; return the file's title."""
    try:
        from lxml import etree
    except ImportError:
        raise MissingExtraError("lxml, which reads OpenDocument files,", "office") from None
    require_small_archive(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        if "META-INF/manifest.xml" in names:
            manifest = archive.read("META-INF/manifest.xml")
            if b"encryption-data" in manifest:
                raise DocumentError("is encrypted: save a copy without a password")
        title = _TitleHandler()
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


class _XmlHandler:
    """A handler of an XML parser's events, which builds no tree; subclasses override methods."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Handle the start of an element."""

    def end(self, tag: str) -> None:
        """Handle the end of an element."""

    def data(self, text: str) -> None:
        """Handle the text between two tags."""

    def doctype(self, *_: object) -> None:
        """Refuse a document type declaration, which can define entities and is never needed."""
        raise DocumentError(
            "broken file: it declares a document type, which OpenDocument files do not have"
        )

    def close(self) -> None:
        """Handle the end of the file."""


class _TitleHandler(_XmlHandler):
    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._inside = False

    @property
    def text(self) -> str:
        """The document's title, or an empty string."""
        return "".join(self._pieces).strip()

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:  # noqa: ARG002
        self._inside = _local(tag) == "title"

    def end(self, tag: str) -> None:  # noqa: ARG002
        self._inside = False

    def data(self, text: str) -> None:
        if self._inside:
            self._pieces.append(text)


class _ParagraphHandler(_XmlHandler):
    """A handler that collects paragraphs; a note inside a paragraph comes before it."""

    def __init__(self) -> None:
        self._paragraphs: list[list[str]] = []
        self._skip_depth = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        name = _local(tag)
        if self._skip_depth or name in _SKIPPED:
            self._skip_depth += 1
        elif name in ("p", "h"):
            self._paragraphs.append([])
        elif name in _SPACES and self._paragraphs:
            self._paragraphs[-1].append(_SPACES[name])
        else:
            self.begin(name, {_local(key): value for key, value in attributes.items()})
        if name == "h" and not self._skip_depth:
            self.begin(name, {_local(key): value for key, value in attributes.items()})

    def end(self, tag: str) -> None:
        name = _local(tag)
        if self._skip_depth:
            self._skip_depth -= 1
        elif name in ("p", "h") and self._paragraphs:
            text = " ".join("".join(self._paragraphs.pop()).split())
            self.paragraph(text, is_heading=name == "h")
        else:
            self.finish(name)

    def data(self, text: str) -> None:
        if self._paragraphs and not self._skip_depth:
            self._paragraphs[-1].append(text)

    def begin(self, name: str, attributes: Mapping[str, str]) -> None:
        """Handle the start of a heading or of an element that is not a paragraph."""

    def finish(self, name: str) -> None:
        """Handle the end of an element that is not a paragraph."""

    def paragraph(self, text: str, *, is_heading: bool) -> None:
        """Handle a complete paragraph."""


class _ContentHandler(_ParagraphHandler):
    """A handler that collects a text's headings, paragraphs, list items and tables as blocks."""

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
        self._cells: list[list[list[str]]] = []  # the cells, lists of paragraphs, of unended rows
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


class _SheetsHandler(_ParagraphHandler):
    """A handler that collects a workbook's rows, with ``_MAX_REPEATED`` equal cells at most."""

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
            self._row += [text] * min(self._repeated, _MAX_REPEATED)
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


_CODE_PAGE = re.compile(rb"\\ansicpg(\d{1,5})")
# hexadecimal picture data; the lookbehind prevents a second match attempt inside a run
_PICTURE_DATA = re.compile(r"(?<![0-9a-fA-F\r\n])[0-9a-fA-F\r\n]{512,}")
_OUTLINE = re.compile(r"\\outlinelevel([0-5])(?!\d) ?")
_TITLE = re.compile(r"\{\\title ([^{}\\]{1,500})\}")
_HEAD_BYTES = 1 << 16


def read_rtf(data: bytes, name: str) -> Document:
    """Read a Rich Text file; a line number is that of a paragraph."""
    try:
        from striprtf.striprtf import rtf_to_text
    except ImportError:
        raise MissingExtraError("striprtf, which reads Rich Text files,", "office") from None
    if not data.lstrip()[:5].startswith(b"{\\rtf"):
        raise DocumentError("broken rtf file: it does not begin with {\\rtf")
    encoding = _encoding(data)
    source = data.decode(encoding, "replace")
    source = source.replace("\\field{", "{")  # striprtf's search for links takes quadratic time
    source = _OUTLINE.sub(
        lambda level: f"{level.group()}{_heading(level)}", _PICTURE_DATA.sub("", source)
    )
    text = rtf_to_text(source, encoding=encoding, errors="replace")
    lines: list[str] = []
    numbers: list[int] = []
    for number, paragraph in enumerate(text.split("\n"), 1):
        is_row = paragraph.rstrip().endswith("|")
        block = _row(paragraph) if is_row else " ".join(paragraph.split())
        if block:
            follows_row = is_row and len(lines) > 1 and " | " in lines[-2]
            if follows_row:
                lines[-1:], numbers[-1:] = [], []
            lines += [block, ""]
            numbers += [number, number]
    title = _TITLE.search(source[:_HEAD_BYTES])
    return Document(
        path=name,
        text="\n".join(lines),
        title=title.group(1).strip() if title else "",
        markup="markdown",
        line_numbers=tuple(numbers),
    )


def _encoding(data: bytes) -> str:
    found = _CODE_PAGE.search(data[:_HEAD_BYTES])
    encoding = f"cp{int(found.group(1))}" if found else "cp1252"
    try:
        b"".decode(encoding)
    except LookupError:
        return "cp1252"
    return encoding


def _heading(level: re.Match[str]) -> str:
    return f" {'#' * (int(level.group(1)) + 1)} "


def _row(paragraph: str) -> str:
    cells = (" ".join(cell.split()) for cell in paragraph.rstrip().rstrip("|").split("|"))
    row = " | ".join(cells)
    return row if row.strip(" |") else ""


_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_MAX_CONTENTS_BYTES = 10_000_000
_MAX_CHAPTERS = 20_000


@dataclass(frozen=True, slots=True)
class _Item:
    """A file of a book; ``is_contents`` marks the table of contents of EPUB 3."""

    path: str
    media_type: str
    is_contents: bool


def read_epub(data: bytes, name: str) -> Document:
    """Read an EPUB book; chapter files count as pages, from 1."""
    try:
        import lxml  # noqa: F401
    except ImportError:
        raise MissingExtraError("lxml, which reads EPUB books,", "office") from None
    require_small_archive(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        package_path = _package_path(archive)
        package = _xml(archive, package_path)
        title = _first_text(package, "title")
        items = _items(package, posixpath.dirname(package_path))
        titles = _titles(archive, package, items)
        encrypted = _encrypted_paths(archive)
        pieces: list[str] = []
        starts: list[int] = []
        length = 0
        for item in _spine(package, items):
            if item.path in encrypted:
                raise DocumentError(
                    "the book is protected (DRM), so only its shop's reader can open it: use a copy"
                    " without protection"
                )
            starts.append(length)
            text = _chapter(archive, item, titles.get(item.path, ""), book=title)
            pieces.append(text)
            length += len(text)
    text = "".join(pieces)
    if not text.strip():
        raise DocumentError(
            "the book has no text: if its pages are pictures, run text recognition first"
        )
    return Document(name, text, title=title, page_starts=tuple(starts), markup="markdown")


def _chapter(archive: zipfile.ZipFile, item: _Item, title: str, *, book: str) -> str:
    """Return a chapter's text under a first-level heading, which separates it from others."""
    try:
        content = archive.read(item.path)
    except KeyError:
        raise DocumentError(f"broken epub file: {item.path} is missing") from None
    page = read_html(content, item.path)
    text = page.text.strip()
    if not text:
        return ""
    if text.startswith("#"):
        return f"# {text.lstrip('#').lstrip()}\n\n"
    own = page.title if page.title != book else ""
    return f"# {title or own or title_from_path(item.path)}\n\n{text}\n\n"


def _package_path(archive: zipfile.ZipFile) -> str:
    for element in _elements_named(_xml(archive, _CONTAINER), "rootfile"):
        return unquote(str(element.get("full-path", "")))
    raise DocumentError("broken epub file: it names no package")


def _items(package: Any, folder: str) -> dict[str, _Item]:
    """Return the files that the book's package lists, by id."""
    return {
        str(element.get("id")): _Item(
            _resolve_link(folder, element.get("href", "")),
            str(element.get("media-type", "")),
            "nav" in str(element.get("properties", "")).split(),
        )
        for element in _elements_named(package, "item")
    }


def _spine(package: Any, items: dict[str, _Item]) -> Iterator[_Item]:
    """Yield the chapters, each once, in reading order."""
    seen = set()
    for element in _elements_named(package, "itemref"):
        item = items.get(str(element.get("idref")))
        if item is None or item.is_contents or item.path in seen or "htm" not in item.media_type:
            continue
        seen.add(item.path)
        if len(seen) > _MAX_CHAPTERS:
            raise DocumentError(f"has more than {_MAX_CHAPTERS:,} chapters: split the book")
        yield item


def _titles(archive: zipfile.ZipFile, package: Any, items: dict[str, _Item]) -> dict[str, str]:
    """Return the chapter titles by path, from the table of contents of EPUB 3 or EPUB 2."""
    for item in items.values():
        if item.is_contents:
            return _titles_in(archive, item.path, "a", "href")
    for spine in _elements_named(package, "spine"):
        contents = items.get(str(spine.get("toc")))
        if contents is not None:
            return _titles_in(archive, contents.path, "navPoint", "src")
    return {}


def _titles_in(archive: zipfile.ZipFile, path: str, tag: str, link: str) -> dict[str, str]:
    titles: dict[str, str] = {}
    if path not in archive.namelist():
        return titles
    folder = posixpath.dirname(path)
    for entry in _elements_named(_xml(archive, path), tag):
        target, title = entry.get(link), entry
        if tag == "navPoint":  # use its own label and link, not those of nested entries
            own = {_element_name(child): child for child in entry}
            if "content" not in own or "navLabel" not in own:
                continue
            target, title = own["content"].get(link), own["navLabel"]
        label = " ".join("".join(title.itertext()).split())
        if target and label:
            titles.setdefault(_resolve_link(folder, str(target).partition("#")[0]), label)
    return titles


def _encrypted_paths(archive: zipfile.ZipFile) -> set[str]:
    """Return the paths of encrypted files, which include obfuscated fonts."""
    if _ENCRYPTION not in archive.namelist():
        return set()
    references = _elements_named(_xml(archive, _ENCRYPTION), "CipherReference")
    return {unquote(str(reference.get("URI", ""))) for reference in references}


def _xml(archive: zipfile.ZipFile, path: str) -> Any:
    """Return the root of an XML file of the book, parsed without entities or document types."""
    from lxml import etree

    try:
        with archive.open(path) as file:
            content = file.read(_MAX_CONTENTS_BYTES + 1)
    except KeyError:
        raise DocumentError(f"broken epub file: {path} is missing") from None
    if len(content) > _MAX_CONTENTS_BYTES:
        raise DocumentError(
            f"broken epub file: {path} is larger than {_MAX_CONTENTS_BYTES / 1e6:.0f} MB"
        )
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    return etree.fromstring(content, parser)


def _elements_named(tree: Any, name: str) -> Iterator[Any]:
    return (element for element in tree.iter(f"{{*}}{name}"))


def _first_text(tree: Any, name: str) -> str:
    return next((" ".join((e.text or "").split()) for e in _elements_named(tree, name)), "")


def _element_name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _resolve_link(folder: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(link)))
