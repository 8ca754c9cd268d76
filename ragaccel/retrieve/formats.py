"""Formats: whether a file is an index of ours, and how one of an older format is read."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ragaccel.errors import IndexCorruptError, IndexMismatchError
from ragaccel.retrieve.schema import APPLICATION_ID, SCHEMA_VERSION, index_command, is_foreign

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# by format: what brings a file to the next one, and the table as which a view lets it look so
_MIGRATIONS = {1: "ALTER TABLE passage ADD COLUMN metadata TEXT NOT NULL DEFAULT ''"}
_VIEWS = {1: ("passage", "SELECT *, '' AS metadata FROM main.passage")}
_IN_THE_WAY = ("readonly", "locked", "full", "disk I/O")


def settle_format(connection: sqlite3.Connection, path: Path) -> bool:
    """Bring a file to today's format, within this connection only if it cannot be written to now.

    Returns:
        Whether the file itself is of today's format; if not, :func:`migrate` goes before changes.

    Raises:
        IndexCorruptError: It is a database of another program.
        IndexMismatchError: It is of a format that a later version made.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and is_foreign(path):
        raise IndexCorruptError(f"{path} is a database of another program: choose another")
    connection.execute("SELECT count(*) FROM meta").fetchone()
    version = _version(connection)
    if version in _MIGRATIONS:
        return _migrates_at_once(connection)
    if version != SCHEMA_VERSION:
        raise IndexMismatchError(
            f"{path} has format {version}, this version of ragaccel reads"
            f" {SCHEMA_VERSION}: make it anew with `{index_command(path, rebuild=True)}`"
        )
    return True


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a file of an older format to today's, waiting for another that writes to it."""
    for view, _ in _VIEWS.values():
        connection.execute(f"DROP VIEW IF EXISTS temp.{view}")
    with _changing(connection):
        while (version := _version(connection)) in _MIGRATIONS:  # or another has been first
            connection.execute(_MIGRATIONS[version])
            connection.execute(f"PRAGMA user_version = {version + 1}")


def _migrates_at_once(connection: sqlite3.Connection) -> bool:
    """Migrate if nothing is in the way: a search waits for no writer and needs no room."""
    (wait,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        migrate(connection)
    except sqlite3.OperationalError as error:
        if not any(cause in str(error) for cause in _IN_THE_WAY):
            raise
        for version in range(_version(connection), SCHEMA_VERSION):
            connection.execute("CREATE TEMP VIEW {} AS {}".format(*_VIEWS[version]))
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout = {wait}")
    return True


@contextmanager
def _changing(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
