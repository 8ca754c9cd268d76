"""Replacing: new contents take the place of a file in one step, or leave it as it was."""

from __future__ import annotations

import importlib
import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from ragaccel.homes import make_folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_READABLE = 0o644
_PREFIX, _SUFFIX = ".ragaccel-", ".part"


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` when the block ends without an error.

    Its folder is made where it is missing. Only its owner may read a private one; another has the
    mode of the file it replaces. What a process that died left of such a file is removed.

    Raises:
        OSError: no permission, a full disk, a folder at ``path``; what stood there is whole.
    """
    make_folder_of(path)
    _remove_abandoned(path.parent)
    handle, fresh = _open_part(path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not private:
                os.chmod(fresh, _mode_of(path))
            if fcntl is not None:  # elsewhere an open file cannot be moved
                os.replace(fresh, path)
        if fcntl is None:
            os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise


def _open_part(folder: Path) -> tuple[int, str]:
    """Make a file with a name of its own, locked as long as it is open: that tells it is in use."""
    while True:
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        if fcntl is None:
            return handle, name
        with suppress(OSError):  # a file system without locks: nobody removes what cannot be locked
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another took it for abandoned before it was locked


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files of processes that are no more: nobody holds their locks."""
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX)]
        for name in names:
            if name.endswith(_SUFFIX):
                _remove_if_abandoned(folder / name)


def _remove_if_abandoned(path: Path) -> None:
    with suppress(OSError):  # it is in use, gone already, or another user's
        if fcntl is None:
            path.unlink()  # refused while it is open
            return
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISREG(os.fstat(handle).st_mode):
                path.unlink()
        finally:
            os.close(handle)


def _mode_of(path: Path) -> int:
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return _READABLE
