"""The store: damage, locks, a full disk and databases of other programs."""

import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest
from hash_embedder import HashEmbedder

from ragaccel import default_index_path
from ragaccel.errors import (
    EmptyIndexError,
    IndexBusyError,
    IndexUnusableError,
    StorageError,
)
from ragaccel.retrieval import Retriever, Store, index_command, index_folder, index_passages


class OtherEmbedder(HashEmbedder):
    """Another embedding model."""

    dimension, fingerprint = 8, "another"


def test_reading_does_not_create_an_index(tmp_path):
    with pytest.raises(EmptyIndexError, match="ragaccel index FOLDER"):
        Store(tmp_path / "none.db").files()
    assert list(tmp_path.iterdir()) == []


def test_what_is_put_is_found(store, embedder, folder):
    index_folder(store, embedder, folder)
    passage = store.passages_of("lamp.md")[1]
    assert store.passages_by_id([passage.passage_id])[passage.passage_id].passage == passage
    assert passage.citation == "lamp.md:7"
    assert store.passages_by_id(["none"]) == {}
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
        with pytest.raises(IndexUnusableError, match=r"ragaccel index .*docs --rebuild"):
            store.files()
        with pytest.raises(IndexUnusableError):
            index_folder(store, embedder, folder)
        assert index_folder(store, embedder, folder, rebuild=True).added == 3


def read_everything(store):
    problems = store.check()
    list(store.vectors())
    if problems:
        raise IndexUnusableError(f"{problems}: --rebuild")


@pytest.mark.parametrize("cut", [1 / 4, 3 / 4])
def test_a_truncated_index(store, embedder, folder, cut):
    for number in range(200):
        (folder / f"{number}.md").write_text(f"# {number}\n\n" + f"word{number} " * 60)
    index_folder(store, embedder, folder)
    store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    data = store.path.read_bytes()
    store.path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(IndexUnusableError, match="--rebuild"):
        read_everything(store)
    assert index_folder(store, embedder, folder, rebuild=True).passages > 200


def test_silent_damage_is_found_by_a_check(store, embedder, folder):
    index_folder(store, embedder, folder)
    with store.transaction():
        store.rows("UPDATE passage SET vector = x'00', text = 'other' WHERE id = 1")
    problems = store.check()
    assert "1 passages have a vector of the wrong size" in problems
    assert "the full-text search does not match the passages" in problems


@pytest.mark.parametrize("content", [b"root:x:0:0:\n", b"SQLite format 3\0" + b"x" * 5000])
def test_rebuilding_never_replaces_a_file_of_somebody_else(tmp_path, folder, embedder, content):
    path = tmp_path / "precious.txt"
    path.write_bytes(content)
    with Store(path) as store, pytest.raises(IndexUnusableError, match="not replaced"):
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
    with pytest.raises(IndexUnusableError, match="another program"):
        Store(tmp_path / "other.db").files()
    index_folder(store, embedder, folder)
    store.rows("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(IndexUnusableError, match=r"format 99.*--rebuild"):
        store.files()


def test_only_one_writes_and_readers_go_on(store, embedder, folder):
    index_folder(store, embedder, folder)
    with Store(store.path) as second, store.writing():
        with pytest.raises(IndexBusyError, match="searching works meanwhile"):
            index_folder(second, embedder, folder)
        assert second.count_passages() == 4
    assert index_folder(store, embedder, folder).is_current


def test_a_transaction_of_another_program_is_reported(store, embedder, folder, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.store._WAIT_SECONDS", 0.05)
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
    with pytest.raises(StorageError, match="free some space"):
        index_folder(store, embedder, folder)
    store.close()
    assert store.files() == before
    assert store.check() == []
    assert index_folder(store, embedder, folder).added == 50


def test_a_place_that_cannot_be_written(tmp_path, embedder, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--index PATH"):
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
    again = {"rebuild": True}
    assert index_command(path, **again) == f"ragaccel index '{tmp_path}/my docs' --rebuild"
    assert index_command(path, folder=str(tmp_path / "my docs")) == (
        f"ragaccel index '{tmp_path}/my docs'"
    )
    assert index_command(tmp_path / "x.db", folder="/d", **again) == (
        f"ragaccel index /d --index {tmp_path}/x.db --rebuild"
    )
    assert index_command(tmp_path / "x.db") == f"ragaccel index FOLDER --index {tmp_path}/x.db"
    of_collection = tmp_path / ".ragaccel" / "set.tsv.db"
    assert index_command(of_collection, **again) == (
        f"ragaccel index --passages {tmp_path}/set.tsv --rebuild"
    )
    assert index_command(tmp_path / "x.db", collection="/s.tsv") == (
        f"ragaccel index --passages /s.tsv --index {tmp_path}/x.db"
    )


def test_files_of_others_are_left_alone(tmp_path, folder, embedder):
    text, database = tmp_path / "notes.txt", tmp_path / "other.db"
    text.write_text("my notes " * 20)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    for path in (text, database):
        before = path.read_bytes()
        with Store(path) as store:
            with pytest.raises(IndexUnusableError, match=r"not a ragaccel index|another program"):
                store.files()
            for rebuild in (False, True):
                with pytest.raises(IndexUnusableError, match="is not a ragaccel index"):
                    index_folder(store, embedder, folder, rebuild=rebuild)
            with pytest.raises(IndexUnusableError, match="is not a ragaccel index"):
                store.discard()
        assert path.read_bytes() == before
        assert not list(tmp_path.glob(f"{path.name}?*")), "nothing is left beside it"
    with pytest.raises(StorageError, match="is a folder"):
        index_folder(Store(folder), embedder, folder)
    with pytest.raises(EmptyIndexError, match="is a folder"):
        Store(folder).files()


def test_a_rebuilt_index_replaces_the_old_one_when_complete(store, embedder, folder):
    index_folder(store, embedder, folder)

    def interrupt(progress):
        if progress.stage == "embedding":
            raise KeyboardInterrupt

    before = store.state()
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, folder, progress=interrupt, rebuild=True)
    assert store.state() == before
    assert store.count_passages() == 4
    assert index_folder(store, embedder, folder, rebuild=True).added == 3
    assert store.state()[0] != before[0]
    assert not list(store.path.parent.glob("*.rebuilt*"))


def test_an_interrupted_rebuild_resumes(store, embedder, folder, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    index_folder(store, embedder, folder)
    embedder.texts.clear()

    def interrupt(progress):
        if progress.stage == "reading" and progress.files_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, folder, progress=interrupt, rebuild=True)
    index_folder(store, embedder, folder, rebuild=True)
    assert len(embedder.texts) == len(set(embedder.texts)) == 4, "nothing is embedded twice"
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, folder, progress=interrupt, rebuild=True)
    report = index_folder(store, embedder, folder, rebuild=True, passage_tokens=20)
    assert report.added == 3, "one begun with other settings is begun anew"
    assert store.meta("passage_tokens") == "20"


def test_a_rebuild_resumes_only_an_attempt_with_the_same_settings(
    store, embedder, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    collection = tmp_path / "set.tsv"
    collection.write_text("".join(f"p{i}\tthing {i}\n" for i in range(600)))

    def interrupt(progress):
        if progress.passages_done >= 512 or progress.files_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_passages(store, embedder, collection, progress=interrupt, rebuild=True)
    index_folder(store, embedder, folder, rebuild=True)
    assert store.sources() == [str(folder)]
    assert store.count_passages() == 4
    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, folder, exclude=["*.csv"], progress=interrupt, rebuild=True)
    assert index_folder(store, embedder, folder, rebuild=True).passages == 4


def test_a_rebuild_without_room_leaves_the_old_index(store, embedder, folder):
    index_folder(store, embedder, folder)
    readers = []

    def read(progress):  # a reader of the new file keeps its log from being emptied
        if progress.stage == "done":
            readers.append(sqlite3.connect(f"{store.path}.rebuilt"))
            readers[0].execute("BEGIN")
            readers[0].execute("SELECT * FROM meta").fetchall()

    with pytest.raises(StorageError, match="the old index is unchanged"):
        index_folder(store, embedder, folder, rebuild=True, progress=read)
    readers[0].close()
    assert store.check() == []
    assert store.count_passages() == 4


def test_deleting_an_index_leaves_nothing_of_an_unfinished_one(store, embedder, folder):
    index_folder(store, embedder, folder)

    def interrupt(progress):
        if progress.stage == "embedding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_folder(store, embedder, folder, progress=interrupt, rebuild=True)
    assert list(store.path.parent.glob("*.rebuilt"))
    store.discard()
    assert [path.name for path in store.path.parent.glob("index.db*")] == ["index.db.lock"]


def test_a_moved_folder_is_rebuilt_where_it_is(embedder, folder):
    with Store(default_index_path(folder)) as store:
        index_folder(store, embedder, folder)
        store.set_meta("fingerprint", "another")
    moved = folder.rename(folder.with_name("moved docs"))
    with Store(default_index_path(moved)) as store:
        with pytest.raises(IndexUnusableError, match=r"`ragaccel index '.*moved docs' --rebuild`"):
            index_folder(store, embedder, moved)
        assert index_folder(store, embedder, moved, rebuild=True).warnings == []


def test_a_rebuilt_index_keeps_patterns_and_exclusions(store, embedder, folder, tmp_path):
    collection = tmp_path / "set.tsv"
    collection.write_text("p1\tone\n")
    index_passages(store, embedder, collection)
    index_folder(store, embedder, folder, exclude=["*.csv"])
    store.leave_out(["lamp.md"])
    store.set_meta("fingerprint", "another")
    report = index_folder(store, embedder, folder, rebuild=True)
    assert list(store.files()) == ["sub folder 🙂/boat.txt"]
    assert report.skip_reasons["taken out"] == 1
    assert [w for w in report.warnings if str(collection) in w]
    store.leave_out(["lamp.md"], undo=True)
    assert index_folder(store, embedder, folder).added == 1
    damaged = default_index_path(folder)
    damaged.parent.mkdir()
    damaged.write_bytes(b"nothing " * 100)
    with Store(damaged) as broken:
        (warning,) = index_folder(broken, embedder, folder, rebuild=True).warnings
    assert "--exclude" in warning


def test_a_replaced_or_deleted_index_is_noticed(store, embedder, folder):
    index_folder(store, embedder, folder)
    with Store(store.path) as reader:
        retriever = Retriever(reader, embedder)
        assert "Petrel" in retriever.search("boat", 1)[0].text
        (folder / "sub folder 🙂/boat.txt").write_text("The boat is called Tern.\n")
        index_folder(store, embedder, folder, rebuild=True)
        assert "Tern" in retriever.search("boat", 1)[0].text
        index_folder(store, OtherEmbedder(), folder, rebuild=True)
        with pytest.raises(IndexUnusableError):
            retriever.search("boat", 1)
        store.discard()
        for mode in ("fused", "text"):
            with pytest.raises(EmptyIndexError):
                retriever.search("boat", 1, mode=mode)


def test_what_is_written_after_another_process_has_read_is_kept(tmp_path, embedder, folder):
    """Checking the file does not release the locks that keep its log in place."""
    path = tmp_path / "kept elsewhere.db"
    with Store(path) as reader, Store(path) as store:
        index_folder(store, embedder, folder)
        assert len(reader.files()) == 3
        (folder / "new.md").write_text("a new text.")
        with store.writing():  # looks at the file while connections are open
            script = "import sys; from ragaccel.retrieval.store import Store\n"
            script += "with Store(sys.argv[1]) as store: assert len(store.files()) == 3"
            subprocess.run([sys.executable, "-c", script, str(path)], check=True)
            assert path.with_name(f"{path.name}-wal").exists()
        assert index_folder(store, embedder, folder).added == 1
        script = "import sys; from ragaccel.retrieval.store import Store\n"
        script += "with Store(sys.argv[1]) as store: assert len(store.files()) == 4"
        subprocess.run([sys.executable, "-c", script, str(path)], check=True)
