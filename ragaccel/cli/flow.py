"""Flow: styled text laid out in lines while it streams."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class Flow:
    """Breaks lines between words at ``width`` cells; with None it writes what comes, as it comes.

    A word is held back until the space behind it shows where it ends; ``finish`` writes the last.
    """

    def __init__(self, write: Callable[[Text], None], width: int | None) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._space = ""
        self._word = Text()

    def feed(self, text: str, style: str = "") -> None:
        """Take some more text, all of one style."""
        if self._width is None:
            self._write(Text(text, style=style))
            return
        for part in _PARTS.findall(text):
            if part == "\n":
                self._end_word()
                self._emit(Text("\n"))
                self._column, self._space = 0, ""
            elif part.isspace():
                self._end_word()
                self._space += part
            else:
                self._word.append(part, style=style)

    def finish(self) -> None:
        """Write what is still held back."""
        self._end_word()

    @property
    def at_line_start(self) -> bool:
        """Whether the next word would stand at the start of a line."""
        return self._column == 0

    def _end_word(self) -> None:
        if not self._word or self._width is None:
            return
        width = cell_len(self._word.plain)
        if self._column and self._column + cell_len(self._space) + width > self._width:
            self._emit(Text("\n"))
            self._column, self._space = 0, ""
        self._emit(Text(self._space) + self._word)
        self._column += cell_len(self._space) + width
        self._word, self._space = Text(), ""

    def _emit(self, text: Text) -> None:
        if text:
            self._write(text)
