"""The store: damage, locks, a full disk and other people's databases."""

import sqlite3
import threading

import numpy as np
import pytest

from ragaccel.errors import (
    IndexBusyError,
    IndexCorruptError,
    IndexMismatchError,
    IndexWriteError,
    NothingIndexedError,
)
from ragaccel.retrieve.indexing import index_folder
from ragaccel.retrieve.schema import default_index_path, rebuild_command
from ragaccel.retrieve.store import Store


def test_reading_does_not_create_an_index(tmp_path):
    with pytest.raises(NothingIndexedError, match="ragaccel index FOLDER"):
        Store(tmp_path / "none.db").files()
    assert list(tmp_path.iterdir()) == []


def test_what_is_put_is_found(store, embedder, folder):
    index_folder(store, embedder, folder)
    passage = store.passages_of("lamp.md")[1]
    assert store.passage(passage.passage_id) == passage
    assert passage.citation == "lamp.md:7"
    assert store.passage("none") is None
    assert store.count_passages() == 4
    keys, vectors = next(store.vectors())
    assert keys.tolist() == store.keys().tolist() == [1, 2, 3, 4]
    assert vectors.shape == (4, 64)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    (only,) = store.vectors([2])
    assert only[0].tolist() == [2]
    assert store.files()["lamp.md"].num_passages == 2
    assert store.remove(["lamp.md", "missing"]) == 1
    assert store.count_passages() == 2
    assert store.check() == []


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_file_that_is_no_index(tmp_path, folder, embedder, content):
    path = default_index_path(folder)
    path.parent.mkdir()
    path.write_bytes(content)
    with Store(path) as store:
        with pytest.raises(IndexCorruptError, match=r"ragaccel index .*docs --rebuild"):
            store.files()
        with pytest.raises(IndexCorruptError):
            index_folder(store, embedder, folder)
        assert index_folder(store, embedder, folder, rebuild=True).added == 3


def read_everything(store):
    problems = store.check()
    list(store.vectors())
    if problems:
        raise IndexCorruptError(f"{problems}: --rebuild")


@pytest.mark.parametrize("cut", [1 / 4, 3 / 4])
def test_a_truncated_index(store, embedder, folder, cut):
    for number in range(200):
        (folder / f"{number}.md").write_text(f"# {number}\n\n" + f"word{number} " * 60)
    index_folder(store, embedder, folder)
    store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    data = store.path.read_bytes()
    store.path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(IndexCorruptError, match="--rebuild"):
        read_everything(store)
    assert index_folder(store, embedder, folder, rebuild=True).passages > 200


def test_silent_damage_is_found_by_a_check(store, embedder, folder):
    index_folder(store, embedder, folder)
    with store.transaction() as connection:
        connection.execute("UPDATE passage SET vector = x'00', text = 'other' WHERE id = 1")
    problems = store.check()
    assert "1 passages have a vector of the wrong size" in problems
    assert "the full-text search does not match the passages" in problems


@pytest.mark.parametrize("content", [b"root:x:0:0:\n", b"SQLite format 3\0" + b"x" * 5000])
def test_rebuilding_never_replaces_a_file_of_somebody_else(tmp_path, folder, embedder, content):
    path = tmp_path / "precious.txt"
    path.write_bytes(content)
    with Store(path) as store, pytest.raises(IndexCorruptError, match="not replaced"):
        index_folder(store, embedder, folder, rebuild=True)
    assert path.read_bytes() == content
    assert not path.with_name("precious.txt.lock").exists()


def test_rebuilding_replaces_an_index_kept_elsewhere(tmp_path, folder, embedder):
    (tmp_path / "kept.db").touch()
    with Store(tmp_path / "kept.db") as store:
        assert index_folder(store, embedder, folder, rebuild=True).added == 3
        assert index_folder(store, embedder, folder, rebuild=True).added == 3


def test_a_database_of_another_program_or_format(tmp_path, store, embedder, folder):
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE meta (key)")
    other.close()
    with pytest.raises(IndexCorruptError, match="another program"):
        Store(tmp_path / "other.db").files()
    index_folder(store, embedder, folder)
    store.rows("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(IndexMismatchError, match=r"format 99.*--rebuild"):
        store.files()


def test_only_one_writes_and_readers_go_on(store, embedder, folder):
    index_folder(store, embedder, folder)
    with Store(store.path) as second, store.writing():
        with pytest.raises(IndexBusyError, match="searching works meanwhile"):
            index_folder(second, embedder, folder)
        assert second.count_passages() == 4
    assert index_folder(store, embedder, folder).is_current


def test_a_transaction_of_another_program_is_reported(store, embedder, folder, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieve.database._WAIT_SECONDS", 0.05)
    index_folder(store, embedder, folder)
    busy = pytest.raises(IndexBusyError, match="another process is writing")
    with Store(store.path) as second, second.transaction(), busy:
        store.remove(["lamp.md"])
    assert store.remove(["lamp.md"]) == 1


def test_a_full_disk_loses_nothing(store, embedder, folder):
    index_folder(store, embedder, folder)
    before = store.files()
    (pages,) = store.rows("PRAGMA page_count")[0]
    store.rows(f"PRAGMA max_page_count = {pages + 2}")
    for number in range(50):
        (folder / f"{number}.md").write_text(f"# {number}\n\n" + f"word{number} " * 100)
    with pytest.raises(IndexWriteError, match="free some space"):
        index_folder(store, embedder, folder)
    store.close()
    assert store.files() == before
    assert store.check() == []
    assert index_folder(store, embedder, folder).added == 50


def test_a_place_that_cannot_be_written(tmp_path, embedder, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexWriteError, match="--index PATH"):
        index_folder(Store(tmp_path / "file/index.db"), embedder, folder)


def test_an_index_on_a_read_only_place_is_read(store, embedder, folder, monkeypatch):
    index_folder(store, embedder, folder)
    store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    connect = sqlite3.connect

    def refuse(address, **options):
        if not options.get("uri"):
            raise sqlite3.OperationalError("unable to open database file")
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", refuse)
    assert len(store.files()) == 3


def test_threads_have_connections_of_their_own(store, embedder, folder):
    index_folder(store, embedder, folder)
    counts = []
    threads = [
        threading.Thread(target=lambda: counts.append(store.count_passages())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [4] * 4


def test_the_rebuilding_command_can_be_pasted(tmp_path):
    path = default_index_path(tmp_path / "my docs")
    assert rebuild_command(path) == f"ragaccel index '{tmp_path}/my docs' --rebuild"
    assert rebuild_command(tmp_path / "x.db", "/d") == (
        f"ragaccel index /d --index {tmp_path}/x.db --rebuild"
    )
