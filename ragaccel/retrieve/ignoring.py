"""Ignore rules: which paths a .gitignore file names."""

from __future__ import annotations

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
_BRACKET = re.compile(r"\[[!^]?\]?[^\]]*\]")


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
    try:
        parts = tuple(None if glob == "**" else _translated(glob) for glob in globs)
    except re.error:
        return None
    return _Pattern(parts, negated, folders_only)


def _translated(glob: str) -> re.Pattern[str]:
    """A glob for one part of a path as a regular expression that never takes back a star."""
    between = [""]  # stars
    width = position = 0
    last_bracket = glob.rfind("]")
    while position < len(glob):
        letter = glob[position]
        bracket = _BRACKET.match(glob, position) if position < last_bracket else None
        end = position + 1
        width += 1
        if letter == "*":
            width -= 1
            if between[-1] or len(between) == 1:
                between.append("")
        elif letter == "?":
            between[-1] += "."
        elif bracket:
            between[-1] += _translated_bracket(bracket.group()[1:-1])
            end = bracket.end()
        else:
            end += letter == "\\" and end < len(glob)
            between[-1] += re.escape(glob[end - 1])
        position = end
    if width > _MAX_NAME:
        return _NOTHING
    first, *middle, last = between if len(between) > 1 else (between[0], "")
    stars = "".join(
        f"(?=(?P<s{n}>.*?{part}))(?P=s{n})" for n, part in enumerate(middle)
    )  # what was looked ahead for is not tried again
    tail = f".*{last}" if len(between) > 1 else ""
    return re.compile(first + stars + tail, re.DOTALL)


def _translated_bracket(inside: str) -> str:
    negated = inside[0] in "!^"
    letters = inside[1:] if negated else inside
    letters = re.sub(r"([\\\[&~|^])", r"\\\1", letters).replace("--", r"-\-")
    return f"[{'^' if negated else ''}{letters}]"


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
