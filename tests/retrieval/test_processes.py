"""Processes that fork or write side by side: nothing committed is lost."""

import gc
import multiprocessing
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import faiss
import numpy as np
import pytest
from hash_embedder import HashEmbedder

from ragaccel.errors import IndexBusyError
from ragaccel.passage import Passage
from ragaccel.retrieval import (
    Collection,
    Store,
    VectorIndex,
    index_folder,
    store as store_module,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked"
    ),
]
WAIT_SECONDS = 30
ROWS = np.eye(8)


@pytest.fixture
def collection(tmp_path):
    with Collection(tmp_path / "c.db") as collection:
        put(collection, "start", 0)
        collection.search(ROWS[0], 1)
        yield collection


def put(collection, name, row):
    collection.put([Passage(name, name)], ROWS[row : row + 1])


def nearest(collection, row):
    (item,) = collection.search(ROWS[row], 1)
    return item.passage.passage_id


def ids(items):
    return [item.passage.passage_id for item in items]


@contextmanager
def forked(work):
    """Fork a child that does some work, and require that it succeeds."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    try:
        yield
    finally:
        child.join(WAIT_SECONDS)
        exitcode = child.exitcode
        child.kill()
    assert exitcode == 0


@contextmanager
def meanwhile(work):
    """Repeat some work in a thread within the block; its error fails the test."""
    stop, errors = threading.Event(), []

    def run():
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert errors == []


def events(count):
    return [multiprocessing.get_context("fork").Event() for _ in range(count)]


def test_what_a_child_writes_is_kept_when_its_parent_closes(collection):
    opened, closed = events(2)

    def work():
        assert len(collection) == 1
        opened.set()
        assert closed.wait(WAIT_SECONDS)
        put(collection, "child", 1)
        assert nearest(collection, 1) == "child"

    with forked(work):
        assert opened.wait(WAIT_SECONDS)
        collection.close()
        closed.set()
    assert ids(collection) == ["start", "child"]


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_child_writes_whatever_threads_of_its_parent_were_at_when_it_was_forked(tmp_path, place):
    """Children of a file write to the same one, and children of a memory to copies."""
    collection = Collection(tmp_path / "c.db" if place == "file" else None)
    put(collection, "start", 0)

    def churn(name):
        put(collection, name, 3)
        collection.search(ROWS[3], 2)
        collection.drop([name])

    def work(number):
        for turn in range(5):
            put(collection, f"child {number}.{turn}", 1)
            assert nearest(collection, 0) == "start"
            assert nearest(collection, 1).startswith("child")

    with meanwhile(lambda: churn("a")), meanwhile(lambda: churn("b")):
        for number in range(6):
            with forked(lambda number=number: work(number)):
                pass
    assert len(collection) == (1 + 6 * 5 if place == "file" else 1)
    collection.close()


def test_a_fork_during_a_transaction_is_reported(collection, tmp_path):
    def work():
        for use in (lambda: len(collection), lambda: len(Collection(collection.path))):
            with pytest.raises(IndexBusyError, match="forked in the middle of a change"):
                use()

    with Store(collection.path) as writer, writer.transaction():
        writer.rows("DELETE FROM passage")
        with forked(work):
            pass
    assert len(collection) == 0


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_child_gives_up_a_connection_that_another_thread_keeps_busy(tmp_path, monkeypatch, place):
    monkeypatch.setattr(store_module, "_FORK_WAIT_SECONDS", 0.1)
    collection = Collection(tmp_path / "c.db" if place == "file" else None)
    put(collection, "start", 0)
    reading, go_on = threading.Event(), threading.Event()

    def read(_):
        reading.set()
        return go_on.wait(WAIT_SECONDS)

    def work():
        with pytest.raises(IndexBusyError, match="forked in the middle of a change"):
            len(collection)
        collection.close()

    thread = threading.Thread(target=lambda: collection.search(ROWS[0], 1, where=read))
    thread.start()
    assert reading.wait(WAIT_SECONDS)
    with forked(work):
        pass
    go_on.set()
    thread.join()
    assert nearest(collection, 0) == "start"


def test_vectors_are_trained_again_in_a_child_of_a_process_with_many_cores():
    rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        index = VectorIndex(16, flat_limit=500)
        index.add(np.arange(1000), rows)

        def work():
            index.add(np.arange(1000, 2000), rows + 1)
            fresh = VectorIndex(16, flat_limit=500)
            fresh.build([(np.arange(1000), rows)])
            assert not fresh.is_exact

        with forked(work):
            pass
    finally:
        faiss.omp_set_num_threads(before)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux what is open")
def test_a_child_inherits_no_open_file_and_a_forgotten_collection_leaves_none(collection):
    def opened():
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return [name for name in links if name.startswith(str(collection.path.parent))]

    def work():
        assert not opened()

    with forked(work):
        pass
    forgotten = Collection(collection.path.with_name("x.db"))
    put(forgotten, "start", 0)
    assert opened()
    del forgotten
    collection.close()
    gc.collect()
    assert not opened()


def test_what_is_written_after_another_process_has_read_is_kept(tmp_path, folder):
    """Checking the file does not release the locks that keep its log in place."""
    path, embedder = tmp_path / "kept elsewhere.db", HashEmbedder()

    def count_elsewhere(expected):
        script = "import sys; from ragaccel.retrieval import Store\n"
        script += f"with Store(sys.argv[1]) as store: assert len(store.files()) == {expected}"
        subprocess.run([sys.executable, "-c", script, str(path)], check=True)

    with Store(path) as reader, Store(path) as writer:
        index_folder(writer, embedder, folder)
        assert len(reader.files()) == 3
        (folder / "new.md").write_text("a new text.")
        with writer.writing():  # looks at the file while connections are open
            count_elsewhere(3)
            assert path.with_name(f"{path.name}-wal").exists()
        assert index_folder(writer, embedder, folder).added == 1
        count_elsewhere(4)
