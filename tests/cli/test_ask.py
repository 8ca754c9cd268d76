"""``ragaccel ask`` indexes a folder and answers a question, in every output format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import HashEmbedder
from scripted_llm import ScriptedLLM, first_passage, quotes

from ragaccel.cli import ask as ask_module, index as index_module
from ragaccel.cli.history import History

HUT = "The hut sleeps fourteen people in two rooms."
KEY = "The key hangs behind the water tank on the north side."


@pytest.fixture
def docs():
    folder = Path("docs")
    folder.mkdir()
    (folder / "hut.md").write_text(f"# Hut\n\n{HUT}\n")
    (folder / "key.txt").write_text(f"{KEY}\n")
    return folder


@pytest.fixture
def llm(monkeypatch):
    """A model that quotes the first passage; tests may replace what it says."""
    model = ScriptedLLM(first_passage)
    monkeypatch.setattr(ask_module, "load_llm", lambda terminal, settings: model)
    monkeypatch.setattr(index_module, "load_embedder", lambda settings: HashEmbedder())
    return model


def test_the_answer_is_on_stdout_and_all_else_on_stderr(cli, docs, llm):
    ended = cli("ask", docs, "Where does the key hang?")
    assert ended.code == 0
    assert ended.out == f"«{KEY}» [1]\n\n  ¹ key.txt:1\n"
    assert "2 added" in ended.err
    assert "tokens/s" in ended.err
    assert "\x1b" not in ended.out + ended.err


def test_an_unchanged_folder_prints_no_index_report(cli, docs, llm):
    cli("ask", docs, "Where does the key hang?")
    assert "added" not in cli("ask", docs, "Where does the key hang?").err
    (docs / "new.txt").write_text("A third file about dogs.")
    (docs / "hut.md").unlink()
    assert "1 added, 1 removed" in cli("ask", docs, "Where does the key hang?").err


def test_quiet_leaves_only_the_answer(cli, docs, llm):
    ended = cli("ask", docs, "Where does the key hang?", "--quiet")
    assert (ended.code, ended.err) == (0, "")


def test_plain_is_the_text_alone(cli, docs, llm):
    assert cli("ask", docs, "Where does the key hang?", "--plain").out == f"{KEY} [1]\n"
    ended = cli("ask", docs, "Where does the key hang?", "--plain", "--no-stream", "-q")
    assert (ended.out, ended.err) == (f"{KEY} [1]\n", "")


def test_streamed_or_whole_the_output_is_the_same(cli, docs, llm):
    llm.say = quotes(2, lead="It says that ")
    asked = ("ask", docs, "Where does the key hang?", "--model", "any")  # reads whole passages
    streamed = cli(*asked)
    whole = cli(*asked, "--no-stream")
    assert streamed.out == whole.out
    assert "»²" in whole.out


def test_json_is_one_document_on_stdout(cli, docs, llm):
    ended = cli("ask", docs, "Where does the key hang?", "--json", "--compare")
    document = json.loads(ended.out)
    assert document["answer"] == f"{KEY} [1]"
    assert document["answered"] is True
    source = document["sources"][0]
    assert (source["path"], source["line"], source["citation"]) == ("key.txt", 1, "key.txt:1")
    assert source["used"]
    (span,) = document["copied_spans"]
    assert (span["text"], span["number"]) == (KEY, 1)
    assert source["text"][span["passage_start"] : span["passage_end"]] == KEY
    assert document["acceptance"]["acceptance_length"] > 1
    assert document["timings"]["total_seconds"] == 1.0
    assert {"index_seconds", "load_seconds", "retrieve_seconds"} <= set(document["timings"])
    assert document["comparison"]["speed_up"] == 2.0
    assert document["comparison"]["same_tokens"] is True


def test_compare_tells_the_speed_up_and_that_the_tokens_are_the_same(cli, docs, llm):
    last = cli("ask", docs, "Where does the key hang?", "--compare").err.splitlines()[-1]
    assert "2.0× plain decoding" in last
    assert "same tokens: yes" in last
    assert "acceptance length" in last


def test_nothing_is_remembered_while_speeds_are_compared(cli, docs, llm):
    cli("ask", docs, "Where does the key hang?", "--compare")
    assert all(settings["remember"] is False for settings in llm.settings)
    cli("ask", docs, "Where does the key hang?")
    assert "remember" not in llm.settings[-1]


def test_no_accel_decodes_plainly(cli, docs, llm):
    cli("ask", docs, "Where does the key hang?", "--no-accel")
    assert type(llm.settings[-1]["drafter"]).__name__ == "NoDrafter"


def test_flags_reach_the_model(cli, docs, llm):
    cli("ask", docs, "Key?", "-k", "1", "--max-tokens", "3", "--temperature", "0.5", "--seed", "7")
    settings = llm.settings[-1]
    assert (settings["max_new_tokens"], settings["temperature"], settings["seed"]) == (3, 0.5, 7)
    assert len(llm.prompts[-1].passages) == 1


def test_a_cut_answer_says_so(cli, docs, llm):
    assert "cut at --max-tokens" in cli("ask", docs, "Key?", "--max-tokens", "3").err


def test_a_refusal_is_shown_with_what_is_nearest_and_ends_with_5(cli, docs, llm):
    llm.say = lambda prompt: "The passages do not tell."
    ended = cli("ask", docs, "Where does the key hang?", "-k", "1")
    assert ended.code == 5
    assert ended.out.startswith("The passages do not tell.\n\nNearest in the documents:\n")
    assert f"¹ key.txt:1\n      «{KEY}»\n" in ended.out
    assert "not answered: no passage that was found answers it" in ended.err
    document = json.loads(cli("ask", docs, "Where does the key hang?", "--json").out)
    assert (document["answered"], document["refusal"]) == (False, "not told")
    assert (document["nearest"][0]["sentence"], document["nearest"][0]["path"]) == (KEY, "key.txt")
    assert cli("ask", docs, "Key?", "--plain").out == "The passages do not tell.\n"


def test_an_answer_has_no_refusal(cli, docs, llm):
    document = json.loads(cli("ask", docs, "Where does the key hang?", "--json").out)
    assert (document["answered"], document["refusal"], document["nearest"]) == (True, None, [])


def test_what_the_bundled_reader_makes_up_is_not_shown(cli, docs, llm):
    llm.is_bundled_reader = True
    llm.say = lambda prompt: "The key hangs in the pub. [1]"
    ended = cli("ask", docs, "Where does the key hang?")
    assert ended.code == 5
    assert "pub" not in ended.out
    assert f"«{KEY}»" in ended.out
    llm.is_bundled_reader = False  # a model of the user's may use words of its own
    assert cli("ask", docs, "Where does the key hang?").code == 0


def test_a_chat_tells_that_a_question_was_not_answered(cli, docs, llm, pipe):
    llm.say = lambda prompt: "The passages do not tell."
    pipe("Where does the key hang?\n")
    ended = cli("chat", docs)
    assert ended.code == 5
    assert f"«{KEY}»" in ended.out


def test_sources_and_stats_on_request(cli, docs, llm):
    options = ("--show-sources", "--stats", "--model", "any")
    ended = cli("ask", docs, "Where does the key hang?", *options)
    assert "hut.md:3" in ended.out
    assert "score" in ended.out
    assert HUT in ended.out
    assert "verify passes" in ended.err
    assert "by copy" in ended.err


def test_a_pipe_beside_the_question_is_read_first(cli, docs, llm, pipe):
    pipe("The spare key is in the boathouse, under the third oar.")
    ended = cli("ask", docs, "Where is the spare key?")
    assert ended.out.startswith("«The spare key is in the boathouse, under the third oar.» [1]")
    assert "<stdin>:1" in ended.out


def test_a_question_from_a_pipe(cli, docs, llm, pipe):
    pipe("Where does the key hang?\n")
    assert cli("ask", docs).code == 0
    assert "Where does the key hang?" in llm.prompts[-1].text


def test_an_index_by_itself_is_asked_as_it_is(cli, docs, llm):
    assert cli("index", docs, "--index", "i.db").code == 0
    (docs / "later.txt").write_text("Later things.")
    ended = cli("ask", "--index", "i.db", "Where does the key hang?")
    assert ended.code == 0
    assert "added" not in ended.err
    assert not (docs / ".ragaccel").exists()


def test_continue_takes_up_the_last_conversation(cli, docs, llm):
    cli("ask", docs, "Where does the key hang?")
    cli("ask", docs, "And who hung it there?", "--continue")
    assert "Where does the key hang?" in llm.prompts[-1].text
    cli("ask", docs, "What of the hut?")
    assert "Where does the key hang?" not in llm.prompts[-1].text
    history = History()
    assert [turn.conversation for turn in history.recent()] == [2, 1, 1]
    history.close()


def test_the_history_keeps_what_belongs_to_an_answer(cli, docs, llm):
    cli("ask", docs, "Where does the key hang?")
    (turn,) = json.loads(cli("logs", "--json").out)
    assert turn["answer"] == f"{KEY} [1]"
    assert turn["sources"][0]["citation"] == "key.txt:1"
    assert turn["acceptance"]["acceptance_length"] > 1


def test_ctrl_c_keeps_what_was_answered_so_far(cli, docs, llm):
    def stop(number):
        if number == 6:
            raise KeyboardInterrupt

    llm.before_piece = stop
    ended = cli("ask", docs, "Where does the key hang?")
    assert ended.code == 130
    assert ended.out.startswith("«The key hangs behind the water»")
    history = History()
    turn = history.recent()[0]
    history.close()
    assert (turn.answer, turn.state) == ("The key hangs behind the water", "interrupted")
    llm.before_piece = lambda number: None
    assert cli("ask", docs, "Where does the key hang?").code == 0


def test_a_closed_pipe_ends_it_quietly(cli, docs, llm, monkeypatch):
    def gone(number):
        raise BrokenPipeError

    llm.before_piece = gone
    ended = cli("ask", docs, "Where does the key hang?")
    assert ended.code == 1
    assert "rror" not in ended.err


@pytest.mark.parametrize("change", ["INSERT", "UPDATE"])
def test_a_history_that_fails_later_does_not_cost_the_answer(cli, docs, llm, change):
    history = History()
    history._db.execute(
        f"CREATE TRIGGER full BEFORE {change} ON turn BEGIN"
        " SELECT RAISE(ABORT, 'database or disk is full'); END"
    )
    history.close()
    ended = cli("ask", docs, "Where does the key hang?")
    assert ended.code == 0
    assert KEY in ended.out
    assert "not written to the history" in ended.err


def test_a_history_that_cannot_be_written_does_not_cost_the_answer(cli, docs, llm, home):
    home.mkdir()
    (home / "history.db").write_bytes(b"no database " * 1000)
    ended = cli("ask", docs, "Where does the key hang?")
    assert ended.code == 0
    assert KEY in ended.out
    assert "not written to the history" in ended.err


def test_colours_when_asked_for(cli, docs, llm):
    Path("ragaccel.toml").write_text('color = "always"\n')
    coloured = cli("ask", docs, "Where does the key hang?")
    assert "\x1b[36m" in coloured.out
    assert "\x1b" not in cli("ask", docs, "Where does the key hang?", "--no-color").out


def test_a_question_longer_than_the_context_is_refused(cli, docs, llm):
    llm.context_length = 300
    ended = cli("ask", docs, "why " * 300)
    assert (ended.code, ended.out) == (1, "")
    assert "tokens" in ended.err
