"""The store: one SQLite file of documents, passages and vectors.

An index file may come from an untrusted source. SQL inside it (a trigger, a view, a default value,
an indexed expression) would run when the file is used, so a file whose schema differs from
``SCHEMA`` in any way is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import sqlite3
import stat
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import numpy as np

from ragaccel.errors import (
    ConfigurationError,
    EmptyIndexError,
    IndexBusyError,
    IndexUnusableError,
    RagaccelError,
    StorageError,
)
from ragaccel.passage import Passage
from ragaccel.paths import PerProcess, keep_forever
from ragaccel.retrieval.chunking import CHUNKER_VERSION

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Schema = frozenset[tuple[str, ...]]


APPLICATION_ID = 0x52414741  # "RAGA": marks our files among SQLite files
SCHEMA_VERSION = 3
OWN_FOLDER = ".ragaccel"

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE file (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,           -- 'document', 'collection': a file of ready-made passages, or
                                  -- 'given': passages that a program put in
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    sha256 TEXT NOT NULL,         -- of its bytes; '' while a collection is partly indexed
    status TEXT NOT NULL,         -- 'indexed' or 'binary'
    title TEXT NOT NULL DEFAULT ''
);
CREATE TABLE passage (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: the key of its vector in memory
    passage_id TEXT NOT NULL UNIQUE,
    file_id INTEGER NOT NULL REFERENCES file (id) ON DELETE CASCADE,
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    page INTEGER,
    line INTEGER,
    title TEXT NOT NULL,
    text TEXT NOT NULL,
    text_hash BLOB NOT NULL,      -- of the embedded text: title and text
    vector BLOB NOT NULL,         -- float16, little-endian
    metadata TEXT NOT NULL DEFAULT '',     -- JSON that a program stores with the passage
    places TEXT NOT NULL DEFAULT ''        -- "offset:number …": where the page or line changes
);
CREATE INDEX passage_of_file ON passage (file_id);
CREATE INDEX passage_by_text ON passage (text_hash);
CREATE TABLE unread (             -- files of the folder that the last run failed on or skipped
    path TEXT PRIMARY KEY,
    kind TEXT NOT NULL,           -- 'failed', 'doubtful': the encoding is uncertain, or 'skipped'
    reason TEXT NOT NULL,
    size INTEGER NOT NULL,        -- of the file in that run, as mtime_ns; 0 if irrelevant
    mtime_ns INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE staged (             -- vectors of a file that is partly indexed; not searched
    text_hash BLOB PRIMARY KEY,   -- as in passage
    path TEXT NOT NULL,
    vector BLOB NOT NULL
) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5 (
    title, text, content = 'passage', content_rowid = 'id',
    tokenize = 'porter unicode61 remove_diacritics 2'
);
CREATE TRIGGER passage_added AFTER INSERT ON passage BEGIN
    INSERT INTO words (rowid, title, text) VALUES (new.id, new.title, new.text);
END;
CREATE TRIGGER passage_removed AFTER DELETE ON passage BEGIN
    INSERT INTO words (words, rowid, title, text)
    VALUES ('delete', old.id, old.title, old.text);
END;
"""


def default_index_path(folder: str | Path) -> Path:
    """Return the default path of a folder's index: ``FOLDER/.ragaccel/index.db``."""
    return Path(folder) / OWN_FOLDER / "index.db"


def default_collection_path(collection: Path) -> Path:
    """Return the default path of a collection's index: ``.ragaccel/NAME.db`` beside it."""
    return collection.parent / OWN_FOLDER / f"{collection.name}.db"


def is_default_location(path: Path) -> bool:
    """Return whether a path is a default index path, where ragaccel alone makes files."""
    return path.parent.name == OWN_FOLDER and path.suffix == ".db"


def require_no_symlink(path: Path) -> None:
    """Refuse a default index path that is a symbolic link: a folder may contain hostile links.

    Raises:
        StorageError: The path, or its folder, is a symbolic link.
    """
    if is_default_location(path) and (path.is_symlink() or path.parent.is_symlink()):
        raise StorageError(
            f"{path} leads through a symbolic link to {path.resolve()}: delete the link, or name"
            " the target with --index PATH"
        )


def index_command(
    path: Path, *, folder: str = "", collection: str = "", rebuild: bool = False
) -> str:
    """Return the shell command that builds or rebuilds an index.

    ``folder`` or ``collection`` is the source of the index; without either, it is derived from a
    default index path.
    """
    if is_default_location(path) and not (folder or collection):
        home = path.parent.parent
        if path.name == "index.db":
            folder = str(home)
        else:
            collection = str(home / path.stem)
    default = path
    if collection:
        source = f"--passages {shlex.quote(collection)}"
        default = default_collection_path(Path(collection))
    else:
        source = shlex.quote(folder) if folder else "FOLDER"
        if folder:
            default = default_index_path(folder)
    elsewhere = path.absolute() != default.absolute() or not (folder or collection)
    index_option = f" --index {shlex.quote(str(path))}" if elsewhere else ""
    return f"ragaccel index {source}{index_option}{' --rebuild' if rebuild else ''}"


def random_token() -> str:
    """Return a random token; unlike SQLite's ``random()``, it differs between forked processes."""
    return secrets.token_hex(8)


@contextmanager
def translate_sqlite_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ragaccel's: busy, disk full, not writable, or damaged.

    The queries are always valid, so any other error means that the file is damaged.
    """
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.OperationalError as error:
        raise _operational_error(path, error) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise corrupt_index_error(path, error) from error


def _operational_error(path: Path, error: sqlite3.OperationalError) -> RagaccelError:
    message = str(error)
    if "locked" in message or "busy" in message:
        return IndexBusyError(
            f"another process is writing to {path}: wait until it ends, then try again"
        )
    if "full" in message or "disk I/O" in message:
        return StorageError(
            f"the disk is full, or {path} cannot grow: free some space and run the same"
            " command again; everything indexed before is kept"
        )
    if ("unable to open" in message or "readonly" in message) and _is_private(path):
        return StorageError(
            f"{path} belongs to another user: ask the owner to share it with"
            f" `{index_command(path)} --shared`, or keep an index of your own with --index PATH"
        )
    if "readonly" in message or "unable to open" in message:
        return StorageError(
            f"{path} cannot be written: change its permissions, or keep the index elsewhere with"
            " --index PATH"
        )
    return corrupt_index_error(path, error)


def _is_private(path: Path) -> bool:
    """Return whether the file exists and this user may not read it."""
    return path.is_file() and not os.access(path, os.R_OK)


def is_foreign(path: Path) -> bool:
    """Return whether a file is not an index: it is not empty and lacks ragaccel's application id.

    Return False at the default paths, where ragaccel alone makes files, and for unreadable files.
    """
    if is_default_location(path) or path.name.endswith(".rebuilt") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except OSError:
        return False
    return bool(header) and header[68:] != APPLICATION_ID.to_bytes(4, "big")


def corrupt_index_error(path: Path, cause: object) -> IndexUnusableError:
    """Return the error for a damaged index; its message has the command that rebuilds the index."""
    if is_foreign(path):
        return IndexUnusableError(
            f"{path} is not a ragaccel index: name another file with --index PATH"
        )
    command = index_command(path, rebuild=True)
    filled = (
        ""
        if is_default_location(path)
        else "; if a program put in its passages, delete the file and put them in again"
    )
    return IndexUnusableError(
        f"the index {path} is damaged ({cause}): rebuild it with `{command}`{filled}"
    )


_MAX_SCHEMA_OBJECTS = 64
_MAX_SQL_CHARS = 3000  # our longest statement has a third of that
_SCHEMA_OF_FILE = (
    "SELECT type, name, tbl_name, substr(coalesce(sql, ''), 1, ?) FROM sqlite_master LIMIT ?"
)
_SQL_TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?(?:\*/|\Z)|\s+|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|\w+|.""",
    re.DOTALL,
)
_QUOTED_WORD = re.compile(r"""(['"`])(\w+)\1""")


def restrict(connection: sqlite3.Connection) -> None:
    """Set SQLite's options for untrusted files, before anything is read from the file."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    set_config = getattr(connection, "setconfig", None)  # since Python 3.12
    if set_config is not None:
        set_config(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009


def require_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not an index of this format.

    Raises:
        IndexUnusableError: Another program made the database, its schema was changed, or another
            version of ragaccel made it.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and is_foreign(path):
        raise IndexUnusableError(
            f"{path} is a database of another program: name another file with --index PATH"
        )
    found = _schema_in(connection)
    if not any(name == "meta" for _, name, *_ in found):
        raise corrupt_index_error(path, "it has no table 'meta'")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise IndexUnusableError(
            f"{path} has format {version}, but this version of ragaccel reads format"
            f" {SCHEMA_VERSION}: rebuild it with `{index_command(path, rebuild=True)}`, or if a"
            " program put in its passages, put them into a new file"
        )
    if found != _expected_schema():
        odd = sorted(f"{kind} {name!r}" for kind, name, *_ in found ^ _expected_schema())
        raise corrupt_index_error(path, f"its schema is not that of an index: see {odd[0]}")
    if not _can_update_fts_untrusted():
        connection.execute("PRAGMA trusted_schema = ON")  # the schema was just checked to be ours


@lru_cache(maxsize=1)
def _expected_schema() -> Schema:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _schema_in(connection)


@lru_cache(maxsize=1)
def _can_update_fts_untrusted() -> bool:
    """Return whether SQLite lets triggers of an untrusted schema write to a full-text table.

    Early versions forbid it.
    """
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        connection.execute("PRAGMA trusted_schema = OFF")
        try:
            connection.execute(
                "INSERT INTO passage (passage_id, file_id, start, end, title, text, text_hash,"
                " vector) VALUES ('', 1, 0, 0, '', '', x'', x'')"
            )
        except sqlite3.OperationalError:
            return False
        return True


def _schema_in(connection: sqlite3.Connection) -> Schema:
    """Return the schema's objects as (type, name, table, SQL without comments and spaces)."""
    rows = connection.execute(_SCHEMA_OF_FILE, (_MAX_SQL_CHARS, _MAX_SCHEMA_OBJECTS)).fetchall()
    return frozenset((*map(str, row[:3]), _normalize_sql(str(row[3]))) for row in rows)


def _normalize_sql(sql: str) -> str:
    """Remove comments, spaces, and quotes around single words from SQL."""
    if len(sql) >= _MAX_SQL_CHARS:  # it was cut, so it must not compare equal
        return sql
    tokens = _SQL_TOKEN.findall(sql)
    meaningful = (
        token for token in tokens if not token.isspace() and token[:2] not in ("--", "/*")
    )
    return "\0".join(_QUOTED_WORD.sub(r"\2", token) for token in meaningful)


_WAIT_SECONDS = 5.0
_FORK_WAIT_SECONDS = 10.0


class _ThreadConnection:
    """A thread's connection; it closes when the thread ends, so that no file stays open."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection: sqlite3.Connection | None = None
        self.identity: tuple[int, int] | None = None
        self.locked_for_fork = False

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def __del__(self) -> None:
        self.close()


class _ProcessConnections:
    """A process's connections to one file, and the lock that its writing threads take turns by."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.connections: WeakSet[_ThreadConnection] = WeakSet()
        self.writers = threading.Lock()  # SQLite's own wait is unfair and short


_all_connections: WeakSet[_ThreadConnection] = WeakSet()
_all_connections_lock = threading.Lock()
_opening_lock = threading.Lock()  # held while a thread registers its connection, and during a fork
_connections_at_fork: list[_ThreadConnection] = []
_inherited: list[_ThreadConnection] = []


def _before_fork() -> None:
    """Close every connection once it is idle, and keep threads from opening one during the fork.

    SQLite keeps one table of locks for all connections of a process. A child inherits the table but
    not the locks: with an inherited connection open, data that the child writes through another
    connection is lost when the parent closes the file.
    """
    _opening_lock.acquire()
    _connections_at_fork[:] = _list_connections()
    latest = time.monotonic() + _FORK_WAIT_SECONDS
    for held in _connections_at_fork:
        held.locked_for_fork = held.lock.acquire(timeout=max(0.0, latest - time.monotonic()))
        if held.locked_for_fork and held.connection and not held.connection.in_transaction:
            held.close()
    _all_connections_lock.acquire()


def _after_fork() -> None:
    _all_connections_lock.release()
    for held in _connections_at_fork:
        if held.locked_for_fork:
            held.lock.release()
    _connections_at_fork.clear()
    _opening_lock.release()


def _after_fork_in_child() -> None:
    """Keep connections with an open transaction: closing one would undo the parent's changes."""
    for held in _connections_at_fork:
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


def _list_connections() -> list[_ThreadConnection]:
    with _all_connections_lock:
        return list(_all_connections)


def is_open_in_process(path: Path) -> bool:
    """Return whether this process has an index file open; if so, only SQLite may open it again.

    On POSIX, closing any handle of a file releases all locks that the process holds on it. Another
    process could then delete the log under an open connection, whose writes would be lost.
    """
    identity = _device_and_inode(path)
    return identity is not None and any(
        held.connection is not None and held.identity == identity for held in _list_connections()
    )


def _device_and_inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Connections:
    """The connections to an index file: one per thread and process, opened on first use.

    A fork waits for connections in use, then closes all of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute_path = path.absolute()  # the program may change its working directory
        self._process_connections = PerProcess(_ProcessConnections)

    def close(self) -> None:
        """Close every connection once it is idle; the next use opens a new one."""
        with _all_connections_lock:
            connections = list(self._process_connections.get().connections)
        for held in connections:
            with held.lock:
                held.close()

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """Yield this thread's connection, opening it if needed; forks wait until the block ends."""
        held = self._thread_connection()
        with held.lock:
            if held.connection is None:
                self._open_for_thread(held)
            assert held.connection is not None
            yield held.connection

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        with self.using() as connection, translate_sqlite_errors(self.path):
            return connection.execute(query, values).fetchall()

    def run_many(self, statement: str, values: Iterator[Sequence[Any]]) -> None:
        """Run one statement once for each row of values."""
        with self.using() as connection, translate_sqlite_errors(self.path):
            connection.executemany(statement, values)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one consistent snapshot of the file within the block, even if others write to it."""
        self.close_if_replaced()
        with self.using() as connection:
            if connection.in_transaction:
                yield
                return
            with translate_sqlite_errors(self.path):
                connection.execute("BEGIN")
            try:
                yield
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("COMMIT")

    @contextmanager
    def write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection whose changes are kept together at the end, or undone by an error."""
        with self.using() as connection:
            if connection.in_transaction:
                raise ConfigurationError(
                    f"{self.path} cannot be changed during a search or another change: a condition"
                    " (where) may only read passages"
                )
        with (
            self._process_connections.get().writers,
            self.using() as connection,
            translate_sqlite_errors(self.path),
        ):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def close_if_replaced(self) -> None:
        """Close this thread's connection if its file was replaced or deleted meanwhile."""
        held = self._thread_connection()
        with held.lock:
            connection = held.connection
            if connection is None or connection.in_transaction:
                return
            if held.identity != self._file_identity():
                held.close()

    def _thread_connection(self) -> _ThreadConnection:
        own = self._process_connections.get()
        held: _ThreadConnection | None = getattr(own.local, "held", None)
        if held is None:
            held = own.local.held = _ThreadConnection()
            with _opening_lock, _all_connections_lock:
                own.connections.add(held)
                _all_connections.add(held)
        return held

    def _file_identity(self) -> tuple[int, int] | None:
        return _device_and_inode(self._absolute_path)

    def _open_for_thread(self, held: _ThreadConnection) -> None:
        held.identity = self._file_identity()
        if held.identity and any(held.identity == other.identity for other in _inherited):
            raise IndexBusyError(
                f"this process was forked in the middle of a change to {self.path} and cannot use"
                " the file: fork before or after the change, or start processes by spawn"
            )
        with translate_sqlite_errors(self.path):
            held.connection = self._open()

    def _open(self) -> sqlite3.Connection:
        if self._absolute_path.is_dir():
            raise EmptyIndexError(
                f"{self.path} is a folder, not an index: name a file with --index PATH"
            )
        if not self._absolute_path.is_file():
            raise EmptyIndexError(
                f"there is no index at {self.path}: build one with `{index_command(self.path)}`"
            )
        require_no_symlink(self._absolute_path)
        self._check_companion_files()
        try:
            return self._connect(str(self._absolute_path))
        except sqlite3.OperationalError as error:
            if "readonly" not in str(error) and "unable to open" not in str(error):
                raise
            # WAL mode needs files beside the index, which a read-only folder forbids
            return self._connect(f"{self._absolute_path.resolve().as_uri()}?mode=ro&immutable=1")

    def _check_companion_files(self) -> None:
        """Refuse journal and log files that SQLite would read though it did not create them."""
        if os.path.lexists(f"{self._absolute_path}-journal"):
            raise corrupt_index_error(
                self.path, "there is a journal beside it, which ragaccel never writes"
            )
        for ending in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(f"{self._absolute_path}{ending}").st_mode):
                    raise corrupt_index_error(
                        self.path, f"its {ending[1:]} file is not a regular file"
                    )

    def _connect(self, address: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            address,
            timeout=_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=address.startswith("file:"),
        )
        try:
            restrict(connection)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            require_format(connection, self.path)
            return connection
        except BaseException:
            connection.close()
            raise


_SHARED_FILE, _SHARED_FOLDER = 0o644, 0o755
_creation_lock = threading.Lock()
_SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")  # files that SQLite keeps beside a database


class Database:
    """An index file as a whole: creation, replacement, copies, and the lock of its one writer."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
        self._connections = Connections(path)
        self.rows = self._connections.rows
        self.run_many = self._connections.run_many
        self.reading = self._connections.reading
        self.close_if_replaced = self._connections.close_if_replaced
        self.close = self._connections.close

    @contextmanager
    def writing(self, *, wait_seconds: float = 0.0) -> Iterator[None]:
        """Hold the write lock within the block; create the file if it does not exist.

        Args:
            wait_seconds: How long to wait for another holder of the lock.

        Raises:
            IndexBusyError: Another process or thread holds the lock.
            StorageError: The folder cannot be written to.
            IndexUnusableError: The file there is not an index of ragaccel.
        """
        with self._write_lock(wait_seconds):
            with self._translate_os_errors():
                self._create()
            yield

    @contextmanager
    def atomic_write(self) -> Iterator[Path]:
        """Hold the write lock, and yield the path of a new file that replaces this one at the end.

        If the block raises, the old file stays unchanged, and the unfinished new file stays for the
        next attempt.

        Raises:
            IndexBusyError, StorageError, IndexUnusableError: As in :meth:`writing`.
        """
        new_file = self._companion(".rebuilt")
        with self._write_lock():
            yield new_file
            with self._translate_os_errors():
                if _has_log(new_file):  # SQLite reports no error if its last checkpoint fails
                    raise StorageError(
                        f"the disk is full, or {new_file} cannot grow: free some space and run the"
                        " same command again; the old index is unchanged"
                    )
                self._checkpoint()
                self._delete(keep_file=True)
                new_file.replace(self.path)

    def discard(self) -> None:
        """Delete the file, and the new file of an unfinished :meth:`atomic_write`.

        Raises:
            IndexBusyError, StorageError, IndexUnusableError: As in :meth:`writing`.
        """
        with self._write_lock(), self._translate_os_errors():
            self._delete()
            for ending in (*_SQLITE_SUFFIXES, ".lock", ""):
                self._companion(f".rebuilt{ending}").unlink(missing_ok=True)

    def _checkpoint(self) -> None:
        """Write the log into the file, so that the file is complete without it."""
        with suppress(IndexUnusableError, EmptyIndexError):
            ((busy, *_),) = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
            if busy:
                raise IndexBusyError(
                    f"another process is reading {self.path}: wait until it ends, then run the"
                    " same command again, which resumes where it stopped"
                )

    @contextmanager
    def _write_lock(self, wait_seconds: float = 0.0) -> Iterator[None]:
        if self.path.is_dir():
            raise StorageError(f"{self.path} is a folder: name a file with --index PATH")
        require_no_symlink(self.path)
        if not is_open_in_process(self.path) and is_foreign(self.path):
            raise IndexUnusableError(
                f"{self.path} is not a ragaccel index, so it is not replaced: name another file"
                " with --index PATH, or delete this one yourself if nobody needs it"
            )
        with self._translate_os_errors():
            make_folder(self.path.parent, shared=self.shared)
            if self.shared:
                self._make_readable()
        with closing(self._acquire_lock(wait_seconds)):
            yield

    @contextmanager
    def _translate_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self.path.parent} cannot be written to ({error.strerror}): keep the index"
                " elsewhere with --index PATH"
            ) from error

    def _acquire_lock(self, wait_seconds: float) -> sqlite3.Connection:
        """Acquire the write lock and return its connection, which holds the lock until it closes.

        The lock is SQLite's write lock (``BEGIN IMMEDIATE``). ``BEGIN EXCLUSIVE`` would also need
        the lock of all readers: processes that try at the same time would all be refused.
        """
        with self._translate_os_errors(), translate_sqlite_errors(self.path):
            lock_path = self._companion(".lock")
            _create_lock_file(lock_path, shared=self.shared)
            lock = sqlite3.connect(lock_path, timeout=wait_seconds)
        try:
            with translate_sqlite_errors(self.path):
                lock.execute("BEGIN IMMEDIATE")
        except IndexBusyError:
            lock.close()
            raise IndexBusyError(
                f"another process is indexing into {self.path}: wait until it ends, or stop it;"
                " searching works meanwhile"
            ) from None
        except BaseException:
            lock.close()
            raise
        return lock

    def _delete(self, *, keep_file: bool = False) -> None:
        """Delete the index; first its log, so that the log is never replayed onto a new file."""
        self.close()
        for ending in _SQLITE_SUFFIXES if keep_file else (*_SQLITE_SUFFIXES, ""):
            self._companion(ending).unlink(missing_ok=True)

    def _create(self) -> None:
        """Create an empty index under another name and rename it, so that it is never partial."""
        if self.path.exists() and self.path.stat().st_size:
            return
        self._delete()
        new_file = self._companion(".new")
        _create_empty_replacing(new_file, shared=self.shared)
        with translate_sqlite_errors(self.path), closing(sqlite3.connect(new_file)) as connection:
            epoch = f"INSERT INTO meta VALUES ('epoch', '{random_token()}');"
            connection.executescript(f"BEGIN; {SCHEMA} {epoch} COMMIT;")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("PRAGMA journal_mode = WAL")
        new_file.replace(self.path)

    def _make_readable(self) -> None:
        """Let other users read the index's files and folder, if this user owns them."""
        paths = [self._companion(ending) for ending in ("", "-wal", "-shm", ".lock")]
        if self.path.parent.name == OWN_FOLDER:
            paths.append(self.path.parent)
        for path in paths:
            with suppress(OSError):  # missing, or owned by another user
                readable = _SHARED_FOLDER if path.is_dir() else _SHARED_FILE
                if not path.is_symlink():
                    path.chmod(stat.S_IMODE(path.stat().st_mode) | readable)

    def _companion(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection whose changes are kept together at the end, or undone by an error."""
        with self._connections.write_transaction() as connection:
            yield connection
            connection.execute(
                "INSERT OR REPLACE INTO meta VALUES ('change', ?)", (random_token(),)
            )

    def copy_to(self, path: str | Path) -> None:
        """Copy the file as it is now to another path, replacing an index there.

        Others may write meanwhile. Copying a file to itself does nothing.

        Raises:
            StorageError: The path cannot be written to.
            IndexUnusableError: The file there is not an index of ragaccel.
        """
        path = Path(path)
        if path.resolve() == self.path.resolve():
            return
        self.close_if_replaced()
        target = Database(path, shared=self.shared)
        with target._write_lock(_WAIT_SECONDS), target._translate_os_errors():
            new_file = path.with_name(f"{path.name}.new")
            _create_empty_replacing(new_file, shared=self.shared)
            own = self._connections.using()
            with (
                translate_sqlite_errors(path),
                closing(sqlite3.connect(new_file)) as copy,
                own as connection,
            ):
                connection.backup(copy)
            target._delete()
            new_file.replace(path)


def make_folder(folder: Path, *, shared: bool = False) -> None:
    """Create a folder if it does not exist, private to its owner unless ``shared``."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_SHARED_FOLDER if shared else 0o700, exist_ok=True)


def _create_empty_replacing(path: Path, *, shared: bool) -> None:
    """Replace a file by an empty one, whose permissions SQLite gives to the log beside it."""
    for ending in (*_SQLITE_SUFFIXES, ""):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    _create_empty(path, shared=shared)


def _create_empty(path: Path, *, shared: bool) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(path, flags, _SHARED_FILE if shared else 0o600))


def _create_lock_file(path: Path, *, shared: bool) -> None:
    """Create the lock file, or truncate it, since SQLite reads its content.

    An existing file is not opened here: closing it would release the locks that other threads hold
    on it. For the same reason, two threads do not create it at once.
    """
    with _creation_lock:
        try:
            state = path.lstat()
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process created it
                _create_empty(path, shared=shared)
            return
    if not stat.S_ISREG(state.st_mode):
        raise StorageError(f"{path} is not a regular file and cannot hold a lock: delete it")
    if state.st_size:
        os.truncate(path, 0)


def _has_log(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The index's record of a file; ``size`` in bytes and ``mtime_ns`` are those when it was read.

    ``kind`` is ``"document"``, ``"collection"`` or ``"given"`` (passages that a program put in);
    ``status`` is ``"indexed"`` or ``"binary"``.
    """

    path: str
    size: int
    mtime_ns: int
    sha256: str
    status: str = "indexed"
    kind: str = "document"
    title: str = ""
    num_passages: int = 0


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file whose current content is not in the index, or may be wrongly decoded, and the reason.

    ``kind`` is ``"failed"``, ``"doubtful"`` (read in an uncertain encoding) or ``"skipped"``.
    ``size`` and ``mtime_ns`` are from the run that recorded it; 0 if reading it again may succeed.
    """

    path: str
    kind: str
    reason: str
    size: int = 0
    mtime_ns: int = 0


def text_hash(passage: Passage) -> bytes:
    """Return a 16-byte hash of a passage's title and text, the key of its vector."""
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()[:16]


def embedded_text(passage: Passage) -> str:
    """Return the text that is embedded for a passage: its title, then its text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


_VECTORS_AT_ONCE = 20_000
_COMPANION_SUFFIX = re.compile(r"(\.(lock|new|rebuilt))*(-(wal|shm|journal))?")
PASSAGE_COLUMNS = """p.id, p.passage_id, p.text, p.title,
    CASE f.kind WHEN 'collection' THEN '' ELSE f.path END,
    p.start, p.end, p.page, p.line, p.places"""
PASSAGE_TABLES = "passage AS p JOIN file AS f ON f.id = p.file_id"
_NUMBER = (int, type(None))
_PASSAGE_TYPES = (int, str, str, str, str, int, int, _NUMBER, _NUMBER, str)
_FILE_TYPES = (str, int, int, str, str, str, str, int)
_MAX_DIGITS = 6
_PASSAGE = f"SELECT {PASSAGE_COLUMNS} FROM {PASSAGE_TABLES}"

_WORD = re.compile(r"\w+")
_STOP_WORD_LIST = """
a about an and are as at be been but by can could did do does for from had has have how i if in into
is it its me my no not of on or our shall she should so than that the their them there they this to
us was we were what when where which who whom whose why will with would you your
"""
_STOP_WORDS = frozenset(_STOP_WORD_LIST.split())
_TITLE_WEIGHT = 2.0
_MAX_WORDS = 32
_REBUILT_AS = "rebuilt_as"
_PROGRAM = "program"


class Store:
    """An index file; safe to read from several threads and while another process writes.

    The file is opened on first use, so that a damaged file can still be rebuilt.

    Args:
        path: The file; ``with store.writing()`` creates it, reading a missing one is an error.
        shared: Let other users of this machine read the file; by default a new file is private to
            its owner.
    """

    def __init__(self, path: str | Path, *, shared: bool = False) -> None:
        self.path = Path(path)
        self.shared = shared
        self._database = Database(self.path, shared=shared)
        self.rows = self._database.rows
        self.reading = self._database.reading
        self.writing = self._database.writing
        self.transaction = self._database.transaction
        self.atomic_write = self._database.atomic_write
        self.discard = self._database.discard
        self.close = self._database.close
        self.copy_to = self._database.copy_to

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def put_file(self, record: FileRecord) -> int:
        """Add or replace a file's record without touching its passages; return its row id."""
        values = (record.path, record.kind, record.size, record.mtime_ns, record.sha256)
        self.rows(
            "INSERT INTO file (path, kind, size, mtime_ns, sha256, status, title)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET"
            " kind = excluded.kind, size = excluded.size, mtime_ns = excluded.mtime_ns,"
            " sha256 = excluded.sha256, status = excluded.status, title = excluded.title",
            (*values, record.status, record.title),
        )
        return int(self.rows("SELECT id FROM file WHERE path = ?", (record.path,))[0][0])

    def put_passages(
        self, file_id: int, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]
    ) -> None:
        """Add passages to a file; ``vectors`` maps :func:`text_hash` to float16 bytes."""
        given = ((file_id, p, vectors[text_hash(p)], "") for p in passages)
        self.put_rows(given)

    def put_rows(self, rows: Iterable[tuple[int, Passage, bytes, str]]) -> None:
        """Add passages, each given as (file id, passage, float16 bytes, metadata as JSON)."""
        self._database.run_many(
            "INSERT INTO passage (file_id, passage_id, start, end, page, line, title, text,"
            " places, text_hash, vector, metadata) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (file_id, *_passage_columns(p), vector, metadata)
                for file_id, p, vector, metadata in rows
            ),
        )

    def drop_passages(self, file_id: int) -> None:
        """Remove the passages of a file, given by row id; the file's record stays."""
        self.rows("DELETE FROM passage WHERE file_id = ?", (file_id,))

    def drop_ids(self, passage_ids: Iterable[str]) -> None:
        """Remove passages by their ids."""
        self._database.run_many(
            "DELETE FROM passage WHERE passage_id = ?", ((name,) for name in passage_ids)
        )

    def remove(self, paths: Iterable[str]) -> int:
        """Remove files and their passages in one transaction; return how many files existed."""
        removed = 0
        with self.transaction() as connection:
            for path in paths:
                found = connection.execute("SELECT id FROM file WHERE path = ?", (path,)).fetchone()
                if found:
                    self.drop_passages(found[0])
                    connection.execute("DELETE FROM file WHERE id = ?", found)
                    removed += 1
        return removed

    def reset_times(self) -> None:
        """Make the next indexing run read every document, even if size and time are unchanged."""
        with self.transaction() as connection:
            connection.execute("UPDATE file SET mtime_ns = -1 WHERE kind = 'document'")
            connection.execute("UPDATE unread SET mtime_ns = -1")

    def put_unread(self, unread: Mapping[str, UnreadFile]) -> None:
        """Replace the files, by path, that :meth:`unread` returns."""
        if unread == self.unread():
            return
        with self.transaction() as connection:
            connection.execute("DELETE FROM unread")
            rows = ((f.path, f.kind, f.reason, f.size, f.mtime_ns) for f in unread.values())
            self._database.run_many("INSERT INTO unread VALUES (?, ?, ?, ?, ?)", rows)

    def stage(self, path: str, vectors: Mapping[bytes, bytes]) -> None:
        """Store vectors of a file that is partly indexed; searches do not see them."""
        placeholders = ",".join(["(?, ?, ?)"] * len(vectors))  # one statement is atomic
        values = [value for key, vector in vectors.items() for value in (key, path, vector)]
        self.rows(f"INSERT OR REPLACE INTO staged VALUES {placeholders}", values)

    def unstage(self, path: str | None = None, *, keep: Container[bytes] = ()) -> None:
        """Delete the vectors staged for a file, or for all files, except those of ``keep``."""
        chosen, values = ("", ()) if path is None else (" WHERE path = ?", (path,))
        staged = self.rows(f"SELECT text_hash FROM staged{chosen}", values)
        gone = [row for row in staged if row[0] not in keep]
        if gone and len(gone) == len(staged):
            self.rows(f"DELETE FROM staged{chosen}", values)
        elif gone:
            with self.transaction():
                self._database.run_many("DELETE FROM staged WHERE text_hash = ?", iter(gone))

    def rename(self, old: str, new: str) -> None:
        """Change the path of a file in its record."""
        with self.transaction() as connection:
            connection.execute("UPDATE file SET path = ? WHERE path = ?", (new, old))

    def leave_out(self, paths: Sequence[str], *, undo: bool = False) -> None:
        """Exclude documents from future indexing runs; with ``undo``, include them again."""
        known = dict.fromkeys(self.left_out())
        if undo:
            known = dict.fromkeys(path for path in known if path not in set(paths))
        else:
            known |= dict.fromkeys(paths)
        self.set_meta("left_out", json.dumps(list(known)))

    def set_meta(self, key: str, value: str) -> None:
        """Store a setting of the index."""
        self.rows("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def renew_epoch(self) -> None:
        """Make readers reload all vectors, as after a rebuild."""
        self.set_meta("epoch", random_token())

    # Reading

    def meta(self, key: str, default: str = "") -> str:
        """Return a setting, e.g. ``folder`` or ``fingerprint``; ``default`` if it was never set."""
        found = self.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(found[0][0]) if found else default

    def meta_number(self, key: str) -> int:
        """Return a setting that is a number; 0 if it was never set.

        Raises:
            IndexUnusableError: The stored value is not a number, or too large.
        """
        written = self.meta(key, "0")
        if not (written.isascii() and written.isdigit() and len(written) <= _MAX_DIGITS):
            raise corrupt_index_error(self.path, f"its {key} is {written[:20]!r}, not a number")
        return int(written)

    def meta_list(self, key: str) -> list[str]:
        """Return a setting that is a list of strings; empty if it was never set.

        Raises:
            IndexUnusableError: The stored value is not such a list.
        """
        try:
            found = json.loads(self.meta(key, "[]"))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise corrupt_index_error(self.path, f"its {key} is not a list of names")
        return found

    def require_fingerprint(self, fingerprint: str) -> None:
        """Refuse an index whose vectors another embedder or chunker made.

        Raises:
            IndexUnusableError: The fingerprints differ; the message says how to rebuild the index.
        """
        made_with = self.meta("fingerprint")
        if made_with and made_with != fingerprint:
            self.raise_mismatch("another embedding model or version")

    def raise_mismatch(self, made_with: str) -> NoReturn:
        """Raise the error that the index has other settings, with the command to rebuild it.

        ``made_with`` names these settings in the message.

        Raises:
            IndexUnusableError: Always.
        """
        folder = collection = ""
        # a default location names its folder by itself, even if that was moved
        if not is_default_location(self.path):
            sources = self.sources()
            folder = next((name for name in sources if Path(name).is_dir()), "")
            files = (name for name in sources if Path(name).is_file())
            collection = "" if folder else next(files, "")
        command = index_command(self.path, folder=folder, collection=collection, rebuild=True)
        raise IndexUnusableError(
            f"{self.path} was made with {made_with}: rebuild it with `{command}`, or use the"
            " settings it was made with"
        )

    def sources(self) -> list[str]:
        """Return the folder and the collections that the index was built from, absolute."""
        folder = self.meta("folder")
        files = self.files().items()
        collections = [path for path, file in files if file.kind == "collection"]
        return [folder, *collections] if folder else collections

    def left_out(self) -> list[str]:
        """Return the paths of excluded documents; see :meth:`leave_out`."""
        return self.meta_list("left_out")

    def owns(self, path: Path) -> bool:
        """Return whether a file is the index, or one of its log, lock and temporary files."""
        rest = path.name.removeprefix(self.path.name)
        is_ours = path.name.startswith(self.path.name) and _COMPANION_SUFFIX.fullmatch(rest)
        return bool(is_ours) and path.parent.resolve() == self.path.parent.resolve()

    def files(self) -> dict[str, FileRecord]:
        """Return the record of every file in the index, by path."""
        rows = self.rows(
            "SELECT path, size, mtime_ns, sha256, status, kind, title,"
            " (SELECT count(*) FROM passage WHERE file_id = file.id) FROM file ORDER BY path"
        )
        for row in rows:
            self._require_types(row, _FILE_TYPES, "file")
        return {row[0]: FileRecord(*row) for row in rows}

    def unread(self) -> dict[str, UnreadFile]:
        """Return, by path, files that failed, were skipped or have an uncertain encoding.

        The last indexing run recorded them.
        """
        rows = self.rows("SELECT path, kind, reason, size, mtime_ns FROM unread ORDER BY path")
        for row in rows:
            self._require_types(row, (str, str, str, int, int), "file")
        return {row[0]: UnreadFile(*row) for row in rows}

    def state(self) -> tuple[str, str]:
        """Return (epoch, change): a rebuild renews both tokens, any change renews the second.

        Raises:
            EmptyIndexError: The index was deleted since it was opened.
        """
        self._database.close_if_replaced()
        return self.meta("epoch"), self.meta("change")

    def count_passages(self) -> int:
        """Count the passages of all files of the index."""
        return int(self.rows("SELECT count(*) FROM passage")[0][0])

    def passages(self, keys: Sequence[int]) -> dict[int, Passage]:
        """Return passages by row id; missing ones are left out."""
        placeholders = ",".join("?" * len(keys))
        rows = self.rows(f"{_PASSAGE} WHERE p.id IN ({placeholders})", keys)
        return {row[0]: self.passage_from_row(row) for row in rows}

    def hashes_of(self, path: str) -> dict[str, bytes]:
        """Return the :func:`text_hash` of every passage of a file, by passage id."""
        return dict(
            self.rows(
                "SELECT passage_id, text_hash FROM passage WHERE file_id ="
                " (SELECT id FROM file WHERE path = ?)",
                (path,),
            )
        )

    def paths_of(self, passage_ids: Sequence[str]) -> dict[str, str]:
        """Return the file path of each passage id; unknown ids are left out."""
        placeholders = ",".join("?" * len(passage_ids))
        return dict(
            self.rows(
                "SELECT p.passage_id, f.path FROM passage AS p JOIN file AS f ON f.id = p.file_id"
                f" WHERE p.passage_id IN ({placeholders})",
                passage_ids,
            )
        )

    def passages_of(self, path: str) -> list[Passage]:
        """Return the passages of a file, in the order of its text."""
        rows = self.rows(f"{_PASSAGE} WHERE f.path = ? ORDER BY p.start, p.id", (path,))
        return [self.passage_from_row(row) for row in rows]

    def passage(self, passage_id: str) -> Passage | None:
        """Return the passage of an id, or None if there is no such passage."""
        rows = self.rows(f"{_PASSAGE} WHERE p.passage_id = ?", (passage_id,))
        return self.passage_from_row(rows[0]) if rows else None

    def known_vectors(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the vectors of those texts that are indexed or staged, by :func:`text_hash`."""
        known: dict[bytes, bytes] = {}
        for first in range(0, len(hashes), 500):
            part = hashes[first : first + 500]
            placeholders = ",".join("?" * len(part))
            for table in ("staged", "passage"):
                query = f"SELECT text_hash, vector FROM {table} WHERE text_hash IN ({placeholders})"
                known.update(self.rows(query, part))
        return known

    def keys(self) -> NDArray[np.int64]:
        """Return the row ids of all passages, ascending."""
        rows = self.rows("SELECT id FROM passage")  # SQLite scans a smaller index, sorted by file
        return np.sort(np.array([key for (key,) in rows], dtype=np.int64))

    def vectors(
        self, keys: Sequence[int] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield (row ids, vectors) of all passages, or of the given ones, in batches."""
        wanted = self.keys().tolist() if keys is None else sorted(keys)
        for first in range(0, len(wanted), _VECTORS_AT_ONCE):
            part = wanted[first : first + _VECTORS_AT_ONCE]
            allowed = "" if keys is None else f" AND id IN ({','.join(map(str, part))})"
            rows = self.rows(
                f"SELECT id, vector FROM passage WHERE id BETWEEN ? AND ?{allowed}",
                (part[0], part[-1]),
            )
            if not rows:  # removed meanwhile
                continue
            found = np.array([row[0] for row in rows], dtype=np.int64)
            yield found, self.unpack_vectors([row[1] for row in rows])

    def passage_from_row(self, row: Sequence[Any]) -> Passage:
        """Make a passage of a row of :data:`PASSAGE_COLUMNS`.

        Raises:
            IndexUnusableError: A value has the wrong type.
        """
        self._require_types(row, _PASSAGE_TYPES, "passage")
        passage = Passage(*row[1:9])
        try:
            return replace(passage, locations=_parse_locations(row[9])) if row[9] else passage
        except ValueError:
            raise corrupt_index_error(
                self.path, f"the page or line numbers of passage {row[1]!r} are invalid"
            ) from None

    def _require_types(self, row: Sequence[Any], types: Sequence[Any], what: str) -> None:
        """Refuse a row with values of other types, since SQLite stores any type in any column."""
        if not all(isinstance(value, kind) for value, kind in zip(row, types, strict=True)):
            raise corrupt_index_error(self.path, f"a value of a {what} has the wrong type")

    def unpack_vectors(self, packed: Sequence[bytes]) -> NDArray[np.float32]:
        """Return vectors [N, D] from their stored float16 bytes.

        Raises:
            IndexUnusableError: A vector does not have D numbers.
        """
        size = 2 * self.meta_number("dimension")
        if not size or any(not isinstance(one, bytes) or len(one) != size for one in packed):
            raise corrupt_index_error(self.path, "a vector has the wrong size")
        flat = np.frombuffer(b"".join(packed), dtype="<f2")
        return flat.reshape(len(packed), -1).astype(np.float32)

    def check(self) -> list[str]:
        """Read the whole file and return the problems found; an empty list if there are none."""
        problems = [str(row[0]) for row in self.rows("PRAGMA integrity_check")]
        problems = [problem for problem in problems if problem != "ok"]
        size = 2 * self.meta_number("dimension")
        odd = self.rows("SELECT count(*) FROM passage WHERE length(vector) != ?", (size,))[0][0]
        if odd:
            problems.append(f"{odd} passages have a vector of the wrong size")
        try:
            self.rows("INSERT INTO words (words, rank) VALUES ('integrity-check', 1)")
        except IndexUnusableError:
            problems.append("the full-text search does not match the passages")
        return problems

    def search_text(self, question: str, limit: int) -> list[tuple[int, float]]:
        """Return the passages that share words with a question as (row id, BM25 score), best first.

        Any word may match; English stop words are searched for only if there are no other words.
        The question is quoted: operators of SQLite's query language have no effect.
        """
        query = _fts_query(question)
        if not query:
            return []
        rows = self.rows(
            "SELECT rowid, bm25(words, ?, 1.0) AS cost FROM words WHERE words MATCH ?"
            " ORDER BY cost, rowid LIMIT ?",
            (_TITLE_WEIGHT, query, limit),
        )
        return [(key, -cost) for key, cost in rows]

    def require_embedder(self, embedder: str) -> None:
        """Refuse an index whose vectors are known to come from an embedder of another fingerprint.

        Raises:
            IndexUnusableError: Another embedder made the vectors.
        """
        if not self.is_filled_by_program():
            self.require_fingerprint(index_fingerprint(embedder))
            return
        made_with = self.meta("embedder")
        if made_with not in ("", embedder):
            raise IndexUnusableError(
                f"{self.path} holds vectors of another embedding model, {made_with!r}, not of"
                f" {embedder!r}: open it with {made_with!r}, or put the passages into a new file"
            )

    def mark_filled_by_program(self, embedder: str) -> None:
        """Record that a program puts passages into this store, and which embedder it uses."""
        self.set_meta("embedder", embedder)
        self.set_meta("filled_by", _PROGRAM)

    def is_filled_by_program(self) -> bool:
        """Return whether a program puts in the passages; indexing runs then refuse the store."""
        return self.meta("filled_by") == _PROGRAM

    def open_for_program(self, embedder: str) -> None:
        """Create the file if it does not exist; refuse one with another embedder's vectors.

        Raises:
            IndexUnusableError: As :meth:`require_embedder`.
            StorageError: The file cannot be created.
            IndexUnusableError: The file is not an index of ragaccel.
        """
        if self._is_blank():
            with self.writing(wait_seconds=_WAIT_SECONDS):
                if self._is_blank():  # another process may have filled it meanwhile
                    self.mark_filled_by_program(embedder)
        if embedder and self.count_passages():
            self.require_embedder(embedder)

    def require_filled_by_program(self) -> None:
        """Refuse an index that indexing runs keep: the next run would undo a program's changes.

        Raises:
            StorageError: ``ragaccel index`` made the index.
        """
        if not self.is_filled_by_program():
            raise StorageError(
                f"{self.path} is kept by `ragaccel index`, whose next run would undo this change:"
                " change the documents and index again, or put the passages into another file"
            )

    def ensure_dimension(self, embedder: str, dimension: int) -> None:
        """Refuse vectors of another dimension or embedder; an empty store adopts both.

        Raises:
            IndexUnusableError: As :meth:`require_embedder` and :func:`require_dimension`.
        """
        held = self.meta_number("dimension")
        if not self.count_passages():
            if dimension != held:
                self.reset_dimension(embedder)
            self.mark_filled_by_program(embedder)
            self.set_meta("dimension", str(dimension))
            return
        if embedder:
            self.require_embedder(embedder)
        require_dimension(self.path, dimension, held)

    def reset_dimension(self, embedder: str) -> None:
        """Allow vectors of another dimension; a new epoch makes readers drop the old ones."""
        self.mark_filled_by_program(embedder)
        self.set_meta("dimension", "0")
        self.renew_epoch()

    def require_filled_by_indexing(self) -> None:
        """Refuse a store filled by a program: an indexing run would lose its passages.

        Raises:
            StorageError: A program put in the passages.
        """
        if self.path.is_file() and self.is_filled_by_program():
            raise StorageError(
                f"{self.path} holds passages that a program put in and indexing would lose: index"
                " into another file with --index PATH"
            )

    def _is_blank(self) -> bool:
        """Return whether the file is missing, empty, or an index that was never filled."""
        if not self.path.exists() or not self.path.stat().st_size:
            return True
        return not (self.is_filled_by_program() or self.meta("fingerprint"))

    @contextmanager
    def rebuild(self, made_with: Mapping[str, str], kept: Mapping[str, str]) -> Iterator[Store]:
        """Yield a new store that replaces this one when the block ends without an error.

        Args:
            made_with: Settings (:meth:`Store.meta`) of the new store. An interrupted attempt with
                the same settings is resumed if it was made on this machine; a copy that came with
                a folder is discarded.
            kept: Further settings, which may differ between attempts.

        Raises:
            IndexBusyError, StorageError, IndexUnusableError: As from ``store.writing()``.
        """
        with self.atomic_write() as new_path, Store(new_path, shared=self.shared) as fresh:
            try:
                can_resume = new_path.is_file() and all(
                    fresh.meta(key) == value
                    for key, value in {**made_with, _REBUILT_AS: _file_identity(new_path)}.items()
                )
            except RagaccelError:
                can_resume = False
            if not can_resume:
                fresh.discard()
            with fresh.writing():
                for key, value in {
                    **made_with,
                    **kept,
                    _REBUILT_AS: _file_identity(new_path),
                }.items():
                    fresh.set_meta(key, value)
                yield fresh
            fresh.close()
            new_path.with_name(new_path.name + ".lock").unlink(missing_ok=True)


def _fts_query(question: str) -> str:
    words = list(dict.fromkeys(_WORD.findall(question.lower())))
    content_words = [word for word in words if word not in _STOP_WORDS] or words
    return " OR ".join(f'"{word}"' for word in content_words[:_MAX_WORDS])


def _passage_columns(p: Passage) -> tuple[str | int | bytes | None, ...]:
    locations = " ".join(f"{offset}:{number}" for offset, number in p.locations)
    return (p.passage_id, p.start, p.end, p.page, p.line, p.title, p.text, locations, text_hash(p))


def _parse_locations(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (pair.partition(":") for pair in text.split())
    return tuple((int(offset), int(number)) for offset, _, number in pairs)


def _file_identity(path: Path) -> str:
    """Return device and inode, which distinguish a file from copies such as unpacked archives."""
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}"


def index_fingerprint(embedder: str) -> str:
    """Return a hash of the embedder's fingerprint and the chunker's version.

    An index can only be updated with the same fingerprint.
    """
    return hashlib.sha256(f"{embedder}\0{CHUNKER_VERSION}".encode()).hexdigest()


def require_dimension(path: Path, given: int, held: int) -> None:
    """Refuse vectors whose dimension is not ``held``, that of an index; an empty one (0) takes any.

    Raises:
        IndexUnusableError: The dimensions differ.
    """
    if held not in (0, given):
        raise IndexUnusableError(
            f"{path} holds vectors of {held} numbers, not of {given}: use the embedding model that"
            " made them, or put the passages into a new file"
        )
