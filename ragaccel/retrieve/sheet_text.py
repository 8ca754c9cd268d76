"""Workbooks read as text: each row a line of ``column: value`` pairs, under the sheet's name."""

from __future__ import annotations

import datetime
import io
from typing import TYPE_CHECKING, Any

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document
from ragaccel.retrieve.data_text import is_header, named_cells, record_line, tidy
from ragaccel.retrieve.plain_text import spoken_name
from ragaccel.retrieve.reader_process import MAX_TEXT_BYTES
from ragaccel.retrieve.zip_limits import require_modest

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_ROWS = 1_048_576  # of a sheet, as the format has it
_MAX_CELLS = 5_000_000


class SheetLines:
    """The lines of a workbook's sheets; a line's number is that of its row in the sheet.

    The first row of several words names the columns, and so does one after an empty row that has
    other columns than the table above. A row of one cell is a caption.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._numbers: list[int] = []
        self._name = ""
        self._size = 0
        self._cells = 0
        self._columns: list[str] = []
        self._used: list[int] = []
        self._after_gap = True

    def begin(self, name: str) -> None:
        """Start a sheet; it is named above its first row."""
        self._name = tidy(name)
        self._columns, self._used, self._after_gap = [], [], True

    def row(self, number: int, cells: list[str]) -> None:
        """Add a row of a sheet, ``number`` counted from 1."""
        self._cells += len(cells)
        if number > _MAX_ROWS or self._cells > _MAX_CELLS:
            raise DocumentError(
                f"has more than {_MAX_ROWS:,} rows or {_MAX_CELLS:,} cells: export what matters of"
                " it as CSV"
            )
        used = [position for position, cell in enumerate(cells) if cell.strip()]
        if not used:
            self._after_gap = True
            return
        if self._name:
            self._add(f"# {self._name}\n", number)
            self._name = ""
        if len(used) == 1 and (self._after_gap or not self._columns):
            self._add(f"{record_line([('', tidy(cells[used[0]]))])}\n", number)
        elif self._names_columns(cells, used):
            self._columns = [tidy(cell.replace("_", " ")) for cell in cells]
            self._used = used
        else:
            self._add(record_line(named_cells(self._columns, cells)), number)
        self._after_gap = False

    def document(self, name: str, title: str = "") -> Document:
        """All of it as a document."""
        return Document(
            path=name,
            text="\n".join(self._lines),
            title=title or spoken_name(name),
            markup="markdown",
            line_numbers=tuple(self._numbers),
        )

    def _names_columns(self, cells: list[str], used: list[int]) -> bool:
        is_new = not self._columns or (self._after_gap and used != self._used)
        return is_new and len(used) > 1 and is_header(cells)

    def _add(self, text: str, number: int) -> None:
        self._size += len(text)
        if self._size > MAX_TEXT_BYTES:  # the name of a column can be long, and is in every row
            raise DocumentError(f"holds more than {MAX_TEXT_BYTES / 1e6:.0f} MB of text: split it")
        for line in text.split("\n"):
            self._lines.append(line)
            self._numbers.append(number)


def read_xlsx(data: bytes, name: str) -> Document:
    """Read an Excel workbook; formulas as the values that were saved with them."""
    try:
        import openpyxl
    except ImportError:
        raise MissingExtraError("openpyxl, which reads Excel files,", "office") from None
    require_modest(data)
    book = openpyxl.load_workbook(
        io.BytesIO(data), read_only=True, data_only=True, keep_links=False
    )
    lines = SheetLines()
    for sheet in book.worksheets:
        lines.begin(sheet.title)
        sheet.reset_dimensions()  # what a file says of its own size need not be so
        for number, row in enumerate(sheet.iter_rows(), 1):
            lines.row(number, _texts(row))
    return lines.document(name, (book.properties.title or "").strip())


def _texts(row: Iterable[Any]) -> list[str]:
    return ["" if cell.value is None else _text(cell) for cell in row]


def _text(cell: Any) -> str:
    """A value as people write it."""
    value = cell.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        percent = "%" in str(cell.number_format)
        return f"{value * 100:.12g}%" if percent else f"{value:.15g}"
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return str(value)
