"""Settings: an option, else its RAGACCEL_* variable, else ragaccel.toml, else the default.

A ``ragaccel.toml`` in the folder that a command runs in may be a stranger's, who handed on a folder
of documents. So it sets only what loads nothing and writes nowhere (``HARMLESS``).
"""

import inspect
import json
import re
import shlex
import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ragaccel.cli import options
from ragaccel.cli.exits import UsageError
from ragaccel.homes import project_settings_file, user_settings_file
from ragaccel.regular_files import read_regular_file

_MAX_FILE_BYTES = 16_384  # reading TOML can take the square of it
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a command is to do, and beside it where each setting comes from."""

    model: options.Model = None
    embedder: options.Embedder = None
    device: options.Device = None
    dtype: options.Dtype = "auto"
    memory: options.Memory = None
    drafter: options.Drafter = None
    space: options.Space = None
    follow_links: options.FollowLinks = False
    shared: options.Shared = False
    k: options.K = 6
    max_tokens: options.MaxTokens = 256
    temperature: options.Temperature = 0.0
    seed: options.Seed = 0
    color: options.Color = "auto"
    origins: dict[str, str] = field(default_factory=dict)


_FIELDS = {each.name: each for each in fields(Settings) if each.name != "origins"}
KEYS = tuple(_FIELDS)
HARMLESS = frozenset({"k", "max_tokens", "temperature", "seed", "color"})


def option_of(key: str) -> inspect.Parameter:
    """Return the option of a setting for a command's signature; its variable sets it, too."""
    kind, option = get_args(_FIELDS[key].type)
    option = copy(option)
    option.envvar = variable(key)
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=_FIELDS[key].default,
        annotation=Annotated[kind, option],
    )


def variable(key: str) -> str:
    """Return the environment variable of a setting."""
    return f"RAGACCEL_{key.upper()}"


def describe(key: str) -> str:
    """Return what a setting is for, and what holds where nothing is set."""
    option = get_args(_FIELDS[key].type)[1]
    unset = option.show_default
    return f"{option.help} Unset: {unset}." if isinstance(unset, str) else option.help


def resolve(context: typer.Context, keys: Iterable[str]) -> Settings:
    """Return these settings of a command that was called.

    Raises:
        UsageError: a file holds an unknown name or a wrong value.
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
            found.origins[key] = variable(key)
        elif key in in_files:
            raw, path = in_files[key]
            values[key], found.origins[key] = _converted(context, option, raw, path), str(path)
    settings = Settings(**values, origins=found.origins)
    _refuse_shadowed(settings)
    return settings


def read_files() -> tuple[dict[str, tuple[Any, Path]], list[str]]:
    """Return what the files set, each with its file, and what the folder's may not set and why.

    Raises:
        UsageError: a file is not TOML, or holds an unknown name.
    """
    users, folders = user_settings_file(), project_settings_file()
    found = {key: (raw, users) for key, raw in read_file(users).items()}
    ignored = []
    for key, raw in read_file(folders).items():
        if key in HARMLESS or _is_same(users, folders):
            found[key] = raw, folders
        else:
            ignored.append(
                f"{folders}: {key} is ignored, for a file beside documents must not choose what is"
                f" loaded, read or written: if you want it, set {key} in {users}, or"
                f" {variable(key)}={shlex.quote(str(raw))}"
            )
    return found, ignored


def read_file(path: Path) -> dict[str, Any]:
    """Return the names and values of a settings file; nothing where there is no such file.

    Raises:
        UsageError: it is not TOML, cannot be read or holds an unknown name.
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
        raise UsageError(f"{path} is not a settings file: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # no UTF-8, no TOML, a number of too many digits
        raise UsageError(f"{path} is not a settings file: {error}") from None
    for key, raw in found.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(KEYS)
            raise UsageError(f"{path}: no setting is called {key!r}; {hint}")
        if not isinstance(raw, (str, int, float)):
            raise UsageError(f"{path}: {key} must be a text in quotes, a number, true or false")
    return found


def _converted(context: typer.Context, option: Any, raw: Any, path: Path) -> Any:
    """Return what a file says as the option's own type, by the rules of the command line."""
    told = f"{path}: {option.name} = {json.dumps(raw, ensure_ascii=False)}"
    if isinstance(raw, bool) != option.is_flag:
        raise UsageError(f"{told}: give {'true or false' if option.is_flag else 'a value'}")
    try:
        return option.process_value(context, raw if option.is_flag else str(raw))
    except typer.BadParameter as error:
        raise UsageError(f"{told}: {error.message}") from None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _refuse_shadowed(settings: Settings) -> None:
    """Refuse a hub name, set once for all folders, that a folder in the current one bears too."""
    for key in ("model", "embedder", "space"):
        name, origin = getattr(settings, key), settings.origins.get(key)
        if origin != "flag" and name and _HUB_NAME.fullmatch(name) and Path(name).is_dir():
            raise UsageError(
                f"{origin}: {key} = {name!r} is also the name of a folder here, which may be a"
                f" stranger's: give --{key} ./{name} for the folder, or run this elsewhere"
            )
