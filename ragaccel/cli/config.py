"""``ragaccel config``: what is set, and where."""

from typing import TYPE_CHECKING, Annotated

import typer

from ragaccel.cli import options
from ragaccel.cli.verb import verb

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal

config = typer.Typer(
    help="Show or change the settings.\n\nThey come from ragaccel.toml (the user's, then"
    " the current folder's, for what loads, reads and writes nothing), then from RAGACCEL_*"
    " variables, then from flags; the later wins.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Key = Annotated[str, typer.Argument(metavar="KEY", help="A setting's name, e.g. model.")]
Project = Annotated[
    bool, typer.Option("--project", help="In ./ragaccel.toml, for this folder only.")
]


def show(terminal: "Terminal", json: options.Json = False) -> "ExitCode":
    """Show every setting, its value and where the value comes from."""
    from rich.table import Table

    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import SETTINGS, resolve

    settings = resolve()
    if json:
        terminal.json(
            {
                s.key: {"value": settings.values[s.key], "from": settings.origins[s.key]}
                for s in SETTINGS
            }
        )
        return ExitCode.OK
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("setting", "value", "from", "what it is"):
        table.add_column(heading, overflow="fold")
    for setting in SETTINGS:
        value = settings.values[setting.key]
        shown = "–" if value is None else str(value)
        table.add_row(setting.key, shown, settings.origins[setting.key], setting.help)
    terminal.show(table)
    return ExitCode.OK


def get(terminal: "Terminal", key: Key) -> "ExitCode":
    """Print the value of one setting."""
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import known, resolve

    known(key, "config get")
    value = resolve().values[key]
    terminal.write("" if value is None else str(value), end="\n")
    return ExitCode.OK


def set_(
    terminal: "Terminal",
    key: Key,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The new value.")],
    project: Project = False,
) -> "ExitCode":
    """Write a setting into ragaccel.toml."""
    from ragaccel.cli.exits import ExitCode, UsageError
    from ragaccel.cli.settings import how_to_allow, known, write_value

    setting = known(key, "config set")
    parsed = setting.parse(value, "config set")
    if project and not setting.may_come_with_documents:
        raise UsageError(
            f"--project: {key} is not taken from a file beside documents: "
            + how_to_allow(setting, value)
        )
    path = _file(project)
    write_value(path, key, parsed)
    terminal.note(f"{key} = {parsed} in {path}")
    return ExitCode.OK


def unset(terminal: "Terminal", key: Key, project: Project = False) -> "ExitCode":
    """Take a setting out of ragaccel.toml, so that its default holds again."""
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.settings import known, write_value

    known(key, "config unset")
    path = _file(project)
    write_value(path, key, None)
    terminal.note(f"{key} is not set in {path} any more")
    return ExitCode.OK


def _file(project: bool) -> "Path":
    from ragaccel.homes import project_settings_file, user_settings_file

    return project_settings_file() if project else user_settings_file()


for name, function in (("show", show), ("get", get), ("set", set_), ("unset", unset)):
    config.command(name)(verb(function))
