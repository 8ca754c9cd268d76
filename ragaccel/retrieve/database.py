"""The database: how the index file is created, opened, locked and written to."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ragaccel.errors import (
    IndexBusyError,
    IndexCorruptError,
    IndexMismatchError,
    IndexWriteError,
    NothingIndexedError,
)
from ragaccel.retrieve.formats import settle_format
from ragaccel.retrieve.schema import (
    APPLICATION_ID,
    SCHEMA,
    SCHEMA_VERSION,
    index_command,
    is_foreign,
    reported,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WAIT_SECONDS = 5.0


class _Held:
    """A connection as a thread holds it: closed when the thread ends, or else files stay open."""

    def __init__(self, connection: sqlite3.Connection, identity: tuple[int, int] | None) -> None:
        self.connection = connection
        self.identity = identity

    def __del__(self) -> None:
        self.connection.close()


class Database:
    """An index file as SQLite sees it; a connection a thread, opened when first used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._all_held: WeakSet[_Held] = WeakSet()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close every connection; the next use opens a new one."""
        with self._lock:
            for held in list(self._all_held):
                held.connection.close()
            self._all_held = WeakSet()
            self._local = threading.local()

    @contextmanager
    def writing(self, *, wait_seconds: float = 0.0) -> Iterator[None]:
        """Hold the right to write; creates the file where there is none.

        Args:
            wait_seconds: How long to wait for another that holds it.

        Raises:
            IndexBusyError: Another process, or another thread, holds it.
            IndexWriteError: The place cannot be written to.
            IndexCorruptError: What lies there is not ours.
        """
        with self._locked(wait_seconds):
            with self._placing():
                self._create()
            yield

    @contextmanager
    def replacing(self) -> Iterator[Path]:
        """Hold the right to write and give the place of a new file, moved here at the end.

        Until then, and where that end is not reached, the old file stays as it was. An unfinished
        new file stays too, for the next attempt.

        Raises:
            IndexBusyError, IndexWriteError, IndexCorruptError: As in :meth:`writing`.
        """
        draft = self._beside(".rebuilt")
        with self._locked():
            yield draft
            with self._placing():
                if _has_log(draft):  # SQLite tells nobody when the last of it finds no room
                    raise IndexWriteError(
                        f"the disk is full, or {draft} cannot grow: free some space and run the"
                        " same command again; the old index is as it was"
                    )
                self._settle()
                self._delete(keep_file=True)
                draft.replace(self.path)

    def discard(self) -> None:
        """Delete the file, and what an unfinished :meth:`replacing` left.

        Raises:
            IndexBusyError, IndexWriteError, IndexCorruptError: As in :meth:`writing`.
        """
        with self._locked(), self._placing():
            self._delete()
            for ending in ("-wal", "-shm", ".lock", ""):
                self._beside(f".rebuilt{ending}").unlink(missing_ok=True)

    def _settle(self) -> None:
        """Bring the log into the file, so that the file is whole without it."""
        with suppress(IndexCorruptError, IndexMismatchError, NothingIndexedError):
            ((busy, *_),) = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
            if busy:
                raise IndexBusyError(
                    f"another process is reading {self.path}: wait for it, then run the same"
                    " command again; it goes on where it was"
                )

    @contextmanager
    def _locked(self, wait_seconds: float = 0.0) -> Iterator[None]:
        if self.path.is_dir():
            raise IndexWriteError(f"{self.path} is a folder: name a file with --index PATH")
        if is_foreign(self.path):
            raise IndexCorruptError(
                f"{self.path} is no index of ragaccel, so it is not replaced: choose another place"
                " with --index PATH, or delete it yourself if nobody needs it"
            )
        with self._placing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._acquire(wait_seconds)):
            yield

    @contextmanager
    def _placing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise IndexWriteError(
                f"cannot write in {self.path.parent} ({error.strerror}): keep the index elsewhere"
                " with --index PATH"
            ) from error

    def _acquire(self, wait_seconds: float) -> sqlite3.Connection:
        """An exclusive lock that the system lets go of when the process dies, on any platform."""
        with reported(self.path):
            lock = sqlite3.connect(self._beside(".lock"), timeout=wait_seconds)
        try:
            with reported(self.path):
                lock.execute("BEGIN EXCLUSIVE")
        except IndexBusyError:
            lock.close()
            raise IndexBusyError(
                f"another process is indexing into {self.path}: wait for it to end or stop it;"
                " searching works meanwhile"
            ) from None
        except BaseException:
            lock.close()
            raise
        return lock

    def _delete(self, *, keep_file: bool = False) -> None:
        """Remove the index; the log goes first, so that none is ever replayed onto a new file."""
        self.close()
        for ending in ("-wal", "-shm") if keep_file else ("-wal", "-shm", ""):
            self._beside(ending).unlink(missing_ok=True)

    def _create(self) -> None:
        """Make an empty index beside its place and move it there, so that it is whole or absent."""
        if self.path.exists() and self.path.stat().st_size:
            return
        self._delete()
        draft = self._beside(".new")
        draft.unlink(missing_ok=True)
        with reported(self.path), closing(sqlite3.connect(draft)) as connection:
            connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("PRAGMA journal_mode = WAL")
        draft.replace(self.path)

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make several changes at once: all of them are kept, or none."""
        connection = self.connection()
        with reported(self.path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute(
                    "INSERT OR REPLACE INTO meta VALUES ('change', hex(randomblob(8)))"
                )
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def copy_to(self, path: str | Path) -> None:
        """Copy the file as it is now, whoever writes to it; what was there before is replaced.

        Nothing is done where the place is its own.

        Raises:
            IndexWriteError: The place cannot be written to.
            IndexCorruptError: What lies there is not ours.
        """
        path = Path(path)
        if path.resolve() == self.path.resolve():
            return
        self.follow()
        place = Database(path)
        with place._locked(_WAIT_SECONDS), place._placing():
            draft = path.with_name(f"{path.name}.new")
            draft.unlink(missing_ok=True)
            with reported(path), closing(sqlite3.connect(draft)) as copy:
                self.connection().backup(copy)
            place._delete()
            draft.replace(path)

    def connection(self) -> sqlite3.Connection:
        """The connection of this thread, opened when first asked for."""
        held: _Held | None = getattr(self._local, "held", None)
        if held is None:
            identity = self._identity()
            with reported(self.path):
                held = _Held(self._open(), identity)
            with self._lock:
                self._all_held.add(held)
            self._local.held = held
        return held.connection

    def follow(self) -> None:
        """Let go of a file that was replaced or deleted since this thread opened it."""
        held: _Held | None = getattr(self._local, "held", None)
        if held is None or held.identity == self._identity():
            return
        with self._lock:
            self._all_held.discard(held)
        held.connection.close()
        self._local.held = None

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _open(self) -> sqlite3.Connection:
        if self.path.is_dir():
            raise NothingIndexedError(
                f"{self.path} is a folder, not an index: name a file with --index PATH"
            )
        if not self.path.is_file():
            raise NothingIndexedError(
                f"there is no index at {self.path}: make one with `{index_command(self.path)}`"
            )
        try:
            return self._opened(str(self.path))
        except sqlite3.OperationalError as error:
            if "readonly" not in str(error) and "unable to open" not in str(error):
                raise
            # a folder that may only be read: WAL needs to write beside the file, a snapshot not
            return self._opened(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1")

    def _opened(self, address: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            address,
            timeout=_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=address.startswith("file:"),
        )
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            settle_format(connection, self.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query that reads."""
        with reported(self.path):
            return self.connection().execute(query, values).fetchall()


def _has_log(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0
