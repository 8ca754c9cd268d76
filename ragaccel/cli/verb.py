"""Verb: what every command has in common, from its flags to how it ends."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragaccel.cli.settings import option_of, read_files, resolve

if TYPE_CHECKING:
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal

# Options of every command, beside the color of its settings.
_COMMON: dict[str, Any] = {
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the result and errors; no progress.")
    ],
    "no_color": Annotated[
        bool, typer.Option("--no-color", help="Marks instead of colours, as with NO_COLOR.")
    ],
    "debug": Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error.", envvar="RAGACCEL_DEBUG"),
    ],
}


def verb(function: Callable[..., "ExitCode"], *settings: str) -> Callable[..., None]:
    """Make a command of a function that takes a Terminal first and returns its exit code.

    Adds --color, --quiet, --no-color and --debug, turns every error into one line on stderr and an
    exit code, and makes sure that a reader who leaves (a closed pipe) ends the command quietly.

    Args:
        function: It takes the command's own arguments, and Settings as ``settings`` if there are.
        settings: Which of them are options of the command.
    """
    parameters = _parameters(function, settings)

    def command(context: typer.Context, **arguments: Any) -> None:
        switches = {name: arguments.pop(name) for name in _COMMON}
        for key in {*settings, "color"}:  # in the context, too, with where they come from
            del arguments[key]
        raise typer.Exit(int(_carry_out(function, context, arguments, settings, **switches)))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


def _parameters(
    function: Callable[..., "ExitCode"], settings: Sequence[str]
) -> list[inspect.Parameter]:
    """Return a command's parameters: the function's own, its settings in their place."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    found = [inspect.Parameter("context", keyword, annotation=typer.Context)]
    for own in list(inspect.signature(function).parameters.values())[1:]:
        if own.name == "settings":
            found += [option_of(key) for key in settings if key != "color"]
        else:
            found.append(own.replace(kind=keyword))
    found.append(option_of("color"))
    return found + [
        inspect.Parameter(name, keyword, default=False, annotation=kind)
        for name, kind in _COMMON.items()
    ]


def _carry_out(
    function: Callable[..., "ExitCode"],
    context: typer.Context,
    arguments: dict[str, Any],
    settings: Sequence[str],
    *,
    quiet: bool,
    no_color: bool,
    debug: bool,
) -> "ExitCode":
    from ragaccel.cli.exits import ExitCode
    from ragaccel.cli.terminal import Terminal, silence_libraries

    def call() -> "ExitCode":
        if settings:
            arguments["settings"] = resolve(context, settings)
        return function(terminal, **arguments)

    silence_libraries()
    color, warnings = _color_and_warnings(context)
    terminal = Terminal(quiet=quiet, color="never" if no_color else color)
    try:
        for warning in warnings:
            terminal.warn(warning)
        code = _attempt(call, terminal, debug=debug)
        terminal.close()
    except BrokenPipeError:
        _let_go_of_stdout()
        return ExitCode.FAILED
    return code


def _attempt(call: Callable[[], "ExitCode"], terminal: "Terminal", *, debug: bool) -> "ExitCode":
    from ragaccel.cli.exits import exit_code_of, explain

    try:
        return call()
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        if isinstance(error, KeyboardInterrupt):
            terminal.note("interrupted")
        else:
            terminal.fail(explain(error))
        if debug:
            terminal.err.print_exception()
        return code


def _color_and_warnings(context: typer.Context) -> tuple[str, list[str]]:
    """Return the wished colours, and what the current folder's settings file says in vain."""
    from ragaccel.cli.exits import UsageError

    try:
        return resolve(context, ("color",)).color, read_files()[1]
    except UsageError:
        return "auto", []  # the command that needs the settings says what is wrong with them


def _let_go_of_stdout() -> None:
    """Point stdout at nothing, or Python complains of the closed pipe once more as it exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
