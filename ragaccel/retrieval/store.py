"""The store: documents, passages and vectors in one SQLite file, or in memory.

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
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from ragaccel.retrieval.language import frequent_words, language_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    return Path(os.path.expanduser(folder)) / OWN_FOLDER / "index.db"


def default_collection_path(collection: Path) -> Path:
    """Return the default path of a collection's index: ``.ragaccel/NAME.db`` beside it."""
    return collection.parent / OWN_FOLDER / f"{collection.name}.db"


def _is_default_location(path: Path) -> bool:
    """Return whether a path is a default index path, where ragaccel alone makes files."""
    return path.parent.name == OWN_FOLDER and path.suffix == ".db"


def index_command(
    path: Path, *, folder: str = "", collection: str = "", rebuild: bool = False
) -> str:
    """Return the shell command that builds or rebuilds an index.

    ``folder`` or ``collection`` is the source of the index; without either, it is derived from a
    default index path.
    """
    if _is_default_location(path) and not (folder or collection):
        home = path.parent.parent
        if path.name == "index.db":
            folder = str(home)
        else:
            collection = str(home / path.stem)
    source, default = "FOLDER", None
    if collection:
        source = f"--passages {shlex.quote(collection)}"
        default = default_collection_path(Path(collection))
    elif folder:
        source, default = shlex.quote(folder), default_index_path(folder)
    is_elsewhere = default is None or path.absolute() != default.absolute()
    index_option = f" --index {shlex.quote(str(path))}" if is_elsewhere else ""
    return f"ragaccel index {source}{index_option}{' --rebuild' if rebuild else ''}"


# Errors


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the operating system into ragaccel's.

    The queries are always valid, so an error of SQLite without a known cause means that the file is
    damaged.
    """
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError, OSError) as error:
        raise _translate(path, error) from error


def _translate(path: Path, error: Exception) -> RagaccelError:
    if isinstance(error, OSError):
        return StorageError(
            f"{path.parent} cannot be written to ({error.strerror}): keep the index elsewhere with"
            " path=FILE"
        )
    message = str(error) if isinstance(error, sqlite3.OperationalError) else ""
    if "locked" in message or "busy" in message:
        return IndexBusyError(
            f"another process is writing to {path}: wait until it ends, then try again"
        )
    if "full" in message or "disk I/O" in message:
        return StorageError(
            f"the disk is full, or {path} cannot grow: free some space and run the same"
            " command again; everything indexed before is kept"
        )
    if "unable to open" in message or "readonly" in message:
        if path.is_file() and not os.access(path, os.R_OK):
            return StorageError(
                f"{path} belongs to another user: ask the owner to share it with"
                f" `{index_command(path)} --shared`, or keep an index of your own with path=FILE"
            )
        return StorageError(
            f"{path} cannot be written: change its permissions, or keep the index elsewhere with"
            " path=FILE"
        )
    return corrupt_index_error(path, error)


def corrupt_index_error(path: Path, cause: object) -> IndexUnusableError:
    """Return the error for a damaged index; its message has the command that rebuilds the index."""
    if _is_foreign(path):
        return IndexUnusableError(
            f"{path} is not a ragaccel index: name another file with path=FILE"
        )
    command = index_command(path, rebuild=True)
    filled = (
        ""
        if _is_default_location(path)
        else "; if a program put in its passages, delete the file and put them in again"
    )
    return IndexUnusableError(
        f"the index {path} is damaged ({cause}): rebuild it with `{command}`{filled}"
    )


def _is_foreign(path: Path) -> bool:
    """Return whether a file is not an index: it is not empty and lacks ragaccel's application id.

    Return False at the default paths, where ragaccel alone makes files, and for unreadable files.
    """
    if _is_default_location(path) or path.name.endswith(".rebuilt") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except OSError:
        return False
    return bool(header) and header[68:] != APPLICATION_ID.to_bytes(4, "big")


# The schema of a file


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
_TRUSTS_ITS_FTS = (3, 44)  # earlier versions may forbid triggers that write to a full-text table


def _require_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not an index of this format, before anything in it can run.

    Raises:
        IndexUnusableError: Another program made the database, its schema was changed, or another
            version of ragaccel made it.
    """
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and _is_foreign(path):
        raise IndexUnusableError(
            f"{path} is a database of another program: name another file with path=FILE"
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
    if sqlite3.sqlite_version_info < _TRUSTS_ITS_FTS:
        connection.execute("PRAGMA trusted_schema = ON")  # the schema was just checked to be ours


@lru_cache(maxsize=1)
def _expected_schema() -> Schema:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _schema_in(connection)


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


# Connections and forks


class _Connection:
    """A SQLite connection, used by whoever holds ``lock``; it closes when its thread ends."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sqlite: sqlite3.Connection | None = None
        self.identity: object = None  # device and inode of its file
        self.in_memory = False

    def close(self) -> None:
        if self.sqlite is not None:
            self.sqlite.close()
            self.sqlite = None

    def __del__(self) -> None:
        self.close()


_WAIT_SECONDS = 5.0
_FORK_WAIT_SECONDS = 10.0
_connections: WeakSet[_Connection] = WeakSet()  # of all stores in this process
_connections_lock = threading.Lock()  # held while a thread adds its connection, and during a fork
_held_at_fork: list[tuple[_Connection, bool]] = []  # with whether its lock could be acquired
_lost: set[object] = set()  # identities that this process inherited in the middle of a change


def _before_fork() -> None:
    """Close every connection to a file once it is idle.

    SQLite keeps one table of locks for all connections of a process. A child inherits the table but
    not the locks: with an inherited connection open, data that the child writes through another
    connection is lost when the parent closes the file.
    """
    _connections_lock.acquire()
    latest = time.monotonic() + _FORK_WAIT_SECONDS
    for held in list(_connections):
        is_locked = held.lock.acquire(timeout=max(0.0, latest - time.monotonic()))
        _held_at_fork.append((held, is_locked))
        if is_locked and held.sqlite and not (held.in_memory or held.sqlite.in_transaction):
            held.close()


def _after_fork() -> None:
    for held, is_locked in _held_at_fork:
        if is_locked:
            held.lock.release()
    _held_at_fork.clear()
    _connections_lock.release()


def _after_fork_in_child() -> None:
    """Give up connections in the middle of a change: closing one would undo the parent's changes.

    One in memory that no other thread was using is a copy, which the child owns.
    """
    for held, is_locked in _held_at_fork:
        if held.sqlite is not None and not (is_locked and held.in_memory):
            keep_forever(held.sqlite)
            _lost.add(held.identity)
            held.sqlite = None
        if not is_locked:
            held.lock = threading.RLock()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_after_fork_in_child,
    )


def _is_open_in_process(path: Path) -> bool:
    """Return whether this process has an index file open; if so, only SQLite may open it again.

    On POSIX, closing any handle of a file releases all locks that the process holds on it. Another
    process could then delete the log under an open connection, whose writes would be lost.
    """
    identity = _identity(path)
    with _connections_lock:
        held = list(_connections)
    return identity is not None and any(one.sqlite and one.identity == identity for one in held)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode, which distinguish a file from copies such as unpacked archives."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


# Records


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The index's record of a file; ``size`` in bytes and ``mtime_ns`` are those when it was read.

    ``kind`` is ``"document"``, ``"collection"``, ``"text"`` (a program's) or ``"given"`` (passages
    that a program put in);
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


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage with the metadata that a program stored; searches set ``passage.score``."""

    passage: Passage
    metadata: dict[str, Any] = field(default_factory=dict)


def text_hash(passage: Passage) -> bytes:
    """Return a 16-byte hash of a passage's title and text, the key of its vector."""
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()[:16]


def embedded_text(passage: Passage) -> str:
    """Return the text that is embedded for a passage: its title, then its text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def index_fingerprint(embedder: str) -> str:
    """Return a hash of the embedder's fingerprint and the chunker's version.

    An index can only be updated with the same fingerprint.
    """
    return hashlib.sha256(f"{embedder}\0{CHUNKER_VERSION}".encode()).hexdigest()


_SHARED_FILE, _SHARED_FOLDER = 0o644, 0o755
_SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")  # files that SQLite keeps beside a database
_COMPANION_SUFFIX = re.compile(r"(\.(lock|new|rebuilt))*(-(wal|shm|journal))?")
_MAX_SQL_VALUES = 500  # SQLite limits the number of values in one query
_VECTORS_AT_ONCE = 20_000
_PASSAGE_TABLES = "passage AS p JOIN file AS f ON f.id = p.file_id"
_PASSAGES = f"""SELECT p.id, p.passage_id, p.text, p.title,
    CASE f.kind WHEN 'collection' THEN '' ELSE f.path END,
    p.start, p.end, p.page, p.line, p.places, p.metadata FROM {_PASSAGE_TABLES}"""
_NUMBER = (int, type(None))
_PASSAGE_TYPES = (int, str, str, str, str, int, int, _NUMBER, _NUMBER, str, object)
_FILE_TYPES = (str, int, int, str, str, str, str, int)
_MAX_DIGITS = 6
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
    """An index: one SQLite file, or memory; safe to use from several threads.

    Each thread of a process has its own connection to a file, opened on first use, so that a
    damaged file can still be rebuilt; other processes may write meanwhile. All threads share the
    one connection to memory, in turns. A forked process opens the file anew, and has a copy of a
    store in memory.

    Args:
        path: The file; ``with store.writing()`` creates it, reading a missing one is an error.
            None: a store in memory.
        shared: Let other users of this machine read the file; by default a new file is private to
            its owner.
    """

    def __init__(self, path: str | Path | None = None, *, shared: bool = False) -> None:
        self.path = Path(":memory:" if path is None else os.path.expanduser(path))
        self.shared = shared
        self._file = self.path.absolute()  # the program may change its working directory
        self._local = threading.local()
        self._own: WeakSet[_Connection] = WeakSet()
        self._writers = PerProcess(threading.Lock)  # SQLite's own wait is unfair and short
        self._memory = self._open_memory() if path is None else None

    @property
    def in_memory(self) -> bool:
        """Whether there is no file."""
        return self._memory is not None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection once it is idle; the next use of a file opens a new one."""
        with _connections_lock:
            connections = list(self._own)
        for held in connections:
            with held.lock:
                held.close()

    # Queries and transactions

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        with self._connected() as connection, _translated_errors(self.path):
            return connection.execute(query, values).fetchall()

    def rows_in(self, query: str, values: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """Run a query with ``IN ({})`` for all values, some at a time, and yield its rows."""
        values = list(values)
        for first in range(0, len(values), _MAX_SQL_VALUES):
            part = values[first : first + _MAX_SQL_VALUES]
            yield from self.rows(query.format(",".join("?" * len(part))), part)

    def run(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Run one statement once for each row of values."""
        with self._connected() as connection, _translated_errors(self.path):
            connection.executemany(statement, values)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one consistent snapshot within the block, even if others write to it."""
        self._close_if_replaced()
        with self._connected() as connection:
            if connection.in_transaction:
                yield
                return
            self.rows("BEGIN")
            try:
                yield
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep the changes of the block together at its end; an error undoes them."""
        with self._connected() as connection:
            if connection.in_transaction:
                raise ConfigurationError(
                    f"{self.path} cannot be changed during a search or another change: a condition"
                    " (where) may only read passages"
                )
        with self._writers.get(), self._connected() as connection:
            self.rows("BEGIN IMMEDIATE")
            try:
                yield
                self.set_meta("change", secrets.token_hex(8))
                self.rows("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection, opened if needed; forks and ``close`` wait until the block ends."""
        held = self._memory or self._thread_connection()
        with held.lock:
            if held.sqlite is None:
                self._open(held)
            assert held.sqlite is not None
            yield held.sqlite

    def _thread_connection(self) -> _Connection:
        held: _Connection | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = self._new_connection()
        return held

    def _new_connection(self) -> _Connection:
        held = _Connection()
        with _connections_lock:
            self._own.add(held)
            _connections.add(held)
        return held

    def _open_memory(self) -> _Connection:
        held = self._new_connection()
        held.in_memory, held.identity = True, object()
        held.sqlite = self._connect(":memory:")
        _create_schema(held.sqlite)
        return held

    def _open(self, held: _Connection) -> None:
        if not held.in_memory:
            held.identity = _identity(self._file)
        if held.identity in _lost:
            raise IndexBusyError(
                f"this process was forked in the middle of a change to {self.path} and cannot use"
                " it: fork before or after the change, or start processes by spawn"
            )
        if held.in_memory:
            raise EmptyIndexError("this collection in memory was closed: make a new one")
        with _translated_errors(self.path):
            held.sqlite = self._open_file()

    def _open_file(self) -> sqlite3.Connection:
        if self._file.is_dir():
            raise EmptyIndexError(
                f"{self.path} is a folder, not an index: name a file with path=FILE"
            )
        if not self._file.is_file():
            raise EmptyIndexError(
                f"there is no index at {self.path}: build one with `{index_command(self.path)}`"
            )
        self._require_no_symlink()
        self._check_companion_files()
        try:
            return self._connect(str(self._file))
        except sqlite3.OperationalError as error:
            if "readonly" not in str(error) and "unable to open" not in str(error):
                raise
            # WAL mode needs files beside the index, which a read-only folder forbids
            return self._connect(f"{self._file.resolve().as_uri()}?mode=ro&immutable=1")

    def _connect(self, address: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            address,
            timeout=_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=address.startswith("file:"),
        )
        try:
            if address != ":memory:":
                _require_format(connection, self.path)  # first: until then the file is untrusted
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            return connection
        except BaseException:
            connection.close()
            raise

    def _close_if_replaced(self) -> None:
        """Close this thread's connection if its file was replaced or deleted meanwhile."""
        if self.in_memory:
            return
        held = self._thread_connection()
        with held.lock:
            if held.sqlite is None or held.sqlite.in_transaction:
                return
            if held.identity != _identity(self._file):
                held.close()

    # The file as a whole

    def _require_no_symlink(self) -> None:
        """Refuse a default index path that is a symbolic link: a folder may contain hostile links.

        Raises:
            StorageError: The path, or its folder, is a symbolic link.
        """
        file = self._file
        if _is_default_location(file) and (file.is_symlink() or file.parent.is_symlink()):
            raise StorageError(
                f"{self.path} leads through a symbolic link to {file.resolve()}: delete the link,"
                " or name the target with path=FILE"
            )

    def _check_companion_files(self) -> None:
        """Refuse journal and log files that SQLite would read though it did not create them."""
        if os.path.lexists(self._companion("-journal")):
            raise corrupt_index_error(
                self.path, "there is a journal beside it, which ragaccel never writes"
            )
        for ending in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(self._companion(ending).lstat().st_mode):
                    raise corrupt_index_error(
                        self.path, f"its {ending[1:]} file is not a regular file"
                    )

    def _companion(self, ending: str) -> Path:
        return self._file.with_name(self._file.name + ending)

    def owns(self, path: Path) -> bool:
        """Return whether a file is the index, or one of its log, lock and temporary files."""
        rest = path.name.removeprefix(self._file.name)
        is_ours = path.name.startswith(self._file.name) and _COMPANION_SUFFIX.fullmatch(rest)
        return bool(is_ours) and path.parent.resolve() == self._file.parent.resolve()

    @contextmanager
    def writing(self, *, wait_seconds: float = 0.0) -> Iterator[None]:
        """Hold the lock of the one writer within the block; create the file if it does not exist.

        Args:
            wait_seconds: How long to wait for another holder of the lock.

        Raises:
            IndexBusyError: Another process or thread holds the lock.
            StorageError: The folder cannot be written to.
            IndexUnusableError: The file there is not an index of ragaccel.
        """
        if self.in_memory:
            yield
            return
        with self._write_lock(wait_seconds):
            self._create()
            yield

    @contextmanager
    def rebuild(self, made_with: Mapping[str, str], kept: Mapping[str, str]) -> Iterator[Store]:
        """Yield a new store that replaces this one when the block ends without an error.

        Otherwise the old file stays unchanged, and the new one stays for the next attempt.

        Args:
            made_with: Settings (``meta``) of the new store. An interrupted attempt with the
                same settings is resumed if it was made on this machine; a copy that came with a
                folder is discarded.
            kept: Further settings, which may differ between attempts.

        Raises:
            IndexBusyError, StorageError, IndexUnusableError: As in ``writing``.
        """
        new_file = self._companion(".rebuilt")
        with self._write_lock(), Store(new_file, shared=self.shared) as fresh:
            if not fresh._is_attempt(made_with):
                fresh.discard()
            with fresh.writing():
                settings = {**made_with, **kept, _REBUILT_AS: str(_identity(new_file))}
                for key, value in settings.items():
                    fresh.set_meta(key, value)
                yield fresh
            fresh.close()
            fresh._companion(".lock").unlink(missing_ok=True)
            self._replace_by(new_file)

    def _is_attempt(self, made_with: Mapping[str, str]) -> bool:
        """Return whether this is an unfinished rebuild with these settings, of this machine."""
        wanted = {**made_with, _REBUILT_AS: str(_identity(self._file))}
        try:
            return self._file.is_file() and all(self.meta(k) == v for k, v in wanted.items())
        except RagaccelError:
            return False

    def _replace_by(self, new_file: Path) -> None:
        with _translated_errors(self.path):
            log = new_file.with_name(new_file.name + "-wal")
            if log.exists() and log.stat().st_size:  # SQLite hides that its last checkpoint failed
                raise StorageError(
                    f"the disk is full, or {new_file} cannot grow: free some space and run the"
                    " same command again; the old index is unchanged"
                )
            with suppress(IndexUnusableError, EmptyIndexError):
                ((is_busy, *_),) = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
                if is_busy:
                    raise IndexBusyError(
                        f"another process is reading {self.path}: wait until it ends, then run the"
                        " same command again, which resumes where it stopped"
                    )
            self._delete(keep_file=True)
            new_file.replace(self._file)

    def discard(self) -> None:
        """Delete the file, and the new file of an unfinished ``rebuild``.

        Raises:
            IndexBusyError, StorageError, IndexUnusableError: As in ``writing``.
        """
        with self._write_lock(), _translated_errors(self.path):
            self._delete()
            for ending in (*_SQLITE_SUFFIXES, ".lock", ""):
                self._companion(f".rebuilt{ending}").unlink(missing_ok=True)

    def copy_to(self, path: str | Path) -> None:
        """Copy the content as it is now to a file, replacing an index there.

        Others may write meanwhile. Copying a file to itself does nothing.

        Raises:
            StorageError: The path cannot be written to.
            IndexUnusableError: The file there is not an index of ragaccel.
        """
        target = Store(path, shared=self.shared)
        if target._file.resolve() == self._file.resolve():
            return
        self._close_if_replaced()
        with (
            target._write_lock(_WAIT_SECONDS),
            _translated_errors(target.path),
            target._replacing() as copy,
            self._connected() as connection,
        ):
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = WAL")

    def _create(self) -> None:
        """Create an empty index if there is no file, or an empty one."""
        with _translated_errors(self.path):
            if not (self._file.exists() and self._file.stat().st_size):
                with self._replacing() as connection:
                    _create_schema(connection)
                    connection.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def _replacing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection to a new file that replaces this one, so that none is ever partial."""
        new_file = self._companion(".new")
        for ending in (*_SQLITE_SUFFIXES, ""):
            self._companion(f".new{ending}").unlink(missing_ok=True)
        _create_empty(new_file, shared=self.shared)  # SQLite gives its permissions to the log
        with closing(sqlite3.connect(new_file)) as connection:
            yield connection
        self._delete()
        new_file.replace(self._file)

    def _delete(self, *, keep_file: bool = False) -> None:
        """Delete the index; first its log, so that the log is never replayed onto a new file."""
        self.close()
        for ending in _SQLITE_SUFFIXES if keep_file else (*_SQLITE_SUFFIXES, ""):
            self._companion(ending).unlink(missing_ok=True)

    @contextmanager
    def _write_lock(self, wait_seconds: float = 0.0) -> Iterator[None]:
        """Hold SQLite's write lock on a file beside the index.

        ``BEGIN EXCLUSIVE`` would also need the lock of all readers: processes that try at the same
        time would all be refused.
        """
        if self.in_memory:
            raise ConfigurationError("an index in memory has no file to replace: make a new one")
        if self._file.is_dir():
            raise StorageError(f"{self.path} is a folder: name a file with path=FILE")
        self._require_no_symlink()
        if not _is_open_in_process(self._file) and _is_foreign(self._file):
            raise IndexUnusableError(
                f"{self.path} is not a ragaccel index, so it is not replaced: name another file"
                " with path=FILE, or delete this one yourself if nobody needs it"
            )
        with _translated_errors(self.path):
            _make_folder(self._file.parent, shared=self.shared)
            if self.shared:
                self._make_readable()
            lock_file = self._companion(".lock")
            _create_lock_file(lock_file, shared=self.shared)
            lock = sqlite3.connect(lock_file, timeout=wait_seconds)
        with closing(lock):
            try:
                with _translated_errors(self.path):
                    lock.execute("BEGIN IMMEDIATE")
            except IndexBusyError:
                raise IndexBusyError(
                    f"another process is indexing into {self.path}: wait until it ends, or stop it;"
                    " searching works meanwhile"
                ) from None
            yield

    def _make_readable(self) -> None:
        """Let other users read the index's files and folder, if this user owns them."""
        paths = [self._companion(ending) for ending in ("", "-wal", "-shm", ".lock")]
        if self._file.parent.name == OWN_FOLDER:
            paths.append(self._file.parent)
        for path in paths:
            with suppress(OSError):  # missing, or owned by another user
                readable = _SHARED_FOLDER if path.is_dir() else _SHARED_FILE
                if not path.is_symlink():
                    path.chmod(stat.S_IMODE(path.stat().st_mode) | readable)

    # Settings

    def meta(self, key: str, default: str = "") -> str:
        """Return a setting, e.g. ``folder`` or ``fingerprint``; ``default`` if it was never set."""
        found = self.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(found[0][0]) if found else default

    def set_meta(self, key: str, value: str) -> None:
        """Store a setting of the index."""
        self.rows("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

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
        found = _from_json(self.meta(key, "[]"))
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise corrupt_index_error(self.path, f"its {key} is not a list of names")
        return found

    def state(self) -> tuple[str, str]:
        """Return (epoch, change): a rebuild renews both tokens, any change renews the second.

        Raises:
            EmptyIndexError: The index was deleted since it was opened.
        """
        self._close_if_replaced()
        return self.meta("epoch"), self.meta("change")

    def sources(self) -> list[str]:
        """Return the folder and the collections that the index was built from, absolute."""
        folder = self.meta("folder")
        files = self.files().items()
        collections = [path for path, file in files if file.kind == "collection"]
        return [folder, *collections] if folder else collections

    def left_out(self) -> list[str]:
        """Return the paths of excluded documents; see ``leave_out``."""
        return self.meta_list("left_out")

    def leave_out(self, paths: Sequence[str], *, undo: bool = False) -> None:
        """Exclude documents from future indexing runs; with ``undo``, include them again."""
        others = [path for path in self.left_out() if path not in set(paths)]
        known = others if undo else [*others, *dict.fromkeys(paths)]
        self.set_meta("left_out", json.dumps(known))

    # Who made the vectors

    def adopt(self, embedder: str, dimension: int = 0) -> None:
        """Record that a program puts passages in, with which embedder, and the vectors' dimension.

        Another dimension makes readers drop the vectors they hold; with 0, any may be put in next.
        """
        if dimension != self.meta_number("dimension"):
            self.set_meta("epoch", secrets.token_hex(8))
        self.set_meta("embedder", embedder)
        self.set_meta("filled_by", _PROGRAM)
        self.set_meta("dimension", str(dimension))

    def is_filled_by_program(self) -> bool:
        """Return whether a program puts in the passages; indexing runs then refuse the store."""
        return self.meta("filled_by") == _PROGRAM

    def is_blank(self) -> bool:
        """Return whether the file is missing, empty, or an index that was never filled."""
        if not (self.in_memory or (self._file.exists() and self._file.stat().st_size)):
            return True
        return not (self.is_filled_by_program() or self.meta("fingerprint"))

    def require_embedder(self, embedder: str) -> None:
        """Refuse an index whose vectors are known to come from an embedder of another fingerprint.

        Raises:
            IndexUnusableError: Another embedder made the vectors; the message says how to rebuild.
        """
        if not self.is_filled_by_program():
            if self.meta("fingerprint") not in ("", index_fingerprint(embedder)):
                self.raise_mismatch("another embedding model or version")
            return
        made_with = self.meta("embedder")
        if made_with not in ("", embedder):
            raise IndexUnusableError(
                f"{self.path} holds vectors of another embedding model, {made_with!r}, not of"
                f" {embedder!r}: open it with {made_with!r}, or put the passages into a new file"
            )

    def require_dimension(self, given: int) -> None:
        """Refuse vectors of another dimension than those of the index; an empty one takes any.

        Raises:
            IndexUnusableError: The dimensions differ.
        """
        held = self.meta_number("dimension")
        if held not in (0, given):
            raise IndexUnusableError(
                f"{self.path} holds vectors of {held} numbers, not of {given}: use the embedding"
                " model that made them, or put the passages into a new file"
            )

    def raise_mismatch(self, made_with: str) -> NoReturn:
        """Raise the error that the index has other settings, with the command to rebuild it.

        ``made_with`` names these settings in the message.

        Raises:
            IndexUnusableError: Always.
        """
        folder = collection = ""
        # a default location names its folder by itself, even if that was moved
        if not _is_default_location(self.path):
            sources = self.sources()
            folder = next((name for name in sources if Path(name).is_dir()), "")
            files = (name for name in sources if Path(name).is_file())
            collection = "" if folder else next(files, "")
        command = index_command(self.path, folder=folder, collection=collection, rebuild=True)
        raise IndexUnusableError(
            f"{self.path} was made with {made_with}: rebuild it with `{command}`, or use the"
            " settings it was made with"
        )

    # Writing files, passages and vectors

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

    def put_passages(self, file_id: int, passages: Iterable[tuple[Passage, bytes, str]]) -> None:
        """Add passages to a file, each as (passage, float16 vector, metadata as JSON)."""
        self.run(
            "INSERT INTO passage (file_id, passage_id, start, end, page, line, title, text,"
            " places, text_hash, vector, metadata) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ((file_id, *_passage_columns(p), *more) for p, *more in passages),
        )

    def drop_passages(self, file_id: int) -> None:
        """Remove the passages of a file, given by row id; the file's record stays."""
        self.rows("DELETE FROM passage WHERE file_id = ?", (file_id,))

    def drop_ids(self, passage_ids: Iterable[str]) -> None:
        """Remove passages by their ids."""
        self.run("DELETE FROM passage WHERE passage_id = ?", ((name,) for name in passage_ids))

    def drop_files(self, paths: Iterable[str]) -> None:
        """Remove files and, by cascade, their passages."""
        self.run("DELETE FROM file WHERE path = ?", ((path,) for path in paths))

    def remove(self, paths: Iterable[str]) -> int:
        """Remove files and their passages in one transaction; return how many files existed."""
        with self.transaction():
            before = self._count("file")
            self.drop_files(paths)
            return before - self._count("file")

    def put_unread(self, unread: Mapping[str, UnreadFile]) -> None:
        """Replace the files, by path, that ``unread`` returns."""
        if unread == self.unread():
            return
        with self.transaction():
            self.rows("DELETE FROM unread")
            rows = ((f.path, f.kind, f.reason, f.size, f.mtime_ns) for f in unread.values())
            self.run("INSERT INTO unread VALUES (?, ?, ?, ?, ?)", rows)

    def stage(self, path: str, vectors: Mapping[bytes, bytes]) -> None:
        """Store vectors of a file that is partly indexed; searches do not see them."""
        placeholders = ",".join(["(?, ?, ?)"] * len(vectors))  # one statement is atomic
        values = [value for key, vector in vectors.items() for value in (key, path, vector)]
        self.rows(f"INSERT OR REPLACE INTO staged VALUES {placeholders}", values)

    def unstage(self, path: str | None = None) -> None:
        """Delete the vectors staged for a file, or for all files."""
        chosen, values = ("", ()) if path is None else (" WHERE path = ?", (path,))
        if self.rows(f"SELECT 1 FROM staged{chosen} LIMIT 1", values):
            self.rows(f"DELETE FROM staged{chosen}", values)

    # Reading files, passages and vectors

    def files(self) -> dict[str, FileRecord]:
        """Return the record of every file in the index, by path."""
        rows = self.rows(
            "SELECT path, size, mtime_ns, sha256, status, kind, title,"
            " (SELECT count(*) FROM passage WHERE file_id = file.id) FROM file ORDER BY path"
        )
        return {row[0]: FileRecord(*row) for row in self._typed(rows, _FILE_TYPES, "file")}

    def unread(self) -> dict[str, UnreadFile]:
        """Return, by path, files that failed, were skipped or have an uncertain encoding.

        The last indexing run recorded them.
        """
        rows = self.rows("SELECT path, kind, reason, size, mtime_ns FROM unread ORDER BY path")
        types = (str, str, str, int, int)
        return {row[0]: UnreadFile(*row) for row in self._typed(rows, types, "file")}

    def count_passages(self) -> int:
        """Count the passages of all files of the index."""
        return self._count("passage")

    def _count(self, table: str) -> int:
        return int(self.rows(f"SELECT count(*) FROM {table}")[0][0])

    def passages(self, keys: Iterable[int]) -> dict[int, StoredPassage]:
        """Return passages by row id; missing ones are left out."""
        return dict(self._passages("p.id", keys))

    def passages_by_id(self, passage_ids: Iterable[str]) -> dict[str, StoredPassage]:
        """Return passages by id; missing ones are left out."""
        found = self._passages("p.passage_id", passage_ids)
        return {item.passage.passage_id: item for _, item in found}

    def document(self, path: str) -> list[StoredPassage]:
        """Return the passages of a file, in the order of its text."""
        return [item for _, item in self._passages("f.path", [path])]

    def _passages(self, column: str, values: Iterable[Any]) -> Iterator[tuple[int, StoredPassage]]:
        query = f"{_PASSAGES} WHERE {column} IN ({{}}) ORDER BY p.start, p.id"
        for row in self._typed(self.rows_in(query, values), _PASSAGE_TYPES, "passage"):
            yield row[0], self._stored_passage(row)

    def _stored_passage(self, row: Sequence[Any]) -> StoredPassage:
        *columns, locations, metadata = row
        more = _from_json(metadata) if metadata != "" else {}
        if not isinstance(more, dict):
            raise corrupt_index_error(
                self.path, f"the metadata of passage {row[1]!r} is not a JSON object"
            )
        passage = Passage(*columns[1:])
        try:
            if locations:
                passage = replace(passage, locations=_parse_locations(locations))
        except ValueError:
            raise corrupt_index_error(
                self.path, f"the page or line numbers of passage {row[1]!r} are invalid"
            ) from None
        return StoredPassage(passage, more)

    def _typed(
        self, rows: Iterable[Sequence[Any]], types: Sequence[Any], what: str
    ) -> Iterator[Sequence[Any]]:
        """Refuse rows with values of other types, since SQLite stores any type in any column."""
        for row in rows:
            if not all(isinstance(value, kind) for value, kind in zip(row, types, strict=True)):
                raise corrupt_index_error(self.path, f"a value of a {what} has the wrong type")
            yield row

    def hashes_of(self, path: str) -> dict[str, bytes]:
        """Return the ``text_hash`` of every passage of a file, by passage id."""
        query = f"SELECT p.passage_id, p.text_hash FROM {_PASSAGE_TABLES} WHERE f.path = ?"
        return dict(self.rows(query, (path,)))

    def paths_of(self, passage_ids: Iterable[str]) -> dict[str, str]:
        """Return the file path of each passage id; unknown ids are left out."""
        query = f"SELECT p.passage_id, f.path FROM {_PASSAGE_TABLES} WHERE p.passage_id IN ({{}})"
        return dict(self.rows_in(query, passage_ids))

    def known_vectors(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the vectors of those texts that are indexed or staged, by ``text_hash``."""
        query = "SELECT text_hash, vector FROM {table} WHERE text_hash IN ({{}})"
        known = dict(self.rows_in(query.format(table="staged"), hashes))
        return known | dict(self.rows_in(query.format(table="passage"), hashes))

    def keys(self) -> NDArray[np.int64]:
        """Return the row ids of all passages, ascending."""
        rows = self.rows("SELECT id FROM passage")  # SQLite scans a smaller index, sorted by file
        return np.sort(np.array([key for (key,) in rows], dtype=np.int64))

    def vectors(
        self, keys: Sequence[int] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield (row ids, vectors) of all passages, or of the given ones, in batches.

        Raises:
            IndexUnusableError: A vector does not have D numbers.
        """
        size = 2 * self.meta_number("dimension")
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
            found, packed = zip(*rows, strict=True)
            if not size or any(not isinstance(one, bytes) or len(one) != size for one in packed):
                raise corrupt_index_error(self.path, "a vector has the wrong size")
            vectors = np.frombuffer(b"".join(packed), dtype="<f2").reshape(len(packed), -1)
            yield np.array(found, dtype=np.int64), vectors.astype(np.float32)

    def vectors_by_key(self, keys: Iterable[int]) -> dict[int, NDArray[np.float32]]:
        """Return the vectors [D] of passages by row id; missing ones are left out."""
        parts = self.vectors(list(keys))
        return {
            key: row for found, rows in parts for key, row in zip(found.tolist(), rows, strict=True)
        }

    def search_text(self, question: str, limit: int) -> list[tuple[int, float]]:
        """Return the passages that share words with a question as (row id, BM25 score), best first.

        Any word may match; the stop words of the question's language are searched for only if there
        are no other words.
        The question is quoted: operators of SQLite's query language have no effect.
        """
        words = list(dict.fromkeys(_WORD.findall(question.lower())))
        language = language_of(question)
        frequent = _STOP_WORDS if language == "English" else frequent_words(language)
        words = [word for word in words if word not in frequent] or words
        query = " OR ".join(f'"{word}"' for word in words[:_MAX_WORDS])
        if not query:
            return []
        rows = self.rows(
            "SELECT rowid, bm25(words, ?, 1.0) AS cost FROM words WHERE words MATCH ?"
            " ORDER BY cost, rowid LIMIT ?",
            (_TITLE_WEIGHT, query, limit),
        )
        return [(key, -cost) for key, cost in rows]

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
        except (StorageError, IndexBusyError):
            pass  # only who may write the file can compare the words
        return problems


def _passage_columns(p: Passage) -> tuple[str | int | bytes | None, ...]:
    locations = " ".join(f"{offset}:{number}" for offset, number in p.locations)
    return (p.passage_id, p.start, p.end, p.page, p.line, p.title, p.text, locations, text_hash(p))


def _parse_locations(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (pair.partition(":") for pair in text.split())
    return tuple((int(offset), int(number)) for offset, _, number in pairs)


def _from_json(text: str) -> Any:
    """Return the value of JSON text, or None if it is invalid."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _create_schema(connection: sqlite3.Connection) -> None:
    epoch = f"INSERT INTO meta VALUES ('epoch', '{secrets.token_hex(8)}');"
    connection.executescript(f"BEGIN; {SCHEMA} {epoch} COMMIT;")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _make_folder(folder: Path, *, shared: bool) -> None:
    """Create a folder if it does not exist, private to its owner unless ``shared``."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_SHARED_FOLDER if shared else 0o700, exist_ok=True)


def _create_empty(path: Path, *, shared: bool) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(path, flags, _SHARED_FILE if shared else 0o600))


_creation_lock = threading.Lock()


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
