"""Records: what the index keeps of a file, and what tells the text of a passage from another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragaccel.passage import Passage


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the index knows of a file; ``mtime_ns`` is when it was last changed, as it was read."""

    path: str
    size: int
    mtime_ns: int
    sha256: str
    status: str = "indexed"
    kind: str = "document"
    title: str = ""
    num_passages: int = 0


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file that is not in the index as it stands, and why.

    ``kind`` is ``"failed"``, ``"doubtful"``: read, but by a guess, or ``"skipped"``. ``size`` and
    ``mtime_ns`` are those of the file then; 0 where another try may end otherwise.
    """

    path: str
    kind: str
    reason: str
    size: int = 0
    mtime_ns: int = 0


def text_hash(passage: Passage) -> bytes:
    """What tells passages apart that must be embedded apart: title and text."""
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()[:16]


def embedded_text(passage: Passage) -> str:
    """What is embedded of a passage: its title, then its text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text
