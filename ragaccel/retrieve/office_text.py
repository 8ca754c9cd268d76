"""Word and PowerPoint files read as text: headings, lists, tables and slides kept."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from ragaccel.errors import MissingExtraError
from ragaccel.passage import Document

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADING_STYLE = re.compile(r"(?i)heading (\d)")
_SPACE = re.compile(r"\s+")


def read_docx(data: bytes, name: str) -> Document:
    """Read a Word file in the order of its body; its "lines" are its paragraphs and tables.

    A Word file has no pages until it is laid out, and no lines either.
    """
    try:
        import docx
    except ImportError:
        raise MissingExtraError("python-docx, which reads Word files,", "office") from None
    file = docx.Document(io.BytesIO(data))
    blocks = [
        _table(item) if hasattr(item, "rows") else _paragraph(item)
        for item in file.iter_inner_content()
    ]
    lines, numbers = [], []
    for number, block in enumerate(blocks, 1):
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


def _paragraph(paragraph: Any) -> str:
    text = _tidy(paragraph.text)
    style = paragraph.style.name if paragraph.style is not None else ""
    level = _HEADING_STYLE.match(style)
    if not text:
        return ""
    if level or style == "Title":
        return f"{'#' * (int(level.group(1)) if level else 1)} {text}"
    return f"- {text}" if style.startswith("List") else text


def read_pptx(data: bytes, name: str) -> Document:
    """Read a presentation; a slide is a page, its title a heading, its notes come last."""
    try:
        import pptx
    except ImportError:
        raise MissingExtraError("python-pptx, which reads PowerPoint files,", "office") from None
    file = pptx.Presentation(io.BytesIO(data))
    text, starts = "", []
    for slide in file.slides:
        starts.append(len(text))
        content = "\n\n".join(block for block in _slide(slide) if block)
        text += f"{content}\n\n" if content else ""
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
