"""Paths: the data directory, atomic writes, safe reads of regular files, objects per process.

Between the listing of a folder and the reading of its files, anyone with write permission can
replace a file by a pipe, a device or a link. So files are opened first and checked afterwards, by
their descriptor.
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
    """Return the data directory: ``RAGACCEL_HOME``, else the platform's folder for user data.

    Raises:
        RuntimeError: The user has no home directory.
    """
    if chosen := os.environ.get("RAGACCEL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_dir

    return Path(user_data_dir("ragaccel", appauthor=False)).expanduser()


def ensure_data_dir() -> Path:
    """Return the data directory; create it, readable by this user alone, if it is missing.

    Call this before writing a file there, so that the directory is private: it also holds the
    history of questions.

    Raises:
        OSError: The directory cannot be created.
    """
    home = data_dir()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return home


def ensure_parent_dir(path: Path) -> None:
    """Create the folder of a file; if the file is in the data directory, make that private.

    Raises:
        OSError: The folder cannot be created.
    """
    with suppress(RuntimeError):  # the user has no home directory
        if data_dir() in path.parents:
            ensure_data_dir()
    path.parent.mkdir(parents=True, exist_ok=True)


def user_settings_file() -> Path:
    """Return the path of the user's settings file, which applies in every folder."""
    return data_dir() / "ragaccel.toml"


def default_model_file() -> Path:
    """Return the path of the file that names the model to use if no other setting does."""
    return data_dir() / "default-model"


def project_settings_file() -> Path:
    """Return the path of the current folder's settings file, which overrides the user's.

    Only settings that load no code or model are read from it.
    """
    return Path("ragaccel.toml")


def latency_file(key: str) -> Path | None:
    """Return the path of a model's latency profile; None if the user has no home directory."""
    try:
        return data_dir() / "measurements" / f"{key}.json"
    except RuntimeError:
        return None


fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_DEFAULT_MODE = 0o644
_PREFIX, _SUFFIX = ".ragaccel-", ".part"


@contextmanager
def atomic_write(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the block ends without an error.

    The folder is created if it is missing. A private file is readable by its owner alone; any
    other gets the mode of the file it replaces. Temporary files of dead processes are removed.

    Raises:
        OSError: ``path`` cannot be written (no permission, a full disk, a folder); the old file is
            unchanged.
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
            if fcntl is not None:  # on Windows an open file cannot be moved
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _open_temporary(folder: Path) -> tuple[int, str]:
    """Create a temporary file; its lock, held while it is open, marks it as in use."""
    while True:
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        if fcntl is None:
            return handle, name
        with suppress(OSError):  # without locks here, other processes cannot remove it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process removed it as abandoned before it was locked


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files whose lock nobody holds: their processes have died."""
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX)]
        for name in names:
            if name.endswith(_SUFFIX):
                _remove_if_abandoned(folder / name)


def _remove_if_abandoned(path: Path) -> None:
    with suppress(OSError):  # in use, already gone, or another user's
        if fcntl is None:
            path.unlink()  # fails while it is open
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
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a pipe without a writer would block forever
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_HAS_DIR_FD = os.open in os.supports_dir_fd and bool(_NOFOLLOW)
_MIN_BLOCK = 1 << 16


class NotRegularError(OSError):
    """The opened path is not a regular file, or lies behind a link that must not be followed."""


class TooLargeError(OSError):
    """The file is larger than the limit; ``size`` is a lower bound of its size in bytes."""

    def __init__(self, path: Path, size: int, max_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
        self.size = size


def read_regular_file(path: Path, max_bytes: int, *, inside: Path | None = None) -> bytes:
    """Read a whole regular file.

    Args:
        path: The file.
        max_bytes: The maximum number of bytes to read, whatever size the file claims to have.
        inside: A folder above the file; links below that folder are not followed. If it is None,
            all links are followed.

    Raises:
        NotRegularError: The path is a folder, a pipe, a socket or a device, or behind a link.
        TooLargeError: The file is larger than ``max_bytes``.
        OSError: The file is missing or cannot be read.
    """
    with open_regular_file(path, inside=inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise TooLargeError(path, size, max_bytes)
        parts: list[bytes] = []
        bytes_left = max_bytes + 1  # a file may grow, and files in /proc report a size of 0
        while bytes_left and (part := file.read(min(bytes_left, max(size + 1, _MIN_BLOCK)))):
            parts.append(part)
            bytes_left -= len(part)
    if not bytes_left:
        raise TooLargeError(path, max_bytes + 1, max_bytes)
    return b"".join(parts)


def open_regular_file(path: Path, *, inside: Path | None = None) -> BinaryIO:
    """Open a regular file for reading; never block, whatever is at the path.

    Args:
        path: The file.
        inside: A folder above the file; links below that folder are not followed. If it is None,
            all links are followed.

    Raises:
        NotRegularError: The path is a folder, a pipe, a socket or a device, or behind a link.
        OSError: The file is missing or cannot be opened.
    """
    try:
        handle = os.open(path, _READ | _NONBLOCK) if inside is None else _open_below(inside, path)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularError(error.errno, "it is not a regular file", str(path)) from None
        if inside is not None and error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
            raise NotRegularError(error.errno, "it is behind a symbolic link", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
        return open(handle, "rb", buffering=_MIN_BLOCK)
    except BaseException:
        os.close(handle)
        raise


def _open_below(root: Path, path: Path) -> int:
    """Open a file folder by folder, each relative to the one before, refusing links."""
    *folders, name = path.relative_to(root).parts
    if ".." in (*folders, name):
        raise NotRegularError(errno.EINVAL, "it is outside its folder", str(path))
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
    """Open a file on a platform without ``dir_fd``, then check that no link led to it."""
    handle = os.open(path, _READ | _NONBLOCK)
    real = Path(os.path.realpath(path))
    straight = Path(os.path.realpath(root)) / path.relative_to(root)
    if real != straight or not os.path.samestat(os.fstat(handle), os.lstat(straight)):
        os.close(handle)
        raise NotRegularError(errno.ELOOP, "it is behind a symbolic link", str(path))
    return handle


Made = TypeVar("Made")

_torch_owner: list[int] = []  # id of the process that used torch first; forked processes inherit it


def claim_torch() -> None:
    """Claim torch for this process; call it before torch computes and before taking a lock.

    A forked process has none of its parent's threads: it would wait forever for torch's thread
    pool, and for locks that other threads held at the fork.

    Raises:
        ConfigurationError: A parent of this forked process has claimed torch.
    """
    if not _torch_owner:
        _torch_owner.append(os.getpid())
    if not owns_torch():
        raise ConfigurationError(
            "this process was forked from one that had already used a model, and cannot use any: "
            "load models in each process after the fork, or start processes by spawn"
        )


def owns_torch() -> bool:
    """Return whether this process may use torch: it was not forked from one that had used it."""
    return _torch_owner in ([], [os.getpid()])


def keep_forever(inherited: object) -> None:
    """Leak an object that a parent process owns, so that this process never closes it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


class PerProcess(Generic[Made]):
    """An object that each process creates for itself on first use, such as a lock.

    Locks need this: in a forked process, a lock that another thread held is never released.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: dict[int, Made] = {}

    def get(self) -> Made:
        """Return this process's object; the same for all of its threads."""
        process = os.getpid()
        if process not in self._made:
            self._made.setdefault(process, self._make())
        return self._made[process]

    def __reduce__(self) -> str:
        """Raise TypeError: this object cannot be pickled, as a lock cannot."""
        raise TypeError("an object that each process creates for itself cannot be pickled")
