"""Word and PowerPoint files read as text: headings, lists, tables and slides kept."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from ragaccel.errors import MissingExtraError
from ragaccel.passage import Document
from ragaccel.retrieve.zip_limits import require_modest

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADING_STYLE = re.compile(r"(?i)heading (\d)")
_SPACE = re.compile(r"\s+")
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_WORD_SPACES = frozenset({f"{_WORD}tab", f"{_WORD}ptab", f"{_WORD}cr"})


def read_docx(data: bytes, name: str) -> Document:
    """Read a Word file in the order of its body; its "lines" are its paragraphs and tables.

    A Word file has no pages until it is laid out, and no lines either.
    """
    try:
        import docx
    except ImportError:
        raise MissingExtraError("python-docx, which reads Word files,", "office") from None
    require_modest(data)
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
    """The text of a Word file's elements, each looked at once.

    The library's own paragraphs look their style up among all styles, and its rows repeat a cell
    as often as its ``gridSpan`` says, which may be a hundred million times.
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
        """A row's cells, each said once however many columns it spans.

        A cell merged with the one ``above`` it, by column, says what that one says.
        """
        cells = []
        column = _number(_value(row, "trPr", "gridBefore"), 0)
        for cell in row.iterchildren(_WORD + "tc"):
            merged = _value(cell, "tcPr", "vMerge", missing="restart") != "restart"
            paragraphs = cell.iterchildren(_WORD + "p")
            text = above.get(column, "") if merged else _tidy(" ".join(map(_word_text, paragraphs)))
            above[column] = text
            cells.append(text)
            column += _number(_value(cell, "tcPr", "gridSpan"), 1)
        return " | ".join(cells)


def _value(element: Any, properties: str, name: str, *, missing: str = "") -> str:
    """The ``w:val`` of a property; empty if it has none, ``missing`` if there is no such one."""
    found = element.find(f"{_WORD}{properties}/{_WORD}{name}")
    return missing if found is None else found.get(_WORD + "val", "")


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else otherwise


def _word_text(paragraph: Any) -> str:
    said: list[str] = []
    for element in paragraph:
        if element.tag == _WORD + "r":
            said += _run_text(element)
        elif element.tag == _WORD + "hyperlink":
            for run in element.iterchildren(_WORD + "r"):
                said += _run_text(run)
    return _tidy("".join(said))


def _run_text(run: Any) -> Iterator[str]:
    for element in run:
        if element.tag == _WORD + "t":
            yield element.text or ""
        elif element.tag in _WORD_SPACES:
            yield " "
        elif element.tag == _WORD + "noBreakHyphen":
            yield "-"
        elif element.tag == _WORD + "br":  # a page's end is no space
            yield " " if element.get(_WORD + "type", "textWrapping") == "textWrapping" else ""


def read_pptx(data: bytes, name: str) -> Document:
    """Read a presentation; a slide is a page, its title a heading, its notes come last."""
    try:
        import pptx
    except ImportError:
        raise MissingExtraError("python-pptx, which reads PowerPoint files,", "office") from None
    require_modest(data)
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
    if heading is not None and _tidy(heading.text_frame.text):
        yield f"# {_tidy(heading.text_frame.text)}"
    for shape in _flattened(slide.shapes):
        if heading is not None and shape.shape_id == heading.shape_id:
            continue
        if shape.has_text_frame:
            yield "\n".join(_bullets(shape.text_frame.paragraphs))
        elif getattr(shape, "has_table", False):
            yield _table(shape.table)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        yield _tidy(slide.notes_slide.notes_text_frame.text)


def _flattened(shapes: Any) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _flattened(shape.shapes)
        else:
            yield shape


def _bullets(paragraphs: Any) -> Iterator[str]:
    said = [_tidy("".join(run.text for run in item.runs)) for item in paragraphs]
    said = [text for text in said if text]
    yield from said if len(said) == 1 else (f"- {text}" for text in said)


def _table(table: Any) -> str:
    rows = (" | ".join(_tidy(cell.text) for cell in row.cells) for row in table.rows)
    return "\n".join(row for row in rows if row.strip(" |"))


def _tidy(text: str) -> str:
    return _SPACE.sub(" ", text).strip()
