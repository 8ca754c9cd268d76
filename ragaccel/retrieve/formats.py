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

# by format: what brings a file to the next one, and what lets it look so if it cannot be written to
_MIGRATIONS = {1: "ALTER TABLE passage ADD COLUMN metadata TEXT NOT NULL DEFAULT ''"}
_VIEWS = {1: "CREATE TEMP VIEW passage AS SELECT *, '' AS metadata FROM main.passage"}


def settle_format(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a file to today's format, within this connection only if it cannot be written to.

    Raises:
        IndexCorruptError: It is a database of another program.
        IndexMismatchError: It is of a format that a later version made.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and is_foreign(path):
        raise IndexCorruptError(f"{path} is a database of another program: choose another")
    connection.execute("SELECT count(*) FROM meta").fetchone()
    version = _version(connection)
    while version in _MIGRATIONS:
        version = _migrate(connection, version)
    if version != SCHEMA_VERSION:
        raise IndexMismatchError(
            f"{path} has format {version}, this version of ragaccel reads"
            f" {SCHEMA_VERSION}: make it anew with `{index_command(path, rebuild=True)}`"
        )


def _migrate(connection: sqlite3.Connection, version: int) -> int:
    try:
        with _changing(connection):
            if _version(connection) == version:  # another process may have been first
                connection.execute(_MIGRATIONS[version])
                connection.execute(f"PRAGMA user_version = {version + 1}")
    except sqlite3.OperationalError as error:
        if "readonly" not in str(error):
            raise
        connection.execute(_VIEWS[version])
        return version + 1
    return _version(connection)


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
