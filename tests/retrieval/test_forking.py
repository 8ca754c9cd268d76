"""Forks: parent and child use a collection that was opened before the fork."""

import gc
import multiprocessing
import threading
from contextlib import contextmanager
from pathlib import Path

import faiss
import numpy as np
import pytest

from ragaccel.errors import IndexBusyError
from ragaccel.passage import Passage
from ragaccel.retrieval import Collection, Store, VectorIndex, store as connections

pytestmark = [
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


def events(count):
    return [multiprocessing.get_context("fork").Event() for _ in range(count)]


def test_what_a_child_writes_is_kept_when_its_parent_closes(collection):
    opened, closed = events(2)

    def work():
        assert len(collection) == 1
        opened.set()
        assert closed.wait(WAIT_SECONDS)
        put(collection, "child", 1)
        assert ids(collection.search(ROWS[1], 1)) == ["child"]

    with forked(work):
        assert opened.wait(WAIT_SECONDS)
        collection.close()
        closed.set()
    assert ids(collection) == ["start", "child"]
    with Store(collection.path) as store:
        assert store.check() == []


def test_children_find_what_each_other_puts_in(collection):
    first_put, second_put = events(2)

    def first():
        put(collection, "first", 1)
        assert ids(collection.search(ROWS[1], 1)) == ["first"]
        first_put.set()
        assert second_put.wait(WAIT_SECONDS)
        assert ids(collection.search(ROWS[2], 1)) == ["second"]

    def second():
        assert first_put.wait(WAIT_SECONDS)
        put(collection, "second", 2)
        second_put.set()

    with forked(first), forked(second):
        pass
    assert ids(collection.search(ROWS[2], 1)) == ["second"]


def test_a_child_reads_no_vectors_anew(collection):
    def work():
        VectorIndex.build = lambda *_: pytest.fail("built anew")
        assert ids(collection.search(ROWS[0], 1)) == ["start"]

    with forked(work):
        pass


def test_parent_and_child_write_while_threads_of_the_parent_do(collection):
    stop = threading.Event()
    errors = []

    def churn(name):
        try:
            while not stop.is_set():
                put(collection, name, 3)
                collection.search(ROWS[3], 2)
                collection.drop([name])
        except Exception as error:
            errors.append(error)

    def work(number):
        for turn in range(5):
            put(collection, f"child {number}.{turn}", number % 8)
            assert len(collection.search(ROWS[1], 3)) == 3

    put(collection, "more", 1)
    put(collection, "most", 2)
    threads = [threading.Thread(target=churn, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    try:
        for number in range(6):
            with forked(lambda number=number: work(number)):
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(collection) == 3 + 6 * 5


def test_a_fork_during_a_transaction_is_reported(collection):
    def work():
        for use in (lambda: len(collection), lambda: len(Collection(collection.path))):
            with pytest.raises(IndexBusyError, match="forked in the middle of a change"):
                use()

    with collection._changing():
        collection._store.rows("DELETE FROM passage")
        with forked(work):
            pass
    assert len(collection) == 0


def test_a_lock_that_another_thread_held_is_free_in_a_child(collection):
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with collection._search._vectors.current(), collection._store._writers.get():
            held.set()
            go_on.wait(WAIT_SECONDS)

    def work():
        put(collection, "child", 1)
        assert ids(collection.search(ROWS[1], 1)) == ["child"]

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(WAIT_SECONDS)
    try:
        with forked(work):
            pass
    finally:
        go_on.set()
        thread.join()
    assert len(collection) == 2


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
def test_a_child_inherits_no_open_file(collection):
    def work():
        names = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        assert not [name for name in names if name.startswith(str(collection.path))]

    with forked(work):
        pass


def test_a_collection_in_memory_is_copied_by_a_fork_at_any_moment():
    collection, stop = Collection(), threading.Event()
    put(collection, "start", 0)

    def churn():
        while not stop.is_set():
            put(collection, "other", 1)
            collection.drop(["other"])

    def work():
        put(collection, "child", 2)
        assert ids(collection.search(ROWS[2], 1)) == ["child"]
        assert {"start", "child"} <= set(ids(collection))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(10):
            with forked(work):
                pass
    finally:
        stop.set()
        thread.join()
    assert ids(collection) == ["start"]


def test_a_forgotten_collection_leaves_no_connection(tmp_path):
    before = set(connections._connections)
    collection = Collection(tmp_path / "x.db")
    put(collection, "start", 0)
    assert set(connections._connections) - before
    del collection
    gc.collect()
    assert set(connections._connections) <= before
