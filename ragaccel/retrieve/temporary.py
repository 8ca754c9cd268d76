"""Temporary places: where the file of a collection without a path is, for as long as it lives."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from ragaccel.errors import NothingIndexedError


class TemporaryPlace:
    """A folder that goes with the object it was made for, or before when that is closed."""

    def __init__(self, owner: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ragaccel-"))
        self.delete = weakref.finalize(owner, _delete, self.folder, os.getpid())


def require_there(path: Path, temporary: TemporaryPlace | None) -> None:
    """Refuse to go on with a collection whose file is gone.

    Raises:
        NothingIndexedError: With the cause.
    """
    if temporary is not None and not temporary.delete.alive:
        raise NothingIndexedError("this temporary collection was closed: make a new one")
    if not path.exists():
        raise NothingIndexedError(
            f"the collection {path} was moved or deleted: open it at its new place, or make a new"
            " one"
        )


def _delete(folder: Path, process: int) -> None:
    """Delete a temporary collection, but not from a process that was forked off meanwhile."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
