"""The database: how the index file is created, locked, replaced and written to."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import (
    IndexBusyError,
    IndexCorruptError,
    IndexMismatchError,
    IndexWriteError,
    NothingIndexedError,
)
from ragaccel.retrieve.connections import Connections
from ragaccel.retrieve.schema import (
    APPLICATION_ID,
    SCHEMA,
    SCHEMA_VERSION,
    is_foreign,
    new_token,
    reported,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAIT_SECONDS = 5.0


class Database:
    """An index file as a whole: made, replaced, copied, and changed by one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connections = Connections(path)
        self.rows = self._connections.rows
        self.run_many = self._connections.run_many
        self.reading = self._connections.reading
        self.follow = self._connections.follow
        self.close = self._connections.close

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
            epoch = f"INSERT INTO meta VALUES ('epoch', '{new_token()}');"
            connection.executescript(f"BEGIN; {SCHEMA} {epoch} COMMIT;")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("PRAGMA journal_mode = WAL")
        draft.replace(self.path)

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make several changes at once: all of them are kept, or none."""
        with self._connections.changing() as connection:
            yield connection
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('change', ?)", (new_token(),))

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
            own = self._connections.using()
            with reported(path), closing(sqlite3.connect(draft)) as copy, own as connection:
                connection.backup(copy)
            place._delete()
            draft.replace(path)


def _has_log(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0
