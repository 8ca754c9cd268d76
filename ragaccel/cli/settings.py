"""The settings of the commands: options that variables and files may also set.

A setting is its option, else its RAGACCEL_* variable, else its entry in ragaccel.toml, else its
default; the default of the model is what ``ragaccel models default`` stored. A ``ragaccel.toml`` in
the current folder may have come with someone else's documents, so it may set only
``PROJECT_FILE_KEYS``: settings that make ragaccel load, read or write nothing else.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer import Argument, Option

from ragaccel.cli.terminal import UsageError
from ragaccel.paths import (
    default_model_file,
    project_settings_file,
    read_regular_file,
    user_settings_file,
)

Target = Annotated[
    str | None,
    Argument(metavar="DIR", help="Folder of documents (or an index file).", show_default=False),
]
Index = Annotated[
    Path | None,
    Option("--index", metavar="PATH", help="Index file; default: DIR/.ragaccel/index.db."),
]
Json = Annotated[bool, Option("--json", help="Print one JSON document to stdout.")]


def option(default: Any, metavar: str, help: str, *names: str, **rules: Any) -> Any:  # noqa: A002
    """Return a dataclass field that is an option with a value; see ``options_of``."""
    declared = Option(*names, metavar=metavar, help=help, **rules)
    return field(default=default, metadata={"option": declared})


def flag(help: str, *names: str, **rules: Any) -> Any:  # noqa: A002
    """Return a dataclass field that is an option without a value; see ``options_of``."""
    return field(default=False, metadata={"option": Option(*names, help=help, **rules)})


def options_of(kind: type[Any], names: Sequence[str] = ()) -> list[Parameter]:
    """Return the fields of a dataclass as parameters of a command: those named, or all."""
    declared = {each.name: each for each in fields(kind) if each.metadata}
    types = get_type_hints(kind)
    return [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=declared[name].default,
            annotation=Annotated[types[name], declared[name].metadata["option"]],
        )
        for name in names or declared
        if name in declared
    ]


@dataclass(frozen=True, slots=True)
class Output:
    """How an answer is decoded and shown; ``plain`` shows no marks of copied spans."""

    compare: bool = flag("Also decode plainly and show the speed-up.", "--compare")
    show_passages: bool = flag(
        "List every passage that the model read, with score and text.", "--show-passages"
    )
    stats: bool = flag("Show timings and how many draft tokens were accepted.", "--stats")
    json: bool = flag("Print one JSON document to stdout.", "--json")
    plain: bool = flag("Print the answer's text alone, without marks.", "--plain")
    no_stream: bool = flag("Print the answer only when it is complete.", "--no-stream")
    no_accel: bool = flag("Decode plainly, a token a pass; same answer.", "--no-accel")
    resume: bool = flag("Continue the last conversation about DIR.", "--continue", "-c")


def _check_finite(number: float) -> float:
    if not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


_MAX_FILE_BYTES = 16_384  # the time to read TOML can grow with the square of its size
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all settings; ``origins`` tells where each comes from."""

    model: str | None = option(
        None,
        "NAME",
        "Language model: a folder or a hub name.",
        show_default="the bundled reader",
    )
    embedder: str | None = option(
        None, "NAME", "Embedding model: a folder or a hub name.", show_default="all-MiniLM-L6-v2"
    )
    device: str | None = option(
        None, "NAME", "Where the model runs, e.g. cpu or cuda.", show_default="the best there is"
    )
    dtype: str = option(
        "auto",
        "TYPE",
        "Number format of the model's weights, e.g. bfloat16; int8 halves them.",
    )
    memory: str | None = option(
        None,
        "FILE",
        "Keep answers in FILE and draft from them; off: keep none, not even within a run.",
        show_default="kept within a run only",
    )
    drafter: Literal["trees", "copy", "space", "mixed"] | None = option(
        None,
        "HOW",
        "How draft tokens are made: trees, copy, space or mixed (trees and space).",
        show_default="trees, or mixed with an adapter",
    )
    space: str | None = option(
        None, "DIR", "SPACE adapter: a folder or a hub name.", show_default="the model's own"
    )
    follow_links: bool = flag("Also read files outside DIR that links lead to.", "--follow-links")
    shared: bool = flag("Let other users of this machine read the index.", "--shared")
    k: int = option(
        6, "N", "Passages to retrieve; for the built-in model, sentences.", "-k", min=1, max=1000
    )
    max_new_tokens: int = option(256, "N", "Maximum length of the answer, in tokens.", min=1)
    temperature: float = option(
        0.0, "T", "0 takes the likeliest token, above 0 samples.", min=0, callback=_check_finite
    )
    seed: int = option(0, "N", "Seed of sampling.", min=0)
    color: Literal["auto", "always", "never"] = option(
        "auto", "WHEN", "Colours: auto, always or never."
    )
    origins: dict[str, str] = field(default_factory=dict)


_DECLARED = {each.name: each.metadata["option"] for each in fields(Settings) if each.metadata}
KEYS = tuple(_DECLARED)
PROJECT_FILE_KEYS = frozenset({"k", "max_new_tokens", "temperature", "seed", "color"})


def env_variable(key: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"RAGACCEL_{key.upper()}"


for _key, _option in _DECLARED.items():
    _option.envvar = env_variable(_key)


def describe_setting(key: str) -> str:
    """Return a setting's help text, which says what an unset setting means."""
    declared = _DECLARED[key]
    unset = declared.show_default
    return f"{declared.help} Unset: {unset}." if isinstance(unset, str) else declared.help


def resolve_settings(context: typer.Context, keys: Iterable[str]) -> Settings:
    """Return the values of some settings, from the command line, variables and files.

    Args:
        context: The parsed command line.
        keys: The settings that are options of the command.
    """
    in_files, _ = read_files()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for parameter in context.command.params:
        key = parameter.name or ""
        if key not in keys:
            continue
        given = {"COMMANDLINE": "flag", "ENVIRONMENT": env_variable(key)}
        source = context.get_parameter_source(key)
        values[key] = context.params[key]
        origins[key] = given.get(source.name if source else "", "default")
        if origins[key] == "default" and key in in_files:
            raw, path = in_files[key]
            values[key], origins[key] = _convert(context, parameter, raw, path), str(path)
    settings = Settings(**values, origins=origins)
    _check_shadowed(settings)
    return settings


def read_files() -> tuple[dict[str, tuple[Any, Path]], list[str]]:
    """Read the default model, and the user's and the current folder's settings file.

    Returns:
        found: (value, file) by setting; the current folder's file wins.
        ignored: A warning for each setting that the current folder's file may not set.
    """
    users, folders = user_settings_file(), project_settings_file()
    found: dict[str, tuple[Any, Path]] = {}
    ignored = []
    try:
        if model := read_default_model():
            found["model"] = model, default_model_file()
    except UsageError as error:
        ignored.append(f"{error} (it is ignored)")
    found |= {key: (raw, users) for key, raw in read_file(users).items()}
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


def read_default_model() -> str | None:
    """Return the model that ``ragaccel models default`` stored, or None.

    Raises:
        UsageError: The file is damaged.
    """
    path = default_model_file()
    try:
        text = read_regular_file(path, _MAX_FILE_BYTES).decode("utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        text, problem = "", str(error)
    else:
        problem = "it does not hold one name"
    if not text.isprintable() or not text:
        raise UsageError(
            f"{path} is damaged: {problem}: set a model by `ragaccel models default NAME`, or"
            " delete the file by `ragaccel models default --clear`"
        )
    return text


def read_file(path: Path) -> dict[str, Any]:
    """Return the names and values of a settings file; empty if the file does not exist."""
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
    except PermissionError:
        raise UsageError(
            f"{path} cannot be read (no permission): change its permissions, or set RAGACCEL_HOME"
            " to another folder"
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


def _convert(context: typer.Context, parameter: Any, raw: Any, path: Path) -> Any:
    """Convert a value of a settings file to the option's type, as the command line does."""
    assignment = f"{path}: {parameter.name} = {json.dumps(raw, ensure_ascii=False)}"
    is_flag = parameter.is_flag
    if isinstance(raw, bool) != is_flag:
        raise UsageError(f"{assignment}: give {'true or false' if is_flag else 'a value'}")
    try:
        return parameter.process_value(context, raw if is_flag else str(raw))
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
    """
    for key in ("model", "embedder", "space"):
        name, origin = getattr(settings, key), settings.origins.get(key)
        if origin != "flag" and name and _HUB_NAME.fullmatch(name) and Path(name).is_dir():
            raise UsageError(
                f"{origin}: {key} = {name!r} names a model of the hub, but the current folder has a"
                f" folder of that name: give --{key} ./{name} to use that folder, or run this in"
                " another folder to use the hub's"
            )
