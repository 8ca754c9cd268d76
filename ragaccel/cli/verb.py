"""Verb: what every command has in common, from its flags to how it ends."""

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal

# Flags of every command: what they are, and their value where they are not given.
_COMMON: dict[str, tuple[Any, Any]] = {
    "quiet": (
        Annotated[
            bool, typer.Option("--quiet", "-q", help="Only the result and errors; no progress.")
        ],
        False,
    ),
    "no_color": (
        Annotated[
            bool, typer.Option("--no-color", help="Marks instead of colours, as with NO_COLOR.")
        ],
        False,
    ),
    "debug": (
        Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
        False,
    ),
}


def verb(function: Callable[..., "ExitCode"]) -> Callable[..., None]:
    """Make a command of a function that takes a Terminal first and returns its exit code.

    Adds --quiet, --no-color and --debug, turns every error into one line on stderr and an exit
    code, and makes sure that a reader who leaves (a closed pipe) ends the command quietly.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _COMMON.items()
    ]

    def command(**arguments: Any) -> None:
        switches = {name: arguments.pop(name) for name in _COMMON}
        raise typer.Exit(int(_carry_out(function, arguments, **switches)))

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


def _carry_out(
    function: Callable[..., "ExitCode"],
    arguments: dict[str, Any],
    *,
    quiet: bool,
    no_color: bool,
    debug: bool,
) -> "ExitCode":
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal, silence_libraries

    silence_libraries()
    color = "never" if no_color else _wished_color()
    terminal = Terminal(quiet=quiet, color=color)
    try:
        for warning in _ignored_settings():
            terminal.warn(warning)
        code = _attempt(function, terminal, arguments, debug=debug)
        terminal.close()
    except BrokenPipeError:
        _let_go_of_stdout()
        return ExitCode.FAILED
    return code


def _attempt(
    function: Callable[..., "ExitCode"],
    terminal: "Terminal",
    arguments: dict[str, Any],
    *,
    debug: bool,
) -> "ExitCode":
    from ragaccel.cli.exits import exit_code_of, explain

    try:
        return function(terminal, **arguments)
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        if isinstance(error, KeyboardInterrupt):
            terminal.note("interrupted")
        else:
            terminal.fail(explain(error))
        if debug or os.environ.get("RAGACCEL_DEBUG"):
            terminal.err.print_exception()
        return code


def _wished_color() -> str:
    from ragaccel.cli.exits import UsageError
    from ragaccel.cli.settings import resolve

    try:
        return resolve().text("color") or "auto"
    except UsageError:
        return "auto"  # the command that needs the settings says what is wrong with them


def _ignored_settings() -> list[str]:
    from ragaccel.cli.exits import UsageError
    from ragaccel.cli.settings import ignored_in_folder

    try:
        return ignored_in_folder()
    except UsageError:
        return []  # as above


def _let_go_of_stdout() -> None:
    """Point stdout at nothing, or Python complains of the closed pipe once more as it exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
