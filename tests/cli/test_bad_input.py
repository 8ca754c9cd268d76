"""Bad input, end to end: each kind gets a clear message and exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fakes import HashEmbedder
from scripted_llm import ScriptedLLM, first_passage

from eval.robustness.stand_ins import save_tiny_model
from ragaccel.cli import ask as ask_module, index as index_module

KEY = "The key hangs behind the water tank on the north side."
QUESTION = "Where does the key hang?"
TINY_PDF = b"%PDF-1.4\n1 0 obj\n<</Type/Catalog/Pages 2 0 R>>\nendobj\ntrailer<</Root 1 0 R"


@pytest.fixture
def docs():
    folder = Path("docs")
    folder.mkdir()
    (folder / "key.txt").write_text(KEY)
    return folder


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(index_module, "load_embedder", lambda settings: HashEmbedder())


@pytest.fixture
def llm(monkeypatch):
    model = ScriptedLLM(first_passage)
    monkeypatch.setattr(ask_module, "load_llm", lambda terminal, settings: model)
    return model


def one_line(ended):
    """Return the error line of a failed command, which is its only line of that kind."""
    assert ended.out == ""
    assert "Traceback" not in ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    return line


def test_an_empty_folder(cli, llm):
    Path("docs").mkdir()
    ended = cli("ask", "docs", QUESTION)
    assert ended.code == 3
    assert "docs holds no document" in one_line(ended)
    assert cli("index", "docs").code == 0


def test_a_binary_is_passed_over_and_counted(cli, docs, llm):
    (docs / "program").write_bytes(b"\x7fELF\0\0\1" * 99)
    (docs / "photo.png").write_bytes(b"\x89PNG\r\n\0")
    ended = cli("index", docs)
    assert ended.code == 0
    assert "2 skipped" in ended.err
    ended = cli("ask", docs, QUESTION)
    assert (ended.code, KEY in ended.out) == (0, True)


def test_a_folder_of_binaries_alone(cli, llm):
    Path("docs").mkdir()
    Path("docs/program").write_bytes(b"\x7fELF\0\0\1" * 99)
    assert cli("ask", "docs", QUESTION).code == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("broken.pdf", TINY_PDF, "pdf"),
        ("empty.pdf", b"", "pdf"),
        ("broken.docx", b"PK\3\4 not a zip", "docx"),
        ("broken.ipynb", b'{"cells": [', "ipynb"),
    ],
)
def test_a_broken_file_is_named_and_the_rest_is_indexed(cli, docs, llm, name, content, said):
    (docs / name).write_bytes(content)
    ended = cli("index", docs)
    assert ended.code == 4
    assert f"warning: {name}: " in ended.err
    assert said in ended.err
    assert "1 added" in ended.err
    assert cli("index", docs, "--strict").code == 1
    assert list(json.loads(cli("index", docs, "--json").out)["failed"]) == [name]
    ended = cli("ask", docs, QUESTION)
    assert (ended.code, KEY in ended.out) == (0, True)
    assert name not in ended.err  # it is named once, when it is indexed


def test_a_file_of_200_megabytes(cli, docs, llm):
    with (docs / "huge.log").open("wb") as file:
        file.truncate(200_000_000)
    ended = cli("index", docs)
    assert ended.code == 4
    assert "huge.log: 200 MB" in ended.err
    assert cli("ask", docs, QUESTION).code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(cli, docs, llm):
    (docs / "secret.txt").write_text("secret")
    (docs / "secret.txt").chmod(0)
    ended = cli("index", docs)
    assert (ended.code, "secret.txt: no permission" in ended.err) == (4, True)


def test_no_permission_as_the_system_tells_it(cli, docs, llm, monkeypatch):
    """Test the same for root, who may read everything."""
    (docs / "secret.txt").write_text("secret")
    open_ = os.open

    def refuse(path, *arguments, **options):
        if str(path).endswith("secret.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    ended = cli("index", docs)
    assert (ended.code, "secret.txt: no permission" in ended.err) == (4, True)
    assert cli("ask", docs, QUESTION).code == 0


def test_a_folder_that_may_only_be_read(cli, docs, llm, monkeypatch):
    cli("index", docs)
    from ragaccel.errors import StorageError
    from ragaccel.retrieval import Store

    def refuse(self, *, reset=False):
        raise StorageError("cannot write the index: keep it elsewhere with --index PATH")

    monkeypatch.setattr(Store, "writing", refuse)
    ended = cli("ask", docs, QUESTION)
    assert (ended.code, KEY in ended.out) == (0, True)
    assert "from the index as it is" in ended.err
    ended = cli("index", docs)
    assert ended.code == 1
    assert "--index PATH" in one_line(ended)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252"])
def test_text_that_is_not_utf8(cli, docs, llm, encoding):
    (docs / "key.txt").unlink()
    (docs / "old.txt").write_bytes(
        "Der Schlüssel hängt hinter dem Öltank im Flur.".encode(encoding)
    )
    ended = cli("ask", docs, "Wo hängt der Schlüssel?")
    assert ended.code == 0
    assert "Schlüssel hängt" in ended.out


def test_names_with_spaces_and_emoji(cli, llm):
    folder = Path("my documents 📚")
    folder.mkdir()
    (folder / "the key 🔑 (1).txt").write_text(KEY)
    ended = cli("ask", folder, QUESTION)
    assert ended.code == 0
    assert "the key 🔑 (1).txt:1" in ended.out
    assert cli("search", folder, "key").code == 0
    assert "🔑" in cli("ls", folder).out
    assert json.loads(cli("ask", folder, QUESTION, "--json").out)["sources"][0]["path"].endswith(
        "the key 🔑 (1).txt"
    )


def test_a_name_that_is_no_unicode(cli, docs, llm):
    try:
        Path(os.fsdecode(bytes(docs.resolve()) + b"/caf\xe9.txt")).write_text("Coffee.")
    except OSError:
        pytest.skip("this file system takes no such names")
    ended = cli("index", docs)
    assert ended.code == 4
    assert "UTF-8" in ended.err
    assert cli("ask", docs, QUESTION).code == 0


@pytest.mark.parametrize(
    "command", [["ask", QUESTION], ["search", "key"], ["ls"], ["stats"], ["rm"]]
)
def test_a_corrupt_index_is_told_with_the_command_that_mends_it(cli, docs, llm, command):
    cli("index", docs)
    path = docs / ".ragaccel" / "index.db"
    path.write_bytes(b"rubbish " * 2000)
    name, *rest = command
    ended = cli(name, docs, *rest, *(["key.txt"] if name == "rm" else []))
    assert ended.code == 1
    line = one_line(ended)
    assert "damaged" in line
    assert "ragaccel index docs --rebuild" in line
    assert cli("index", docs, "--rebuild").code == 0
    assert cli("ask", docs, QUESTION).code == 0


def test_an_index_with_damage_inside(cli, docs, llm):
    for number in range(40):
        (docs / f"{number}.txt").write_text(f"Fact {number}. " * 30)
    cli("index", docs)
    path = docs / ".ragaccel" / "index.db"
    content = bytearray(path.read_bytes())
    content[8192:40960] = os.urandom(32768)
    path.write_bytes(content)
    ended = cli("doctor", docs)
    assert ended.code == 1
    assert "--rebuild" in ended.out
    assert "Traceback" not in ended.err
    assert cli("rm", docs, "--all", "--yes").code == 0
    assert cli("ask", docs, QUESTION).code == 0


def test_an_index_of_another_embedding_model(cli, docs, llm, monkeypatch):
    cli("index", docs)
    other = HashEmbedder()
    other.fingerprint = "another"
    monkeypatch.setattr(index_module, "load_embedder", lambda settings: other)
    ended = cli("ask", docs, QUESTION)
    assert ended.code == 1
    assert "ragaccel index docs --rebuild" in one_line(ended)
    assert cli("index", docs, "--rebuild").code == 0


@pytest.mark.parametrize("name", ["no-such/model", "./no-such-folder", "no such model"])
def test_a_model_that_does_not_exist(cli, docs, name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = cli("ask", docs, QUESTION, "--model", name)
    assert ended.code == 1
    assert name.removeprefix("./") in one_line(ended)
    assert cli("ls", docs).code == 0


def test_a_folder_that_is_no_model(cli, docs):
    Path("empty").mkdir()
    ended = cli("ask", docs, QUESTION, "--model", "empty")
    assert ended.code == 1
    assert "empty" in one_line(ended)


def test_an_embedding_model_that_does_not_exist(cli, docs, monkeypatch):
    from huggingface_hub import constants

    from ragaccel.retrieval import load_embedder

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        index_module, "load_embedder", lambda settings: load_embedder(settings.embedder)
    )
    ended = cli("index", docs, "--embedder", "./none")
    assert ended.code == 1
    assert "none" in one_line(ended)


def test_a_prompt_longer_than_the_limit(cli, docs):
    model = save_tiny_model(Path("model"), context=700)
    ended = cli("ask", docs, "why " * 300, "--model", model)
    assert ended.code == 1
    assert "tokens" in one_line(ended)
    ended = cli("ask", docs, QUESTION, "--model", model, "--max-tokens", "5000")
    assert ended.code == 1
    assert "max_new_tokens" in one_line(ended)
    ended = cli("ask", docs, QUESTION, "--model", model, "--max-tokens", "8", "--compare")
    assert ended.code == 0
    assert "same tokens: yes" in ended.err


def test_passages_that_do_not_fit_are_told(cli, docs, llm):
    for number in range(5):
        (docs / f"key-{number}.txt").write_text(f"Key {number}. " + KEY * 5)
    llm.context_length = 1500
    assert "did not fit" in cli("ask", docs, QUESTION, "--model", "any").err


def test_a_whole_answer_from_a_real_model(cli, docs):
    model = save_tiny_model(Path("model"))
    assert "4,096 tokens of context" in cli("doctor", "--load", "--model", model).out
    arguments = ["ask", docs, QUESTION, "--model", model, "--max-tokens", "24", "--json"]
    fast = json.loads(cli(*arguments).out)
    plain = json.loads(cli(*arguments, "--no-accel").out)
    assert fast["answer"] == plain["answer"]
    assert plain["acceptance"]["acceptance_length"] == 1.0
    sampled = [
        json.loads(cli(*arguments, "--temperature", "1", "--seed", "3", *extra).out)["answer"]
        for extra in ([], ["--no-accel"])
    ]
    assert sampled[0] == sampled[1] != fast["answer"]
