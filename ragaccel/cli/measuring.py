"""Measuring: ``ragaccel doctor --measure``, what verifying so many tokens at once costs here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ragaccel.cli.exits import ExitCode
from ragaccel.cli.room import load_llm
from ragaccel.cli.settings import resolve
from ragaccel.decode.interfaces import NoDrafter

if TYPE_CHECKING:
    from ragaccel.cli.terminal import Terminal
    from ragaccel.llm import LLM

    Costs = dict[str, dict[int, float]]  # seconds by rows, for each way of choosing

_CONTEXT, _REPEATS = 512, 5


def show_costs(terminal: Terminal, model: str | None, *, json: bool) -> ExitCode:
    """Measure, show and keep what passes of the model cost on this device.

    Raises:
        ModelNotFoundError, ModelRefusedError: the model cannot be used.
    """
    llm = load_llm(terminal, resolve({"model": model}), drafter=NoDrafter())  # compiles nothing
    costs = _measured(terminal, llm)
    for way, seconds in costs.items():
        llm.engine.costs.replace(way, seconds)
    kept = llm.engine.costs.save()
    if json:
        terminal.json({"key": llm.model.cost_key, "kept": kept, "seconds": costs})
        return ExitCode.OK
    terminal.show(_table(costs))
    terminal.note(
        f"kept in {llm.engine.costs.path}: later answers begin with it"
        if kept
        else f"{llm.engine.costs.path} cannot be written: every run learns it anew"
    )
    return ExitCode.OK


def _measured(terminal: Terminal, llm: LLM) -> Costs:
    from ragaccel.engine.measuring import ROWS, WAYS, measure_passes

    limit = llm.context_length
    context = _CONTEXT if limit is None else min(_CONTEXT, limit - 2)
    rows = [number for number in ROWS if number <= llm.engine.max_rows]
    bar = Progress(
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=28),
        TimeRemainingColumn(),
        console=terminal.err,
        transient=True,
        disable=not terminal.interactive,
    )
    task = bar.add_task("measuring", total=len(WAYS) * (_REPEATS + 1) * len(rows))
    with bar:
        return {
            way: dict(
                measure_passes(
                    llm.engine,
                    context=context,
                    repeats=_REPEATS,
                    rows=rows,
                    sampling=sampling,
                    advance=lambda: bar.advance(task),
                )
            )
            for way, sampling in WAYS.items()
        }


def _table(costs: Costs) -> Table:
    table = Table("rows", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for way in costs:
        table.add_column(f"{way}, ms", justify="right")
        table.add_column("x one row", justify="right")
    for number in next(iter(costs.values())):
        cells = [
            cell
            for seconds in costs.values()
            for cell in (f"{1e3 * seconds[number]:.1f}", f"{seconds[number] / seconds[1]:.2f}")
        ]
        table.add_row(str(number), *cells)
    return table
