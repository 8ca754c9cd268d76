"""The commands index, search, ls, rm, stats and doctor."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cli_documents import HUT, KEY, QUESTION

from eval.robustness.stand_ins import save_tiny_model
from ragaccel.cli import doctor as checks
from ragaccel.errors import UnsupportedModelError
from ragaccel.passage import Passage
from ragaccel.retrieval import Collection

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib


def listed(ended):
    return [line.split(maxsplit=1)[1] for line in ended.out.splitlines()]


def test_index_says_what_it_did(cli, docs):
    ended = cli("index", docs)
    assert (ended.code, ended.out) == (0, "")
    assert "2 added" in ended.err
    assert "2 unchanged" in cli("index", docs).err
    document = cli("index", docs, "--rebuild", "--json").json
    assert (document["added"], document["passages"], document["failed"]) == (2, 2, {})
    figures = cli("stats", docs, "--json").json
    assert (figures["files"], figures["passages"], figures["dimensions"]) == (2, 2, 64)
    assert figures["bytes"] > 0
    assert cli("index", docs, "--exclude", "*.txt", "--json").json["removed"] == 1
    cli("search", docs, "key")
    assert listed(cli("ls", docs)) == ["hut.md  Hut"]
    assert "*.txt" in cli("stats", docs).out
    assert "as in an earlier run: --exclude *.txt" in cli("index", docs).err


def test_links_out_of_the_folder_are_named_once_and_followed_on_demand(cli, docs, tmp_path):
    (tmp_path / "elsewhere.md").write_text("# Elsewhere\n\nThe gannet is a bird.\n")
    (docs / "link.md").symlink_to(tmp_path / "elsewhere.md")
    ended = cli("index", docs)
    assert "link.md" in ended.err
    assert "--follow-links" in ended.err
    assert "link.md" not in cli("search", docs, "gannet").err
    assert "link.md" not in cli("ls", docs).out
    assert "gannet" in cli("search", docs, "gannet", "--follow-links").out
    assert "link.md" in cli("ls", docs).out


def test_an_index_is_its_owners_alone_unless_shared(cli, docs, monkeypatch):
    place = docs / ".ragaccel/index.db"
    before = os.umask(0o022)
    try:
        for command, file, folder in (
            (("index", docs), 0o600, 0o700),
            (("search", docs, "anything", "--shared"), 0o644, 0o755),
            (("search", docs, "anything"), 0o644, 0o755),  # shared until it is rebuilt
            (("index", docs, "--rebuild"), 0o600, 0o755),
        ):
            cli(*command)
            modes = place.stat().st_mode & 0o777, place.parent.stat().st_mode & 0o777
            assert modes == (file, folder), command
        monkeypatch.setenv("RAGACCEL_SHARED", "yes")
        cli("index", docs, "--rebuild")
        assert place.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_ready_made_passages_keep_their_ids_and_are_brought_up_to_date(cli, llm):
    passages = Path("set.tsv")
    passages.write_text(f"p7\t{HUT}\np9\t{KEY}\n")
    assert cli("index", "--passages", passages).code == 0
    ended = cli("ask", passages, QUESTION)
    assert (ended.code, "¹ p9" in ended.out) == (0, True)
    passages.write_text("p7\tThe hut burned down.\n")
    found = cli("search", passages, "hut", "--json").json["passages"]
    assert [p["text"] for p in found] == ["The hut burned down."]
    passages.write_text("p7\t \n")
    assert "no passage with text" in cli("search", passages, "hut").err
    assert cli("index", "docs", "--passages", passages).code == 2
    passages.write_text("no tab in here\n")
    ended = cli("index", "--passages", passages)
    assert ended.code == 1
    assert "set.tsv" in ended.error


def test_search_shows_passages_with_scores(cli, docs):
    ended = cli("search", docs, QUESTION, "-k", "1")
    for part in ("key.txt line 1", "score", KEY):
        assert part in ended.out
    (docs / "long.txt").write_text("boathouse " * 50 + "end.")
    assert "boathouse end." in cli("search", docs, "boathouse", "--full").out
    assert "boathouse end." not in cli("search", docs, "boathouse").out
    document = cli("search", docs, "key", "--json", "--mode", "dense").json
    assert document["mode"] == "dense"
    assert {"text", "score", "citation"} <= set(document["passages"][0])
    assert cli("search", "--index", "none.db", "key").code == 3
    ended = cli("search", docs, "boathouse", "--mode", "text", "--json")
    assert len(ended.json["passages"]) == 1
    assert cli("search", docs, "zeppelin", "--mode", "text").code == 3


def test_ls_lists_files(cli, docs):
    assert cli("ls", docs).code == 3
    cli("index", docs)
    lines = cli("ls", docs).out.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "hut.md"], ["1", "key.txt"]]
    assert cli("ls", docs, "--json").json[0]["path"] == "hut.md"
    with Collection("c.db") as collection:
        collection.put([Passage("a", "x"), Passage("b", "y", path="b.md")], [[1.0], [1.0]])
    assert listed(cli("ls", "--index", "c.db")) == ["(of no document)", "b.md"]


def test_rm_takes_a_file_out_for_good_and_leaves_it_where_it_is(cli, docs):
    (docs / "odd [1]*.txt").write_text("An odd name.")
    cli("index", docs)
    assert "removed 1 file from" in cli("rm", docs, "odd [1]*.txt").err
    assert "removed 1 file from" in cli("rm", docs, "k*.txt").err
    cli("search", docs, "key?")
    assert listed(cli("ls", docs)) == ["hut.md  Hut"]
    assert (docs / "key.txt").exists()
    ended = cli("rm", docs, "none.txt")
    assert ended.code == 1
    assert "none.txt" in ended.err
    cli("index", docs, "--rebuild")
    assert len(listed(cli("ls", docs))) == 1
    assert "key.txt" in cli("stats", docs).out
    assert cli("rm", docs, "--undo", "k*.txt").code == 0
    assert cli("rm", docs, "--undo", "none.txt").code == 1
    assert cli("rm", docs, "--undo").code == 2
    cli("index", docs)
    assert listed(cli("ls", docs)) == ["hut.md  Hut", "key.txt"]


def test_rm_takes_an_index_and_all_of_it(cli, docs):
    cli("index", docs, "--index", "my.db")
    for place in ((docs, "key.txt"), ("hut.md",)):
        assert cli("rm", *place, "--index", "my.db").code == 0
    assert not cli("ls", "my.db").out
    for confirmed, code in (((), 2), (("--yes",), 0), (("--yes",), 3)):
        assert cli("rm", "--index", "my.db", "--all", *confirmed).code == code
        assert Path("my.db").exists() == (code == 2)
    assert (docs / "key.txt").exists()
    assert f"ragaccel index {docs} --index my.db" in cli("ls", docs, "--index", "my.db").err


@pytest.fixture
def no_models(monkeypatch):
    monkeypatch.setattr(checks, "_language_model", lambda settings: "bundled reader")
    monkeypatch.setattr(checks, "_embedding_model", lambda settings: "hash")
    monkeypatch.setattr(checks, "_check_model", lambda terminal, settings: "decodes exactly")


@pytest.mark.usefixtures("no_models")
def test_doctor_looks_at_everything_and_names_what_is_broken(cli, docs, home):
    ended = cli("doctor")
    assert ended.code == 0, ended
    for name in ("python", "torch", "extra retrieval", "sqlite", "language model", "data folder"):
        assert name in ended.out
    cli("index", docs)
    last = cli("doctor", docs, "--json").json[-1]
    assert last["name"] == "index"
    assert "undamaged" in last["detail"]
    shutil.rmtree(docs / ".ragaccel")
    shutil.rmtree(home, ignore_errors=True)
    home.write_text("a file where a folder belongs")
    ended = cli("doctor", docs)
    assert ended.code == 1
    assert "RAGACCEL_HOME" in ended.out
    assert "ragaccel index" in ended.out


@pytest.mark.usefixtures("no_models")
def test_doctor_loads_the_built_in_model(cli, monkeypatch):
    def refuse(terminal, settings):
        raise UnsupportedModelError("its passes take no cache")

    monkeypatch.setattr(checks, "_check_model", refuse)
    ended = cli("doctor")
    assert (ended.code, "its passes take no cache" in ended.out) == (1, True)
    assert cli("doctor", "--model", "any").code == 0


@pytest.mark.usefixtures("no_models")
def test_doctor_knows_the_extras_of_the_project_and_what_is_too_old(cli, monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {name: list(needed) for name, needed in checks.EXTRAS.items()} == {
        name: needed
        for name, needed in extras.items()
        if name not in ("all", "dev", "docs", "eval")
    }
    have = checks._version
    monkeypatch.setattr(
        checks, "_version", lambda name: "1.2.0" if name == "accelerate" else have(name)
    )
    states = {check["name"]: check for check in cli("doctor", "--json").json}
    assert states["extra multi-gpu"]["state"] == "ok"
    assert states["extra train"]["state"] == "missing"
    assert states["extra train"]["detail"] == "accelerate 1.2.0, but >=1.4 is needed"


def test_doctor_measures_what_rows_cost_and_keeps_it(cli, home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model = save_tiny_model(Path("model"))
    ended = cli("doctor", "--measure", "--model", model)
    assert ended.code == 0, ended
    for part in ("greedy, ms", "filtered, ms", "weights and the keys and values of"):
        assert part in ended.out + ended.err
    measured = cli("doctor", "--measure", "--model", model, "--json").json
    assert measured["kept"]
    kept = json.loads((home / "measurements" / f"{measured['key']}.json").read_text())
    assert kept["seconds"]["greedy"] == measured["seconds"]["greedy"]
    assert kept["threads"] >= 1
    assert set(measured["seconds"]["sampled"]) == set(measured["seconds"]["greedy"])
    assert all(one["limit_seconds"] > 0 for one in measured["by_length"])


def test_indexing_stops_after_the_time_that_is_given(cli, docs, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.indexing._BATCH_PASSAGES", 1)
    ended = cli("index", docs, "--for", "0.000001s")
    assert ended.code == 0
    assert "the time is over: 1 file is left" in ended.err
    assert "`ragaccel index docs` goes on" in ended.err.replace("\n", " ")
    assert cli("index", docs, "--for", "2m").err.count("1 added") == 1
    for wrong in ("2", "soon", "0s"):
        assert "write it as 30s, 2m or 1h" in cli("index", docs, "--for", wrong).error
    assert "not both" in cli("index", docs, "--for", "1h", "--rebuild").error
