"""The loaders of office files: Word, Excel, PowerPoint, OpenDocument, RTF and EPUB."""

from __future__ import annotations

import datetime
import io
import posixpath
import re
import zipfile
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ragaccel.errors import DocumentError
from ragaccel.retrieval.loaders import (
    Lines,
    collapse_spaces,
    document_of_pages,
    title_from_path,
)
from ragaccel.retrieval.loaders.html import read_html
from ragaccel.retrieval.loaders.tabular import is_header, named_cells, record_line, table_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragaccel.passage import Document


MAX_UNPACKED_BYTES = 200_000_000
_XML_OPTIONS: Any = {
    **dict.fromkeys(("resolve_entities", "load_dtd"), False),
    **dict.fromkeys(("no_network", "remove_comments", "remove_pis"), True),
}
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
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_CONTENTS = f"{_WORD}sdtPr/{_WORD}docPartObj"  # of a control that Word fills


def read_docx(data: bytes, name: str) -> Document:
    """Read a Word file; a line number is that of a paragraph or table, since it has no lines."""
    import docx

    require_small_archive(data)
    file = docx.Document(io.BytesIO(data))
    body = _WordBody(file.styles)
    lines = Lines()
    for number, block in enumerate(body.blocks(file.element.body), 1):
        if block:
            lines.add(f"{block}\n", number)
    return lines.document(name, (file.core_properties.title or "").strip())


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
        for element in _children(body, "p", "tbl"):
            if element.tag == _WORD + "p":
                yield self._paragraph(element)
            else:
                yield "\n".join(self._table(element))

    def _paragraph(self, paragraph: Any) -> str:
        text = collapse_spaces(paragraph.text)
        if not text:
            return ""
        style = self.styles.get(_value(paragraph, "pPr", "pStyle"), self.default)
        level = _HEADING_STYLE.match(style)
        if level or style == "Title":
            return f"{'#' * (int(level.group(1)) if level else 1)} {text}"
        return f"- {text}" if style.startswith("List") else text

    def _table(self, table: Any, *, is_nested: bool = False) -> list[str]:
        above: dict[int, str] = {}
        rows = [*_children(table, "tr")]
        marks = [_value(row, "trPr", "tblHeader", missing="0") for row in rows[:1]]
        cells = [self._row(row, above) for row in rows]
        return table_lines(
            ([text for _, text in row] for row in cells),
            has_header=not {"0", "false", "off"}.issuperset(marks),
            is_grid=not is_nested and len({tuple(at for at, _ in row) for row in cells}) == 1,
        )

    def _row(self, row: Any, above: dict[int, str]) -> list[tuple[int, str]]:
        """Return (column, text) of a row's cells; a cell that spans columns is there once.

        A cell merged with the one above it repeats that cell's text; ``above`` holds it by column.
        """
        cells = []
        column = _number(_value(row, "trPr", "gridBefore"), 0)
        for cell in _children(row, "tc"):
            if _value(cell, "tcPr", "vMerge", missing="restart") == "restart":
                above[column] = collapse_spaces(" ".join(self._cell(cell)))
            cells.append((column, above.get(column, "")))
            column += _number(_value(cell, "tcPr", "gridSpan"), 1)
        return cells

    def _cell(self, cell: Any) -> Iterator[str]:
        for element in _children(cell, "p", "tbl"):
            is_text = element.tag == _WORD + "p"
            yield element.text if is_text else "; ".join(self._table(element, is_nested=True))


def _children(element: Any, *names: str) -> Iterator[Any]:
    """Yield the children of some names, also in content controls other than tables of contents."""
    for child in element:
        name = _local(child)
        if name in names:
            yield child
        elif name in ("sdt", "sdtContent") and child.find(_CONTENTS) is None:
            yield from _children(child, *names)


def _value(element: Any, properties: str, name: str, *, missing: str = "") -> str:
    """Return the ``w:val`` of a property, or ``missing`` if there is no such property."""
    found = element.find(f"{_WORD}{properties}/{_WORD}{name}")
    return missing if found is None else found.get(_WORD + "val", "")


def _number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


def read_pptx(data: bytes, name: str) -> Document:
    """Read a presentation: slides are pages, titles are headings, notes come last."""
    import pptx

    require_small_archive(data)
    file = pptx.Presentation(io.BytesIO(data))
    slides = ("\n\n".join(block for block in _slide(slide) if block) for slide in file.slides)
    title = (file.core_properties.title or "").strip()
    return document_of_pages(name, slides, "" if title == "PowerPoint Presentation" else title)


def _slide(slide: Any) -> Iterator[str]:
    heading = slide.shapes.title
    if heading is not None and (title := collapse_spaces(heading.text_frame.text)):
        yield f"# {title}"
    for shape in _flattened(slide.shapes):
        if heading is not None and shape.shape_id == heading.shape_id:
            continue
        if shape.has_text_frame:
            yield "\n".join(_bullets(shape.text_frame.paragraphs))
        elif getattr(shape, "has_table", False):
            yield _table(shape.table)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        yield collapse_spaces(slide.notes_slide.notes_text_frame.text)


def _flattened(shapes: Any) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _flattened(shape.shapes)
        else:
            yield shape


def _bullets(paragraphs: Any) -> Iterator[str]:
    texts = [collapse_spaces("".join(run.text for run in item.runs)) for item in paragraphs]
    texts = [text for text in texts if text]
    yield from texts if len(texts) == 1 else (f"- {text}" for text in texts)


def _table(table: Any) -> str:
    rows = ([cell.text for cell in row.cells] for row in table.rows)
    is_grid = not any(cell.is_spanned for cell in table.iter_cells())
    return "\n".join(table_lines(rows, has_header=table.first_row, is_grid=is_grid))


_MAX_ROWS = 1_048_576  # the format's limit for a sheet
_MAX_CELLS = 5_000_000


class _Sheets:
    """The lines of a workbook's sheets, each with the number of its row in the sheet.

    The first row with several words is a header, and so is a row after an empty one if it uses
    other columns than the table above. A row with one cell is a caption.
    """

    def __init__(self) -> None:
        self._lines = Lines()
        self._name = ""
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
            self._lines.add(f"# {self._name}\n", number)
            self._name = ""
        if len(used) == 1 and (self._after_gap or not self._columns):
            self._lines.add(f"{record_line([('', collapse_spaces(cells[used[0]]))])}\n", number)
        elif self._names_columns(cells, used):
            self._columns = [collapse_spaces(cell.replace("_", " ")) for cell in cells]
            self._used_columns = used
        else:
            self._lines.add(record_line(named_cells(self._columns, cells)), number)
        self._after_gap = False

    def document(self, name: str, title: str) -> Document:
        """Return all lines as a document."""
        return self._lines.document(name, title or title_from_path(name))

    def _names_columns(self, cells: list[str], used: list[int]) -> bool:
        is_new = not self._columns or (self._after_gap and used != self._used_columns)
        return is_new and len(used) > 1 and is_header(cells)


def read_xlsx(data: bytes, name: str) -> Document:
    """Read an Excel workbook, with the saved values of its formulas."""
    import openpyxl

    require_small_archive(data)
    book = openpyxl.load_workbook(
        io.BytesIO(data), read_only=True, data_only=True, keep_links=False
    )
    sheets = _Sheets()
    for sheet in book.worksheets:
        sheets.begin(sheet.title)
        sheet.reset_dimensions()  # the file may declare a wrong size
        for number, row in enumerate(sheet.iter_rows(), 1):
            sheets.row(number, [_text(cell) for cell in row])
    return sheets.document(name, (book.properties.title or "").strip())


def _text(cell: Any) -> str:
    """Format a cell's value as people write it."""
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        percent = "%" in str(cell.number_format)
        return f"{value * 100:.12g}%" if percent else f"{value:.15g}"
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return str(value)


_CONTENT, _META, _MANIFEST = "content.xml", "meta.xml", "META-INF/manifest.xml"
_SKIPPED_TAGS = (
    "tracked-changes annotation annotation-end note-citation table-of-content alphabetical-index"
    " illustration-index table-index forms scripts automatic-styles font-face-decls desc"
)
_SKIPPED = frozenset(_SKIPPED_TAGS.split())
_SPACES = ("s", "tab", "line-break")
_CELLS = ("table-cell", "covered-table-cell")
_MAX_REPEATED = 1_000  # adjacent equal cells; longer runs only fill the sheet


def read_odt(data: bytes, name: str) -> Document:
    """Read an OpenDocument text; a line number is that of a paragraph or other block."""
    return _read_open_text(data, name, _OpenText())


def read_odp(data: bytes, name: str) -> Document:
    """Read an OpenDocument presentation: slides are pages, titles are headings."""
    document = _read_open_text(data, name, _OpenText(has_slides=True))
    return replace(document, line_numbers=())


def read_ods(data: bytes, name: str) -> Document:
    """Read an OpenDocument workbook, with the same lines as for an Excel workbook."""
    with _open_document(data) as archive:
        return _open_sheets(archive).document(name, _open_title(archive))


def _read_open_text(data: bytes, name: str, text: _OpenText) -> Document:
    with _open_document(data) as archive:
        text.add_below(_parse(archive, _CONTENT))
        return text.lines.document(name, _open_title(archive))


def _open_document(data: bytes) -> zipfile.ZipFile:
    require_small_archive(data)
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    if _MANIFEST in names and b"encryption-data" in archive.read(_MANIFEST):
        raise DocumentError("is encrypted: save a copy without a password")
    if _CONTENT not in names:
        raise DocumentError(f"broken file: it has no {_CONTENT}")
    return archive


def _open_title(archive: zipfile.ZipFile) -> str:
    if _META not in archive.namelist():
        return ""
    return str(_parse(archive, _META).findtext(".//{*}title") or "").strip()


def _parse(archive: zipfile.ZipFile, member: str) -> Any:
    """Return the root of an XML file without document type, comments and instructions."""
    from lxml import etree

    with archive.open(member) as file:
        tree = etree.parse(file, etree.XMLParser(**_XML_OPTIONS))
    _refuse_document_type(tree)
    return tree.getroot()


def _refuse_document_type(tree: Any) -> None:
    """Refuse a document type declaration, which can define entities and is never needed."""
    if tree.docinfo.doctype:
        raise DocumentError(
            "broken file: it declares a document type, which OpenDocument files do not have"
        )


class _OpenText:
    """The headings, paragraphs, list items and tables of an OpenDocument file, as ``lines``.

    A note inside a paragraph comes before it.
    """

    def __init__(self, *, has_slides: bool = False) -> None:
        self.lines = Lines()
        self._has_slides = has_slides
        self._number = 0

    def add_below(self, element: Any, prefix: str = "", cell: list[str] | None = None) -> str:
        """Add the blocks below an element; return its text outside of blocks.

        Args:
            element: The element.
            prefix: The mark of a paragraph there, "- " in a list, "# " in the title of a slide.
            cell: The paragraphs of the table cell that the element is in.
        """
        text = [element.text or ""]
        for child in element:
            text += [self._add(child, prefix, cell), child.tail or ""]
        return "".join(text)

    def _add(self, element: Any, prefix: str, cell: list[str] | None) -> str:
        name = _local(element)
        if name in _SKIPPED:
            return ""
        if name == "table":
            rows = [*self._rows(element)]
            parents = [_local(row.getparent()) for row in rows[:1]]
            cells = [[*_cells_of(row)] for row in rows]
            lines = table_lines(
                (map(_cell_text, row) for row in cells),
                has_header=parents == ["table-header-rows"],
                is_grid=cell is None and not any(map(_is_merged, chain(*cells))),
            )
            self._add_block("\n".join(lines), cell)
            return ""
        if name == "list-item" and prefix != "# ":
            prefix = "- "
        elif name == "frame":
            is_title = _attributes(element).get("class") == "title"
            prefix = "# " if is_title else prefix.replace("# ", "")
        elif name == "page" and self._has_slides:
            self.lines.page_starts.append(self.lines.size)
        text = self.add_below(element, prefix, cell)
        if name not in ("p", "h"):
            return f" {text}" if name in _SPACES else text
        if text := collapse_spaces(text):
            prefix = _heading_mark(element) if name == "h" else prefix
            self._add_block(text if cell is not None else prefix + text, cell)
        return ""

    def _add_block(self, text: str, cell: list[str] | None) -> None:
        if not text:
            return
        if cell is not None:
            cell.append(text.replace("\n", "; "))
            return
        self._number += 1
        self.lines.add(f"{text}\n", self._number)

    def _rows(self, table: Any) -> Iterator[Any]:
        for element in table:
            name = _local(element)
            if name == "table-row":
                yield element
            elif name not in _SKIPPED:
                yield from self._rows(element)


def _cell_text(cell: Any) -> str:
    paragraphs: list[str] = []
    _OpenText().add_below(cell, "", paragraphs)
    return " ".join(paragraphs)


def _open_sheets(archive: zipfile.ZipFile) -> _Sheets:
    """Return the rows of a workbook, with ``_MAX_REPEATED`` equal cells at most.

    Rows are read one after another: a tree would take several times the memory of the file.
    """
    from lxml import etree

    sheets, number = _Sheets(), 0
    with archive.open(_CONTENT) as file:
        tags = ("{*}table", "{*}table-row")
        events = etree.iterparse(file, ("start", "end"), tag=tags, **_XML_OPTIONS)
        for event, element in events:
            is_table, attributes = _local(element) == "table", _attributes(element)
            if is_table and event == "start":
                sheets.begin(attributes.get("name", "Sheet"))
                number = 0
            elif not is_table and event == "end":
                sheets.row(min(number, 1_000_000) + 1, _sheet_row(element))
                number += _count(attributes.get("number-rows-repeated", "1"))
                element.clear(keep_tail=True)
    _refuse_document_type(events.root.getroottree())
    return sheets


def _sheet_row(element: Any) -> list[str]:
    row: list[str] = []
    for cell in _cells_of(element):
        repeated = _count(_attributes(cell).get("number-columns-repeated", "1"))
        row += [_cell_text(cell)] * min(repeated, _MAX_REPEATED)
    while row and not row[-1]:
        row.pop()
    return row


def _cells_of(row: Any) -> Iterator[Any]:
    return (element for element in row if _local(element) in _CELLS)


def _is_merged(cell: Any) -> bool:
    repeated = _attributes(cell).get("number-columns-repeated", "1")
    return repeated != "1" or _local(cell) != "table-cell"


def _heading_mark(element: Any) -> str:
    level = _attributes(element).get("outline-level", "1")
    return "#" * (min(6, int(level)) if level.isdecimal() and int(level) else 1) + " "


def _attributes(element: Any) -> dict[str, str]:
    return {key.rpartition("}")[2]: value for key, value in element.items()}


def _count(text: str) -> int:
    return max(1, int(text)) if text.isdecimal() and len(text) < 10 else 1


def _local(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


_CODE_PAGE = re.compile(rb"\\ansicpg(\d{1,5})")
# hexadecimal picture data; the lookbehind prevents a second match attempt inside a run
_PICTURE_DATA = re.compile(r"(?<![0-9a-fA-F\r\n])[0-9a-fA-F\r\n]{512,}")
_OUTLINE = re.compile(r"\\outlinelevel([0-5])(?!\d) ?")
_TITLE = re.compile(r"\{\\title ([^{}\\]{1,500})\}")
_HEAD_BYTES = 1 << 16


def read_rtf(data: bytes, name: str) -> Document:
    """Read a Rich Text file; a line number is that of a paragraph."""
    from striprtf.striprtf import rtf_to_text

    if not data.lstrip()[:5].startswith(b"{\\rtf"):
        raise DocumentError("broken rtf file: it does not begin with {\\rtf")
    encoding = _encoding(data)
    source = data.decode(encoding, "replace")
    source = source.replace("\\field{", "{")  # striprtf's search for links takes quadratic time
    source = _OUTLINE.sub(
        lambda level: f"{level.group()} {'#' * (int(level.group(1)) + 1)} ",
        _PICTURE_DATA.sub("", source),
    )
    lines = Lines()
    text = rtf_to_text(source, encoding=encoding, errors="replace")
    for number, paragraph in enumerate(text.split("\n"), 1):
        is_row = paragraph.rstrip().endswith("|")
        block = _row(paragraph) if is_row else collapse_spaces(paragraph)
        if not block:
            continue
        if is_row and len(lines.texts) > 1 and " | " in lines.texts[-2]:  # a table goes on
            lines.texts.pop()
            lines.numbers.pop()
        lines.add(f"{block}\n", number)
    title = _TITLE.search(source[:_HEAD_BYTES])
    return lines.document(name, title.group(1).strip() if title else "")


def _encoding(data: bytes) -> str:
    found = _CODE_PAGE.search(data[:_HEAD_BYTES])
    encoding = f"cp{int(found.group(1))}" if found else "cp1252"
    try:
        b"".decode(encoding)
    except LookupError:
        return "cp1252"
    return encoding


def _row(paragraph: str) -> str:
    row = " | ".join(map(collapse_spaces, paragraph.rstrip().rstrip("|").split("|")))
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
    require_small_archive(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        package_path = _package_path(archive)
        package = _book_xml(archive, package_path)
        title = collapse_spaces(package.findtext(".//{*}title") or "")
        items = _items(package, posixpath.dirname(package_path))
        titles = _titles(archive, package, items)
        encrypted = _encrypted_paths(archive)
        chapters = []
        for item in _spine(package, items):
            if item.path in encrypted:
                raise DocumentError(
                    "the book is protected (DRM), so only its shop's reader can open it: use a copy"
                    " without protection"
                )
            chapters.append(_chapter(archive, item, titles.get(item.path, ""), book=title))
    if not any(chapters):
        raise DocumentError(
            "the book has no text: if its pages are pictures, run text recognition first"
        )
    return document_of_pages(name, chapters, title)


def _chapter(archive: zipfile.ZipFile, item: _Item, title: str, *, book: str) -> str:
    """Return a chapter's text under a first-level heading, which separates it from others."""
    page = read_html(_member(archive, item.path), item.path)
    text = page.text.strip()
    if not text:
        return ""
    if text.startswith("#"):
        return f"# {text.lstrip('#').lstrip()}"
    own = page.title if page.title != book else ""
    return f"# {title or own or title_from_path(item.path)}\n\n{text}"


def _package_path(archive: zipfile.ZipFile) -> str:
    for element in _book_xml(archive, _CONTAINER).iter("{*}rootfile"):
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
        for element in package.iter("{*}item")
    }


def _spine(package: Any, items: dict[str, _Item]) -> Iterator[_Item]:
    """Yield the chapters, each once, in reading order."""
    seen = set()
    for element in package.iter("{*}itemref"):
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
    for spine in package.iter("{*}spine"):
        contents = items.get(str(spine.get("toc")))
        if contents is not None:
            return _titles_in(archive, contents.path, "navPoint", "src")
    return {}


def _titles_in(archive: zipfile.ZipFile, path: str, tag: str, link: str) -> dict[str, str]:
    titles: dict[str, str] = {}
    if path not in archive.namelist():
        return titles
    folder = posixpath.dirname(path)
    for entry in _book_xml(archive, path).iter(f"{{*}}{tag}"):
        target, title = entry.get(link), entry
        if tag == "navPoint":  # use its own label and link, not those of nested entries
            own = {_local(child): child for child in entry}
            if "content" not in own or "navLabel" not in own:
                continue
            target, title = own["content"].get(link), own["navLabel"]
        label = collapse_spaces("".join(title.itertext()))
        if target and label:
            titles.setdefault(_resolve_link(folder, str(target).partition("#")[0]), label)
    return titles


def _encrypted_paths(archive: zipfile.ZipFile) -> set[str]:
    """Return the paths of encrypted files, which include obfuscated fonts."""
    if _ENCRYPTION not in archive.namelist():
        return set()
    references = _book_xml(archive, _ENCRYPTION).iter("{*}CipherReference")
    return {unquote(str(reference.get("URI", ""))) for reference in references}


def _book_xml(archive: zipfile.ZipFile, path: str) -> Any:
    """Return the root of an XML file of the book."""
    from lxml import etree

    content = _member(archive, path, _MAX_CONTENTS_BYTES + 1)
    if len(content) > _MAX_CONTENTS_BYTES:
        raise DocumentError(
            f"broken epub file: {path} is larger than {_MAX_CONTENTS_BYTES / 1e6:.0f} MB"
        )
    return etree.fromstring(content, etree.XMLParser(**_XML_OPTIONS))


def _member(archive: zipfile.ZipFile, path: str, max_bytes: int = -1) -> bytes:
    try:
        with archive.open(path) as file:
            return file.read(max_bytes)
    except KeyError:
        raise DocumentError(f"broken epub file: {path} is missing") from None


def _resolve_link(folder: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(link)))
