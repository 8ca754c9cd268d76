"""Regular files: a file that others may swap at any time, opened once and read up to a limit.

Between the listing of a folder and the reading of its files anyone who may write there can put a
pipe, a device or a link in the place of a file. So nothing is asked of a path before it is opened:
the open file itself says what it is.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would hold the opening for ever
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)
_WALKS = os.open in os.supports_dir_fd and bool(_NO_LINK)
_LEAST_BLOCK = 1 << 16


class NotRegularError(OSError):
    """What was opened is no regular file, or a link leads to it that may not be followed."""


class TooLargeError(OSError):
    """A file that holds more bytes than may be read; ``size`` is what it holds at least."""

    def __init__(self, path: Path, size: int, max_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
        self.size = size


def read_regular_file(path: Path, max_bytes: int, *, inside: Path | None = None) -> bytes:
    """Read a regular file whole.

    Args:
        path: The file.
        max_bytes: The most that is read, whatever size the file claims to have.
        inside: A folder that the file is below; no link below it is followed. None: links are.

    Raises:
        NotRegularError: It is a folder, a pipe, a socket or a device, or behind a link.
        TooLargeError: It holds more than ``max_bytes``.
        OSError: It is missing or cannot be read.
    """
    with open_regular_file(path, inside=inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise TooLargeError(path, size, max_bytes)
        parts: list[bytes] = []
        room = (
            max_bytes + 1
        )  # a file may grow meanwhile, and those of /proc say that they are empty
        while room and (part := file.read(min(room, max(size + 1, _LEAST_BLOCK)))):
            parts.append(part)
            room -= len(part)
    if not room:
        raise TooLargeError(path, max_bytes + 1, max_bytes)
    return b"".join(parts)


def open_regular_file(path: Path, *, inside: Path | None = None) -> BinaryIO:
    """Open a regular file to read its bytes; never waits, whatever lies there.

    Args:
        path: The file.
        inside: A folder that the file is below; no link below it is followed. None: links are.

    Raises:
        NotRegularError: It is a folder, a pipe, a socket or a device, or behind a link.
        OSError: It is missing or cannot be opened.
    """
    try:
        handle = os.open(path, _READ | _NO_WAIT) if inside is None else _open_below(inside, path)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularError(error.errno, "not a regular file", str(path)) from None
        if inside is not None and error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
            raise NotRegularError(error.errno, "behind a link", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
        return open(handle, "rb", buffering=_LEAST_BLOCK)
    except BaseException:
        os.close(handle)
        raise


def _open_below(root: Path, path: Path) -> int:
    """Open a file step by step from a folder, so that no step is a link at that moment."""
    *folders, name = path.relative_to(root).parts
    if ".." in (*folders, name):
        raise NotRegularError(errno.EINVAL, "outside its folder", str(path))
    if not _WALKS:
        return _open_checked(root, path)
    inner = os.open(root, _READ | _FOLDER)
    try:
        for folder in folders:
            outer, inner = inner, os.open(folder, _READ | _FOLDER | _NO_LINK, dir_fd=inner)
            os.close(outer)
        return os.open(name, _READ | _NO_WAIT | _NO_LINK, dir_fd=inner)
    finally:
        os.close(inner)


def _open_checked(root: Path, path: Path) -> int:
    """Open a file where steps cannot be opened one by one, then look whether a link led there."""
    handle = os.open(path, _READ | _NO_WAIT)
    real = Path(os.path.realpath(path))
    straight = Path(os.path.realpath(root)) / path.relative_to(root)
    if real != straight or not os.path.samestat(os.fstat(handle), os.lstat(straight)):
        os.close(handle)
        raise NotRegularError(errno.ELOOP, "behind a link", str(path))
    return handle
