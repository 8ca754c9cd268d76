"""Formats: whether a file is an index of ours, of the format of this version, and nothing else.

An index may come along with a stranger's folder. SQL that it holds (a trigger, a view, a default
value, an indexed expression) would run when it is used, so all of its schema must be ours.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING

from ragaccel.errors import IndexCorruptError, IndexMismatchError
from ragaccel.retrieve.schema import (
    APPLICATION_ID,
    SCHEMA,
    SCHEMA_VERSION,
    damaged,
    index_command,
    is_foreign,
)

if TYPE_CHECKING:
    from pathlib import Path

    Schema = frozenset[tuple[str, ...]]

_MOST_OBJECTS = 64
_LONGEST_SQL = 3000  # ours are a third of that
_SCHEMA_OF_FILE = (
    "SELECT type, name, tbl_name, substr(coalesce(sql, ''), 1, ?) FROM sqlite_master LIMIT ?"
)
_SQL_TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?(?:\*/|\Z)|\s+|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|\w+|.""",
    re.DOTALL,
)
_QUOTED_WORD = re.compile(r"""(['"`])(\w+)\1""")


def harden(connection: sqlite3.Connection) -> None:
    """Let SQLite believe a file as little as it can: before anything of it is read."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    set_config = getattr(connection, "setconfig", None)  # since Python 3.12
    if set_config is not None:
        set_config(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009


def require_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is no index, or one of another format.

    Raises:
        IndexCorruptError: It is a database of another program, or somebody put something into it.
        IndexMismatchError: Another version of ragaccel made it.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and is_foreign(path):
        raise IndexCorruptError(f"{path} is a database of another program: choose another")
    found = _schema_in(connection)
    if not any(name == "meta" for _, name, *_ in found):
        raise damaged(path, "no such table: meta")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise IndexMismatchError(
            f"{path} has format {version}, this version of ragaccel reads"
            f" {SCHEMA_VERSION}: make it anew with `{index_command(path, rebuild=True)}`, or if a"
            " program put its passages in, put them into a new file"
        )
    if found != _own_schema():
        odd = sorted(f"{kind} {name!r}" for kind, name, *_ in found ^ _own_schema())
        raise damaged(path, f"its schema is not that of an index: {odd[0]}")
    if not _fills_words_untrusted():
        connection.execute("PRAGMA trusted_schema = ON")  # it is ours to the last word by now


@lru_cache(maxsize=1)
def _own_schema() -> Schema:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _schema_in(connection)


@lru_cache(maxsize=1)
def _fills_words_untrusted() -> bool:
    """Whether triggers may write to a full-text index without trust; early SQLite forbids it."""
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
    """What a database holds, as (type, name, table, SQL), the SQL without comments and spaces."""
    rows = connection.execute(_SCHEMA_OF_FILE, (_LONGEST_SQL, _MOST_OBJECTS)).fetchall()
    return frozenset((*map(str, row[:3]), _plain(str(row[3]))) for row in rows)


def _plain(sql: str) -> str:
    """SQL without what means nothing: comments, spaces, and quotes around single words."""
    if len(sql) >= _LONGEST_SQL:  # more may follow what was read of it
        return sql
    tokens = _SQL_TOKEN.findall(sql)
    telling = (token for token in tokens if not token.isspace() and token[:2] not in ("--", "/*"))
    return "\0".join(_QUOTED_WORD.sub(r"\2", token) for token in telling)
