"""Paths: the data directory, files replaced as a whole, files that may be opened, forks.

Between the listing of a folder and the reading of its files anyone who may write there can put a
pipe, a device or a link in the place of a file. So nothing is asked of a path before it is opened:
the open file itself says what it is.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def data_dir() -> Path:
    """The folder of this user's data: RAGACCEL_HOME, else where the platform keeps such things.

    Raises:
        RuntimeError: A user without a home.
    """
    if chosen := os.environ.get("RAGACCEL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_dir

    return Path(user_data_dir("ragaccel", appauthor=False)).expanduser()


def ensure_data_dir() -> Path:
    """Return the data folder, made if it is missing; only this user may read a new one.

    Whatever is put there first makes it by this function: what was asked is kept there too.

    Raises:
        OSError: it cannot be made.
    """
    home = data_dir()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return home


def ensure_parent_dir(path: Path) -> None:
    """Make the folder that a file is to be in; a new data folder on the way is this user's alone.

    Raises:
        OSError: it cannot be made.
    """
    with suppress(RuntimeError):  # a user without a home
        if data_dir() in path.parents:
            ensure_data_dir()
    path.parent.mkdir(parents=True, exist_ok=True)


def user_settings_file() -> Path:
    """The settings file that holds wherever the command is run."""
    return data_dir() / "ragaccel.toml"


def project_settings_file() -> Path:
    """The settings file of the current folder: before the user's, for what loads nothing."""
    return Path("ragaccel.toml")


def latency_file(key: str) -> Path | None:
    """Where it is kept what passes of a model cost here; None for a user without a home."""
    try:
        return data_dir() / "costs" / f"{key}.json"
    except RuntimeError:
        return None


fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_DEFAULT_MODE = 0o644
_PREFIX, _SUFFIX = ".ragaccel-", ".part"


@contextmanager
def atomic_write(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` when the block ends without an error.

    Its folder is made where it is missing. Only its owner may read a private one; another has the
    mode of the file it replaces. What a process that died left of such a file is removed.

    Raises:
        OSError: no permission, a full disk, a folder at ``path``; what stood there is whole.
    """
    ensure_parent_dir(path)
    _remove_abandoned(path.parent)
    handle, temporary = _open_temporary(path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not private:
                os.chmod(temporary, _mode_of(path))
            if fcntl is not None:  # elsewhere an open file cannot be moved
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _open_temporary(folder: Path) -> tuple[int, str]:
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
        return _DEFAULT_MODE


_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would hold the opening for ever
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_HAS_DIR_FD = os.open in os.supports_dir_fd and bool(_NOFOLLOW)
_MIN_BLOCK = 1 << 16


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
        bytes_left = (
            max_bytes + 1
        )  # a file may grow meanwhile, and those of /proc say that they are empty
        while bytes_left and (part := file.read(min(bytes_left, max(size + 1, _MIN_BLOCK)))):
            parts.append(part)
            bytes_left -= len(part)
    if not bytes_left:
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
        handle = os.open(path, _READ | _NONBLOCK) if inside is None else _open_below(inside, path)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularError(error.errno, "not a regular file", str(path)) from None
        if inside is not None and error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
            raise NotRegularError(error.errno, "behind a link", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
        return open(handle, "rb", buffering=_MIN_BLOCK)
    except BaseException:
        os.close(handle)
        raise


def _open_below(root: Path, path: Path) -> int:
    """Open a file step by step from a folder, so that no step is a link at that moment."""
    *folders, name = path.relative_to(root).parts
    if ".." in (*folders, name):
        raise NotRegularError(errno.EINVAL, "outside its folder", str(path))
    if not _HAS_DIR_FD:
        return _open_checked(root, path)
    inner = os.open(root, _READ | _DIRECTORY)
    try:
        for folder in folders:
            outer, inner = inner, os.open(folder, _READ | _DIRECTORY | _NOFOLLOW, dir_fd=inner)
            os.close(outer)
        return os.open(name, _READ | _NONBLOCK | _NOFOLLOW, dir_fd=inner)
    finally:
        os.close(inner)


def _open_checked(root: Path, path: Path) -> int:
    """Open a file where steps cannot be opened one by one, then look whether a link led there."""
    handle = os.open(path, _READ | _NONBLOCK)
    real = Path(os.path.realpath(path))
    straight = Path(os.path.realpath(root)) / path.relative_to(root)
    if real != straight or not os.path.samestat(os.fstat(handle), os.lstat(straight)):
        os.close(handle)
        raise NotRegularError(errno.ELOOP, "behind a link", str(path))
    return handle


Made = TypeVar("Made")

_torch_owner: list[int] = []  # the process that first used torch, also in those forked from it


def claim_torch() -> None:
    """Claim torch for this process: called before torch computes and before any lock is taken.

    A forked process has none of its parent's threads: it would wait for ever for those of torch's
    pool, and for locks that others held at the fork.

    Raises:
        ConfigurationError: A process that this one was forked from has claimed it.
    """
    if not _torch_owner:
        _torch_owner.append(os.getpid())
    if not owns_torch():
        raise ConfigurationError(
            "this process was forked from one that had already used a model, and cannot use any: "
            "load models after the fork, in each process, or start processes by spawn"
        )


def owns_torch() -> bool:
    """Return whether this process may use torch: no process that it was forked from has."""
    return _torch_owner in ([], [os.getpid()])


def keep_forever(inherited: object) -> None:
    """Keep what a parent process owns from being closed here: not even the end of Python does."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


class PerProcess(Generic[Made]):
    """What each process makes for itself when it first asks, such as a lock.

    A lock that another thread holds at a fork is never released in the forked process.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: dict[int, Made] = {}

    def get(self) -> Made:
        """Return this process's own; the same for all of its threads."""
        process = os.getpid()
        if process not in self._made:
            self._made.setdefault(process, self._make())
        return self._made[process]

    def __reduce__(self) -> str:
        """Refuse to be pickled, used or not, as locks do.

        Raises:
            TypeError: Always.
        """
        raise TypeError("what each process makes for itself cannot be pickled")
