"""Copied spans are marked, with and without colours."""

from __future__ import annotations

import sys

import pytest

from ragaccel.answer import Highlighter, Segment
from ragaccel.cli.terminal import MarkedAnswer, Terminal, WordWrap, printable
from ragaccel.passage import Passage

HUT = "The hut sleeps fourteen people in two rooms."
KEY = "The key hangs behind the water tank, on the north side."


def marked(capsys, segments, **settings):
    answer = MarkedAnswer(Terminal(**settings))
    for segment in segments:
        answer.add([segment])
    answer.finish()
    return capsys.readouterr().out


def test_a_copied_span_stands_in_marks_with_its_number(capsys):
    text = marked(capsys, [Segment("It says: "), Segment(HUT, 2), Segment(" So there.")])
    assert text == f"It says: «{HUT}»² So there.\n"


@pytest.mark.parametrize("citation", [" [2]", "[2]", ". [2]"])
def test_a_number_that_the_answer_gives_itself_is_not_given_twice(capsys, citation):
    pieces = [Segment(HUT, 2), *(Segment(letter) for letter in citation)]
    assert marked(capsys, pieces) == f"«{HUT}»{citation}\n"


def test_another_number_behind_a_span_is_not_mistaken_for_its_own(capsys):
    assert marked(capsys, [Segment(HUT, 2), Segment(" [23] [1]")]) == f"«{HUT}»² [23] [1]\n"


def test_spans_of_two_passages_side_by_side(capsys):
    pieces = [Segment("The hut ", 1), Segment("sleeps", 1), Segment(" "), Segment(KEY, 3)]
    assert marked(capsys, pieces) == f"«The hut sleeps»¹ «{KEY}»³\n"


def test_colours_carry_the_passage_and_so_does_the_number(capsys):
    text = marked(
        capsys, [Segment("A "), Segment(HUT, 1), Segment(" "), Segment(KEY, 2)], color="always"
    )
    assert "\x1b[36m" in text
    assert "\x1b[35m" in text
    assert "¹" in text
    assert "²" in text
    assert text.count("«") == text.count("»") == 2


def test_ascii_terminals_get_ascii_marks(capsys, monkeypatch):
    monkeypatch.setattr(Terminal, "unicode", property(lambda self: False))
    assert marked(capsys, [Segment(HUT, 1)]) == f"<<{HUT}>>[1]\n"


def test_marks_are_the_same_whole_or_in_any_pieces(capsys):
    passages = [Passage("a", HUT), Passage("b", KEY)]
    text = f"Yes. {HUT} [1] And {KEY[:30]} somewhere."
    results = set()
    for size in (1, 2, 3, 7, 1000):
        highlighter, answer = Highlighter(passages), MarkedAnswer(Terminal())
        for at in range(0, len(text), size):
            answer.add(highlighter.feed(text[at : at + size]))
        answer.add(highlighter.finish())
        answer.finish()
        results.add(capsys.readouterr().out)
    assert len(results) == 1
    assert f"«{HUT}» [1] And «" in results.pop()


def test_lines_break_between_words():
    lines = []
    wrap = WordWrap(lambda text: lines.append(text.plain), 20)
    for letter in "the quick brown fox jumps  over\nthe 東京東京 dog and-a-very-long-word-it-is x":
        wrap.feed(letter)
    wrap.finish()
    assert "".join(lines).split("\n") == [
        "the quick brown fox",
        "jumps  over",
        "the 東京東京 dog",
        "and-a-very-long-word-it-is",
        "x",
    ]


def test_word_wrap_without_a_width_changes_nothing():
    written = []
    wrap = WordWrap(lambda text: written.append(text.plain), None)
    for piece in ("  a\n\n", "b c ", "d" * 500):
        wrap.feed(piece)
    wrap.finish()
    assert "".join(written) == "  a\n\nb c " + "d" * 500


def test_escape_sequences_of_a_document_are_not_obeyed(capsys):
    assert "\x1b" not in marked(capsys, [Segment("\x1b[2Jgone \x9b31m", 1), Segment("\x07")])
    assert printable("a\tb\nc") == "a\tb\nc"


def test_names_that_stdout_cannot_show_are_escaped(capsys):
    Terminal().write(b"caf\xe9.md".decode("utf-8", "surrogateescape"), end="\n")
    assert capsys.readouterr().out == "caf\\udce9.md\n"
    assert sys.stdout.errors == "backslashreplace"
