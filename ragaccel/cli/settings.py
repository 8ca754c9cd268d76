"""The options of the commands, of which settings may also come from variables and files.

A setting is its option, else its RAGACCEL_* variable, else its entry in ragaccel.toml, else its
default. A ``ragaccel.toml`` in the current folder may have come with someone else's documents, so
it may set only ``PROJECT_FILE_KEYS``: settings that make ragaccel load, read or write nothing else.
"""

import inspect
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from ragaccel.cli.terminal import UsageError
from ragaccel.paths import project_settings_file, read_regular_file, user_settings_file

if TYPE_CHECKING:
    from ragaccel.cli.terminal import ExitCode, Terminal


Target = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR", help="Folder of documents (or an index file).", show_default=False
    ),
]
Index = Annotated[
    Path | None,
    typer.Option("--index", metavar="PATH", help="Index file; default: DIR/.ragaccel/index.db."),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Index only files that match; may be repeated."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Leave out files that match; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
NoAccel = Annotated[
    bool, typer.Option("--no-accel", help="Decode plainly, a token a pass; same answer.")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Also decode plainly and show the speed-up.")
]
NoStream = Annotated[
    bool, typer.Option("--no-stream", help="Print the answer only when it is complete.")
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Print the answer's text alone, without marks.")
]
ShowSources = Annotated[
    bool,
    typer.Option(
        "--show-sources", help="List every passage that the model read, with score and text."
    ),
]
ShowStats = Annotated[
    bool, typer.Option("--stats", help="Show timings and how many draft tokens were accepted.")
]
Continue = Annotated[
    bool, typer.Option("--continue", "-c", help="Continue the last conversation about DIR.")
]


def _check_finite(number: float) -> float:
    if not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


# Settings: options that a RAGACCEL_* variable or ragaccel.toml may also set.
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Language model: a folder or a hub name.",
        show_default="the bundled reader",
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Embedding model: a folder or a hub name.",
        show_default="all-MiniLM-L6-v2",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Where the model runs, e.g. cpu or cuda.",
        show_default="the best there is",
    ),
]
Dtype = Annotated[
    str, typer.Option(metavar="TYPE", help="Number format of the model's weights, e.g. bfloat16.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Keep answers in FILE and draft from them; off: keep none, not even within a run.",
        show_default="kept within a run only",
    ),
]
Drafter = Annotated[
    Literal["trees", "copy", "space", "mixed"] | None,
    typer.Option(
        metavar="HOW",
        help="How draft tokens are made: trees, copy, space or mixed (trees and space).",
        show_default="trees, or mixed with an adapter",
    ),
]
Space = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="SPACE adapter: a folder or a hub name.",
        show_default="the model's own",
    ),
]
FollowLinks = Annotated[
    bool, typer.Option("--follow-links", help="Also read files outside DIR that links lead to.")
]
Shared = Annotated[
    bool, typer.Option("--shared", help="Let other users of this machine read the index.")
]
K = Annotated[
    int, typer.Option("-k", metavar="N", min=1, max=1000, help="Number of passages to retrieve.")
]
MaxTokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Maximum length of the answer, in tokens.")
]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="T",
        min=0,
        callback=_check_finite,
        help="0 takes the likeliest token, above 0 samples.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of sampling.")]
Color = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(metavar="WHEN", help="Colours: auto, always or never."),
]


_MAX_FILE_BYTES = 16_384  # the time to read TOML can grow with the square of its size
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all settings; ``origins`` tells where each comes from."""

    model: Model = None
    embedder: Embedder = None
    device: Device = None
    dtype: Dtype = "auto"
    memory: Memory = None
    drafter: Drafter = None
    space: Space = None
    follow_links: FollowLinks = False
    shared: Shared = False
    k: K = 6
    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    seed: Seed = 0
    color: Color = "auto"
    origins: dict[str, str] = field(default_factory=dict)


_FIELDS = {each.name: each for each in fields(Settings) if each.name != "origins"}
KEYS = tuple(_FIELDS)
PROJECT_FILE_KEYS = frozenset({"k", "max_tokens", "temperature", "seed", "color"})


def make_option(key: str) -> inspect.Parameter:
    """Return a setting as an option of a command, which its RAGACCEL_* variable can set, too."""
    kind, option = get_args(_FIELDS[key].type)
    option = copy(option)
    option.envvar = env_variable(key)
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=_FIELDS[key].default,
        annotation=Annotated[kind, option],
    )


def env_variable(key: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"RAGACCEL_{key.upper()}"


def describe_setting(key: str) -> str:
    """Return a setting's help text, which says what an unset setting means."""
    option = get_args(_FIELDS[key].type)[1]
    unset = option.show_default
    return f"{option.help} Unset: {unset}." if isinstance(unset, str) else option.help


def resolve_settings(context: typer.Context, keys: Iterable[str]) -> Settings:
    """Return the values of some settings, from the command line, variables and files.

    Args:
        context: The parsed command line.
        keys: The settings that are options of the command.

    Raises:
        UsageError: A settings file holds an unknown name or a wrong value.
    """
    in_files, _ = read_files()
    found = Settings()
    values: dict[str, Any] = {}
    for option in context.command.params:
        key = option.name or ""
        if key not in keys:
            continue
        source = context.get_parameter_source(key)
        values[key], found.origins[key] = context.params[key], "default"
        if source is not None and source.name == "COMMANDLINE":
            found.origins[key] = "flag"
        elif source is not None and source.name == "ENVIRONMENT":
            found.origins[key] = env_variable(key)
        elif key in in_files:
            raw, path = in_files[key]
            values[key], found.origins[key] = _convert(context, option, raw, path), str(path)
    settings = Settings(**values, origins=found.origins)
    _check_shadowed(settings)
    return settings


def read_files() -> tuple[dict[str, tuple[Any, Path]], list[str]]:
    """Read the user's and the current folder's settings file.

    Returns:
        found: (value, file) by setting; the current folder's file wins.
        ignored: A warning for each setting that the current folder's file may not set.

    Raises:
        UsageError: A file is not TOML, or holds an unknown name.
    """
    users, folders = user_settings_file(), project_settings_file()
    found = {key: (raw, users) for key, raw in read_file(users).items()}
    ignored = []
    for key, raw in read_file(folders).items():
        if key in PROJECT_FILE_KEYS or _is_same_file(users, folders):
            found[key] = raw, folders
        else:
            ignored.append(
                f"{folders}: {key} is ignored, because this file may have come with someone else's"
                f" documents and must not choose what is loaded, read or written: to use this"
                f" value, set {key} in {users}, or {env_variable(key)}={shlex.quote(str(raw))}"
            )
    return found, ignored


def read_file(path: Path) -> dict[str, Any]:
    """Return the names and values of a settings file; empty if the file does not exist.

    Raises:
        UsageError: The file is not TOML, cannot be read or holds an unknown name.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
    try:
        found: dict[str, Any] = tomllib.loads(
            read_regular_file(path, _MAX_FILE_BYTES).decode("utf-8")
        )
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except RecursionError:
        raise UsageError(
            f"{path} is not a settings file: its values are nested too deeply"
        ) from None
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, or a number of too many digits
        raise UsageError(f"{path} is not a settings file: {error}") from None
    for key, raw in found.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else "the settings are: " + ", ".join(KEYS)
            raise UsageError(f"{path}: unknown setting {key!r}; {hint}")
        if not isinstance(raw, (str, int, float)):
            raise UsageError(f"{path}: {key} must be a text in quotes, a number, true or false")
    return found


def _convert(context: typer.Context, option: Any, raw: Any, path: Path) -> Any:
    """Convert a value of a settings file to the option's type, as the command line does."""
    assignment = f"{path}: {option.name} = {json.dumps(raw, ensure_ascii=False)}"
    if isinstance(raw, bool) != option.is_flag:
        raise UsageError(f"{assignment}: give {'true or false' if option.is_flag else 'a value'}")
    try:
        return option.process_value(context, raw if option.is_flag else str(raw))
    except typer.BadParameter as error:
        raise UsageError(f"{assignment}: {error.message}") from None


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _check_shadowed(settings: Settings) -> None:
    """Refuse a hub name from a variable or file if the current folder has a folder of that name.

    The folder may have come with someone else's documents.

    Raises:
        UsageError: There is such a folder.
    """
    for key in ("model", "embedder", "space"):
        name, origin = getattr(settings, key), settings.origins.get(key)
        if origin != "flag" and name and _HUB_NAME.fullmatch(name) and Path(name).is_dir():
            raise UsageError(
                f"{origin}: {key} = {name!r} names a model of the hub, but the current folder has a"
                f" folder of that name: give --{key} ./{name} to use that folder, or run this in"
                " another folder to use the hub's"
            )


# Options that every command has, beside the setting --color.
_COMMON: dict[str, Any] = {
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")
    ],
    "no_color": Annotated[
        bool, typer.Option("--no-color", help="Use no colours, as with NO_COLOR.")
    ],
    "debug": Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error.", envvar="RAGACCEL_DEBUG"),
    ],
}


def make_command(function: Callable[..., "ExitCode"], *settings: str) -> Callable[..., None]:
    """Return a function as a Typer command; it takes a Terminal first and returns an exit code.

    The command gets --color, --quiet, --no-color and --debug. Every error becomes one line on
    stderr and an exit code; a closed pipe ends the command quietly.

    Args:
        function: Takes the command's own arguments, and ``settings`` if it has settings.
        settings: The settings that are options of the command.
    """
    parameters = _parameters(function, settings)

    def command(context: typer.Context, **arguments: Any) -> None:
        switches = {name: arguments.pop(name) for name in _COMMON}
        for key in {*settings, "color"}:  # resolve_settings reads them from the context
            del arguments[key]
        raise typer.Exit(int(_run_command(function, context, arguments, settings, **switches)))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


def _parameters(
    function: Callable[..., "ExitCode"], settings: Sequence[str]
) -> list[inspect.Parameter]:
    """Return a command's parameters: the function's own, with ``settings`` replaced by options."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    found = [inspect.Parameter("context", keyword, annotation=typer.Context)]
    for own in list(inspect.signature(function).parameters.values())[1:]:
        if own.name == "settings":
            found += [make_option(key) for key in settings if key != "color"]
        else:
            found.append(own.replace(kind=keyword))
    found.append(make_option("color"))
    return found + [
        inspect.Parameter(name, keyword, default=False, annotation=kind)
        for name, kind in _COMMON.items()
    ]


def _run_command(
    function: Callable[..., "ExitCode"],
    context: typer.Context,
    arguments: dict[str, Any],
    settings: Sequence[str],
    *,
    quiet: bool,
    no_color: bool,
    debug: bool,
) -> "ExitCode":
    from ragaccel.cli.terminal import ExitCode, Terminal, silence_libraries

    def call() -> "ExitCode":
        if settings:
            arguments["settings"] = resolve_settings(context, settings)
        return function(terminal, **arguments)

    silence_libraries()
    color, warnings = _color_and_warnings(context)
    terminal = Terminal(quiet=quiet, color="never" if no_color else color)
    try:
        for warning in warnings:
            terminal.warn(warning)
        code = _call(call, terminal, debug=debug)
        terminal.close()
    except BrokenPipeError:
        _discard_stdout()
        return ExitCode.FAILED
    return code


def _call(call: Callable[[], "ExitCode"], terminal: "Terminal", *, debug: bool) -> "ExitCode":
    from ragaccel.cli.terminal import exit_code_of, explain

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
    """Return the --color setting, and the warnings about the current folder's settings file."""
    from ragaccel.cli.terminal import UsageError

    try:
        return resolve_settings(context, ("color",)).color, read_files()[1]
    except UsageError:
        return "auto", []  # a command that needs the settings reports the error


def _discard_stdout() -> None:
    """Point stdout at /dev/null, since Python would report the closed pipe again at its exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
