"""``ragaccel stats``: how large an index is and what it is made of."""

from typing import TYPE_CHECKING

from ragaccel.cli import options

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal


def stats(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    json: options.Json = False,
) -> "ExitCode":
    """Show how many files and passages an index holds, and what made it."""
    from rich.table import Table

    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.knowledge import open_store, store_figures
    from ragaccel.cli.source import locate

    source = locate(target, index)
    with open_store(source) as store:
        figures = store_figures(store)
    if json:
        terminal.json(figures)
        return ExitCode.OK
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    terminal.show(table)
    return ExitCode.OK
