"""Documents and indexes that cannot be read: each gets a clear message and an exit code."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
from cli_documents import KEY, QUESTION
from hash_embedder import HashEmbedder

from ragaccel.cli import index as index_module
from ragaccel.errors import StorageError
from ragaccel.retrieval import Store
from ragaccel.retrieval.loaders import DocumentReader


@pytest.fixture
def mixed(docs):
    """A folder of a document and three files that are not read."""
    (docs / "key.txt").unlink()
    (docs / "broken.pdf").write_bytes(b"%PDF-1.7 broken")
    (docs / "photo.png").write_bytes(b"\x89PNG")
    (docs / "noise").write_bytes(bytes(range(256)))
    return docs


def answers(cli, docs):
    ended = cli("ask", docs, QUESTION)
    return ended.code == 0 and KEY in ended.out


@pytest.mark.parametrize("content", [None, b"\x7fELF\0\0\1" * 99], ids=["empty", "a binary"])
def test_a_folder_without_documents(cli, llm, content):
    folder = Path("docs")
    folder.mkdir()
    if content:
        (folder / "program").write_bytes(content)
    ended = cli("ask", folder, QUESTION)
    assert ended.code == 3
    assert "docs holds no document" in ended.error
    assert cli("index", folder).code == 0


def huge(path):
    with path.open("wb") as file:
        file.truncate(200_000_000)


BROKEN = [
    ("broken.pdf", lambda path: path.write_bytes(b"%PDF-1.4\n1 0 obj\n<</Type/Catalog"), "pdf"),
    ("huge.log", huge, "200 MB"),
    ("secret.txt", lambda path: path.write_text("secret"), "no permission"),
    (os.fsdecode(b"caf\xe9.txt"), lambda path: path.write_text("Coffee."), "UTF-8"),
]


@pytest.mark.parametrize(("name", "write", "said"), BROKEN, ids=lambda value: ascii(value)[:20])
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_indexed(
    cli, docs, llm, monkeypatch, name, write, said
):
    try:
        write(docs.resolve() / name)
    except OSError:
        pytest.skip("this file system takes no such names")
    open_ = os.open

    def refuse(path, *arguments, **options):  # root, as whom tests may run, may read every file
        if str(path).endswith("secret.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    ended = cli("index", docs)
    assert ended.code == 4
    (warning,) = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    assert said in warning
    assert name.encode("ascii", "backslashreplace").decode() in warning
    assert "2 added" in ended.err
    assert cli("index", docs, "--strict").code == 1
    assert "warning" not in cli("search", docs, "key").err  # named once, when it is indexed
    assert answers(cli, docs)


def test_an_index_that_may_only_be_read(cli, docs, llm, monkeypatch):
    cli("index", docs)

    def refuse(self, *, reset=False):
        raise StorageError("cannot write the index: keep it elsewhere with --index PATH")

    monkeypatch.setattr(Store, "writing", refuse)
    ended = cli("ask", docs, QUESTION)
    assert (ended.code, KEY in ended.out) == (0, True)
    assert "from the index as it is" in ended.err
    ended = cli("index", docs)
    assert ended.code == 1
    assert "--index PATH" in ended.error


def test_a_corrupt_index_is_told_with_the_command_that_mends_it(cli, docs, llm):
    cli("index", docs)
    index = docs / ".ragaccel" / "index.db"
    index.write_bytes(b"rubbish " * 2000)
    for name, *rest in (["ask", QUESTION], ["search", "key"], ["ls"], ["stats"], ["rm", "key.txt"]):
        ended = cli(name, docs, *rest)
        assert ended.code == 1
        assert "damaged" in ended.error
        assert "ragaccel index docs --rebuild" in ended.error
    assert cli("index", docs, "--rebuild").code == 0
    assert answers(cli, docs)
    with sqlite3.connect(index) as db:
        db.execute("UPDATE passage SET vector = x'00'")
    db.close()
    ended = cli("doctor", docs)
    assert (ended.code, "--rebuild" in ended.out) == (1, True)


def test_an_index_of_another_embedding_model(cli, docs, llm, monkeypatch):
    cli("index", docs)
    monkeypatch.setattr(index_module, "load_embedder", lambda settings: HashEmbedder("another"))
    ended = cli("ask", docs, QUESTION)
    assert ended.code == 1
    assert "ragaccel index docs --rebuild" in ended.error
    assert cli("index", docs, "--rebuild").code == 0


def test_a_question_names_unread_files_once(cli, mixed):
    first = cli("search", mixed, "hut")
    assert first.code == 0
    assert first.err.count("broken.pdf") == 1
    assert "photo.png: not a document" in first.err
    assert "ragaccel ls docs --failed" in first.err
    assert cli("search", mixed, "rooms", "-q").err == cli("search", mixed, "hut").err == ""
    (mixed / "broken.pdf").write_bytes(b"")
    assert "broken.pdf" in cli("search", mixed, "hut").err
    (mixed / "worse.pdf").write_bytes(b"no pdf")
    told = cli("search", mixed, "hut").err
    assert ("worse.pdf" in told, "broken.pdf" in told) == (True, False)


def test_indexing_reads_and_names_what_failed_each_time(cli, mixed, monkeypatch):
    read, names = DocumentReader.read, []

    def noted(reader, data, name):
        names.append(name)
        return read(reader, data, name)

    monkeypatch.setattr(DocumentReader, "read", noted)
    for _ in range(2):
        names.clear()
        ended = cli("index", mixed)
        assert ended.code == 4
        assert ended.err.count("warning: broken.pdf: broken pdf file") == 1
    assert names == ["broken.pdf"]
    quiet = cli("index", mixed, "-q")
    assert (quiet.code, quiet.err) == (4, "")
    assert "photo.png" not in ended.err
    assert "2 skipped" in ended.err
    document = json.loads(cli("index", mixed, "--json").out)
    assert set(document["failed"]) == {"broken.pdf"}
    assert document["skipped"] == {"not a document": 1, "binary": 1}
    assert document["passed_over"] == {"noise": "a binary file", "photo.png": "not a document"}


def test_ls_names_unread_files_until_they_are_gone(cli, mixed):
    cli("index", mixed)
    lines = cli("ls", mixed, "--failed").out.splitlines()
    kinds = {line.split()[1].rstrip(":"): line.split()[0] for line in lines}
    assert kinds == {"broken.pdf": "failed", "noise": "skipped", "photo.png": "skipped"}
    (mixed / "hut.md").write_bytes(b"x" * 51_000_000)
    assert "over the limit" in cli("search", mixed, "hut").err
    everything = {d["path"]: d for d in cli("ls", mixed, "--json").json}
    older = everything["hut.md"]  # than the file that is too large now
    assert (older["status"], older["num_passages"]) == ("indexed", 1)
    assert "over the limit" in older["reason"]
    assert everything["photo.png"]["status"] == "skipped"
    assert everything["broken.pdf"]["reason"].startswith("broken pdf file")
    assert "--failed" in cli("ls", mixed).err
    for path in (*kinds, "hut.md"):
        (mixed / path).unlink()
    cli("search", mixed, "hut")
    assert cli("ls", mixed, "--failed").out == ""


def test_many_files_are_counted_by_kind_except_in_json(cli, mixed):
    for number in range(400):
        (mixed / f"{number}.PNG").write_bytes(b"")
        (mixed / f"a\n{number}.gif").write_bytes(b"")
    told = cli("index", mixed).err
    assert "400 .gif: not a document" in told
    assert len(told.splitlines()) < 6
    lines = cli("ls", mixed, "--failed").out.splitlines()
    assert len(lines) == 4
    assert any("401 .png: not a document" in line for line in lines)
    assert len(cli("ls", mixed, "--failed", "--json").json) == 803
