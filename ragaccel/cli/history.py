"""The history of questions and answers, in one SQLite file."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.errors import RagaccelError
from ragaccel.paths import data_dir, ensure_parent_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversation (
  id INTEGER PRIMARY KEY, source TEXT NOT NULL, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS turn (
  id INTEGER PRIMARY KEY, conversation INTEGER NOT NULL REFERENCES conversation(id),
  asked REAL NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL DEFAULT '',
  state TEXT NOT NULL, model TEXT NOT NULL DEFAULT '', details TEXT NOT NULL DEFAULT '{}');
CREATE INDEX IF NOT EXISTS turn_of ON turn(conversation, id);
"""
_PRIVATE = 0o600
UNFINISHED, ANSWERED, INTERRUPTED, FAILED = "unfinished", "answered", "interrupted", "failed"


class HistoryError(RagaccelError):
    """The error that the history cannot be read or written; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, an entry of the history; ``state`` tells if it is complete."""

    turn_id: int
    conversation: int
    source: str
    asked: float
    question: str
    answer: str
    state: str
    model: str
    details_json: str = "{}"

    @property
    def details(self) -> dict[str, Any]:
        """The sources, copied spans, timings and acceptance of the answer, from its JSON."""
        return dict(json.loads(self.details_json))


def default_history_path() -> Path:
    """Return the path of ``history.db`` in the data directory."""
    return data_dir() / "history.db"


class History:
    """The log of questions and answers, grouped by conversation.

    A question is written before it is answered, so that it is logged even if the process is
    killed. Several processes may write at once (WAL). Only the owner may read the file and its WAL
    files, from the moment they are created.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_history_path()
        with self._translate_errors():
            ensure_parent_dir(self.path)
            _make_private(self.path)
            self._db = sqlite3.connect(self.path, timeout=10.0, isolation_level=None)
            self._prepare()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.OperationalError) and re.search("locked|full", str(error)):
                raise HistoryError(
                    f"the history {self.path} cannot be used now: {error}"
                ) from error
            raise HistoryError(
                f"the history {self.path} cannot be used ({error}): move that file away, or set"
                " RAGACCEL_HOME to another folder"
            ) from error

    def _run(self, query: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        with self._translate_errors():
            return self._db.execute(query, values)

    def _rows(self, query: str, values: tuple[object, ...]) -> list[Any]:
        with self._translate_errors():
            return self._db.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _prepare(self) -> None:
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error:
            self._db.close()
            raise

    def open_conversation(self, source: str) -> int:
        """Store a new conversation about a folder or index; return its number."""
        row = self._run(
            "INSERT INTO conversation (source, started) VALUES (?, ?)",
            (_escape_surrogates(source), time.time()),
        )
        return int(row.lastrowid or 0)

    def last_conversation(self, source: str) -> int | None:
        """Return the number of the latest conversation about a folder or index, or None."""
        rows = self._rows(
            "SELECT c.id FROM conversation c JOIN turn t ON t.conversation = c.id"
            " WHERE c.source = ? ORDER BY t.id DESC LIMIT 1",
            (_escape_surrogates(source),),
        )
        return int(rows[0][0]) if rows else None

    def begin(self, conversation: int, question: str, model: str = "") -> int:
        """Write a question and return the number of its turn."""
        row = self._run(
            "INSERT INTO turn (conversation, asked, question, state, model) VALUES (?, ?, ?, ?, ?)",
            (conversation, time.time(), _escape_surrogates(question), UNFINISHED, model),
        )
        return int(row.lastrowid or 0)

    def finish(
        self, turn_id: int, answer: str, state: str, details: dict[str, Any] | None = None
    ) -> None:
        """Write a turn's answer, complete or not, its state and its details."""
        self._run(
            "UPDATE turn SET answer = ?, state = ?, details = ? WHERE id = ?",
            (_escape_surrogates(answer), state, json.dumps(details or {}, default=str), turn_id),
        )

    def exchanges(self, conversation: int) -> list[tuple[str, str]]:
        """Return the answered questions of a conversation with their answers, oldest first."""
        return self._rows(
            "SELECT question, answer FROM turn WHERE conversation = ? AND state = ? ORDER BY id",
            (conversation, ANSWERED),
        )

    def recent(
        self, limit: int = 10, containing: str = "", conversation: int | None = None
    ) -> list[Turn]:
        """Return the latest turns, newest first, whose question or answer contains a text."""
        rows = self._rows(
            "SELECT t.id, t.conversation, c.source, t.asked, t.question, t.answer, t.state,"
            " t.model, t.details FROM turn t JOIN conversation c ON c.id = t.conversation"
            " WHERE (instr(lower(t.question), lower(?1)) OR instr(lower(t.answer), lower(?1))"
            " OR ?1 = '') AND (?2 IS NULL OR t.conversation = ?2) ORDER BY t.id DESC LIMIT ?3",
            (_escape_surrogates(containing), conversation, limit),
        )
        return [Turn(*row) for row in rows]


def _make_private(path: Path) -> None:
    """Let only the owner read a file; create it empty if it is missing.

    SQLite gives its WAL files the same mode. An existing file is not opened, because closing it
    would release the locks that this process holds on it.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE))
    for file in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        with suppress(FileNotFoundError):
            if stat.S_IMODE(file.stat().st_mode) & ~_PRIVATE:
                file.chmod(_PRIVATE)


def _escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which SQLite cannot store and odd file names contain."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
