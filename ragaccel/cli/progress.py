"""Progress: bars on stderr while documents are read and embedded, where a person watches."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from types import TracebackType

    from ragaccel.cli.terminal import Terminal
    from ragaccel.retrieve.report import Progress as Standing

_LONGEST_NAME = 40


class IndexingProgress:
    """Takes what indexing tells of itself and draws it; gone from the screen when it is done.

    One bar for all the work, so that the time it says is left is for all of it. Nothing is drawn
    until there is something to read, and nothing at all without a terminal.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._shown = terminal.interactive
        self._bars = Progress(
            TextColumn("[dim]{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[count]}"),
            TextColumn("[cyan]{task.fields[left]}"),
            TextColumn("[dim]{task.fields[name]}", markup=True),
            console=terminal.err,
            transient=True,
            disable=not self._shown,
        )
        self._task = self._bars.add_task(
            "reading", total=None, visible=False, count="", left="", name=""
        )
        self._began: float | None = None

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
        files = f"{standing.files_done:,}/{standing.files_total:,} files"
        passages = f"{standing.passages_done:,}/{standing.passages_total:,} passages"
        self._bars.update(
            self._task,
            description=standing.stage,
            completed=standing.work_done,
            total=standing.work_total or None,
            count=f"{files}, {passages}" if standing.passages_total else files,
            left=self._time_left(standing),
            visible=standing.files_total > 0,
            name=_short(standing.path),
        )

    def _time_left(self, standing: Standing) -> str:
        """How long what is left will take, going by the run so far; nothing while that is none."""
        if self._began is None:
            self._began = time.monotonic()
        if not standing.work_done:
            return ""
        seconds = (time.monotonic() - self._began) / standing.work_done
        seconds *= max(0.0, standing.work_total - standing.work_done)
        return f"about {timedelta(seconds=round(seconds))} left"


def _short(path: str) -> str:
    from rich.markup import escape

    from ragaccel.cli.terminal import printable

    name = os.path.basename(path)
    return escape(
        printable(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")
    )
