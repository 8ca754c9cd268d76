"""Connections: an index file open in SQLite, once in each thread of each process."""

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
from ragaccel.forking import PerProcess, keep_forever
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
        self.waits_for_fork = False

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def __del__(self) -> None:
        self.close()


class _Own:
    """What a process has of the connections to a file."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.all_held: WeakSet[_Held] = WeakSet()
        self.writers = threading.Lock()  # SQLite lets them wait in no order, and not for long


_everywhere: WeakSet[_Held] = WeakSet()
_everywhere_lock = threading.Lock()
_starting_lock = threading.Lock()  # of threads that use their first connection, and of forks
_at_fork: list[_Held] = []
_inherited: list[_Held] = []


def _before_fork() -> None:
    """Close every connection, once it is not in use; none is opened until the fork is made.

    SQLite keeps one table of locks for all connections of a process. A child inherits the table,
    but not the locks: beside an inherited connection, what it writes through one of its own is lost
    when the parent closes the file.
    """
    _starting_lock.acquire()
    _at_fork[:] = _all_held()
    latest = time.monotonic() + _FORK_WAIT_SECONDS
    for held in _at_fork:
        held.waits_for_fork = held.lock.acquire(timeout=max(0.0, latest - time.monotonic()))
        if held.waits_for_fork and held.connection and not held.connection.in_transaction:
            held.close()
    _everywhere_lock.acquire()


def _after_fork() -> None:
    _everywhere_lock.release()
    for held in _at_fork:
        if held.waits_for_fork:
            held.lock.release()
    _at_fork.clear()
    _starting_lock.release()


def _after_fork_in_child() -> None:
    """Keep what the parent is amid a change with: to close it would undo that."""
    for held in _at_fork:
        if held.connection is not None:
            keep_forever(held)
            _inherited.append(held)
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_after_fork_in_child,
    )


def _all_held() -> list[_Held]:
    with _everywhere_lock:
        return list(_everywhere)


def is_open_here(path: Path) -> bool:
    """Whether this process has an index file open, and so must not open and close it otherwise.

    To close any handle of a file lets go of all locks that the process holds on it (POSIX): another
    process could then take the log away from under a connection, and what that writes is lost.
    """
    identity = _identity_of(path)
    return identity is not None and any(
        held.connection is not None and held.identity == identity for held in _all_held()
    )


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Connections:
    """The connections to an index file, one in each thread of each process, opened when first used.

    A fork closes all that are not in use, and waits for those that are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = path.absolute()  # a program may change its folder
        self._own = PerProcess(_Own)

    def close(self) -> None:
        """Close every connection, once it is not in use; the next use opens a new one."""
        with _everywhere_lock:
            all_held = list(self._own.get().all_held)
        for held in all_held:
            with held.lock:
                held.close()

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """The connection of this thread, opened if it is not; a fork waits for the end."""
        held = self._held()
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
        with self._own.get().writers, self.using() as connection, reported(self.path):
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
        held = self._held()
        with held.lock:
            connection = held.connection
            if connection is None or connection.in_transaction:
                return
            if held.identity != self._identity():
                held.close()

    def _held(self) -> _Held:
        own = self._own.get()
        held: _Held | None = getattr(own.local, "held", None)
        if held is None:
            held = own.local.held = _Held()
            with _starting_lock, _everywhere_lock:
                own.all_held.add(held)
                _everywhere.add(held)
        return held

    def _identity(self) -> tuple[int, int] | None:
        return _identity_of(self._place)

    def _open_into(self, held: _Held) -> None:
        held.identity = self._identity()
        if held.identity and any(held.identity == other.identity for other in _inherited):
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
