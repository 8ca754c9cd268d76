"""The database: how the index file is created, locked, replaced and written to."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
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
from ragaccel.retrieve.connections import Connections, is_open_here
from ragaccel.retrieve.schema import (
    APPLICATION_ID,
    OWN_FOLDER,
    SCHEMA,
    SCHEMA_VERSION,
    is_foreign,
    new_token,
    reported,
    require_no_link,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAIT_SECONDS = 5.0
_SHARED_FILE, _SHARED_FOLDER = 0o644, 0o755
_making_lock = threading.Lock()
_LOGS = ("-wal", "-shm", "-journal")  # what SQLite keeps beside a file


class Database:
    """An index file as a whole: made, replaced, copied, and changed by one at a time."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
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
            for ending in (*_LOGS, ".lock", ""):
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
        require_no_link(self.path)
        if not is_open_here(self.path) and is_foreign(self.path):
            raise IndexCorruptError(
                f"{self.path} is no index of ragaccel, so it is not replaced: choose another place"
                " with --index PATH, or delete it yourself if nobody needs it"
            )
        with self._placing():
            make_folder(self.path.parent, shared=self.shared)
            if self.shared:
                self._share()
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
        """A lock that one holds, and that the system lets go of when the process dies, anywhere.

        It is SQLite's lock of who will write. An exclusive transaction would ask for that of all
        readers besides, and those are the others who ask: at one moment all would be refused.
        """
        with self._placing(), reported(self.path):
            place = self._beside(".lock")
            _make_lock(place, shared=self.shared)
            lock = sqlite3.connect(place, timeout=wait_seconds)
        try:
            with reported(self.path):
                lock.execute("BEGIN IMMEDIATE")
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
        for ending in _LOGS if keep_file else (*_LOGS, ""):
            self._beside(ending).unlink(missing_ok=True)

    def _create(self) -> None:
        """Make an empty index beside its place and move it there, so that it is whole or absent."""
        if self.path.exists() and self.path.stat().st_size:
            return
        self._delete()
        draft = self._beside(".new")
        _make_new(draft, shared=self.shared)
        with reported(self.path), closing(sqlite3.connect(draft)) as connection:
            epoch = f"INSERT INTO meta VALUES ('epoch', '{new_token()}');"
            connection.executescript(f"BEGIN; {SCHEMA} {epoch} COMMIT;")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("PRAGMA journal_mode = WAL")
        draft.replace(self.path)

    def _share(self) -> None:
        """Let others read what was private so far, where it is ours to do so."""
        places = [self._beside(ending) for ending in ("", "-wal", "-shm", ".lock")]
        if self.path.parent.name == OWN_FOLDER:
            places.append(self.path.parent)
        for place in places:
            with suppress(OSError):  # it is not there, or another's
                readable = _SHARED_FOLDER if place.is_dir() else _SHARED_FILE
                if not place.is_symlink():
                    place.chmod(stat.S_IMODE(place.stat().st_mode) | readable)

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
        place = Database(path, shared=self.shared)
        with place._locked(_WAIT_SECONDS), place._placing():
            draft = path.with_name(f"{path.name}.new")
            _make_new(draft, shared=self.shared)
            own = self._connections.using()
            with reported(path), closing(sqlite3.connect(draft)) as copy, own as connection:
                connection.backup(copy)
            place._delete()
            draft.replace(path)


def make_folder(folder: Path, *, shared: bool = False) -> None:
    """Make a folder where there is none: for its owner alone, unless it is to be shared."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_SHARED_FOLDER if shared else 0o700, exist_ok=True)


def _make_new(path: Path, *, shared: bool) -> None:
    """Put an empty file in the place of whatever lies there; SQLite's own files take its mode."""
    for ending in (*_LOGS, ""):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    _make_empty(path, shared=shared)


def _make_empty(path: Path, *, shared: bool) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(path, flags, _SHARED_FILE if shared else 0o600))


def _make_lock(path: Path, *, shared: bool) -> None:
    """Make the file that the lock is held on, or empty it, for SQLite reads what is in it.

    One that is there is never opened here: closing it would let go of the locks on it that other
    threads hold. For the same reason two threads do not make it at once.
    """
    with _making_lock:
        try:
            state = path.lstat()
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process was first
                _make_empty(path, shared=shared)
            return
    if not stat.S_ISREG(state.st_mode):
        raise IndexWriteError(f"{path} is not a file, which it must be to hold a lock: delete it")
    if state.st_size:
        os.truncate(path, 0)


def _has_log(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0
