"""The history keeps questions and answers, even if the process is killed."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import sys

import pytest

from ragaccel.cli.history import ANSWERED, INTERRUPTED, History
from ragaccel.engine import LatencyProfile
from ragaccel.paths import ensure_data_dir, latency_file


@pytest.fixture
def history():
    history = History()
    yield history
    history.close()


def test_a_question_is_there_before_its_answer(history):
    conversation = history.open_conversation("/docs")
    history.begin(conversation, "Who?", "reader")
    other = History()
    turn = other.recent()[0]
    other.close()
    assert (turn.question, turn.answer, turn.state) == ("Who?", "", "unfinished")


def test_the_last_conversation_is_that_of_the_same_source(history):
    first = history.open_conversation("/docs")
    history.finish(history.begin(first, "a?"), "A.", ANSWERED, {"x": 1})
    second = history.open_conversation("/else")
    history.finish(history.begin(second, "b?"), "B", INTERRUPTED)
    assert history.last_conversation("/docs") == first
    assert history.last_conversation("/none") is None
    assert history.exchanges(first) == [("a?", "A.")]
    assert history.exchanges(second) == []
    assert [turn.question for turn in history.recent()] == ["b?", "a?"]
    assert [turn.question for turn in history.recent(containing="A.")] == ["a?"]
    assert history.recent(conversation=first)[0].details == {"x": 1}


def test_names_that_are_no_unicode_are_kept(history):
    name = b"/caf\xe9".decode("utf-8", "surrogateescape")
    conversation = history.open_conversation(name)
    history.finish(history.begin(conversation, f"what of {name}?"), name, ANSWERED)
    assert history.last_conversation(name) == conversation


def test_logs_show_the_latest_last_and_as_json(cli, history):
    assert "nothing was asked" in cli("logs").err
    conversation = history.open_conversation("/docs")
    details = {"sources": [{"number": 2, "citation": "a.md:3", "used": True}]}
    history.finish(history.begin(conversation, "first?"), "One.", ANSWERED, details)
    history.finish(history.begin(conversation, "second?"), "Tw", INTERRUPTED)
    shown = cli("logs").out
    assert shown.index("first?") < shown.index("second?")
    assert "a.md:3" in shown
    assert "(interrupted)" in shown
    document = json.loads(cli("logs", "--json", "-n", "1").out)
    assert [turn["question"] for turn in document] == ["second?"]
    assert cli("logs", "--containing", "one.").out.count("?") == 1
    assert cli("logs", "--path").out.strip() == str(history.path)


def test_a_damaged_history_is_one_clear_line(cli, home):
    home.mkdir()
    (home / "history.db").write_bytes(b"no database " * 1000)
    ended = cli("logs")
    assert ended.code == 1
    assert "history" in ended.err
    assert "Traceback" not in ended.err


def test_damage_found_later_is_one_clear_line_too(cli, home):
    history = History(home / "history.db")
    conversation = history.open_conversation("/docs")
    for number in range(200):
        history.finish(
            history.begin(conversation, f"question {number} " * 20), "answer " * 50, ANSWERED
        )
    history.close()
    content = bytearray((home / "history.db").read_bytes())
    content[8192:] = bytes(len(content) - 8192)
    (home / "history.db").write_bytes(content)
    ended = cli("logs")
    assert ended.code == 1
    assert "history.db cannot be used" in ended.err
    assert cli("logs", "-n", "9" * 25).code == 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
@pytest.mark.parametrize("first", ["history", "measurements", "doctor"])
def test_nobody_else_may_read_what_was_asked(first, tmp_path, monkeypatch):
    home = tmp_path / "new" / "home"
    monkeypatch.setenv("RAGACCEL_HOME", str(home))
    before = os.umask(0o022)
    try:
        if first == "measurements":
            LatencyProfile(0.1, latency_file("a model")).save()
        elif first == "doctor":
            ensure_data_dir()
        history = History()
        history.begin(history.open_conversation("/docs"), "Who?")
        beside = sorted(home.glob("history.db*"))
        assert [file.name for file in beside] == ["history.db", "history.db-shm", "history.db-wal"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in beside} == {0o600}
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        history.close()
    finally:
        os.umask(before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_a_history_is_private_before_anything_is_written(tmp_path, monkeypatch):
    seen, connect = [], sqlite3.connect

    def watched(path, **how):
        seen.append((stat.S_IMODE(os.stat(path).st_mode), os.path.getsize(path)))
        return connect(path, **how)

    monkeypatch.setattr(sqlite3, "connect", watched)
    History(tmp_path / "history.db").close()
    assert seen == [(0o600, 0)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_a_history_that_others_could_read_becomes_private(tmp_path):
    folder = tmp_path / "data"
    path = folder / "history.db"
    old = History(path)
    old.begin(old.open_conversation("/docs"), "Who?")
    for file in folder.iterdir():
        file.chmod(0o644)
    new = History(path)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert [turn.question for turn in new.recent()] == ["Who?"]
    new.close()
    old.close()
