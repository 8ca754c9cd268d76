"""Ignore rules: which paths a .gitignore file names."""

from __future__ import annotations

import fnmatch
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ragaccel.regular_files import read_regular_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

IGNORE_FILES = (".gitignore", ".ragaccelignore")
_MAX_BYTES = 1_000_000
_MAX_PATTERN = 4096  # characters; no path is longer
_MAX_NAME = 255
_TOKEN = re.compile(r"\\(.)|\[([!^]?)(\]?[^\]]+\])|\[", re.DOTALL)


class IgnoreRules:
    """Patterns of a .gitignore file; the last one that matches decides, ``!`` takes back."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.patterns = [pattern for line in lines if (pattern := _pattern(line))]

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def verdict(self, name: str, is_folder: bool) -> bool | None:
        """Whether a path is ignored; None when no pattern speaks of it."""
        parts = name.split("/")
        for pattern in reversed(self.patterns):
            if (is_folder or not pattern.folders_only) and pattern.names(parts):
                return not pattern.negated
        return None

    def ignores(self, name: str, is_folder: bool) -> bool:
        """Whether a path, or a folder it is in, is ignored."""
        parts = name.split("/")
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        return any(self.verdict(folder, True) for folder in above) or bool(
            self.verdict(name, is_folder)
        )


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A line of such a file: an expression for each part of a path, None for any number (``**``).

    Time is that of the pattern times that of the path, as a star takes the first place that fits
    and never tries a second: what another star would find there, the next one finds as well.
    """

    parts: tuple[re.Pattern[str] | None, ...]
    negated: bool
    folders_only: bool

    def names(self, path: Sequence[str]) -> bool:
        parts = self.parts
        if len(parts) == 2 and parts[0] is None and parts[1] is not None:
            return bool(parts[1].fullmatch(path[-1]))
        position = at = stars = 0
        again = -1
        while at < len(path):
            part = parts[position] if position < len(parts) else _NOTHING
            if part is None:
                position, stars, again = position + 1, position + 1, at
            elif part.fullmatch(path[at]):
                position, at = position + 1, at + 1
            elif again >= 0:
                again += 1
                position, at = stars, again
            else:
                return False
        return all(part is None for part in parts[position:])


_NOTHING = re.compile(r"(?!)")


@lru_cache(maxsize=1024)
def _pattern(line: str) -> _Pattern | None:
    line = line.rstrip("\n")
    line = line if line.endswith("\\ ") else line.rstrip()
    if not line or line.startswith("#") or len(line) > _MAX_PATTERN:
        return None
    negated = line.startswith("!")
    line = line[1:] if negated else line
    folders_only = line.endswith("/")
    line = line.rstrip("/")
    anchored = "/" in line
    line = line.lstrip("/")
    if not line:
        return None
    globs = line.split("/") if anchored else ["**", line]
    globs = ["**" if len(glob) > 2 and not glob.strip("*") else glob for glob in globs]
    if globs[-1] == "**":  # what is inside, not the folder itself
        globs.append("?*")
    parts = tuple(None if glob == "**" else _translated(glob) for glob in globs)
    return _Pattern(parts, negated, folders_only)


def _translated(glob: str) -> re.Pattern[str]:
    """A glob for one part of a path as a regular expression that never takes back a star."""
    if len(_TOKEN.sub("?", glob).replace("*", "")) > _MAX_NAME:
        return _NOTHING
    return re.compile(fnmatch.translate(_TOKEN.sub(_as_fnmatch, glob)))


def _as_fnmatch(token: re.Match[str]) -> str:
    """An escaped letter, a bracket or a lone opening one as fnmatch writes it."""
    escaped, negated, inside = token.groups()
    if inside:
        return f"[{'!' if negated else ''}{inside}"
    letter = escaped or "["
    return f"[{letter}]" if letter in "*?[" else letter


def read_rules(folder: Path, *, inside: Path | None = None) -> IgnoreRules:
    """The rules that a folder's own ignore files hold; one that cannot be read holds none.

    With ``inside``, a folder that this one is in or is, no link below that is followed.
    """
    lines: list[str] = []
    for name in IGNORE_FILES:
        with suppress(OSError):
            data = read_regular_file(folder / name, _MAX_BYTES, inside=inside)
            lines += data.decode("utf-8", errors="replace").splitlines()
    return IgnoreRules(lines)
