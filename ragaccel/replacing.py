"""Replacing: new contents take the place of a file in one step, or leave it as it was."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from ragaccel.homes import make_folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_READABLE = 0o644


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` when the block ends without an error.

    Its folder is made where it is missing. Only its owner may read a private one; another has the
    mode of the file it replaces.

    Raises:
        OSError: no permission, a full disk, a folder at ``path``; what stood there is whole.
    """
    make_folder_of(path)
    handle, fresh = tempfile.mkstemp(prefix=".ragaccel-", suffix=".part", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not private:
            os.chmod(fresh, _mode_of(path))
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise


def _mode_of(path: Path) -> int:
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return _READABLE
