"""The commands index, search, ls, rm, stats, chat and doctor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fakes import HashEmbedder
from scripted_llm import ScriptedLLM, first_passage

from ragaccel.cli import ask as ask_module, index as index_module
from ragaccel.cli.history import History
from ragaccel.passage import Passage
from ragaccel.retrieval import Collection

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HUT = "The hut sleeps fourteen people in two rooms."
KEY = "The key hangs behind the water tank on the north side."


@pytest.fixture(autouse=True)
def embedder(monkeypatch):
    monkeypatch.setattr(index_module, "load_embedder", lambda settings: HashEmbedder())


@pytest.fixture
def docs():
    folder = Path("docs")
    folder.mkdir()
    (folder / "hut.md").write_text(f"# Hut\n\n{HUT}\n")
    (folder / "key.txt").write_text(f"{KEY}\n")
    return folder


@pytest.fixture
def llm(monkeypatch):
    model = ScriptedLLM(first_passage)
    monkeypatch.setattr(ask_module, "load_llm", lambda terminal, settings: model)
    return model


def test_index_says_what_it_did(cli, docs):
    ended = cli("index", docs)
    assert (ended.code, ended.out) == (0, "")
    assert "2 added" in ended.err
    assert "2 unchanged" in cli("index", docs).err
    document = json.loads(cli("index", docs, "--rebuild", "--json").out)
    assert (document["added"], document["passages"], document["failed"]) == (2, 2, {})


def test_links_out_of_the_folder_are_named_once_and_followed_on_demand(cli, docs, llm, tmp_path):
    (tmp_path / "elsewhere.md").write_text("# Elsewhere\n\nThe gannet is a bird.\n")
    (docs / "link.md").symlink_to(tmp_path / "elsewhere.md")
    ended = cli("index", docs)
    assert "link.md" in ended.err
    assert "--follow-links" in ended.err
    assert "link.md" not in cli("search", docs, "gannet").err
    assert "elsewhere" not in cli("ls", docs).out.lower()
    assert "gannet" in cli("search", docs, "gannet", "--follow-links").out
    assert "link.md" in cli("ls", docs).out


def test_an_index_is_its_owners_alone_unless_shared(cli, docs, llm, monkeypatch):
    before = os.umask(0o022)
    try:
        cli("index", docs)
        place = docs / ".ragaccel/index.db"
        assert (place.stat().st_mode & 0o777, place.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        cli("search", docs, "anything", "--shared")
        assert (place.stat().st_mode & 0o777, place.parent.stat().st_mode & 0o777) == (0o644, 0o755)
        cli("index", docs, "--rebuild")
        assert place.stat().st_mode & 0o777 == 0o600
        monkeypatch.setenv("RAGACCEL_SHARED", "yes")
        cli("index", docs, "--rebuild")
        assert place.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_strangers_folder_chooses_no_embedding_model(cli, docs, llm, monkeypatch):
    monkeypatch.chdir(docs)
    Path("emb").mkdir()
    Path("ragaccel.toml").write_text('embedder = "./emb"\nmodel = "./emb"\nk = 1\n')
    asked_for = []
    load = index_module.load_embedder
    monkeypatch.setattr(
        index_module, "load_embedder", lambda settings: asked_for.append(settings) or load(settings)
    )
    ended = cli("search", ".", "anything")
    assert ended.code == 0
    assert {(settings.embedder, settings.model) for settings in asked_for} == {(None, None)}
    assert "embedder is ignored" in ended.err
    assert "model is ignored" in ended.err


def test_index_remembers_what_belongs_to_it(cli, docs, llm):
    assert json.loads(cli("index", docs, "--exclude", "*.txt", "--json").out)["added"] == 1
    cli("ask", docs, "key?")
    assert "key.txt" not in cli("ls", docs).out
    assert "*.txt" in cli("stats", docs).out


def test_ready_made_passages_keep_their_ids(cli, llm):
    Path("set.tsv").write_text(f"p7\t{HUT}\np9\t{KEY}\n")
    assert cli("index", "--passages", "set.tsv").code == 0
    ended = cli("ask", "set.tsv", "Where does the key hang?")
    assert (ended.code, "¹ p9" in ended.out) == (0, True)
    assert cli("index", "docs", "--passages", "set.tsv").code == 2
    Path("bad.tsv").write_text("no tab in here\n")
    ended = cli("index", "--passages", "bad.tsv")
    assert ended.code == 1
    assert "bad.tsv" in ended.err


def test_search_shows_passages_with_scores(cli, docs):
    ended = cli("search", docs, "where does the key hang", "-k", "1")
    assert "key.txt:1" in ended.out
    assert "score" in ended.out
    assert KEY in ended.out
    document = json.loads(cli("search", docs, "key", "--json", "--mode", "dense").out)
    assert document["mode"] == "dense"
    assert {"text", "score", "citation"} <= set(document["passages"][0])
    assert cli("search", docs, "key", "--mode", "other").code == 2
    assert cli("search", "--index", "none.db", "key").code == 3


def test_ls_names_what_a_program_put_in_without_a_document(cli):
    with Collection("c.db") as collection:
        collection.put([Passage("a", "x"), Passage("b", "y", path="b.md")], [[1.0], [1.0]])
    lines = cli("ls", "--index", "c.db").out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ["(of no document)", "b.md"]


def test_ls_lists_files_and_json(cli, docs):
    assert cli("ls", docs).code == 3
    cli("index", docs)
    lines = cli("ls", docs).out.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "hut.md"], ["1", "key.txt"]]
    assert json.loads(cli("ls", docs, "--json").out)[0]["path"] == "hut.md"


def test_rm_takes_a_file_out_for_good_and_leaves_it_where_it_is(cli, docs, llm):
    (docs / "odd [1]*.txt").write_text("An odd name.")
    cli("index", docs)
    assert "removed 1 file from" in cli("rm", docs, "odd [1]*.txt").err
    assert "removed 1 file from" in cli("rm", docs, "k*.txt").err
    cli("ask", docs, "key?")
    assert [line.split()[1] for line in cli("ls", docs).out.splitlines()] == ["hut.md"]
    assert (docs / "key.txt").exists()
    ended = cli("rm", docs, "none.txt")
    assert ended.code == 1
    assert "none.txt" in ended.err
    cli("index", docs, "--rebuild")
    assert len(cli("ls", docs).out.splitlines()) == 1
    assert "key.txt" in cli("stats", docs).out
    assert cli("rm", docs, "--undo", "k*.txt").code == 0
    assert cli("rm", docs, "--undo", "none.txt").code == 1
    assert cli("rm", docs, "--undo").code == 2
    cli("index", docs)
    assert [line.split()[1] for line in cli("ls", docs).out.splitlines()] == ["hut.md", "key.txt"]


def test_rm_takes_a_folder_and_an_index(cli, docs):
    cli("index", docs, "--index", "my.db")
    ended = cli("rm", docs, "key.txt", "--index", "my.db")
    assert (ended.code, "removed 1 file from" in ended.err) == (0, True)
    assert cli("rm", "hut.md", "--index", "my.db").code == 0
    assert not cli("ls", "--index", "my.db").out


def test_a_collection_is_brought_up_to_date_before_it_is_asked(cli, llm):
    Path("set.tsv").write_text(f"p7\t{HUT}\np9\t{KEY}\n")
    cli("index", "--passages", "set.tsv")
    Path("set.tsv").write_text("p7\tThe hut burned down.\n")
    found = json.loads(cli("search", "set.tsv", "hut", "--json").out)["passages"]
    assert [p["text"] for p in found] == ["The hut burned down."]
    Path("set.tsv").write_text("p7\t \n")
    assert "no passage with text" in cli("search", "set.tsv", "hut").err


def test_messages_name_the_command_that_helps(cli, docs):
    assert f"ragaccel index {docs} --index my.db" in cli("ls", docs, "--index", "my.db").err
    Path("notes.txt").write_text("my notes\n" * 20)
    assert "not a ragaccel index" in cli("ls", "--index", "notes.txt").err
    assert "is a folder" in cli("index", docs, "--index", ".").err
    assert [path.name for path in Path().glob("notes.txt*")] == ["notes.txt"]


def test_rm_all_deletes_the_index_alone(cli, docs):
    cli("index", docs)
    assert cli("rm", docs, "--all").code == 2
    assert (docs / ".ragaccel" / "index.db").exists()
    assert cli("rm", docs, "--all", "--yes").code == 0
    assert not (docs / ".ragaccel" / "index.db").exists()
    assert (docs / "key.txt").exists()
    assert cli("rm", docs, "--all", "--yes").code == 3


def test_stats_as_json(cli, docs):
    cli("index", docs)
    figures = json.loads(cli("stats", docs, "--json").out)
    assert (figures["files"], figures["passages"], figures["dimensions"]) == (2, 2, 64)
    assert figures["bytes"] > 0


def test_chat_remembers_what_was_said(cli, docs, llm, pipe):
    pipe("Where does the key hang?\n\n/sources\n/new\n/nonsense\nHow many sleep there?\nAnd now?\n")
    ended = cli("chat", docs)
    assert ended.code == 0
    assert ended.out.count("[1]") == 3
    assert "Where does the key hang?" not in llm.prompts[1].text
    assert "How many sleep there?" in llm.prompts[2].text
    assert any(KEY.encode() == bytes(r.token_ids) for r in llm.prompts[0].references)
    assert "/quit" in ended.err
    pipe("Who hung it?\n/quit\nnever asked\n")
    cli("chat", docs, "--continue")
    assert "How many sleep there?" in llm.prompts[-1].text
    history = History()
    assert [turn.conversation for turn in history.recent()] == [2, 2, 2, 1]
    history.close()


def test_earlier_answers_are_references(cli, docs, llm, pipe):
    llm.say = lambda prompt: "An answer of its own that no passage holds."
    pipe("Where does the key hang?\nSay that again.\n")
    cli("chat", docs)
    assert any(
        b"An answer of its own" in bytes(reference.token_ids)
        for reference in llm.prompts[1].references
    )


def test_a_question_that_fails_does_not_end_the_chat(cli, docs, llm, pipe):
    llm.context_length = 600
    pipe("why " * 400 + "\nWhere does the key hang?\n")
    ended = cli("chat", docs)
    assert ended.code == 1
    assert ended.err.count("error:") == 1
    assert KEY in ended.out


def test_doctor_looks_at_everything(cli, docs, monkeypatch):
    from ragaccel.cli import doctor as checks

    monkeypatch.setattr(checks, "_language_model", lambda settings: "bundled reader")
    monkeypatch.setattr(checks, "_embedding_model", lambda settings: "hash")
    ended = cli("doctor")
    assert ended.code == 0, ended
    for name in ("python", "torch", "extra retrieval", "sqlite", "language model", "data folder"):
        assert name in ended.out
    cli("index", docs)
    listed = json.loads(cli("doctor", docs, "--json").out)
    assert listed[-1]["name"] == "index"
    assert "undamaged" in listed[-1]["detail"]


def test_doctor_knows_the_extras_of_the_project_and_what_is_too_old(cli, monkeypatch):
    from ragaccel.cli import doctor as checks

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {name: list(needed) for name, needed in checks.EXTRAS.items()} == {
        name: needed for name, needed in extras.items() if name not in ("dev", "eval")
    }
    have = checks._version
    monkeypatch.setattr(
        checks, "_version", lambda name: "1.2.0" if name == "accelerate" else have(name)
    )
    listed = {check["name"]: check for check in json.loads(cli("doctor", "--json").out)}
    assert listed["extra multi-gpu"]["state"] == "ok"
    assert listed["extra train"]["state"] == "missing"
    assert listed["extra train"]["detail"] == "accelerate 1.2.0, but >=1.4 is needed"


def test_doctor_names_what_is_broken_and_the_remedy(cli, docs, home, monkeypatch):
    from ragaccel.cli import doctor as checks

    monkeypatch.setattr(checks, "_language_model", lambda settings: "bundled reader")
    home.write_text("a file where a folder belongs")
    ended = cli("doctor", docs)
    assert ended.code == 1
    assert "RAGACCEL_HOME" in ended.out
    assert "ragaccel index" in ended.out


def test_doctor_measures_what_rows_cost_and_keeps_it(cli, home):
    ended = cli("doctor", "--measure")
    assert ended.code == 0, ended
    assert "greedy, ms" in ended.out
    assert "filtered, ms" in ended.out
    measured = json.loads(cli("doctor", "--measure", "--json").out)
    assert measured["kept"]
    kept = home / "measurements" / f"{measured['key']}.json"
    assert json.loads(kept.read_text())["seconds"]["greedy"] == measured["seconds"]["greedy"]
    assert set(measured["seconds"]["sampled"]) == set(measured["seconds"]["greedy"])
    assert "weights and the keys and values of" in ended.out + ended.err
    assert json.loads(kept.read_text())["threads"] >= 1
    lengths = {one["context"]: one for one in measured["by_length"]}
    assert all(one["limit_seconds"] > 0 for one in lengths.values())


def test_a_model_of_a_short_context_is_measured(capsys):
    from tiny_llm import tiny_llm

    from ragaccel.cli.doctor import _measure_all
    from ragaccel.cli.terminal import Terminal

    costs = _measure_all(Terminal(quiet=True), tiny_llm(max_positions=100))
    assert {cost.mode for cost in costs} == {"greedy", "sampled", "filtered"}
    assert all(cost.limit_seconds > 0 and cost.context <= 98 for cost in costs)
