"""Progress: bars on stderr while documents are read and embedded, where a person watches."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType

    from ragaccel.cli.terminal import Terminal
    from ragaccel.retrieve.report import Progress as Standing

_LONGEST_NAME = 40


class IndexingProgress:
    """Takes what indexing tells of itself and draws it; gone from the screen when it is done.

    Nothing is drawn until there is something to read, and nothing at all without a terminal.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._shown = terminal.interactive
        self._bars = Progress(
            TextColumn("[dim]{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[name]}", markup=True),
            console=terminal.err,
            transient=True,
            disable=not self._shown,
        )
        self._files = self._bars.add_task("reading", total=None, name="", visible=False)
        self._passages = self._bars.add_task("embedding", total=None, name="", visible=False)

    def __enter__(self) -> IndexingProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, standing: Standing, /) -> None:
        """Draw where indexing stands."""
        if not self._shown:
            return
        self._bars.update(
            self._files,
            completed=standing.files_done,
            total=standing.files_total,
            visible=standing.files_total > 0,
            name=_short(standing.path),
        )
        self._bars.update(
            self._passages,
            completed=standing.passages_done,
            total=standing.passages_total,
            visible=standing.passages_total > 0,
        )


def _short(path: str) -> str:
    from rich.markup import escape

    from ragaccel.cli.terminal import printable

    name = os.path.basename(path)
    return escape(
        printable(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")
    )
