"""Measuring: ``ragaccel doctor --measure``, what verifying so many tokens at once costs here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ragaccel.cli.exits import ExitCode
from ragaccel.cli.room import load_llm
from ragaccel.decoding.session import NoDrafter

if TYPE_CHECKING:
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal
    from ragaccel.llm import LLM

_SHORT, _REPEATS = 512, 5
_LONGER = (2048, 8192, 32768)  # tokens; measured where a pass of them is a matter of moments
_MOMENTS = 0.05  # seconds of a pass of one row


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds by rows, for one way of choosing at one length, and what bounds them."""

    way: str
    context: int
    seconds: dict[int, float]
    limit_seconds: float  # reading weights and states alone


def show_costs(terminal: Terminal, settings: Settings, *, json: bool) -> ExitCode:
    """Measure, show and keep what passes of the model cost on this device.

    Raises:
        ModelNotFoundError, ModelRefusedError: the model cannot be used.
    """
    from ragaccel.models.packing import forget_packing

    forget_packing()  # measured again, too: what was kept may come from a moment under load
    llm = load_llm(terminal, settings, drafter=NoDrafter())  # compiles nothing
    threads = _choose_threads(llm)
    costs = _measured(terminal, llm)
    for cost in costs:
        llm.engine.costs.replace(cost.way, cost.seconds, cost.context)
    kept = llm.engine.costs.save()
    if json:
        terminal.json(
            {
                "key": llm.model.cost_key,
                "kept": kept,
                "threads": threads,
                "seconds": {cost.way: cost.seconds for cost in costs if cost.context <= _SHORT},
                "by_length": [
                    {
                        "way": cost.way,
                        "context": cost.context,
                        "seconds": cost.seconds,
                        "limit_seconds": cost.limit_seconds,
                    }
                    for cost in costs
                ],
            }
        )
        return ExitCode.OK
    terminal.show(_table(costs))
    _explain(terminal, llm, costs, threads)
    terminal.note(
        f"kept in {llm.engine.costs.path}: later answers begin with it"
        if kept
        else f"{llm.engine.costs.path} cannot be written: every run learns it anew"
    )
    return ExitCode.OK


def _choose_threads(llm: LLM) -> dict[int, float]:
    """Let passes use as many threads of a processor as are fastest."""
    from ragaccel.engine.engine import measure_threads

    room = llm.context_length
    seconds = measure_threads(llm.engine, context=_SHORT if room is None else min(_SHORT, room - 2))
    if seconds:
        llm.engine.costs.threads = min(seconds, key=seconds.__getitem__)
    return seconds


def _measured(terminal: Terminal, llm: LLM) -> list[Measured]:
    from ragaccel.engine.engine import ROWS, WAYS, measure_passes
    from ragaccel.engine.latency import read_bandwidth

    room = llm.context_length
    bandwidth = read_bandwidth(llm.model.device)
    rows = [number for number in ROWS if number <= llm.engine.max_rows]
    found: list[Measured] = []
    bar = Progress(
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=28),
        TimeRemainingColumn(),
        console=terminal.err,
        transient=True,
        disable=not terminal.interactive,
    )
    task = bar.add_task("measuring", total=len(WAYS) * (_REPEATS + 1) * len(rows))

    def measure(way: str, context: int) -> None:
        seconds = measure_passes(
            llm.engine,
            context=context,
            repeats=_REPEATS,
            rows=rows,
            sampling=WAYS[way],
            advance=lambda: bar.advance(task),
        )
        states = context * llm.engine.pool.bytes_per_token
        limit = (llm.model.weight_bytes + states) / bandwidth
        found.append(Measured(way, context, dict(seconds), limit))

    with bar:
        for way in WAYS:
            measure(way, _SHORT if room is None else min(_SHORT, room - 2))
        for context in _LONGER:
            if (room is None or context < room - 2) and found[0].seconds[1] < _MOMENTS:
                bar.update(task, description=f"measuring over {context:,} tokens")
                measure("greedy", context)
    return found


def _explain(
    terminal: Terminal, llm: LLM, costs: list[Measured], threads: dict[int, float]
) -> None:
    first = costs[0]
    share = first.limit_seconds / first.seconds[1]
    terminal.note(
        f"reading {llm.model.weight_bytes / 1e6:,.0f} MB of weights and the states of "
        f"{first.context:,} tokens takes {1e3 * first.limit_seconds:.1f} ms at least: a pass of "
        f"one row reaches {share:.0%} of that speed"
    )
    if len(threads) > 1:
        each = ", ".join(f"{number}: {1e3 * value:.1f} ms" for number, value in threads.items())
        terminal.note(f"threads {each}; {llm.engine.costs.threads} are used from now on")


def _table(costs: list[Measured]) -> Table:
    table = Table("rows", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for cost in costs:
        length = "" if cost.context <= _SHORT else f" over {cost.context:,}"
        table.add_column(f"{cost.way}{length}, ms", justify="right")
        table.add_column("x one row", justify="right")
    for number in costs[0].seconds:
        cells = [
            cell
            for cost in costs
            for cell in (
                f"{1e3 * cost.seconds[number]:.1f}",
                f"{cost.seconds[number] / cost.seconds[1]:.2f}",
            )
        ]
        table.add_row(str(number), *cells)
    return table
