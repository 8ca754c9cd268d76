"""History: what was asked and answered, whatever happens to the process."""

from __future__ import annotations

import json

import pytest

from ragaccel.cli.history import ANSWERED, INTERRUPTED, History


@pytest.fixture
def history():
    history = History()
    yield history
    history.close()


def test_a_question_is_there_before_its_answer(history):
    talk = history.open_conversation("/docs")
    history.begin(talk, "Who?", "reader")
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
    talk = history.open_conversation(name)
    history.finish(history.begin(talk, f"what of {name}?"), name, ANSWERED)
    assert history.last_conversation(name) == talk


def test_logs_show_the_latest_last_and_as_json(cli, history):
    assert "nothing was asked" in cli("logs").err
    talk = history.open_conversation("/docs")
    details = {"sources": [{"number": 2, "citation": "a.md:3", "used": True}]}
    history.finish(history.begin(talk, "first?"), "One.", ANSWERED, details)
    history.finish(history.begin(talk, "second?"), "Tw", INTERRUPTED)
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
    talk = history.open_conversation("/docs")
    for number in range(200):
        history.finish(history.begin(talk, f"question {number} " * 20), "answer " * 50, ANSWERED)
    history.close()
    content = bytearray((home / "history.db").read_bytes())
    content[8192:] = bytes(len(content) - 8192)
    (home / "history.db").write_bytes(content)
    ended = cli("logs")
    assert ended.code == 1
    assert "history.db cannot be used" in ended.err
    assert cli("logs", "-n", "9" * 25).code == 2
