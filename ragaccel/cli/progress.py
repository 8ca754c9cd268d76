"""Progress: bars on stderr while documents are read and embedded, where a person watches."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ragaccel.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ragaccel.cli.terminal import Terminal
    from ragaccel.retrieval.indexing import Progress as Standing

_LONGEST_NAME = 40
_WHOLE_RUN = 1e6  # seconds; one batch of passages can take longer than rich's 30


@contextmanager
def indexing_progress(terminal: Terminal) -> Iterator[Callable[[Standing], None]]:
    """Draw what indexing tells of itself; it is gone from the screen at the end.

    One bar for all the work, so that the time it says is left is for all of it. Nothing is drawn
    until there is something to read, and nothing at all without a terminal.
    """
    bars = Progress(
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[name]}"),
        console=terminal.err,
        transient=True,
        speed_estimate_period=_WHOLE_RUN,
        disable=not terminal.interactive,
    )
    task = bars.add_task("reading", total=None, visible=False, count="", name="")

    def draw(standing: Standing, /) -> None:
        files = f"{standing.files_done:,}/{standing.files_total:,} files"
        passages = f"{standing.passages_done:,}/{standing.passages_total:,} passages"
        bars.update(
            task,
            description=standing.stage,
            completed=standing.work_done,
            total=standing.work_total or None,
            count=f"{files}, {passages}" if standing.passages_total else files,
            visible=standing.files_total > 0,
            name=_short(standing.path),
        )

    with bars:
        yield draw if terminal.interactive else _draw_nothing


def _draw_nothing(_: Standing, /) -> None:
    pass


def _short(path: str) -> str:
    name = os.path.basename(path)
    return escape(
        printable(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")
    )
