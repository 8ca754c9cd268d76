"""What stands on the terminal: marks of copied spans, colours, wrapped lines and progress."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from cli_documents import HUT, KEY
from rich.console import Console

from ragaccel.answer import Highlighter, Segment, copied_spans
from ragaccel.cli.answer_view import show_passages, show_quote
from ragaccel.cli.terminal import MarkedAnswer, Terminal, WordWrap, indexing_progress, printable
from ragaccel.passage import NearestSentence, Passage
from ragaccel.retrieval import Progress


@pytest.fixture
def marked(capsys):
    def show(*segments, **settings):
        answer = MarkedAnswer(Terminal(**settings))
        for segment in segments:
            answer.add([segment])
        answer.finish()
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize(
    ("segments", "shown"),
    [
        ([("It says: ", 0), (HUT, 2), (" So there.", 0)], f"It says: «{HUT}»² So there."),
        # a number that the answer gives itself is not given twice
        ([(HUT, 2), *((letter, 0) for letter in " [2]")], f"«{HUT}» [2]"),
        ([(HUT, 2), ("[2]", 0)], f"«{HUT}»[2]"),
        ([(HUT, 2), *((letter, 0) for letter in ". [2]")], f"«{HUT}». [2]"),
        ([(HUT, 2), (" [23] [1]", 0)], f"«{HUT}»² [23] [1]"),
        (
            [("The hut ", 1), ("sleeps", 1), (" ", 0), (KEY, 3)],
            f"«The hut sleeps»¹ «{KEY}»³",
        ),
        # nobody's escape sequences are obeyed
        ([("\x1b[2Jgone \x9b31m", 1), ("\x07", 0)], "«�[2Jgone �31m»¹�"),
    ],
)
def test_a_copied_span_stands_in_marks_with_its_number(marked, segments, shown):
    assert marked(*(Segment(*segment) for segment in segments)) == f"{shown}\n"


def test_colours_carry_the_passage_and_so_does_the_number(marked, monkeypatch):
    segments = [Segment("A "), Segment(HUT, 1), Segment(" "), Segment(KEY, 2)]
    text = marked(*segments, color="always")
    assert all(part in text for part in ("\x1b[36m", "\x1b[35m", "¹", "²"))
    assert text.count("«") == text.count("»") == 2
    monkeypatch.setattr(Terminal, "unicode", property(lambda self: False))
    assert marked(Segment(HUT, 1)) == f"<<{HUT}>>[1]\n"


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


@pytest.mark.parametrize("width", [20, None])
def test_lines_break_between_words(width):
    lines = [
        "the quick brown fox",
        "jumps  over",
        "the 東京東京 dog",
        "and-a-very-long-word-it-is",
        "x",
    ]
    text = "the quick brown fox jumps  over\nthe 東京東京 dog and-a-very-long-word-it-is x"
    written = []
    wrap = WordWrap(lambda part: written.append(part.plain), width)
    for letter in text:
        wrap.feed(letter)
    wrap.finish()
    assert "".join(written) == ("\n".join(lines) if width else text)


def test_what_stdout_cannot_show_is_escaped(capsys):
    Terminal().write(b"caf\xe9.md".decode("utf-8", "surrogateescape"), end="\n")
    assert capsys.readouterr().out == "caf\\udce9.md\n"
    assert sys.stdout.errors == "backslashreplace"
    assert printable("a\tb\nc") == "a\tb\nc"


def test_progress_is_of_all_the_work():
    terminal = Terminal()
    terminal.err = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={})
    with indexing_progress(terminal, "ragaccel index docs") as draw:
        draw(Progress("reading"))
        assert "reading" not in terminal.err.file.getvalue()
        draw(Progress("embedding", 1, 2, 10, 500, "a/[b].md", work_done=100, work_total=1000))
    shown = terminal.err.file.getvalue()
    for part in ("embedding", "1/2 files, 10/500 passages", "[b].md"):
        assert part in shown


@pytest.mark.parametrize(("left", "told"), [(1000, "about 50 min"), (15, "")])
def test_a_long_run_says_how_long_it_takes_once_its_speed_is_known(monkeypatch, left, told, capsys):
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr("ragaccel.cli.terminal.time.perf_counter", lambda: next(clock))
    with indexing_progress(Terminal(), "ragaccel index docs") as draw:
        for done in range(3):
            draw(Progress("embedding", work_done=done, work_total=left + 1))
    shown = " ".join(capsys.readouterr().err.split())
    assert told in shown
    assert ("`ragaccel index docs --for 2m`" in shown) == bool(told)


@pytest.mark.parametrize(("file", "name"), [("guide.pdf", "page"), ("talk.pptx", "slide")])
def test_a_source_is_cited_by_the_page_of_what_is_copied_from_it(file, name, capsys):
    text = "The ferry leaves at six in the morning. The fare is nine crowns for all."
    passage = Passage("p", text, path=file, page=2, locations=((40, 3),))
    for said, place in (("The ferry leaves at six", 2), ("The fare is nine crowns", 3)):
        spans = copied_spans(said, [passage])
        answer = SimpleNamespace(copied_spans=spans, source_numbers=[1], passages=[passage])
        show_passages(Terminal(), answer, everything=False)
        assert f"{file} {name} {place}" in capsys.readouterr().out


def test_a_quote_has_the_number_that_its_passage_has_on_the_screen(capsys):
    said = {"ferry.md": "The ferry is red.", "hut.md": KEY, "boat.md": "No boat sails."}
    names = ["ferry.md", "hut.md", "ferry.md", "boat.md"]
    nearest = [
        NearestSentence(Passage(f"{at}", said[name], path=name, line=at), 0, len(said[name]), 0.5)
        for at, name in enumerate(names)
    ]
    answer = SimpleNamespace(text=f"{KEY} [2]", answered=True, nearest=nearest, chance=0.62)
    show_quote(Terminal(), answer, [], lambda _: ("", ""))
    shown = capsys.readouterr().out
    assert "quotes one sentence, 62% sure" in shown
    assert "² line 2" in shown  # the second passage of the first file
    assert "³ hut.md line 1" in shown
    assert shown.endswith(f"«{KEY}»³\n")
