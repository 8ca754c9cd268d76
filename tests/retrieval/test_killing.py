"""Indexing killed at any moment, and two processes at once: nothing committed is lost."""

import random
import signal
import time

import pytest
from hash_embedder import HashEmbedder
from slow_indexing import start

from ragaccel.errors import IndexBusyError
from ragaccel.retrieval import Retriever, Store, index_folder


@pytest.fixture
def large_folder(tmp_path):
    root = tmp_path / "many"
    root.mkdir()
    for number in range(60):
        (root / f"{number:02}.md").write_text(f"# File {number}\n\nNumber {number} is here.\n")
    return root


def num_indexed(store):
    return len(store.files()) if store.path.exists() else 0


def wait_for(store, number):
    deadline = time.monotonic() + 30
    while num_indexed(store) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_at_any_moment(tmp_path, large_folder):
    moments = random.Random(1)
    finished = 0
    with Store(tmp_path / "index.db") as store:
        for trial in range(8):
            process = start(store, large_folder, 0.05)
            if trial % 2:
                wait_for(store, min(60, finished + 1))
            time.sleep(moments.uniform(0.0, 0.1))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            if store.path.exists():
                assert num_indexed(store) >= finished
                assert store.check() == []
                finished = num_indexed(store)
                store.close()
        assert finished > 0
        report = index_folder(store, HashEmbedder(), large_folder)
        assert report.added == 60 - finished
        assert store.count_passages() == 60
        assert store.check() == []


def test_two_processes_at_once(tmp_path, large_folder):
    with Store(tmp_path / "index.db") as store:
        process = start(store, large_folder, 0.3)
        wait_for(store, 1)
        with pytest.raises(IndexBusyError, match="another process is indexing"):
            index_folder(store, HashEmbedder(), large_folder)
        assert Retriever(store, HashEmbedder()).search("Number 1 is here", 1)
        process.kill()
        process.wait()
        process.stdout.close()
        assert index_folder(store, HashEmbedder(), large_folder).passages == 60
