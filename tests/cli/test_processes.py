"""Processes: two at once, an interrupted one, progress."""

from __future__ import annotations

import os
import signal
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
    """Start a command line with stand-ins for the models; ``settings`` are variables or Popen's."""

    def call(*arguments, settings=(), **variables):
        return spawn(DRIVER, *arguments, env=variables, **dict(settings))

    return call


@pytest.fixture
def ended(start):
    """Run a command line; return its exit code and output."""

    def call(*arguments, **settings):
        return end(start(*arguments, settings=settings))

    return call


def end(process):
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def test_asking_while_another_process_indexes(ended, docs, indexing):
    assert ended("index", docs)[0] == 0
    (docs / "key.txt").write_text(f"{KEY} It is red.")
    first, go_on = indexing(docs)
    code, out, err = ended("index", docs)
    assert (code, out, "another process" in err) == (1, "", True)
    code, out, err = ended("ask", docs, QUESTION)
    assert (code, KEY in out) == (0, True)
    assert first.poll() is None
    assert "from the index as it is" in err
    go_on()
    assert end(first)[0] == 0
    assert "31 unchanged" in ended("index", docs)[2]


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def indexing(start):
    """Start to index, and stop while a text is embedded, until the file "open" is made."""
    gate = Path("gate")
    gate.mkdir()

    def call(docs):
        process = start("index", docs, GATE=str(gate))
        wait_for((gate / "waiting").exists)
        return process, (gate / "open").touch

    yield call
    (gate / "open").touch()  # or it would wait for ever


def test_ctrl_c_while_answering_keeps_the_part(start, docs):
    shown = Path("shown.txt")
    with shown.open("w") as file:
        process = start("ask", docs, QUESTION, SECONDS="0.2", settings={"stdout": file})
        wait_for(lambda: shown.stat().st_size)
        process.send_signal(signal.SIGINT)
        assert end(process)[0] == 130
    out = shown.read_text()
    assert out.startswith("«")
    assert KEY.startswith(out[1:].partition("»")[0])
    history = History()
    (turn,) = history.recent()
    history.close()
    assert turn.state == "interrupted"
    assert turn.answer
    assert KEY.startswith(turn.answer.strip())


def test_progress_is_drawn_for_a_person_and_for_nobody_else(docs, start):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    variables = {"EMBED_SECONDS": "0.02", "TERM": "xterm-256color", "COLUMNS": "100"}
    streams = {"stdout": theirs, "stderr": theirs}
    process = start("ask", docs, QUESTION, settings=streams, **variables)
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
    _, out, err = end(start("index", docs, "--rebuild", **variables))
    assert "embedding" not in out + err
