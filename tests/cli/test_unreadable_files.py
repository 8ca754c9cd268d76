"""Unreadable files are named once, when they are indexed, and by ``ls --failed``."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import HashEmbedder
from rich.console import Console

from ragaccel.answer import copied_spans
from ragaccel.cli import index as index_module
from ragaccel.cli.answer_view import show_sources
from ragaccel.cli.terminal import Terminal, indexing_progress
from ragaccel.passage import Passage
from ragaccel.retrieval import Progress
from ragaccel.retrieval.loaders import DocumentReader

HUT = "The hut sleeps fourteen people in two rooms."


@pytest.fixture(autouse=True)
def embedder(monkeypatch):
    monkeypatch.setattr(index_module, "load_embedder", lambda settings: HashEmbedder())


@pytest.fixture
def docs():
    folder = Path("docs")
    folder.mkdir()
    (folder / "hut.md").write_text(f"# Hut\n\n{HUT}\n")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7 broken")
    (folder / "photo.png").write_bytes(b"\x89PNG")
    (folder / "noise").write_bytes(bytes(range(256)))
    return folder


def test_a_question_names_unread_files_once(cli, docs):
    first = cli("search", docs, "hut")
    assert first.code == 0
    assert first.err.count("broken.pdf") == 1
    assert "photo.png: not a document" in first.err
    assert "ragaccel ls docs --failed" in first.err
    for arguments in (("search", docs, "hut"), ("search", docs, "rooms", "-q")):
        assert cli(*arguments).err == ""


def test_indexing_names_what_failed_each_time_and_keeps_its_code(cli, docs):
    for _ in range(2):
        ended = cli("index", docs)
        assert ended.code == 4
        assert ended.err.count("warning: broken.pdf: broken pdf file") == 1
    assert "photo.png" not in ended.err
    assert cli("index", docs, "--strict").code == 1
    document = json.loads(cli("index", docs, "--json").out)
    assert set(document["failed"]) == {"broken.pdf"}
    assert document["passed_over"] == {"noise": "a binary file", "photo.png": "not a document"}


def test_a_file_that_fails_otherwise_is_named_again(cli, docs):
    cli("index", docs)
    (docs / "broken.pdf").write_bytes(b"")
    assert "broken.pdf" in cli("search", docs, "hut").err
    assert cli("search", docs, "hut").err == ""
    (docs / "worse.pdf").write_bytes(b"no pdf")
    told = cli("search", docs, "hut").err
    assert ("worse.pdf" in told, "broken.pdf" in told) == (True, False)


def test_what_failed_is_not_read_again_by_questions_until_it_changes(cli, docs, monkeypatch):
    cli("index", docs)
    read, names = DocumentReader.read, []

    def noted(reader, data, name):
        names.append(name)
        return read(reader, data, name)

    monkeypatch.setattr(DocumentReader, "read", noted)
    cli("search", docs, "hut")
    assert names == []
    cli("index", docs)
    assert names == ["broken.pdf"]
    (docs / "broken.pdf").write_bytes(b"other")
    cli("search", docs, "hut")
    assert names == ["broken.pdf"] * 2


def test_ls_names_them_later_and_json_all(cli, docs):
    cli("index", docs)
    listed = cli("ls", docs, "--failed")
    assert listed.code == 0
    kinds = {line.split()[1].rstrip(":"): line.split()[0] for line in listed.out.splitlines()}
    assert kinds == {"broken.pdf": "failed", "noise": "skipped", "photo.png": "skipped"}
    documents = {d["path"]: d for d in json.loads(cli("ls", docs, "--failed", "--json").out)}
    assert documents["photo.png"]["status"] == "skipped"
    assert documents["broken.pdf"]["reason"].startswith("broken pdf file")
    everything = {d["path"]: d for d in json.loads(cli("ls", docs, "--json").out)}
    assert (everything["hut.md"]["status"], everything["hut.md"]["reason"]) == ("indexed", "")
    assert everything["broken.pdf"]["reason"].startswith("broken pdf file")
    assert "--failed" in cli("ls", docs).err
    for path in ("broken.pdf", "photo.png", "noise"):
        (docs / path).unlink()
    cli("search", docs, "hut")
    assert cli("ls", docs, "--failed").out == ""


def test_many_files_are_counted_by_kind_except_in_json(cli, docs):
    for number in range(400):
        (docs / f"{number}.PNG").write_bytes(b"")
        (docs / f"a\n{number}.gif").write_bytes(b"")
    told = cli("index", docs).err
    assert "400 .gif: not a document" in told
    assert len(told.splitlines()) < 6
    lines = cli("ls", docs, "--failed").out.splitlines()
    assert len(lines) == 4
    assert any("401 .png: not a document" in line for line in lines)
    assert len(json.loads(cli("ls", docs, "--failed", "--json").out)) == 803


def test_ls_tells_that_an_older_version_is_indexed(cli, docs):
    cli("index", docs)
    (docs / "hut.md").write_bytes(b"x" * 51_000_000)
    assert "over the limit" in cli("search", docs, "hut").err
    (record,) = [d for d in json.loads(cli("ls", docs, "--json").out) if d["path"] == "hut.md"]
    assert (record["status"], record["num_passages"]) == ("indexed", 1)
    assert "over the limit" in record["reason"]


def test_progress_is_of_all_the_work():
    terminal = Terminal()
    terminal.err = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={})
    with indexing_progress(terminal) as draw:
        draw(Progress("reading"))
        assert "reading" not in terminal.err.file.getvalue()
        draw(Progress("embedding", 1, 2, 10, 500, "a/[b].md", work_done=100, work_total=1000))
    shown = terminal.err.file.getvalue()
    for part in ("embedding", "1/2 files, 10/500 passages", "[b].md"):
        assert part in shown


def test_a_source_is_cited_by_the_page_of_what_is_copied_from_it(capsys):
    text = "The ferry leaves at six in the morning. The fare is nine crowns for all."
    passage = Passage("p", text, path="guide.pdf", page=2, locations=((40, 3),))
    for said, place in (("The ferry leaves at six", 2), ("The fare is nine crowns", 3)):
        spans = copied_spans(said, [passage])
        answer = SimpleNamespace(copied_spans=spans, cited_numbers=[1], passages=[passage])
        show_sources(Terminal(), answer, everything=False)
        assert f"guide.pdf:{place}" in capsys.readouterr().out
