"""Processes: two at once, an interrupted one, a closed pipe, a full disk."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from cli_documents import KEY, QUESTION

from ragaccel.cli.history import History

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).parents[1] / "support" / "cli_driver.py"


@pytest.fixture
def docs(docs):
    (docs / "hut.md").unlink()
    for number in range(30):
        (docs / f"{number:02}.txt").write_text(f"Fact {number} is of no use to anybody here.")
    return docs


@pytest.fixture
def start(spawn):
    """Start a command line with stand-ins for the models."""

    def call(*arguments, **settings):
        return spawn(DRIVER, *arguments, **settings)

    return call


def end(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def logged():
    history = History()
    (turn,) = history.recent()
    history.close()
    return turn


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def gate():
    """Make a folder that an indexing process waits at until the test creates a file in it."""
    folder = Path("gate")
    folder.mkdir()
    yield folder
    (folder / "open").touch()  # or it would wait for ever


def test_two_processes_indexing_at_once(start, docs, gate):
    first = start("index", docs, env={"GATE": str(gate)})
    wait_for((gate / "waiting").exists)
    code, out, err = end(start("index", docs))
    assert (code, out) == (1, "")
    assert "another process" in err
    (gate / "open").touch()
    code, _, err = end(first)
    assert code == 0
    assert "31 added" in err
    assert "31 unchanged" in end(start("index", docs))[2]


def test_asking_while_another_process_indexes(start, docs, gate):
    assert end(start("index", docs))[0] == 0
    (docs / "key.txt").write_text(f"{KEY} It is red.")
    for number in range(30):
        (docs / f"new-{number}.txt").write_text(f"New fact {number} is of no use either.")
    first = start("index", docs, env={"GATE": str(gate)})
    wait_for((gate / "waiting").exists)
    code, out, err = end(start("ask", docs, QUESTION))
    assert code == 0
    assert KEY in out
    assert first.poll() is None
    assert "from the index as it is" in err
    (gate / "open").touch()
    assert end(first)[0] == 0


def test_ctrl_c_while_indexing_leaves_an_index_that_goes_on(start, docs):
    process = start("index", docs, env={"EMBED_SECONDS": "0.1"})
    wait_for((docs / ".ragaccel" / "index.db").exists)
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err
    code, _, err = end(start("index", docs))
    assert code == 0
    assert "31 passages" in err


def test_ctrl_c_while_answering_keeps_the_part(start, docs):
    shown = Path("shown.txt")
    with shown.open("w") as file:
        process = start("ask", docs, QUESTION, env={"SECONDS": "0.2"}, stdout=file)
        wait_for(lambda: shown.stat().st_size)
        process.send_signal(signal.SIGINT)
        code, _, err = end(process)
    assert code == 130
    out = shown.read_text()
    assert out.startswith("«")
    assert KEY.startswith(out[1:].partition("»")[0])
    assert "Traceback" not in err
    turn = logged()
    assert turn.state == "interrupted"
    assert turn.answer
    assert KEY.startswith(turn.answer.strip())


def test_kill_leaves_the_question_in_the_history(start, docs):
    process = start("ask", docs, QUESTION, env={"SECONDS": "0.2"}, bufsize=0)
    process.stdout.read(1)
    process.kill()
    process.wait()
    turn = logged()
    assert (turn.question, turn.state) == (QUESTION, "unfinished")
    assert end(start("ask", docs, QUESTION))[0] == 0


def test_a_closed_pipe(start, docs):
    process = start("ask", docs, QUESTION, env={"SECONDS": "0.1"}, bufsize=0)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    err = process.stderr.read()
    assert "rror" not in err
    assert "Traceback" not in err


def full_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


def test_a_full_disk_keeps_what_was_saved(start, docs):
    assert end(start("index", docs))[0] == 0
    for number in range(40):
        words = " ".join(f"w{number}-{i}" for i in range(2000))
        (docs / f"more-{number}.txt").write_text(words)
    code, out, err = end(start("index", docs, preexec_fn=full_disk))
    assert (code, out) == (1, "")
    assert "disk is full" in err
    assert "Traceback" not in err
    code, out, err = end(start("ask", docs, QUESTION, preexec_fn=full_disk))
    assert code == 0, err
    assert KEY in out
    assert "from the index as it is" in err
    code, _, err = end(start("index", docs))
    assert code == 0, err
    with sqlite3.connect(docs / ".ragaccel" / "index.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM file").fetchone() == (71,)
    db.close()


def test_progress_is_drawn_for_a_person_and_for_nobody_else(docs, start):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {"EMBED_SECONDS": "0.02", "TERM": "xterm-256color", "COLUMNS": "100"}
    process = start("ask", docs, QUESTION, stderr=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=30) == 0
    assert b"embedding" in shown
    assert b"\x1b[36m" in shown
    _, out, err = end(start("index", docs, "--rebuild", env=environment))
    assert "embedding" not in out + err
