"""The history of questions and answers, in one SQLite file, and the command logs."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Option

from ragaccel.cli.settings import Json
from ragaccel.cli.terminal import Terminal, printable
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


# SQLite's errors of a disk or folder; others are of the file's content.
_UNWRITABLE = "disk I/O error|is full|unable to open|readonly"


class History:
    """The log of questions and answers, grouped by conversation.

    A question is written before it is answered, so that it is logged even if the process is
    killed. Several processes may write at once (WAL). Only the owner may read the file and its WAL
    files, from the moment they are created.
    """

    def __init__(self, path: Path | None = None) -> None:
        import sqlite3

        self.path = path or default_history_path()
        with self._translate_errors():
            ensure_parent_dir(self.path)
            _make_private(self.path)
            self._db = sqlite3.connect(self.path, timeout=10.0, isolation_level=None)
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.executescript(_SCHEMA)
            except sqlite3.Error:
                self._db.close()
                raise

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        import sqlite3

        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.OperationalError) and re.search("locked|full", str(error)):
                raise HistoryError(
                    f"the history {self.path} cannot be used now: {error}"
                ) from error
            if isinstance(error, OSError) or re.search(_UNWRITABLE, str(error)):
                remedy = "free some space, allow writing there"
            else:
                remedy = "move that file away"
            cause = getattr(error, "strerror", None) or error
            raise HistoryError(
                f"the history {self.path} cannot be used ({cause}): {remedy}, or set RAGACCEL_HOME"
                " to another folder"
            ) from error

    def _insert(self, query: str, values: tuple[object, ...]) -> int:
        with self._translate_errors():
            return int(self._db.execute(query, values).lastrowid or 0)

    def _rows(self, query: str, values: tuple[object, ...]) -> list[Any]:
        with self._translate_errors():
            return self._db.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def open_conversation(self, source: str) -> int:
        """Store a new conversation about a folder or index; return its number."""
        return self._insert(
            "INSERT INTO conversation (source, started) VALUES (?, ?)",
            (_escape_surrogates(source), time.time()),
        )

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
        return self._insert(
            "INSERT INTO turn (conversation, asked, question, state, model) VALUES (?, ?, ?, ?, ?)",
            (conversation, time.time(), _escape_surrogates(question), UNFINISHED, model),
        )

    def finish(
        self, turn_id: int, answer: str, state: str, details: dict[str, Any] | None = None
    ) -> None:
        """Write a turn's answer, complete or not, its state and its details."""
        self._rows(
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


class Conversation:
    """A conversation about one source, written to the history as it goes.

    If the history cannot be written (a damaged file, a full disk), the terminal shows one warning
    and the conversation continues without the history.
    """

    def __init__(self, terminal: Terminal, source: str, *, resume: bool = False) -> None:
        self._terminal = terminal
        self._source = source
        self._exchanges: list[tuple[str, str]] = []
        self._question = ""
        self._turn: int | None = None
        self.number: int | None = None
        self._history: History | None = None
        with self._disable_on_error():
            self._history = History()
            self.number = self._history.last_conversation(source) if resume else None
            if self.number is not None:
                self._exchanges = self._history.exchanges(self.number)
            elif resume:
                terminal.note(
                    "there is no earlier conversation about these documents; a new one begins"
                )

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation so far as chat messages, oldest first."""
        return [
            {"role": role, "content": content}
            for exchange in self._exchanges
            for role, content in zip(("user", "assistant"), exchange, strict=True)
        ]

    def start_over(self) -> None:
        """Begin a new conversation; the history keeps the old one."""
        self._exchanges, self.number = [], None

    def begin(self, question: str, model: str) -> None:
        """Write a question to the history, before it is answered."""
        self._question, self._turn = question, None
        with self._disable_on_error():
            if self._history is not None:
                if self.number is None:
                    self.number = self._history.open_conversation(self._source)
                self._turn = self._history.begin(self.number, question, model)

    def finish(self, answer: str, details: dict[str, Any]) -> None:
        """Write the answer to the history, and add it to the conversation."""
        self._exchanges.append((self._question, answer))
        self._end(answer, ANSWERED, details)

    def fail(self, partial: str, error: BaseException) -> None:
        """Write what was answered before an error to the history."""
        interrupted = isinstance(error, KeyboardInterrupt | BrokenPipeError)
        self._end(partial, INTERRUPTED if interrupted else FAILED)

    def _end(self, answer: str, state: str, details: dict[str, Any] | None = None) -> None:
        with self._disable_on_error():
            if self._history is not None and self._turn is not None:
                self._history.finish(self._turn, answer, state, details)

    def close(self) -> None:
        """Close the history file."""
        if self._history is not None:
            self._history.close()

    @contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        try:
            yield
        except HistoryError as error:
            self._terminal.warn(f"this conversation is not written to the history: {error}")
            self.close()
            self._history = None


_MAX_SQLITE_INTEGER = 2**63 - 1  # larger numbers overflow a column


def logs(
    terminal: Terminal,
    limit: Annotated[
        int, Option("-n", min=1, max=_MAX_SQLITE_INTEGER, help="How many of the latest to show.")
    ] = 5,
    containing: Annotated[
        str, Option("--containing", metavar="TEXT", help="Show only those that contain TEXT.")
    ] = "",
    conversation: Annotated[
        int | None,
        Option(
            "--conversation",
            metavar="N",
            min=1,
            max=_MAX_SQLITE_INTEGER,
            help="Show only conversation N.",
        ),
    ] = None,
    path: Annotated[bool, Option("--path", help="Print the path of the history file.")] = False,
    json: Json = False,
) -> None:
    """Show past questions and answers, the latest last."""
    if path:
        terminal.write(str(default_history_path()), end="\n")
        return
    with closing(History()) as history:
        turns = history.recent(limit, containing, conversation)[::-1]
    if json:
        terminal.json([_turn_json(turn) for turn in turns])
        return
    if not turns:
        nothing = f"no question or answer contains {containing!r}"
        terminal.note(nothing if containing else "nothing was asked yet")
    for turn in turns:
        _show_turn(terminal, turn)


def _show_turn(terminal: Terminal, turn: Turn) -> None:
    when = datetime.fromtimestamp(turn.asked).strftime("%Y-%m-%d %H:%M")
    head = f"#{turn.turn_id}  {when}  {turn.source}  conversation {turn.conversation}"
    terminal.write(Text(printable(head), style="dim"), end="\n")
    terminal.write(Text(printable(turn.question), style="bold"), end="\n")
    terminal.write(printable(turn.answer), end="\n" if turn.answer else "")
    if turn.state != ANSWERED:
        terminal.write(Text(f"({turn.state})", style="yellow"), end="\n")
    for source in turn.details.get("sources", ()):
        if source.get("used", True):  # older records list all passages as sources
            line = f"  {source['number']} {source['citation']}"
            terminal.write(Text(printable(line), style="dim"), end="\n")
    terminal.write("\n")


def _turn_json(turn: Turn) -> dict[str, object]:
    document = {"id": turn.turn_id, **asdict(turn), **turn.details}
    asked = datetime.fromtimestamp(turn.asked).astimezone()
    document["asked"] = asked.isoformat(timespec="seconds")
    del document["turn_id"], document["details_json"]
    return document
