"""A server that opens an index before it forks its workers."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hash_embedder import HashEmbedder

from ragaccel.passage import Passage
from ragaccel.retrieval import Collection, Store, index_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked"
    ),
]
PROGRAM = Path(__file__).parent / "support" / "preload_server.py"
PARENT, FIRST, SECOND = range(3)
WAIT_SECONDS = 120


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/lamp.md").write_text("The lamp burns oil.")
    (tmp_path / "docs/boat.md").write_text("The boat is called Petrel.")
    with Store(tmp_path / "index.db") as store:
        index_folder(store, HashEmbedder(), tmp_path / "docs")
    with Collection(tmp_path / "collection.db") as collection:
        collection.put([Passage("start", "start")], HashEmbedder().embed_documents(["start"]))
    return tmp_path


@contextmanager
def served(folder):
    """Return a function that asks one of a server's processes."""
    server = subprocess.Popen(
        [sys.executable, PROGRAM, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )

    def asked(process, name, *arguments):
        place, latest = folder / f"{process}.sock", time.monotonic() + WAIT_SECONDS
        while not place.exists():
            assert server.poll() is None
            assert time.monotonic() < latest
            time.sleep(0.05)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(WAIT_SECONDS)
            client.connect(str(place))
            with client.makefile("rw") as lines:
                lines.write(json.dumps([name, *arguments]) + "\n")
                lines.flush()
                return json.loads(lines.readline())

    try:
        yield asked
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_workers_use_an_index_that_was_opened_before_the_fork_with_models_of_their_own(folder):
    with served(folder) as asked:
        for process in (FIRST, SECOND):
            assert asked(process, "search", "boat") == ["The boat is called Petrel."]
            assert isinstance(asked(process, "ask", "What burns?"), str)
        answers = {asked(process, "ask", "What burns?") for process in (PARENT, FIRST, SECOND)}
        assert len(answers) == 1
        _require_reads_go_on(asked)


def test_what_one_process_writes_all_others_read_also_after_the_parent_closes(folder):
    with served(folder) as asked:
        asked(FIRST, "put", "first")
        asked(PARENT, "put", "parent")
        assert asked(SECOND, "find", "first") == asked(PARENT, "find", "first") == "first"
        asked(PARENT, "close")
        asked(SECOND, "put", "second")
        for process in (PARENT, FIRST, SECOND):
            assert asked(process, "num_passages") == 4
            assert asked(process, "find", "second") == "second"
        _require_reads_go_on(asked)
    with Store(folder / "collection.db") as store:
        assert store.check() == []
    with Collection(folder / "collection.db") as collection:
        ids = {stored.passage.passage_id for stored in collection}
        assert ids == {"start", "first", "parent", "second"}


def _require_reads_go_on(asked):
    before, *failures = asked(PARENT, "reads")
    latest = time.monotonic() + WAIT_SECONDS
    while not failures and asked(PARENT, "reads")[0] == before:
        assert time.monotonic() < latest
        time.sleep(0.05)
    assert failures == []
