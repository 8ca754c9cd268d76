"""Formats: an index that an earlier version made is read, changed, and never lost."""

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fakes import HashEmbedder

from ragaccel.retrieve.collection import Collection
from ragaccel.retrieve.formats import migrate
from ragaccel.retrieve.indexing import index_folder
from ragaccel.retrieve.retriever import Retriever
from ragaccel.retrieve.store import Store

# Made by the version before: docs/lamp.md, of two passages, and docs/boat.txt, of one
OLD_FILE = Path(__file__).with_name("format_1.db.gz")


@pytest.fixture
def old_index(tmp_path):
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress(OLD_FILE.read_bytes()))
    return path


def format_of(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def columns_of(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA table_info(passage)").fetchall()


def test_the_old_file_is_of_the_old_format(old_index):
    assert format_of(old_index) == 1
    assert "metadata" not in [column[1] for column in columns_of(old_index)]


def test_an_old_index_is_brought_to_the_format_of_today(old_index, tmp_path):
    with Store(old_index) as store:
        found = Retriever(store, HashEmbedder()).search("the boat called Petrel", 1)
        assert found[0].text == "The boat is called Petrel."
        assert store.check() == []
    assert format_of(old_index) == 2
    with Collection(tmp_path / "new.db") as new:
        assert columns_of(old_index) == columns_of(new.path), "as if it was made today"


def test_an_old_index_goes_on_being_indexed(old_index, tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "lamp.md").write_text(
        "# Lamp\n\nThe lamp burns oil.\n\n## Wick\n\nThe wick is cotton.\n"
    )
    (folder / "new.md").write_text("A gannet dives.\n")
    with Store(old_index) as store:
        report = index_folder(store, HashEmbedder(), folder)
        assert (report.added, report.removed, report.embedded) == (1, 1, 1)
        assert store.check() == []


@pytest.fixture
def without_permission(monkeypatch):
    """Nothing may be written to, as in a folder of somebody else (who runs tests may be root)."""
    connect = sqlite3.connect

    def refuse(address, **options):
        if not options.get("uri"):
            raise sqlite3.OperationalError("unable to open database file")
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", refuse)


def test_an_old_index_that_cannot_be_written_to_is_read(old_index, without_permission):
    before = old_index.read_bytes()
    with Store(old_index) as store:
        for mode in ("fused", "dense", "text"):
            found = Retriever(store, HashEmbedder()).search("the boat called Petrel", 1, mode=mode)
            assert found[0].text == "The boat is called Petrel."
        assert len(store.files()) == 2
    with Collection(old_index, fingerprint=HashEmbedder.fingerprint) as collection:
        nearest = collection.search(HashEmbedder().embed_query("The wick is cotton."), 1)
        assert (nearest[0].passage.text, nearest[0].metadata) == ("The wick is cotton.", {})
        assert collection.documents() == {"boat.txt": 1, "lamp.md": 2}
    assert old_index.read_bytes() == before


def test_an_old_file_that_alone_is_read_only_is_read(old_index, monkeypatch):
    connect = sqlite3.connect

    def read_only(address, **options):
        if address != str(old_index):
            return connect(address, **options)
        return connect(f"{old_index.as_uri()}?mode=ro", **{**options, "uri": True})

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with Store(old_index) as store:
        (all_of_it,) = store.vectors()
        assert len(all_of_it[0]) == 3
        assert store.rows("SELECT DISTINCT metadata FROM passage") == [("",)]
    assert format_of(old_index) == 1


def test_two_that_open_an_old_index_at_once_both_read_it(old_index):
    with Store(old_index) as first:
        second = sqlite3.connect(old_index)
        version = second.execute("PRAGMA user_version").fetchone()[0]
        assert first.count_passages() == 3  # and has brought it to format 2 meanwhile
        assert version == 1
        migrate(second)
        second.close()
        assert first.check() == []


def test_an_old_index_is_searched_at_once_while_another_writes_to_it(old_index):
    with (
        closing(sqlite3.connect(old_index, isolation_level=None)) as other,
        Store(old_index) as store,
    ):
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN IMMEDIATE")
        waited = []
        store.rows("PRAGMA query_only")  # opens it
        waited += store.rows("PRAGMA busy_timeout")
        assert len(Retriever(store, HashEmbedder()).search("the boat called Petrel", 3)) == 3
        assert store.rows("SELECT DISTINCT metadata FROM passage") == [("",)]
        other.execute("COMMIT")
        assert format_of(old_index) == 1
        assert waited == [(5000,)], "changes wait for others as always"
        assert store.remove(["boat.txt"]) == 1
        assert format_of(old_index) == 2
        assert store.check() == []


def test_an_old_index_on_a_full_disk_is_searched(old_index, monkeypatch):
    connect = sqlite3.connect

    class Full(sqlite3.Connection):
        def execute(self, statement, *values):
            if statement.startswith("ALTER"):
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(statement, *values)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **more: connect(*a, factory=Full, **more))
    with Store(old_index) as store:
        assert len(Retriever(store, HashEmbedder()).search("the boat called Petrel", 3)) == 3
