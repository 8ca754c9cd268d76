"""The ``ragaccel`` command: its subcommands, and how each is run.

A command is a function that takes a ``Terminal``, then its arguments and options, and returns an
exit code, or None for success. A parameter that is a dataclass, such as ``Settings``, stands for
the options that are its fields. Nothing heavy is imported at the top of a module with commands, so
that ``ragaccel --help`` stays quick.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from ragaccel.cli.ask import ask, chat, search
from ragaccel.cli.doctor import doctor
from ragaccel.cli.history import logs
from ragaccel.cli.index import index, ls, rm, stats
from ragaccel.cli.models import default, models, pull
from ragaccel.cli.settings import (
    KEYS,
    Json,
    Output,
    Settings,
    describe_setting,
    flag,
    options_of,
    read_files,
    resolve_settings,
)
from ragaccel.cli.terminal import (
    ExitCode,
    Terminal,
    UsageError,
    exit_code_of,
    explain,
    silence_libraries,
)
from ragaccel.cli.train import space
from ragaccel.paths import user_settings_file

_EPILOG = (
    "Exit codes: 0 success, 1 failed, 2 wrong usage, 3 nothing found to answer from, "
    "4 some files could not be indexed, 5 not answered, 130 interrupted."
)


@dataclass(frozen=True, slots=True)
class _Common:
    """The options of every command, beside the setting --color."""

    quiet: bool = flag("Print only the result and errors.", "--quiet", "-q")
    no_color: bool = flag("Use no colours, as with NO_COLOR.", "--no-color")
    debug: bool = flag("Show the traceback of an error.", "--debug", envvar="RAGACCEL_DEBUG")


def make_command(
    function: Callable[..., ExitCode | None], options: Sequence[str] = ()
) -> Callable[..., None]:
    """Return a function as a Typer command with --color, --quiet, --no-color and --debug.

    Every error becomes one line on stderr and an exit code; a closed pipe ends the command quietly.

    Args:
        function: The command.
        options: The fields of its dataclasses that are options; all by default.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    fields = {
        each.name: options_of(each.annotation, options)
        for each in own
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }

    def command(context: typer.Context, **given: Any) -> None:
        if context.invoked_subcommand is not None:  # of a group that is a command, too
            return

        def value(parameter: inspect.Parameter) -> Any:
            if parameter.name not in fields:
                return given[parameter.name]
            names = [field.name for field in fields[parameter.name]]
            if parameter.annotation is Settings:
                return resolve_settings(context, names)
            return parameter.annotation(**{name: given[name] for name in names})

        def call(terminal: Terminal) -> ExitCode | None:
            return function(terminal, **{each.name: value(each) for each in own})

        common = _Common(**{option.name: given[option.name] for option in options_of(_Common)})
        raise typer.Exit(int(_run(context, call, common)))

    parameters = [_CONTEXT]
    for each in own:
        parameters += fields.get(each.name, [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)])
    parameters += [*options_of(Settings, ["color"]), *options_of(_Common)]
    named = {each.name: each for each in parameters}  # `config show` has --color among its own
    command.__signature__ = inspect.Signature(list(named.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in named.items()}
    command.__doc__, command.__name__ = function.__doc__, function.__name__
    return command


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def _run(
    context: typer.Context, call: Callable[[Terminal], ExitCode | None], common: _Common
) -> ExitCode:
    silence_libraries()
    color, warnings = _color_and_warnings(context)
    terminal = Terminal(quiet=common.quiet, color="never" if common.no_color else color)
    try:
        for warning in warnings:
            terminal.warn(warning)
        code = _call(call, terminal, debug=common.debug)
        terminal.close()
    except BrokenPipeError:
        _discard_stdout()
        return ExitCode.FAILED
    return code


def _call(
    call: Callable[[Terminal], ExitCode | None], terminal: Terminal, *, debug: bool
) -> ExitCode:
    try:
        return call(terminal) or ExitCode.OK
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            terminal.note("interrupted")
        else:
            terminal.fail(explain(error))
        if debug:
            terminal.err.print_exception()
        return exit_code_of(error)


def _color_and_warnings(context: typer.Context) -> tuple[str, list[str]]:
    """Return the --color setting, and the warnings about the current folder's settings file."""
    try:
        return resolve_settings(context, ["color"]).color, read_files()[1]
    except UsageError:
        return "auto", []  # a command that needs the settings reports the error


def _discard_stdout() -> None:
    """Point stdout at /dev/null, since Python would report the closed pipe again at its exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(terminal: Terminal, json: Json = False, *, settings: Settings) -> None:
    """Show every setting, its value and where the value comes from."""
    values, origins = asdict(settings), settings.origins
    if json:
        terminal.json({key: {"value": values[key], "from": origins[key]} for key in KEYS})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("setting", "value", "from", "what it is"):
        table.add_column(heading, overflow="fold")
    for key in KEYS:
        table.add_row(key, _format_value(values[key]), origins[key], describe_setting(key))
    terminal.show(table)
    path = user_settings_file()
    terminal.note(f"settings file: {path}" + ("" if path.exists() else " (there is none yet)"))


def _format_value(value: object) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _group(text: str, **settings: Any) -> typer.Typer:
    """Return a group of commands; its help is without rich, whose import would slow it down."""
    settings.setdefault("no_args_is_help", not settings.get("invoke_without_command"))
    return typer.Typer(help=text, rich_markup_mode=None, **settings)


app = _group(
    "Answer questions from your own documents, with a local model that quotes them.",
    epilog=_EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config = _group(
    "Show the settings.\n\nThe first of these that gives a setting counts: its option, its"
    " RAGACCEL_* variable, ragaccel.toml in the current folder, the user's own ragaccel.toml, its"
    " default (of the model: what `ragaccel models default` set). The file in the current folder"
    " may only give k, max_new_tokens, temperature, seed and color."
)
model_group = _group(models.__doc__ or "", invoke_without_command=True)
train = _group("Train an adapter that makes answers faster.")

_INDEX = ("embedder", "follow_links", "shared")
_FINDING = ("k", *_INDEX)
_MODEL = ("model", "device", "dtype", "memory", "drafter", "space")
_ANSWER = (*_FINDING, *_MODEL, "max_new_tokens", "temperature", "seed")
_CHAT = (*_ANSWER, "show_passages", "stats", "json", "plain", "no_accel", "resume")

for function, options in (
    (ask, (*_ANSWER, *Output.__slots__)),
    (chat, _CHAT),
    (index, _INDEX),
    (search, _FINDING),
    (ls, ()),
    (rm, ()),
    (stats, ()),
    (logs, ()),
    (doctor, ("embedder", *_MODEL)),
):
    app.command(function.__name__)(make_command(function, options))
config.command("show")(make_command(show))
train.command("space")(make_command(space))
model_group.command("pull")(make_command(pull))
model_group.command("default")(make_command(default))
model_group.callback()(make_command(models))
for group, name in ((config, "config"), (train, "train"), (model_group, "models")):
    if group is not model_group:
        group.callback()(lambda: None)  # else Typer runs a single command without its name
    app.add_typer(group, name=name)


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
        sys.exit(int(ExitCode.INTERRUPTED))
    except OSError as error:  # of --help or --version: stdout cannot be written to
        Terminal().fail(explain(error))
        sys.exit(int(exit_code_of(error)))
