"""Ignore rules: which paths a .gitignore file names."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from ragaccel.regular_files import read_regular_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

IGNORE_FILES = (".gitignore", ".ragaccelignore")
_MAX_BYTES = 1_000_000


class IgnoreRules:
    """Patterns of a .gitignore file; the last one that matches decides, ``!`` takes back."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.patterns = [pattern for line in lines if (pattern := _pattern(line))]

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def verdict(self, name: str, is_folder: bool) -> bool | None:
        """Whether a path is ignored; None when no pattern speaks of it."""
        for regex, negated, folders_only in reversed(self.patterns):
            if (is_folder or not folders_only) and regex.fullmatch(name):
                return not negated
        return None

    def ignores(self, name: str, is_folder: bool) -> bool:
        """Whether a path, or a folder it is in, is ignored."""
        parts = name.split("/")
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        return any(self.verdict(folder, True) for folder in above) or bool(
            self.verdict(name, is_folder)
        )


@lru_cache(maxsize=1024)
def _pattern(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    line = line.rstrip("\n")
    line = line if line.endswith("\\ ") else line.rstrip()
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[1:] if negated else line
    folders_only = line.endswith("/")
    line = line.rstrip("/")
    anchored = "/" in line
    line = line.lstrip("/")
    try:
        body = re.compile(("" if anchored else "(?:.*/)?") + _translated(line))
    except re.error:
        return None
    return (body, negated, folders_only) if line else None


def _translated(pattern: str) -> str:
    """A glob as a regular expression: ``*`` and ``?`` stop at a slash, ``**`` does not."""
    regex, position = "", 0
    while position < len(pattern):
        rest = pattern[position:]
        bracket = re.match(r"\[[!^]?\]?[^\]]*\]", rest)
        if rest.startswith("**/"):
            regex, position = f"{regex}(?:.*/)?", position + 3
        elif rest.startswith("**"):
            regex, position = f"{regex}.*", position + 2
        elif rest[0] == "*":
            regex, position = f"{regex}[^/]*", position + 1
        elif rest[0] == "?":
            regex, position = f"{regex}[^/]", position + 1
        elif bracket:
            inside = bracket.group()[1:-1]
            inside = f"^{inside[1:]}" if inside[0] in "!^" else inside
            inside = inside.replace("\\", "\\\\").replace("[", r"\[")
            regex, position = f"{regex}[{inside}]", position + bracket.end()
        elif rest[0] == "\\" and len(rest) > 1:
            regex, position = regex + re.escape(rest[1]), position + 2
        else:
            regex, position = regex + re.escape(rest[0]), position + 1
    return regex


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
