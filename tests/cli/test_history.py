"""The history keeps questions and answers, even if the process is killed, for their owner alone."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys

import pytest

from ragaccel.cli.history import ANSWERED, INTERRUPTED, History


@pytest.fixture
def history():
    history = History()
    yield history
    history.close()


def ask(history, conversation, question, answer, state=ANSWERED, details=None):
    history.finish(history.begin(conversation, question), answer, state, details)


def test_the_last_conversation_is_that_of_the_same_source(history):
    first, second = history.open_conversation("/docs"), history.open_conversation("/else")
    ask(history, first, "a?", "A.", details={"x": 1})
    ask(history, second, "b?", "B", INTERRUPTED)
    assert history.last_conversation("/docs") == first
    assert history.last_conversation("/none") is None
    assert history.exchanges(first) == [("a?", "A.")]
    assert history.exchanges(second) == []
    assert [turn.question for turn in history.recent()] == ["b?", "a?"]
    assert [turn.question for turn in history.recent(containing="A.")] == ["a?"]
    assert history.recent(conversation=first)[0].details == {"x": 1}
    name = b"/caf\xe9".decode("utf-8", "surrogateescape")  # a name that is no Unicode
    odd = history.open_conversation(name)
    ask(history, odd, f"what of {name}?", name)
    assert history.last_conversation(name) == odd
    history.begin(first, "Who?")  # which is there before its answer, also for others
    other = History()
    turn = other.recent()[0]
    other.close()
    assert (turn.question, turn.answer, turn.state) == ("Who?", "", "unfinished")


def test_logs_show_the_latest_last_and_as_json(cli, history):
    assert "nothing was asked" in cli("logs").err
    conversation = history.open_conversation("/docs")
    unused = {"number": 1, "citation": "b.md:1", "used": False}  # as records were once written
    sources = [unused, {"number": 2, "citation": "a.md:3"}]
    ask(history, conversation, "first?", "One.", details={"sources": sources})
    ask(history, conversation, "second?", "Tw", INTERRUPTED)
    shown = cli("logs").out
    assert shown.index("first?") < shown.index("second?")
    assert ("a.md:3" in shown, "b.md:1" in shown) == (True, False)
    assert "(interrupted)" in shown
    first, second = cli("logs", "--json").json
    assert first["asked"] <= second["asked"]
    assert (first["id"], first["answer"], first["state"]) == (1, "One.", "answered")
    assert (first["sources"], first["source"], first["conversation"]) == (sources, "/docs", 1)
    assert [turn["question"] for turn in cli("logs", "--json", "-n", "1").json] == ["second?"]
    assert cli("logs", "--containing", "one.").out.count("?") == 1
    assert "contains 'three'" in cli("logs", "--containing", "three").err
    assert not cli("logs", "--conversation", "2").out
    assert cli("logs", "--path").out.strip() == str(history.path)


@pytest.mark.parametrize("start", [0, 8192])
def test_a_damaged_history_is_one_clear_line(cli, home, start):
    history = History()
    conversation = history.open_conversation("/docs")
    for number in range(200):
        ask(history, conversation, f"question {number} " * 20, "answer " * 50)
    history.close()
    content = bytearray(history.path.read_bytes())
    content[start:] = bytes(len(content) - start) if start else b"no database " * 1000
    history.path.write_bytes(content)
    ended = cli("logs")
    assert ended.code == 1
    assert "history.db cannot be used" in ended.error


@pytest.mark.parametrize("message", ["disk I/O error", "unable to open database file"])
def test_a_full_disk_does_not_ask_to_move_the_history_away(cli, home, monkeypatch, message):
    def refuse(*_, **__):
        raise sqlite3.OperationalError(message)

    monkeypatch.setattr(sqlite3, "connect", refuse)
    error = cli("logs").error
    assert "free some space" in error
    assert "move" not in error


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_nobody_else_may_read_what_was_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path / "new" / "home"))
    folder, seen, connect = tmp_path / "new" / "home", [], sqlite3.connect

    def modes():
        return {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}

    def watched(path, **how):
        seen.append((modes(), os.path.getsize(path)))
        return connect(path, **how)

    monkeypatch.setattr(sqlite3, "connect", watched)
    before = os.umask(0o022)
    try:
        old = History()
        assert seen == [({0o600}, 0)], "it is private before anything is written"
        old.begin(old.open_conversation("/docs"), "Who?")
        assert len(list(folder.iterdir())) == 3
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.iterdir():
            file.chmod(0o644)
        new = History()
        assert modes() == {0o600}
        assert [turn.question for turn in new.recent()] == ["Who?"]
        new.close()
        old.close()
    finally:
        os.umask(before)
