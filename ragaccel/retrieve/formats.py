"""Formats: whether a file is an index of ours, and of the format of this version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.errors import IndexCorruptError, IndexMismatchError
from ragaccel.retrieve.schema import APPLICATION_ID, SCHEMA_VERSION, index_command, is_foreign

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path


def require_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is no index, or one of another format.

    Raises:
        IndexCorruptError: It is a database of another program.
        IndexMismatchError: Another version of ragaccel made it.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and is_foreign(path):
        raise IndexCorruptError(f"{path} is a database of another program: choose another")
    connection.execute("SELECT count(*) FROM meta").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise IndexMismatchError(
            f"{path} has format {version}, this version of ragaccel reads"
            f" {SCHEMA_VERSION}: make it anew with `{index_command(path, rebuild=True)}`, or if a"
            " program put its passages in, put them into a new file"
        )
