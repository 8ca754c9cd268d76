"""The ``ragaccel`` command: its subcommands and the settings that each takes as options."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ragaccel.cli.commands import (
    ask,
    chat,
    config,
    doctor,
    index,
    logs,
    ls,
    rm,
    search,
    stats,
    train,
)
from ragaccel.cli.settings import make_command

_EPILOG = (
    "Exit codes: 0 success, 1 failed, 2 wrong usage, 3 nothing found to answer from, "
    "4 some files could not be indexed, 5 not answered, 130 interrupted."
)

# Settings that are options of a command.
_INDEX = ("embedder", "follow_links", "shared")
_FINDING = ("k", *_INDEX)
_MODEL = ("model", "device", "dtype", "memory", "drafter", "space")
_ANSWER = ("max_tokens", "temperature", "seed")

# Help without rich, whose import would slow `ragaccel --help` down.
app = typer.Typer(
    help="Answer questions from your own documents, with a local model that quotes them.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function, settings in (
    (ask, (*_FINDING, *_MODEL, *_ANSWER)),
    (chat, (*_FINDING, *_MODEL, *_ANSWER)),
    (index, _INDEX),
    (search, _FINDING),
    (ls, ()),
    (rm, ()),
    (stats, ()),
    (logs, ()),
    (doctor, ("embedder", *_MODEL)),
):
    app.command(function.__name__)(make_command(function, *settings))
app.add_typer(config, name="config")
app.add_typer(train, name="train")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"ragaccel {version('ragaccel')}")
        except PackageNotFoundError:
            typer.echo("ragaccel (version unknown: the package is not installed)")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its code (see ``terminal.ExitCode``)."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="ragaccel")
    except KeyboardInterrupt:
        sys.exit(130)
