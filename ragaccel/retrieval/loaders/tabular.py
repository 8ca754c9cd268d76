"""The loaders of tables and records: CSV, JSON and notebooks."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import deque
from itertools import islice
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

from ragaccel.errors import DocumentError
from ragaccel.passage import Document
from ragaccel.retrieval.loaders import (
    Lines,
    collapse_spaces,
    decode_text,
    document_of_pages,
    title_from_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_NUMBER = re.compile(r"[-+]?[\d.,\s]+%?")
_JSON_TOKEN = re.compile(r'"|-?\d[\d.eE+-]*|true|false|null|NaN|-?Infinity|\n')
_JSON_COLON = re.compile(r"\s*:")
_DIGIT = re.compile(r"\d")
_LONG_NAME = 60  # characters of a cell that does not name a column
_NAMING_KEYS = ("title", "name", "id", "key")
_MAX_HEADING_LEVEL = 6


def read_csv(data: bytes, name: str) -> Document:
    """Read a CSV or TSV table as a line per row, ``Name: Ada; Born: 1815.``, with line numbers.

    The header row is left out, as every row repeats the column names, unless there are no rows.
    """
    text, _ = decode_text(data)
    rows = csv.reader(io.StringIO(text, newline=""), _dialect(text, name))
    lines, number = Lines(), 1
    columns: list[str] = []
    for cells in rows:
        if not any(cell.strip() for cell in cells):
            pass
        elif columns:
            lines.add(record_line(named_cells(columns, cells)), number)
        elif is_header(cells):
            columns = [collapse_spaces(cell.replace("_", " ")) for cell in cells]
        else:
            columns = [f"column {position}" for position in range(1, len(cells) + 1)]
            lines.add(record_line(named_cells(columns, cells)), number)
        number = rows.line_num + 1
    if columns and not lines.texts:
        lines.add(f"Columns: {', '.join(columns)}.", 1)
    return lines.document(name, markup="rows")


def _dialect(text: str, name: str) -> type[csv.Dialect]:
    if name.lower().endswith(".tsv"):
        return csv.excel_tab
    try:
        return csv.Sniffer().sniff(text[:8192], delimiters=",;\t|")
    except csv.Error:
        return csv.excel


def is_header(cells: list[str]) -> bool:
    """Return whether a row is a header: its cells are distinct and none is a number."""
    named = [name for name in map(collapse_spaces, cells) if name]
    return len(set(named)) == len(named) and not any(map(_NUMBER.fullmatch, named))


def named_cells(columns: list[str], cells: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (column name, text) of the cells of a row that are not blank."""
    for position, cell in enumerate(cells):
        if cell.strip():
            yield (columns[position] if position < len(columns) else ""), collapse_spaces(cell)


def table_lines(
    rows: Iterable[Iterable[str]], *, has_header: bool = False, is_grid: bool = True
) -> list[str]:
    """Return the rows of a table within a text, a line each, without blank ones.

    If the first row names the columns, the others are as in ``read_csv``, and it is left out. It
    does if it is known to (``has_header``), or if it has no digit, and of three columns or more one
    is of short texts with digits in all other rows, two at least: of two columns or rows it may be
    the first key and value, or a layout. Otherwise, and without ``is_grid``, as where cells are
    merged, the cells are joined by bars.
    """
    cleaned = [[collapse_spaces(cell) for cell in row] for row in rows]
    known = [row for row in cleaned if any(row)]
    has_header = has_header and known[:1] == cleaned[:1]  # a blank header names nothing
    if is_grid and known and _names_columns(known[0], known[1:], has_header=has_header):
        return [record_line(named_cells(known[0], row)) for row in known[1:]]
    return [" | ".join(row) for row in known]


def _names_columns(head: list[str], rows: list[list[str]], *, has_header: bool) -> bool:
    named = [name for name in head if name]
    is_regular = len(head) > 1 and bool(rows) and all(len(row) == len(head) for row in rows)
    if not is_regular or len({*named}) < max(len(named), len(head) - 1):  # one may be blank
        return False
    if max(map(len, named)) > _LONG_NAME or any(name.endswith((":", "：")) for name in named):
        return False  # a name with a colon is that of the cell beside it
    if has_header or len(head) == 2 or len(rows) == 1 or any(map(_DIGIT.search, head)):
        return has_header
    columns = [*zip(*rows, strict=True)]
    if any(name and name in column for name, column in zip(head, columns, strict=True)):
        return False
    short = (column for column in columns if max(map(len, column)) <= _LONG_NAME)
    return any(all(map(_DIGIT.search, column)) for column in short)


def record_line(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a row as a line, ``Name: Ada; Born: 1815.``; a value without a name stands alone."""
    text = "; ".join(f"{key}: {value}" if key else value for key, value in pairs)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def read_json(data: bytes, name: str) -> Document:
    """Read JSON as text with line numbers: a nested object is a heading, a flat one a line."""
    text, _ = decode_text(data)
    lines = Lines()
    value = _add_value(text, 0, lines)
    if value is None:
        return Document(path=name, text=text, markup="code")
    title = _object_name(value[0]) or title_from_path(name)
    return lines.document(name, title)


def read_json_lines(data: bytes, name: str) -> Document:
    """Read JSON Lines, of which each is a value; keep a line that is not JSON unchanged."""
    text, _ = decode_text(data)
    lines = Lines()
    for number, line in enumerate(text.split("\n")):
        if line.strip() and _add_value(line, number, lines) is None:
            lines.add(line, number + 1)
    return lines.document(name, title_from_path(name))


def _add_value(text: str, first_line: int, lines: Lines) -> tuple[Any] | None:
    """Add the lines of a JSON text; return (value,), or None if the text is not JSON."""
    try:
        value = json.loads(text, object_pairs_hook=_Pairs)
        _Renderer(lines, _scalar_lines(text, first_line + 1)).render(value, "", 1)
    except (ValueError, RecursionError):
        return None
    return (value,)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as a list of its pairs, in the file's order."""

    __slots__ = ()


def _scalar_lines(text: str, line: int) -> Iterator[int]:
    """Yield the line number of every scalar of a JSON text, in order, without keys."""
    position = 0
    while token := _JSON_TOKEN.search(text, position):
        position = token.end()
        if token.group() == "\n":
            line += 1
        elif token.group() == '"':
            _, position = scanstring(text, position)
            colon = _JSON_COLON.match(text, position)
            if colon:
                line += colon.group().count("\n")
                position = colon.end()
            else:
                yield line
        else:
            yield line


class _Renderer:
    """A writer of a parsed JSON value as lines; ``numbers`` has the line number of each scalar."""

    def __init__(self, lines: Lines, numbers: Iterator[int]) -> None:
        self.lines = lines
        self.numbers = numbers
        self.last = 1

    def render(self, value: Any, key: str, depth: int) -> None:
        if not isinstance(value, list):
            self._scalar(key, value)
        elif _is_flat(value):
            self._flat(key, value)
        else:
            self._nested(key, value, depth)

    def _scalar(self, key: str, value: Any) -> None:
        self.last = next(self.numbers, self.last)
        text = _scalar_text(value)
        if "\n" in text:
            self.lines.add(f"{key}:\n\n{text}\n" if key else text, self.last)
        elif text:
            self.lines.add(record_line([(key, text)]), self.last)

    def _flat(self, key: str, value: list[Any]) -> None:
        number = next(self.numbers, self.last) if value else self.last
        more = deque(islice(self.numbers, max(len(value) - 1, 0)), maxlen=1)
        if isinstance(value, _Pairs):
            pairs = [
                (name.replace("_", " "), text) for name, item in value if (text := _one_line(item))
            ]
        else:
            text = ", ".join(text for item in value if (text := _one_line(item)))
            pairs = [(key, text)] if text else []
        if not pairs:
            return
        self.last = more.pop() if more else number
        if isinstance(value, _Pairs) and len(pairs) == 1:
            pairs = [(f"{key} {pairs[0][0]}".strip(), pairs[0][1])]
        record = record_line(pairs)
        self.lines.add(f"{key}: {record}" if key and len(pairs) > 1 else record, number)

    def _nested(self, key: str, value: list[Any], depth: int) -> None:
        if key:
            self.lines.add(f"\n{'#' * min(depth, _MAX_HEADING_LEVEL)} {key}\n", self.last)
            depth += 1
        if isinstance(value, _Pairs):
            for name, item in value:
                self.render(item, name, depth)
        else:
            for position, item in enumerate(value, 1):
                name = "" if _is_flat(item) else _object_name(item) or f"Item {position}"
                self.render(item, name, depth)


def _is_flat(value: Any) -> bool:
    """Return whether a value is a scalar, or a record or list of scalars without line breaks."""
    if not isinstance(value, list):
        return True
    items = [item for _, item in value] if isinstance(value, _Pairs) else value
    return not any(
        isinstance(item, list) or (isinstance(item, str) and "\n" in item.strip()) for item in items
    )


def _object_name(item: Any) -> str:
    """Return the title, name, id or key of a JSON object, or an empty string."""
    if isinstance(item, _Pairs):
        named = {key.lower(): value for key, value in item if not isinstance(value, list)}
        for key in _NAMING_KEYS:
            if named.get(key):
                return collapse_spaces(_scalar_text(named[key]))
    return ""


def _one_line(value: Any) -> str:
    return collapse_spaces(_scalar_text(value)) if isinstance(value, str) else _scalar_text(value)


def _scalar_text(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if type(value) is int:  # the most frequent type
        return str(value)
    return "" if value is None else json.dumps(value)


_MAX_OUTPUT_CHARS = 4_000


def read_notebook(data: bytes, name: str) -> Document:
    """Read a notebook; cells count as pages, from 1.

    Images and outputs longer than 4,000 characters are left out, since they are data, not prose.
    """
    notebook = json.loads(decode_text(data)[0])
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise DocumentError("broken ipynb file: it has no list of cells")
    language = notebook.get("metadata", {}).get("kernelspec", {}).get("language", "")
    return document_of_pages(name, [_cell_text(cell, language) for cell in cells])


def _cell_text(cell: dict[str, Any], language: str) -> str:
    source = _join_source(cell.get("source", "")).strip()
    if cell.get("cell_type") != "code":
        return source
    blocks = [f"```{language}\n{source}\n```"] if source else []
    for output in cell.get("outputs", ()):
        content = output.get("text") or output.get("data", {}).get("text/plain") or ""
        shown = _join_source(content).strip()
        if shown and len(shown) <= _MAX_OUTPUT_CHARS:
            blocks.append(f"```\n{shown}\n```")
    return "\n\n".join(blocks)


def _join_source(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
