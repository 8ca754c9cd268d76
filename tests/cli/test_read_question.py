"""Questions from arguments, from a pipe, or from both."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragaccel.cli.ask import read_question
from ragaccel.cli.index import resolve_source
from ragaccel.cli.terminal import Terminal, UsageError


@pytest.fixture
def docs():
    Path("docs").mkdir()
    return Path("docs")


def ask(target=None, text=None, index=None):
    return read_question(Terminal(), target, text, index)


def test_a_question_comes_from_the_arguments_or_a_pipe(docs, pipe):
    pipe("")
    asked = ask("docs", " Who? ")
    assert (asked.text, asked.context) == ("Who?", "")
    pipe("Who was it?\n")
    asked = ask("docs")
    assert (asked.text, asked.context) == ("Who was it?", "")


def test_a_dash_reads_the_question_from_the_pipe(docs, pipe):
    pipe("Who?")
    assert ask("docs", "-").text == "Who?"


def test_a_pipe_beside_a_question_is_context(docs, pipe):
    pipe("some text, caf\u00e9")
    asked = ask("docs", "Who?")
    assert (asked.text, asked.context) == ("Who?", "some text, café")


def test_an_index_needs_no_folder(docs, pipe):
    pipe("")
    asked = ask("Who?", index=Path("i.db"))
    assert (asked.text, asked.source.folder, asked.source.index) == ("Who?", None, Path("i.db"))
    asked = ask("docs", "Who?", Path("i.db"))
    assert (asked.source.folder, asked.source.index) == (docs, Path("i.db"))


def test_without_a_question_it_says_how_to_ask(docs, pipe):
    pipe("  \n")
    with pytest.raises(UsageError, match=r"what is the question.*ragaccel ask docs"):
        ask("docs")
    with pytest.raises(UsageError, match="ragaccel search docs"):
        read_question(Terminal(), "docs", None, None, subcommand="search")


@pytest.mark.parametrize(
    ("content", "said"), [(b"\x7fELF\0\0", "binary"), (b"a" * (5 << 20), "4 MB")]
)
def test_a_pipe_that_cannot_be_read_is_refused(docs, pipe, content, said):
    pipe(content)
    with pytest.raises(UsageError, match=said):
        ask("docs", "Who?")


def test_a_source_is_a_folder_an_index_or_a_collection(docs):
    assert resolve_source("docs", None).folder == docs
    assert resolve_source("docs", Path("x.db")).index == Path("x.db")
    Path("i.db").touch()
    assert resolve_source("i.db", None) == resolve_source(None, Path("i.db"))
    Path("set.tsv").write_text("1\ttext\n")
    with pytest.raises(UsageError, match="index --passages"):
        resolve_source("set.tsv", None)
    with pytest.raises(UsageError, match="which documents"):
        resolve_source(None, None)
    with pytest.raises(UsageError, match=r"ask DIR 'Who is it\?'"):
        resolve_source("Who is it?", None)
