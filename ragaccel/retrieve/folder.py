"""A folder: which of its files are documents, by the rules of .gitignore and common sense."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.retrieve.ignoring import IgnoreRules, read_rules
from ragaccel.retrieve.schema import OWN_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Rules = tuple[tuple[str, IgnoreRules], ...]

_NEVER = frozenset({"__pycache__", "node_modules"})
_NOT_DOCUMENTS_NAMES = """
.png .jpg .jpeg .gif .webp .bmp .ico .tif .tiff .svg .heic .mp3 .wav .flac .ogg .mp4 .mov .avi .mkv
.webm .zip .gz .bz2 .xz .7z .rar .tar .whl .jar .class .pyc .so .dll .dylib .exe .bin .o .a .woff
.woff2 .ttf .otf .eot .db .sqlite .sqlite3 .parquet .npy .npz .pt .pth .safetensors .onnx .gguf .pkl
.map .lock .min.js .min.css
"""
_ON_PURPOSE = frozenset({"hidden", "ignored", "excluded", "not included"})
_NOT_DOCUMENTS = tuple(_NOT_DOCUMENTS_NAMES.split())


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that may be a document: its path, the one inside the folder, and its state."""

    path: Path
    name: str
    size: int
    mtime_ns: int


@dataclass(slots=True)
class Listing:
    """What a folder holds: files to read, how many were passed over and why, and failures.

    ``passed_over`` names those that were passed over though no rule or pattern says so, with why.
    ``unreadable`` are names of folders that could not be listed: what the index has of them stays.
    """

    files: list[FoundFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    passed_over: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    def skip(self, reason: str, name: str) -> None:
        """Count a file or folder that is passed over; name it unless people said so."""
        self.skipped[reason] += 1
        if reason not in _ON_PURPOSE:
            self.passed_over[name.encode("utf-8", "backslashreplace").decode()] = reason

    def pass_over(self, reason: str, is_meant: Callable[[FoundFile], bool]) -> None:
        """Drop the files that a reason is for, and count them."""
        kept = [file for file in self.files if not is_meant(file)]
        if len(kept) < len(self.files):
            self.skipped[reason] += len(self.files) - len(kept)
            self.files = kept


def list_folder(folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Listing:
    """List the documents of a folder and its subfolders, in order of name.

    Hidden files, pictures, archives and what ``.gitignore`` and ``.ragaccelignore`` name are passed
    over and counted. Links are followed, each folder once, so that a loop of links ends.

    Args:
        folder: Where to look.
        include: Patterns as in .gitignore; if any are given only files that match one are taken.
        exclude: Patterns as in .gitignore for files and folders to pass over.
    """
    listing = Listing()
    walk = _Walk(listing, IgnoreRules(include), IgnoreRules(exclude))
    walk.enter(folder, "", ())
    while walk.links:  # after what is really there, so that a file is known by its own path
        walk.enter(*walk.links.pop(0))
    listing.files.sort(key=lambda file: file.name)
    return listing


class _Walk:
    """One pass over a folder; remembers the folders it has been in."""

    def __init__(self, listing: Listing, include: IgnoreRules, exclude: IgnoreRules) -> None:
        self.listing = listing
        self.include = include
        self.exclude = exclude
        self.seen: set[tuple[int, int]] = set()
        self.links: list[tuple[Path, str, Rules]] = []

    def enter(self, folder: Path, name: str, rules: Rules) -> None:
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
        own = read_rules(folder)
        rules = (*rules, (name, own)) if own else rules
        for entry in entries:
            self._visit(entry, f"{name}/{entry.name}" if name else entry.name, rules)

    def _visit(self, entry: os.DirEntry[str], name: str, rules: Rules) -> None:
        try:
            if entry.name == OWN_FOLDER:
                return
            is_folder = entry.is_dir()
            reason = self._passed_over(entry.name, name, is_folder, rules)
            if reason:
                self.listing.skip(reason, name)
            elif is_folder and entry.is_symlink():
                self.links.append((Path(entry.path), name, rules))
            elif is_folder:
                self.enter(Path(entry.path), name, rules)
            elif entry.is_file():
                self._take(entry, name)
            elif entry.is_symlink():
                self.listing.skip("broken link", name)
            else:
                self.listing.skip("special file", name)
        except OSError as error:
            self.listing.failed[name] = _reason(error, "file")

    def _take(self, entry: os.DirEntry[str], name: str) -> None:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            shown = name.encode("utf-8", "backslashreplace").decode()
            self.listing.failed[shown] = "its name is not valid UTF-8: rename it"
            return
        status = entry.stat()
        found = FoundFile(Path(entry.path), name, status.st_size, status.st_mtime_ns)
        self.listing.files.append(found)

    def _passed_over(
        self,
        base: str,
        name: str,
        is_folder: bool,
        rules: Rules,
    ) -> str:
        """Why a file or folder is not looked at; empty when it is."""
        if base.startswith("."):
            return "hidden"
        if base in _NEVER or _ignored(name, is_folder, rules):
            return "ignored"
        if self.exclude.ignores(name, is_folder):
            return "excluded"
        if is_folder:
            return ""
        if self.include and not self.include.ignores(name, False):
            return "not included"
        return "not a document" if base.lower().endswith(_NOT_DOCUMENTS) else ""


def _ignored(name: str, is_folder: bool, rules: Rules) -> bool:
    """The deepest file with a rule for it decides."""
    for root, own in reversed(rules):
        verdict = own.verdict(name[len(root) + 1 :] if root else name, is_folder)
        if verdict is not None:
            return verdict
    return False


def _reason(error: OSError, what: str) -> str:
    if isinstance(error, PermissionError):
        return f"no permission to read the {what}"
    return f"the {what} cannot be read: {error.strerror or error}"
