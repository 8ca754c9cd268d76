"""Questions from arguments, from a pipe, or from both."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragaccel.cli.ask import read_question
from ragaccel.cli.index import resolve_source
from ragaccel.cli.terminal import Terminal, UsageError


def ask(target=None, text=None, index=None, **settings):
    return read_question(Terminal(), target, text, index, **settings)


@pytest.mark.parametrize(
    ("piped", "arguments", "text", "context"),
    [
        ("", ["docs", " Who? "], "Who?", ""),
        ("Who was it?\n", ["docs"], "Who was it?", ""),
        ("Who?", ["docs", "-"], "Who?", ""),
        ("some text, caf\u00e9", ["docs", "Who?"], "Who?", "some text, café"),
    ],
)
def test_a_question_comes_from_the_arguments_or_a_pipe(docs, pipe, piped, arguments, text, context):
    pipe(piped)
    asked = ask(*arguments)
    assert (asked.text, asked.context, asked.source.folder) == (text, context, docs)


def test_an_index_needs_no_folder(docs, pipe):
    pipe("")
    index = Path("i.db")
    for target, folder in (("Who?", None), ("docs", docs)):
        asked = ask(*([target] if folder is None else [target, "Who?"]), index=index)
        assert (asked.text, asked.source.folder, asked.source.index) == ("Who?", folder, index)


def test_without_a_readable_question_it_says_how_to_ask(docs, pipe):
    for content, how, said in (
        ("  \n", {}, r"what is the question.*ragaccel ask docs"),
        ("  \n", {"subcommand": "search"}, "ragaccel search docs"),
        (b"\x7fELF\0\0", {"text": "Who?"}, "binary"),
        (b"a" * (5 << 20), {"text": "Who?"}, "4 MB"),
    ):
        pipe(content)
        with pytest.raises(UsageError, match=said):
            ask("docs", **how)


def test_a_source_is_a_folder_an_index_or_a_collection(docs):
    assert resolve_source("docs", None).folder == docs
    assert resolve_source("docs", Path("x.db")).index == Path("x.db")
    Path("i.db").touch()
    assert resolve_source("i.db", None) == resolve_source(None, Path("i.db"))
    Path("set.tsv").write_text("1\ttext\n")
    for target, said in (
        ("set.tsv", "index --passages"),
        (None, "which documents"),
        ("Who is it?", r"ask DIR 'Who is it\?'"),
        ("none", r"no folder 'none'$"),
    ):
        with pytest.raises(UsageError, match=said):
            resolve_source(target, None)
