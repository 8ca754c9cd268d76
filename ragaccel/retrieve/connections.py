"""Connections: an index file open in SQLite, once a thread, and anew after a fork."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ragaccel.errors import ConfigurationError, IndexBusyError, NothingIndexedError
from ragaccel.forking import AcrossForks
from ragaccel.retrieve.formats import harden, require_format
from ragaccel.retrieve.schema import damaged, index_command, reported, require_no_link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_WAIT_SECONDS = 5.0
_FORK_WAIT_SECONDS = 10.0


class _Held:
    """A connection as a thread holds it: closed when the thread ends, or else files stay open."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection: sqlite3.Connection | None = None
        self.identity: tuple[int, int] | None = None

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def __del__(self) -> None:
        self.close()


_everywhere: WeakSet[_Held] = WeakSet()
_everywhere_lock = threading.Lock()
_abandoned: list[_Held] = []  # for ever: what closes them would let go of the parent's locks


def is_open_here(path: Path) -> bool:
    """Whether this process has an index file open, and so must not open and close it otherwise.

    To close any handle of a file lets go of all locks that the process holds on it (POSIX): another
    process could then take the log away from under a connection, and what that writes is lost.
    """
    identity = _identity_of(path)
    with _everywhere_lock:
        held_now = list(_everywhere)
    return identity is not None and any(
        held.connection is not None and held.identity == identity for held in held_now
    )


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Connections(AcrossForks):
    """The connections to an index file, one a thread, opened when first used.

    Before a fork all are closed: SQLite takes the locks of a connection that a child inherits for
    the child's own, even when the child opens another, and changes would be lost. A fork waits for
    changes that other threads are making.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._place = path.absolute()  # a program may change its folder
        self._locked: list[_Held] = []
        self._start()

    def _start(self) -> None:
        self._local = threading.local()
        self._all_held: WeakSet[_Held] = WeakSet()
        self._lock = threading.Lock()
        self._writers = threading.Lock()  # SQLite lets them wait in no order, and not for long

    def close(self) -> None:
        """Close every connection, once it is not in use; the next use opens a new one."""
        with self._lock:
            all_held = list(self._all_held)
        for held in all_held:
            with held.lock:
                held.close()

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """The connection of this thread, opened if it is not; a fork waits for the end."""
        held = self._own()
        with held.lock:
            if held.connection is None:
                self._open_into(held)
            assert held.connection is not None
            yield held.connection

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement; the rows it gives."""
        with self.using() as connection, reported(self.path):
            return connection.execute(query, values).fetchall()

    def run_many(self, statement: str, values: Iterator[Sequence[Any]]) -> None:
        """Run one statement with many values."""
        with self.using() as connection, reported(self.path):
            connection.executemany(statement, values)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See the file, within, as it is at one moment, whoever writes to it."""
        self.follow()
        with self.using() as connection:
            if connection.in_transaction:
                yield
                return
            with reported(self.path):
                connection.execute("BEGIN")
            try:
                yield
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("COMMIT")

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Make several changes at once: all of them are kept, or none."""
        with self.using() as connection:
            if connection.in_transaction:
                raise ConfigurationError(
                    f"{self.path} cannot be changed from within a search or another change: a"
                    " condition (where) may only look at passages"
                )
        with self._writers, self.using() as connection, reported(self.path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def follow(self) -> None:
        """Let go of a file that was replaced or deleted since this thread opened it."""
        held = self._own()
        with held.lock:
            connection = held.connection
            if connection is None or connection.in_transaction:
                return
            if held.identity != self._identity():
                held.close()

    # Forks

    def before_fork(self) -> None:
        """Close what no thread is changing something with."""
        self._lock.acquire()
        latest = time.monotonic() + _FORK_WAIT_SECONDS
        for held in list(self._all_held):
            if held.lock.acquire(timeout=max(0.0, latest - time.monotonic())):
                self._locked.append(held)
                if held.connection is not None and not held.connection.in_transaction:
                    held.close()

    def after_fork(self, *, in_child: bool) -> None:
        """Let the threads go on; a child starts anew."""
        if in_child:
            _abandoned.extend(held for held in self._all_held if held.connection is not None)
            self._locked.clear()
            self._start()
            return
        while self._locked:
            self._locked.pop().lock.release()
        self._lock.release()

    # Opening

    def _own(self) -> _Held:
        held: _Held | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = _Held()
            with self._lock:
                self._all_held.add(held)
            with _everywhere_lock:
                _everywhere.add(held)
        return held

    def _identity(self) -> tuple[int, int] | None:
        return _identity_of(self._place)

    def _open_into(self, held: _Held) -> None:
        held.identity = self._identity()
        if held.identity and any(held.identity == other.identity for other in _abandoned):
            raise IndexBusyError(
                f"this process was forked in the middle of a change to {self.path}, and cannot use"
                " it: fork before or after, or start processes by spawn"
            )
        with reported(self.path):
            held.connection = self._open()

    def _open(self) -> sqlite3.Connection:
        if self._place.is_dir():
            raise NothingIndexedError(
                f"{self.path} is a folder, not an index: name a file with --index PATH"
            )
        if not self._place.is_file():
            raise NothingIndexedError(
                f"there is no index at {self.path}: make one with `{index_command(self.path)}`"
            )
        require_no_link(self._place)
        self._look_beside()
        try:
            return self._opened(str(self._place))
        except sqlite3.OperationalError as error:
            if "readonly" not in str(error) and "unable to open" not in str(error):
                raise
            # a folder that may only be read: WAL needs to write beside the file, a snapshot not
            return self._opened(f"{self._place.resolve().as_uri()}?mode=ro&immutable=1")

    def _look_beside(self) -> None:
        """Refuse what SQLite would read, or obey, beside the file and never made there."""
        if os.path.lexists(f"{self._place}-journal"):
            raise damaged(self.path, "a journal lies beside it, which no index of ours has")
        for ending in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(f"{self._place}{ending}").st_mode):
                    raise damaged(self.path, f"its {ending[1:]} file is no regular file")

    def _opened(self, address: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            address,
            timeout=_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=address.startswith("file:"),
        )
        try:
            harden(connection)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            require_format(connection, self.path)
            return connection
        except BaseException:
            connection.close()
            raise
