"""The documents of a folder: list its files, without those that .gitignore rules exclude."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.paths import read_regular_file
from ragaccel.retrieval.store import OWN_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Rules = tuple[tuple[str, "IgnoreRules"], ...]


IGNORE_FILES = (".gitignore", ".ragaccelignore")
_MAX_BYTES = 1_000_000
_MAX_PATTERN = 4096  # characters, the maximum length of a path
_MAX_NAME = 255
_TOKEN = re.compile(r"\\(.)|\[([!^]?)(\]?[^\]]+\])|\[", re.DOTALL)


class IgnoreRules:
    """Patterns of a .gitignore file; the last match decides, and ``!`` negates a pattern."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.patterns = [pattern for line in lines if (pattern := _pattern(line))]

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def verdict(self, name: str, is_folder: bool) -> bool | None:
        """Return whether a path is ignored, or None if no pattern matches."""
        parts = name.split("/")
        for pattern in reversed(self.patterns):
            if (is_folder or not pattern.folders_only) and pattern.matches(parts):
                return not pattern.negated
        return None

    def ignores(self, name: str, is_folder: bool) -> bool:
        """Return whether a path, or a folder above it, is ignored."""
        parts = name.split("/")
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        return any(self.verdict(folder, True) for folder in above) or bool(
            self.verdict(name, is_folder)
        )


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A line of a .gitignore file: a regular expression per path part; None stands for ``**``.

    Matching takes time proportional to pattern length times path length. It backtracks only to the
    last ``**``, since a later ``**`` can match whatever an earlier one could.
    """

    parts: tuple[re.Pattern[str] | None, ...]
    negated: bool
    folders_only: bool

    def matches(self, path: Sequence[str]) -> bool:
        parts = self.parts
        if len(parts) == 2 and parts[0] is None and parts[1] is not None:
            return bool(parts[1].fullmatch(path[-1]))
        position = at = stars = 0
        again = -1
        while at < len(path):
            part = parts[position] if position < len(parts) else _MATCHES_NOTHING
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


_MATCHES_NOTHING = re.compile(r"(?!)")


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
    if globs[-1] == "**":  # matches everything in the folder, not the folder itself
        globs.append("?*")
    parts = tuple(None if glob == "**" else _glob_to_regex(glob) for glob in globs)
    return _Pattern(parts, negated, folders_only)


def _glob_to_regex(glob: str) -> re.Pattern[str]:
    """Translate a glob for one path part to a regular expression without backtracking."""
    if len(_TOKEN.sub("?", glob).replace("*", "")) > _MAX_NAME:
        return _MATCHES_NOTHING
    return re.compile(fnmatch.translate(_TOKEN.sub(_as_fnmatch, glob)))


def _as_fnmatch(token: re.Match[str]) -> str:
    """Translate an escaped character or a bracket to fnmatch's syntax."""
    escaped, negated, inside = token.groups()
    if inside:
        return f"[{'!' if negated else ''}{inside}"
    letter = escaped or "["
    return f"[{letter}]" if letter in "*?[" else letter


def read_rules(folder: Path, *, inside: Path | None = None) -> IgnoreRules:
    """Read the rules of a folder's own ignore files; unreadable files are skipped.

    ``inside`` is this folder or one above it; symbolic links below it are not followed.
    """
    lines: list[str] = []
    for name in IGNORE_FILES:
        with suppress(OSError):
            data = read_regular_file(folder / name, _MAX_BYTES, inside=inside)
            lines += data.decode("utf-8", errors="replace").splitlines()
    return IgnoreRules(lines)


_IGNORED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_NOT_DOCUMENTS_NAMES = """
.png .jpg .jpeg .gif .webp .bmp .ico .tif .tiff .svg .heic .mp3 .wav .flac .ogg .mp4 .mov .avi .mkv
.webm .zip .gz .bz2 .xz .7z .rar .tar .whl .jar .class .pyc .so .dll .dylib .exe .bin .o .a .woff
.woff2 .ttf .otf .eot .db .sqlite .sqlite3 .parquet .npy .npz .pt .pth .safetensors .onnx .gguf .pkl
.map .lock .min.js .min.css
"""
OUTSIDE_LINK = "a link out of the folder, followed only with --follow-links"
_EXPECTED_REASONS = frozenset({"hidden", "ignored", "excluded", "not included"})
_NOT_DOCUMENTS = tuple(_NOT_DOCUMENTS_NAMES.split())


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that may be a document.

    ``name`` is its path relative to the folder, ``size`` is in bytes, ``mtime_ns`` is its
    modification time.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int


@dataclass(slots=True)
class Listing:
    """The listing of a folder: files to read, skipped files by reason, and failures.

    ``skipped`` counts all skipped files and folders by reason; ``passed_over`` maps those that no
    rule or pattern excludes to the reason. ``failed`` maps names of unreadable files and folders to
    the reason; ``unreadable`` names these folders, whose files the index keeps. ``inside`` is a
    folder outside which no file may be read, or None.
    """

    files: list[FoundFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    passed_over: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    inside: Path | None = None

    def skip(self, reason: str, name: str) -> None:
        """Count a skipped file or folder; record its name unless a rule or pattern excludes it."""
        self.skipped[reason] += 1
        if reason not in _EXPECTED_REASONS:
            self.passed_over[name.encode("utf-8", "backslashreplace").decode()] = reason

    def drop(self, reason: str, is_meant: Callable[[FoundFile], bool]) -> None:
        """Drop the files for which ``is_meant`` is true, and count them under a reason."""
        kept = [file for file in self.files if not is_meant(file)]
        if len(kept) < len(self.files):
            self.skipped[reason] += len(self.files) - len(kept)
            self.files = kept


def list_folder(
    folder: Path,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    follow_links: bool = False,
) -> Listing:
    """List the documents of a folder and its subfolders, in order of name.

    Hidden files, pictures, archives and files that ``.gitignore`` or ``.ragaccelignore`` exclude
    are skipped and counted. Links inside the folder are followed to what is not listed already, so
    that loops of links end; links that lead out of the folder are skipped and recorded by name.

    Args:
        folder: The folder to list.
        include: Patterns as in .gitignore; if not empty, only matching files are listed.
        exclude: Patterns as in .gitignore of files and folders to skip.
        follow_links: Also follow links that lead out of the folder.
    """
    listing = Listing(inside=None if follow_links else folder)
    walk = _Walk(folder, listing, IgnoreRules(include), IgnoreRules(exclude))
    walk.run()
    listing.files.sort(key=lambda file: file.name)
    return listing


class _Walk:
    """One traversal of a folder that enters each folder only once; ``seen`` are their inodes."""

    def __init__(
        self, root: Path, listing: Listing, include: IgnoreRules, exclude: IgnoreRules
    ) -> None:
        self.root = root
        self.real_root = Path(os.path.realpath(root))
        self.listing = listing
        self.include = include
        self.exclude = exclude
        self.seen: set[tuple[int, int]] = set()
        self.folders: list[tuple[Path, str, Rules]] = [(root, "", ())]
        self.links: deque[tuple[Path, str, Rules]] = deque()
        self.file_links: list[tuple[Path, str, os.stat_result]] = []

    def run(self) -> None:
        """List everything, links last, so that a file is listed under its real path."""
        while self.folders or self.links:
            self._enter(*(self.folders.pop() if self.folders else self.links.popleft()))
        for path, name, status in self.file_links:
            if (status.st_dev, status.st_ino) in self.seen:
                self.listing.skip("link to a file listed already", name)
            else:
                self._list(path, name, status)

    def _enter(self, folder: Path, name: str, rules: Rules) -> None:
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self.seen:
                self.listing.skip("link to a folder listed already", name)
                return
            self.seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            self.listing.failed[name or "."] = _reason(error, "folder")
            self.listing.unreadable.append(name)
            return
        own = read_rules(folder, inside=self.listing.inside)
        rules = (*rules, (name, own)) if own else rules
        for entry in entries:
            self._visit(entry, f"{name}/{entry.name}" if name else entry.name, rules)

    def _visit(self, entry: os.DirEntry[str], name: str, rules: Rules) -> None:
        try:
            if entry.name == OWN_FOLDER:
                return
            is_folder = entry.is_dir()
            reason = self._skip_reason(entry.name, name, is_folder, rules)
            path = self._link_target(entry)
            if reason:
                self.listing.skip(reason, name)
            elif path is None:
                self.listing.skip(OUTSIDE_LINK, name)
            elif is_folder:
                todo = self.links if entry.is_symlink() else self.folders
                todo.append((path, name, rules))
            elif entry.is_file():
                self._add_file(entry, path, name)
            elif entry.is_symlink():
                self.listing.skip("broken link", name)
            else:
                self.listing.skip("special file", name)
        except OSError as error:
            self.listing.failed[name] = _reason(error, "file")

    def _link_target(self, entry: os.DirEntry[str]) -> Path | None:
        """Return an entry's path with links resolved, or None if it is outside the folder."""
        path = Path(entry.path)
        if self.listing.inside is None or not entry.is_symlink():
            return path
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(self.real_root):
            return None if target.exists() else path
        return self.root / target.relative_to(self.real_root)

    def _add_file(self, entry: os.DirEntry[str], path: Path, name: str) -> None:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            shown = name.encode("utf-8", "backslashreplace").decode()
            self.listing.failed[shown] = "its name is not valid UTF-8: rename it"
            return
        status = entry.stat()
        if entry.is_symlink():
            self.file_links.append((path, name, status))
        else:
            self._list(path, name, status)

    def _list(self, path: Path, name: str, status: os.stat_result) -> None:
        self.seen.add((status.st_dev, status.st_ino))
        found = FoundFile(path, name, status.st_size, status.st_mtime_ns)
        self.listing.files.append(found)

    def _skip_reason(
        self,
        base: str,
        name: str,
        is_folder: bool,
        rules: Rules,
    ) -> str:
        """Return why a file or folder is skipped, or an empty string if it is not."""
        if base.startswith("."):
            return "hidden"
        if base in _IGNORED_FOLDERS or _ignored(name, is_folder, rules):
            return "ignored"
        if self.exclude.ignores(name, is_folder):
            return "excluded"
        if is_folder:
            return ""
        if self.include and not self.include.ignores(name, False):
            return "not included"
        return "not a document" if base.lower().endswith(_NOT_DOCUMENTS) else ""


def _ignored(name: str, is_folder: bool, rules: Rules) -> bool:
    """Return whether rules ignore a path; the deepest folder with a matching rule decides."""
    for root, own in reversed(rules):
        verdict = own.verdict(name[len(root) + 1 :] if root else name, is_folder)
        if verdict is not None:
            return verdict
    return False


def _reason(error: OSError, what: str) -> str:
    if isinstance(error, PermissionError):
        return f"no permission to read the {what}"
    return f"the {what} cannot be read: {error.strerror or error}"
