"""``ragaccel config``: what is set, and where."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from ragaccel.cli import options
from ragaccel.cli.settings import KEYS, describe
from ragaccel.cli.verb import verb

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import Terminal

config = typer.Typer(
    help="Show the settings.\n\nThey come from ragaccel.toml (the user's, then"
    " the current folder's, for what loads, reads and writes nothing), then from RAGACCEL_*"
    " variables, then from flags; the later wins.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def show(terminal: "Terminal", json: options.Json = False, *, settings: "Settings") -> "ExitCode":
    """Show every setting, its value and where the value comes from."""
    from rich.table import Table

    from ragaccel.cli.exits import ExitCode
    from ragaccel.homes import user_settings_file

    values, origins = asdict(settings), settings.origins
    if json:
        terminal.json({key: {"value": values[key], "from": origins[key]} for key in KEYS})
        return ExitCode.OK
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("setting", "value", "from", "what it is"):
        table.add_column(heading, overflow="fold")
    for key in KEYS:
        table.add_row(key, _shown(values[key]), origins[key], describe(key))
    terminal.show(table)
    path = user_settings_file()
    terminal.note(f"settings file: {path}" + ("" if path.exists() else " (there is none yet)"))
    return ExitCode.OK


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


@config.callback()
def _verbs() -> None:
    """Keep ``show`` a word of its own: an only command would need no name."""


config.command("show")(verb(show, *KEYS))
