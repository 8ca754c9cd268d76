"""The schema of an index file, and what a damaged, busy or full one is reported as."""

from __future__ import annotations

import os
import secrets
import shlex
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragaccel.errors import IndexBusyError, IndexCorruptError, IndexWriteError, RagaccelError

if TYPE_CHECKING:
    from collections.abc import Iterator

APPLICATION_ID = 0x52414741  # "RAGA": tells our files from other SQLite files
SCHEMA_VERSION = 3
OWN_FOLDER = ".ragaccel"

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE file (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,           -- 'document', 'collection': a file of ready-made passages, or
                                  -- 'given': what a program put in
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
    vector BLOB NOT NULL,         -- float16, little-endian
    metadata TEXT NOT NULL DEFAULT '',     -- JSON, what a program keeps with it
    places TEXT NOT NULL DEFAULT ''        -- "offset:number …": where its page or line changes
);
CREATE INDEX passage_of_file ON passage (file_id);
CREATE INDEX passage_by_text ON passage (text_hash);
CREATE TABLE unread (             -- what of the folder the last run could not read, or passed over
    path TEXT PRIMARY KEY,
    kind TEXT NOT NULL,           -- 'failed', 'doubtful': read by a guess, or 'skipped'
    reason TEXT NOT NULL,
    size INTEGER NOT NULL,        -- of the file then, with mtime_ns; 0 where they do not matter
    mtime_ns INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE staged (             -- vectors for a file that is not whole yet: no search sees them
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
    """Where the index of a folder lives: ``FOLDER/.ragaccel/index.db``."""
    return Path(folder) / OWN_FOLDER / "index.db"


def default_collection_path(collection: Path) -> Path:
    """Where the index of a collection lives: ``.ragaccel/NAME.db`` beside it."""
    return collection.parent / OWN_FOLDER / f"{collection.name}.db"


def is_own_place(path: Path) -> bool:
    """Whether a file is where our own indexes live, and so ours whatever it holds."""
    return path.parent.name == OWN_FOLDER and path.suffix == ".db"


def require_no_link(path: Path) -> None:
    """Refuse an index beside its documents that is elsewhere: links come along with a folder, too.

    Raises:
        IndexWriteError: It says how the other place can be used.
    """
    if is_own_place(path) and (path.is_symlink() or path.parent.is_symlink()):
        raise IndexWriteError(
            f"{path} is behind a link to {path.resolve()}: delete the link, or give that place"
            " itself with --index PATH"
        )


def index_command(
    path: Path, *, folder: str = "", collection: str = "", rebuild: bool = False
) -> str:
    """The command that makes an index, or makes it anew, ready to be pasted.

    ``folder`` or ``collection`` is what it is made from; where neither is known, the place of the
    index may tell.
    """
    if is_own_place(path) and not (folder or collection):
        home = path.parent.parent
        if path.name == "index.db":
            folder = str(home)
        else:
            collection = str(home / path.stem)
    default = path
    if collection:
        made_from = f"--passages {shlex.quote(collection)}"
        default = default_collection_path(Path(collection))
    else:
        made_from = shlex.quote(folder) if folder else "FOLDER"
        if folder:
            default = default_index_path(folder)
    elsewhere = path.absolute() != default.absolute() or not (folder or collection)
    place = f" --index {shlex.quote(str(path))}" if elsewhere else ""
    return f"ragaccel index {made_from}{place}{' --rebuild' if rebuild else ''}"


def new_token() -> str:
    """What is like no other, in forked processes too, which SQLite's own chance is not."""
    return secrets.token_hex(8)


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours: busy, full, not writable or damaged.

    What is none of the first three is damage: nothing that is asked of an index is wrong in itself.
    """
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.OperationalError as error:
        raise _named(path, error) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise damaged(path, error) from error


def _named(path: Path, error: sqlite3.OperationalError) -> RagaccelError:
    message = str(error)
    if "locked" in message or "busy" in message:
        return IndexBusyError(
            f"another process is writing to {path}: wait for it to end, then try again"
        )
    if "full" in message or "disk I/O" in message:
        return IndexWriteError(
            f"the disk is full, or {path} cannot grow: free some space and run the same"
            " command again; everything indexed before is kept"
        )
    if ("unable to open" in message or "readonly" in message) and _is_private(path):
        return IndexWriteError(
            f"{path} is another user's: its owner may share it with `{index_command(path)}"
            " --shared`, or keep an index of your own with --index PATH"
        )
    if "readonly" in message or "unable to open" in message:
        return IndexWriteError(
            f"cannot write {path}: change its permissions, or keep the index elsewhere with"
            " --index PATH"
        )
    return damaged(path, error)


def _is_private(path: Path) -> bool:
    """Whether a file is there that this user may not read."""
    return path.is_file() and not os.access(path, os.R_OK)


def is_foreign(path: Path) -> bool:
    """Whether a file outside our own places lacks the mark of our indexes in its header."""
    if is_own_place(path) or path.name.endswith(".rebuilt") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except OSError:
        return False
    return bool(header) and header[68:] != APPLICATION_ID.to_bytes(4, "big")


def damaged(path: Path, cause: object) -> IndexCorruptError:
    """The error that says that a file is damaged, and what to do."""
    if is_foreign(path):
        return IndexCorruptError(f"{path} is no index of ragaccel: give another with --index PATH")
    command = index_command(path, rebuild=True)
    filled = (
        ""
        if is_own_place(path)
        else "; if a program put its passages in, delete it and put them in again"
    )
    return IndexCorruptError(
        f"the index {path} is damaged ({cause}): make it anew with `{command}`{filled}"
    )
