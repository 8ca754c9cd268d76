"""The schema of an index file, and what a damaged, busy or full one is reported as."""

from __future__ import annotations

import shlex
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import IndexBusyError, IndexCorruptError, IndexWriteError

if TYPE_CHECKING:
    from collections.abc import Iterator

APPLICATION_ID = 0x52414741  # "RAGA": tells our files from other SQLite files
SCHEMA_VERSION = 1
OWN_FOLDER = ".ragaccel"

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('epoch', hex(randomblob(8)));
CREATE TABLE file (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,           -- 'document', or 'collection' for ready-made passages
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    sha256 TEXT NOT NULL,         -- of its bytes; '' while a collection is only partly in
    status TEXT NOT NULL,         -- 'indexed' or 'binary'
    title TEXT NOT NULL DEFAULT ''
);
CREATE TABLE passage (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice: the key of its vector in memory
    passage_id TEXT NOT NULL UNIQUE,
    file_id INTEGER NOT NULL REFERENCES file (id) ON DELETE CASCADE,
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    page INTEGER,
    line INTEGER,
    title TEXT NOT NULL,
    text TEXT NOT NULL,
    text_hash BLOB NOT NULL,      -- of what is embedded: the title and the text
    vector BLOB NOT NULL          -- float16, little-endian
);
CREATE INDEX passage_of_file ON passage (file_id);
CREATE INDEX passage_by_text ON passage (text_hash);
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
    """Where the index of a folder lives: ``FOLDER/.ragaccel/index.db``."""
    return Path(folder) / OWN_FOLDER / "index.db"


def is_own_place(path: Path) -> bool:
    """Whether a file is where a folder's own index lives, and so ours whatever it holds."""
    return path.name == "index.db" and path.parent.name == OWN_FOLDER


def rebuild_command(path: Path, folder: str = "") -> str:
    """The command that makes an index anew, ready to be pasted."""
    if is_own_place(path):
        return f"ragaccel index {shlex.quote(str(path.parent.parent))} --rebuild"
    place = shlex.quote(folder) if folder else "FOLDER"
    return f"ragaccel index {place} --index {shlex.quote(str(path))} --rebuild"


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours: busy, full, not writable or damaged."""
    try:
        yield
    except sqlite3.OperationalError as error:
        message = str(error)
        if "locked" in message or "busy" in message:
            raise IndexBusyError(
                f"another process is writing to {path}: wait for it to end, then try again"
            ) from error
        if "full" in message or "disk I/O" in message:
            raise IndexWriteError(
                f"the disk is full, or {path} cannot grow: free some space and run the same"
                " command again; everything indexed before is kept"
            ) from error
        if "readonly" in message or "unable to open" in message:
            raise IndexWriteError(
                f"cannot write {path}: change its permissions, or keep the index elsewhere with"
                " --index PATH"
            ) from error
        if "no such" in message or "malformed" in message:
            raise _damaged(path, error) from error
        raise
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise
    except sqlite3.DatabaseError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> IndexCorruptError:
    return IndexCorruptError(
        f"the index {path} is damaged ({error}): make it anew with `{rebuild_command(path)}`"
    )
