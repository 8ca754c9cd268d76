"""Jupyter notebooks read as text: prose as it is, code and its output fenced, cells as pages."""

from __future__ import annotations

import json
from typing import Any

from ragaccel.errors import DocumentError
from ragaccel.passage import Document
from ragaccel.retrieve.plain_text import decode_text

_MAX_OUTPUT_CHARS = 4_000


def read_notebook(data: bytes, name: str) -> Document:
    """Read a notebook; the page of an offset is the 1-based number of its cell.

    Images and outputs of more than 4,000 characters are left out: they are data, not prose.
    """
    notebook = json.loads(decode_text(data)[0])
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise DocumentError("broken ipynb file: it has no list of cells")
    language = notebook.get("metadata", {}).get("kernelspec", {}).get("language", "")
    pieces: list[str] = []
    starts, size = [], 0
    for cell in cells:
        starts.append(size)
        content = _cell_text(cell, language)
        pieces.append(f"{content}\n\n" if content else "")
        size += len(pieces[-1])
    text = "".join(pieces)
    return Document(path=name, text=text, markup="markdown", page_starts=tuple(starts))


def _cell_text(cell: dict[str, Any], language: str) -> str:
    source = _joined(cell.get("source", "")).strip()
    if cell.get("cell_type") != "code":
        return source
    blocks = [f"```{language}\n{source}\n```"] if source else []
    for output in cell.get("outputs", ()):
        said = output.get("text") or output.get("data", {}).get("text/plain") or ""
        shown = _joined(said).strip()
        if shown and len(shown) <= _MAX_OUTPUT_CHARS:
            blocks.append(f"```\n{shown}\n```")
    return "\n\n".join(blocks)


def _joined(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
