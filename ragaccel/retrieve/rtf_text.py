"""Rich Text Format read as text: paragraphs, headings and the rows of tables."""

from __future__ import annotations

import re

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document

_CODE_PAGE = re.compile(rb"\\ansicpg(\d{1,5})")
# what pictures are made of; the look behind keeps a run from being tried again from its middle
_DATA = re.compile(r"(?<![0-9a-fA-F\r\n])[0-9a-fA-F\r\n]{512,}")
_OUTLINE = re.compile(r"\\outlinelevel([0-5])(?!\d) ?")
_TITLE = re.compile(r"\{\\title ([^{}\\]{1,500})\}")
_HEAD_BYTES = 1 << 16


def read_rtf(data: bytes, name: str) -> Document:
    """Read a Rich Text file; its "lines" are its paragraphs."""
    try:
        from striprtf.striprtf import rtf_to_text
    except ImportError:
        raise MissingExtraError("striprtf, which reads Rich Text files,", "office") from None
    if not data.lstrip()[:5].startswith(b"{\\rtf"):
        raise DocumentError("broken rtf file: it does not begin as one")
    encoding = _encoding(data)
    source = data.decode(encoding, "replace")
    source = source.replace("\\field{", "{")  # looking for its links takes the square of its length
    source = _OUTLINE.sub(lambda level: f"{level.group()}{_heading(level)}", _DATA.sub("", source))
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
