"""Settings: ragaccel.toml, then RAGACCEL_* variables, then flags; the later wins.

A ``ragaccel.toml`` in the folder that a command runs in may be a stranger's, who handed on a folder
of documents. So it sets only what loads nothing and writes nowhere
(``Setting.may_come_with_documents``).
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.cli.exits import UsageError
from ragaccel.errors import RagaccelError
from ragaccel.homes import project_settings_file, user_settings_file
from ragaccel.regular_files import read_regular_file
from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = str | int | float | None
_MAX_FILE_BYTES = 16_384  # reading TOML can take the square of it
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
DRAFTERS = ("trees", "copy", "space", "mixed")


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set, and what may be written for it."""

    key: str
    kind: type[str] | type[int] | type[float]
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    may_come_with_documents: bool = False

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return f"RAGACCEL_{self.key.upper()}"

    def parse(self, raw: object, where: str) -> Value:
        """Turn what was written into a value, or say what may be written there.

        Raises:
            UsageError: it is of another type, too small, or not one of the choices.
        """
        shown = f" = {raw!r}" if isinstance(raw, (str, int, float)) else ""
        wrong = f"{where}: {self.key}{shown} is not {self._wanted()}"
        if not shown or isinstance(raw, bool) or (self.kind is int and isinstance(raw, float)):
            raise UsageError(wrong)
        try:
            value = self.kind(str(raw))
        except (TypeError, ValueError):
            raise UsageError(wrong) from None
        if self.choices and value not in self.choices:
            raise UsageError(wrong)
        if not isinstance(value, str) and not self._is_within(value):
            raise UsageError(wrong)
        return value

    def _is_within(self, value: float) -> bool:
        least, most = self.least, self.most
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (least is None or value >= least) and (most is None or value <= most)

    def _wanted(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {str: "a text", int: "a whole number", float: "a number"}[self.kind]
        if self.most is not None:
            return f"{noun} from {self.least:g} to {self.most:g}"
        return noun if self.least is None else f"{noun} of at least {self.least:g}"


_harmless = partial(Setting, may_come_with_documents=True)
SETTINGS = (
    Setting(
        "model", str, None, "language model: a folder or a hub name; unset: the bundled reader"
    ),
    Setting(
        "embedder", str, None, "embedding model: a folder or a hub name; unset: all-MiniLM-L6-v2"
    ),
    Setting(
        "device", str, None, "where the model runs, e.g. cpu or cuda; unset: the best there is"
    ),
    Setting("dtype", str, "auto", "number format of the model's weights, e.g. bfloat16"),
    Setting(
        "memory",
        str,
        None,
        "file that remembers answers between runs, to guess from; off: none within a run either",
    ),
    Setting(
        "drafter",
        str,
        None,
        "how tokens are guessed; unset: trees, or mixed where a SPACE adapter is named",
        choices=DRAFTERS,
    ),
    Setting("space", str, None, "SPACE adapter: a folder or a hub name; unset: the model's own"),
    Setting(
        "follow_links",
        str,
        "no",
        "read what links in a folder of documents lead to outside of it",
        choices=("no", "yes"),
    ),
    Setting(
        "shared",
        str,
        "no",
        "let other users of this machine read the indexes made from now on",
        choices=("no", "yes"),
    ),
    _harmless("k", int, 6, "passages retrieved for a question", least=1, most=1000),
    _harmless("max_tokens", int, 256, "longest answer, in tokens", least=1),
    _harmless("temperature", float, 0.0, "0 takes the likeliest token; above it, sample", least=0),
    _harmless("seed", int, 0, "seed of sampling", least=0, most=2**63 - 1),
    _harmless("color", str, "auto", "colours on the terminal", choices=("auto", "always", "never")),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting's value and, beside it, where the value came from."""

    values: Mapping[str, Value]
    origins: Mapping[str, str]

    def text(self, key: str) -> str | None:
        """A setting that is a text, or None where it is unset."""
        value = self.values[key]
        return None if value is None else str(value)

    def whole(self, key: str) -> int:
        """A setting that is a whole number."""
        return int(self.values[key] or 0)

    def number(self, key: str) -> float:
        """A setting that is a number."""
        return float(self.values[key] or 0.0)

    def is_on(self, key: str) -> bool:
        """A setting that is yes or no."""
        return self.values[key] == "yes"


def resolve(flags: Mapping[str, Value] | None = None) -> Settings:
    """Collect the settings; a flag that was not given is None and decides nothing.

    Raises:
        UsageError: a file or variable holds an unknown key or a value of another type.
    """
    values: dict[str, Value] = {setting.key: setting.default for setting in SETTINGS}
    origins = dict.fromkeys(values, "default")
    users, folders = user_settings_file(), project_settings_file()
    for path in (users, folders):
        for key, raw in read_file(path).items():
            setting = known(key, str(path))
            value = setting.parse(raw, str(path))
            if path is users or setting.may_come_with_documents or _is_same(users, folders):
                values[key], origins[key] = value, str(path)
    for setting in SETTINGS:
        if raw := os.environ.get(setting.env):
            values[setting.key] = setting.parse(raw, setting.env)
            origins[setting.key] = setting.env
    for key, flag in (flags or {}).items():
        if flag is not None:
            values[key] = BY_KEY[key].parse(flag, _flag(key))
            origins[key] = "flag"
    _refuse_shadowed(values, origins)
    return Settings(values, origins)


def ignored_in_folder() -> list[str]:
    """Say of each setting that ``ragaccel.toml`` here holds and may not set how it can be set.

    Raises:
        UsageError: as :func:`resolve`.
    """
    path = project_settings_file()
    if _is_same(path, user_settings_file()):
        return []
    found = [(known(key, str(path)), raw) for key, raw in read_file(path).items()]
    return [
        f"{path}: {setting.key} is ignored, for a file beside documents must not choose what is"
        f" loaded, read or written: {how_to_allow(setting, setting.parse(raw, str(path)))}"
        for setting, raw in found
        if not setting.may_come_with_documents
    ]


def how_to_allow(setting: Setting, raw: object) -> str:
    """Say how a setting takes effect that a file beside documents may not hold."""
    value = shlex.quote(str(raw))
    return (
        f"if you want it, run `ragaccel config set {setting.key} {value}` or set"
        f" {setting.env}={value}"
    )


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _refuse_shadowed(values: Mapping[str, Value], origins: Mapping[str, str]) -> None:
    """Refuse a hub name, set once for all folders, that a folder in the current one bears too."""
    for key in ("model", "embedder", "space"):
        name = values[key]
        if (
            name is None
            or origins[key] == "flag"
            or not _HUB_NAME.fullmatch(str(name))
            or not Path(str(name)).is_dir()
        ):
            continue
        raise UsageError(
            f"{origins[key]}: {key} = {name!r} is also the name of a folder here, which may be a"
            f" stranger's: give {_flag(key)} ./{name} for the folder, or run this elsewhere"
        )


def _flag(key: str) -> str:
    return "-" * (1 + (len(key) > 1)) + key.replace("_", "-")


def known(key: str, where: str) -> Setting:
    """The setting of a key.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    if key in BY_KEY:
        return BY_KEY[key]
    near = get_close_matches(key, BY_KEY, n=1)
    hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(BY_KEY)
    raise UsageError(f"{where}: no setting is called {key!r}; {hint}")


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a settings file; empty when there is none.

    Raises:
        UsageError: the file is not TOML or cannot be read.
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
    return found


def write_value(path: Path, key: str, value: Value) -> None:
    """Set one key in a settings file and leave every other line as it is; None takes it out.

    Raises:
        UsageError: the file is no settings file.
        RagaccelError: it cannot be written; what stood there is whole.
    """
    read_file(path)  # refuses what is no settings file
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    end = _end_of_top_table(lines)
    kept = [line for line in lines[:end] if line.partition("=")[0].strip().strip("\"'") != key]
    if value is not None:
        kept.append(f"{key} = {_toml(value)}")
    kept += lines[end:]
    try:
        with replacing(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())
    except OSError as error:
        raise RagaccelError(
            f"cannot write {path} ({error.strerror or error}): free some space or change its"
            " permissions, then run the same command again; what was set before is kept"
        ) from error


def _end_of_top_table(lines: list[str]) -> int:
    return next((i for i, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))


def _toml(value: Value) -> str:
    if not isinstance(value, str):
        return str(value)
    import json

    return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
