"""The output of an answer: its sources, its statistics and its JSON document."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ragaccel.cli.terminal import number_mark, passage_style, printable
from ragaccel.passage import NearestSentence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.answer import Answer, CopiedSpan
    from ragaccel.cli.terminal import Terminal
    from ragaccel.passage import Passage

    Around = Callable[[Passage], tuple[str, str]]


_INDENT = "      "


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed and tokens of a question's answers compared with those of plain decoding."""

    speed_up: float
    same_tokens: bool
    plain_tokens_per_second: float
    plain_total_seconds: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[Answer, Answer]]) -> Comparison:
        """Compare answers with plain ones; the speed-up is the median ratio of total seconds.

        Args:
            pairs: (ours, plain) answers to one question; those of a pair were timed in succession.
        """
        ratios = [plain.stats.total_seconds / ours.stats.total_seconds for ours, plain in pairs]
        answers = {answer.token_ids for pair in pairs for answer in pair}
        return cls(
            median(ratios),
            len(answers) == 1,
            median(plain.stats.tokens_per_second for _, plain in pairs),
            median(plain.stats.total_seconds for _, plain in pairs),
        )


def show_passages(terminal: Terminal, answer: Answer, *, everything: bool) -> None:
    """List the sources of an answer: the passages that it cites or copies from, one a line.

    ``everything`` lists all passages that were found, with scores and excerpts.
    """
    listed = list(answer.source_numbers)
    if everything:
        listed = list(dict.fromkeys([*listed, *range(1, len(answer.passages) + 1)]))
    if listed:
        terminal.write("\n")
    for number in listed:
        passage = answer.passages[number - 1]
        copied = (s.passage_start for s in answer.copied_spans if s.passage_number == number)
        line = source_line(terminal, number, passage, score=everything, at=next(copied, 0))
        terminal.write(line, end="\n")
        if everything:
            body = _Excerpt.of(terminal, NearestSentence(passage, 0, 0, 0.0))
            terminal.write(body.render(terminal, number, _LISTED_LINES), end="\n")


BUILT_IN = "built-in demo model (7M, English): quotes one sentence"
_SCREEN_LINES, _SCREEN_WIDTH = 24, 80
_USED_LINES = 4  # the command, an empty line, the totals, and the next line of the shell
_LISTED_LINES = 4  # of a passage in a list
_FIRST_LINES, _OTHER_LINES, _MIN_EXCERPT = 8, 5, 2  # of the best passage, of others, of any
_MIN_LINES = 8


def show_quote(terminal: Terminal, answer: Answer, notes: Sequence[str], around: Around) -> None:
    """Show the built-in model's answer: the passages found, then its quote, then notes.

    All of it fits on a screen, with the line of totals that follows. The best sentence of each
    passage is marked; the first passage is shown as whole as fits.
    """
    said = _line(_CITATION.sub("", answer.text))
    if answer.answered:
        sure = "" if answer.chance is None else f", {min(answer.chance, 0.99):.0%} sure"
        quote = _quoted(terminal, said, 1)  # the number is not known yet
        last = [Text(f"{BUILT_IN}{sure}", style="dim"), quote]
    else:
        last = [Text(refusal_line(answer, built_in=True), style="dim")]
    below = [*last, *map(Text, notes)]
    width = terminal.wrap_width or _SCREEN_WIDTH
    height = terminal.out.height if terminal.out.is_terminal else _SCREEN_LINES
    taken = _USED_LINES + sum(len(text.wrap(terminal.out, width)) for text in below)
    shown = show_nearest(terminal, answer, max(_MIN_LINES, height - taken), around)
    terminal.write("\n" if shown else "")
    if answer.answered:
        holding = (n for n, one in enumerate(shown, 1) if said in _line(one.passage.text))
        last[-1] = _quoted(terminal, said, next(holding, 0))
    for text in last if answer.answered else ():
        terminal.show(text)
    for note in notes if answer.answered else [last[0].plain, *notes]:
        terminal.note(note)


_CITATION = re.compile(r"\s*\[\d{1,3}\]\s*\.?$")


def _quoted(terminal: Terminal, quote: str, number: int) -> Text:
    opened, closed = _marks(terminal)
    style = passage_style(number) if number and terminal.colored else ""
    mark = number_mark(terminal, number) if number else ""
    return Text(f"{opened}{quote}{closed}{mark}", style=style)


def refusal_line(answer: Answer, *, built_in: bool = False) -> str:
    """Return one line that says why a question is not answered by a model."""
    from ragaccel.quotes import NO_QUOTE, NOT_ENGLISH, NOT_FOUND, NOT_SURE, NOT_TOLD

    reason = {
        NOT_FOUND: "nothing was found",
        NOT_TOLD: "the passages do not say",
        NOT_ENGLISH: "it reads only English",
        NO_QUOTE: "it found no sentence to quote",
        NOT_SURE: "no sentence fits well enough",
    }[answer.refusal]
    if answer.refusal == NO_QUOTE and answer.finish_reason == "length":
        reason = "--max-new-tokens is too small for the sentence it quotes"
    return f"not answered{' by the built-in model' if built_in else ''}: {reason}"


def show_nearest(
    terminal: Terminal, answer: Answer, lines: int, around: Around
) -> list[NearestSentence]:
    """Show the passages nearest to a question in some lines, the best sentence of each marked.

    The best one gets most lines, others a few, as many as fit. Passages of one file stand together
    below one line that names it. Lines that are left show the text ``around`` a passage. Returns
    the passages in the order of their numbers.
    """
    shown = _share_lines(terminal, answer.nearest, lines)
    spare = lines - sum(shown.values()) - len({_file_of(one) for one in shown})
    files = list(dict.fromkeys(map(_file_of, shown)))
    ordered = sorted(shown, key=lambda one: files.index(_file_of(one)))
    for number, one in enumerate(ordered, start=1):
        together = [other for other in ordered if _file_of(other) == _file_of(one)]
        excerpt, height, label = _Excerpt.of(terminal, one), shown[one], ""
        if one is together[0]:
            line = source_line(terminal, number, one.passage, score=False, at=one.start)
            terminal.write(line, end="\n")
        else:
            label = f"{number_mark(terminal, number)} {_spot_of(one.passage, one.start)}"
        if spare > 0 and len(together) == 1:
            excerpt = _Excerpt.of(terminal, one, *around(one.passage))
            more = max(0, min(excerpt.height - height, spare))
            height, spare = height + more, spare - more
        terminal.write(excerpt.render(terminal, number, height, label), end="\n")
    return ordered


def _file_of(found: NearestSentence) -> str:
    return found.passage.path or found.passage.passage_id


def show_found(terminal: Terminal, number: int, found: NearestSentence, *, full: bool) -> None:
    """Show a search result: its place, score and best sentence with the text around it, or all."""
    passage = found.passage
    line = source_line(terminal, number, passage, score=True, at=0 if full else found.start)
    terminal.write(line, end="\n")
    excerpt = _Excerpt.of(terminal, found)
    whole = Text(printable(passage.text) + "\n")
    terminal.write(whole if full else excerpt.render(terminal, number, _LISTED_LINES), end="\n")


def _share_lines(
    terminal: Terminal, ranking: Sequence[NearestSentence], lines: int
) -> dict[NearestSentence, int]:
    """Share lines among the best passages; each file takes one for its name."""
    shares: dict[NearestSentence, int] = {}
    wanted = {}
    for one in ranking:
        wanted[one] = _Excerpt.of(terminal, one).height
        names = len({_file_of(other) for other in [*shares, one]})
        left = lines - sum(shares.values()) - names
        if left >= min(wanted[one], _MIN_EXCERPT):
            shares[one] = min(wanted[one], left, _OTHER_LINES if shares else _FIRST_LINES)
    left = lines - sum(shares.values()) - len({_file_of(one) for one in shares})
    for one in shares:
        more = min(left, wanted[one] - shares[one])
        shares[one], left = shares[one] + more, left - more
    return shares


@dataclass(frozen=True, slots=True)
class _Excerpt:
    """The text of a passage on one line, the place of its best sentence there, if any, and its own.

    ``core`` is what a cut keeps if it can: the passage, without the text around it.
    """

    text: str
    start: int
    end: int
    core: tuple[int, int]
    width: int | None

    @classmethod
    def of(
        cls, terminal: Terminal, found: NearestSentence, before: str = "", after: str = ""
    ) -> _Excerpt:
        """Return a passage with its best sentence, between the texts around it in its file."""
        whole, start, end = found.passage.text, found.start, found.end
        parts = (before, whole[:start], whole[start:end], whole[end:], after)
        text, ends = "", [0]
        for part in map(_line, parts):
            text += (" " if text and part else "") + part
            ends.append(len(text))
        starts = [at + (0 < at < len(text)) for at in ends]
        return cls(
            text, min(starts[2], ends[3]), ends[3], (starts[1], ends[4]), terminal.wrap_width
        )

    @property
    def height(self) -> int:
        """The lines of the whole text."""
        return _indented(f"«{self.text}»", self.width or _SCREEN_WIDTH).count("\n") + 1

    def render(self, terminal: Terminal, number: int, height: int, label: str = "") -> Text:
        """Return the text around the best sentence, indented, in at most ``height`` lines.

        It begins with the label.
        """
        width = self.width or _SCREEN_WIDTH
        size = height * (width - len(_INDENT)) - len(label)
        while True:
            line = f"{label} {self._cut(terminal, size)}".lstrip()
            if size <= 40 or _indented(line, width).count("\n") < height:
                break
            size -= 8
        opened, closed = _marks(terminal)
        body = _indented(line, self.width)
        shown = Text(body, style="dim")
        if terminal.colored and self.end > self.start:
            last = body.rfind(closed)
            style = f"not dim {passage_style(number)}"
            shown.stylize(style, body.find(opened), last + len(closed) if last >= 0 else len(body))
        return shown

    def _cut(self, terminal: Terminal, size: int) -> str:
        """Return about ``size`` characters around the best sentence, which is in marks."""
        opened, closed = _marks(terminal) if self.end > self.start else ("", "")
        size -= len(opened + closed) + 2
        keep = self.core if size >= self.core[1] - self.core[0] else (self.start, self.end)
        low, high = (0, len(self.text)) if keep == self.core else self.core
        spare = max(0, size - (keep[1] - keep[0]))
        first = max(low, keep[0] - max(spare // 2, spare - (high - keep[1])))
        last = min(high, first + size)
        first, last = self._at_words(first, last)
        best = self.text[self.start : min(self.end, last)]
        before, after = self.text[first : self.start], self.text[self.end : last]
        return (
            f"{'…' * (first > 0)}{before}{opened}{best}{'…' * (last < self.end)}{closed}{after}"
            f"{'…' * (self.end <= last < len(self.text))}"
        )

    def _at_words(self, first: int, last: int) -> tuple[int, int]:
        """Move the ends of a cut inwards to the ends of words, outside the best sentence."""
        if first > 0:
            first = min(self.start, self.text.find(" ", first, self.start) + 1 or self.start)
        if self.end < last < len(self.text):
            last = max(self.end, self.text.rfind(" ", self.end, last))
        return first, last


def _marks(terminal: Terminal) -> tuple[str, str]:
    return ("«", "»") if terminal.unicode else ("<<", ">>")


def _line(text: str) -> str:
    return " ".join(printable(text).split())


def source_line(
    terminal: Terminal, number: int, passage: Passage, *, score: bool, at: int = 0
) -> Text:
    """Return the line of a source: its number in its colour, its place and its title.

    ``at`` is an offset in the passage's text; the place has the page or line there.
    """
    style = passage_style(number) if terminal.colored else ""
    line = Text("  ").append(number_mark(terminal, number), style=style)
    line.append(" " + _line(place_of(passage, at)), style=style)
    if score:
        line.append(f"  score {passage.score:.3f}", style="dim")
    if passage.title and not is_name(passage.title, passage.path):
        title = Text("  " + _line(passage.title), style="dim")
        if terminal.wrap_width is not None:
            title.truncate(max(0, terminal.wrap_width - line.cell_len), overflow="ellipsis")
        line.append_text(title)
    return line


def place_of(passage: Passage, at: int = 0) -> str:
    """Return where a character of a passage is, as in ``guide.pdf page 3`` or ``notes.md line 12``.

    A passage without a file has only its id.
    """
    return f"{passage.path or passage.passage_id} {_spot_of(passage, at)}".rstrip()


_PARTS = {  # what a file's pages or lines are, if it is no text or PDF
    ".ipynb": "cell",
    ".epub": "chapter",
    **dict.fromkeys((".pptx", ".odp"), "slide"),
    **dict.fromkeys((".docx", ".odt", ".rtf"), "paragraph"),
    **dict.fromkeys((".xlsx", ".xlsm", ".ods"), "row"),
}


def _spot_of(passage: Passage, at: int) -> str:
    there = passage.cut(at, at + 1)
    name = _PARTS.get(os.path.splitext(passage.path)[1].lower())
    if there.page is not None:
        return f"{name or 'page'} {there.page}"
    return "" if there.line is None else f"{name or 'line'} {there.line}"


def is_name(title: str, path: str) -> bool:
    """Return whether a title only repeats the file's name."""
    name = os.path.basename(path)
    return title in (path, name, os.path.splitext(name)[0])


def _indented(line: str, width: int | None) -> str:
    if width is None:
        return _INDENT + line
    return textwrap.fill(
        line, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )


def totals_line(answer: Answer, seconds: dict[str, float], comparison: Comparison | None) -> str:
    """Return how long an answer took, in words, and its speed-up if it was compared.

    ``seconds`` are those of the stages before generation by name; short ones other than the search
    are left out.
    """
    stats = answer.stats
    stages = {name: taken for name, taken in seconds.items() if taken >= _LONG_STAGE}
    stages |= {
        "search": seconds.get("retrieve", 0.0),
        "prompt": stats.prefill_seconds,
        "answer": max(0.0, stats.total_seconds - stats.prefill_seconds),
    }
    stages.pop("retrieve", None)
    parts = ", ".join(f"{name} {taken:.1f}" for name, taken in stages.items())
    line = f"{sum(stages.values()):.1f} s: {parts}"
    if comparison is not None:
        same = "yes" if comparison.same_tokens else "NO"
        line += f" · {comparison.speed_up:.1f}× plain decoding · same tokens: {same}"
    return line


_LONG_STAGE = 1.0  # seconds


def stats_table(answer: Answer, seconds: dict[str, float]) -> Table:
    """Return a table of timings, token counts and accepted draft tokens."""
    stats = answer.stats
    stages = seconds | {
        "prefill": stats.prefill_seconds,
        "draft": stats.draft_seconds,
        "verify": stats.verify_seconds,
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in (
        *((f"{stage} seconds", f"{taken:.3f}") for stage, taken in stages.items()),
        ("prompt tokens", f"{stats.prompt_tokens}"),
        ("new tokens", f"{stats.new_tokens}"),
        ("verify passes", f"{stats.verify_passes}"),
        ("accepted draft tokens", f"{stats.accepted_tokens} of {stats.draft_tokens}"),
        *((f"  by {source}", f"{n}") for source, n in stats.accepted_by_source.items()),
        ("acceptance length", f"{stats.acceptance_length:.2f}"),
        ("tokens/s", f"{stats.tokens_per_second:.1f}"),
    ):
        table.add_row(name, value)
    return table


def _values(record: object, names: str) -> dict[str, Any]:
    """Return the attributes with these names, for JSON."""
    return {name: getattr(record, name) for name in names.split()}


def passage_json(passage: Passage) -> dict[str, Any]:
    """Return a passage's text, title, location and score as a JSON object."""
    return _values(passage, "passage_id citation path page line title score start end text")


def answer_json(
    question: str, answer: Answer, seconds: dict[str, float], comparison: Comparison | None
) -> dict[str, Any]:
    """Return an answer as a JSON object: text, passages, copied spans, timings."""
    stats = answer.stats
    passages = [
        {"number": number, **passage_json(passage)}
        for number, passage in enumerate(answer.passages, start=1)
    ]
    document: dict[str, Any] = {
        "question": question,
        "answer": answer.text,
        "answered": answer.answered,
        "refusal": answer.refusal or None,
        "chance": answer.chance,
        "nearest": [
            {
                "sentence": nearest.text,
                **passage_json(nearest.passage),
                "citation": nearest.passage.citation_at(nearest.start),
                "score": nearest.score,
                "sentence_start": nearest.start,
                "sentence_end": nearest.end,
            }
            for nearest in answer.nearest
        ],
        "finish_reason": answer.finish_reason,
        "passages": passages,
        "sources": [passages[number - 1] for number in answer.source_numbers],
        "copied_spans": [_span_json(answer, span) for span in answer.copied_spans],
        "dropped_passages": [passage_json(passage) for passage in answer.dropped_passages],
        "usage": _values(answer.usage, "prompt_tokens completion_tokens total_tokens"),
        "timings": {
            **{f"{stage}_seconds": taken for stage, taken in seconds.items()},
            **_values(stats, "prefill_seconds draft_seconds verify_seconds total_seconds"),
            "tokens_per_second": stats.tokens_per_second,
        },
        "acceptance": {
            **_values(stats, "acceptance_length acceptance_rate verify_passes draft_tokens"),
            "accepted_tokens": stats.accepted_tokens,
            "accepted_by_source": dict(stats.accepted_by_source),
        },
    }
    if comparison is not None:
        document["comparison"] = asdict(comparison)
    return document


def _span_json(answer: Answer, span: CopiedSpan) -> dict[str, Any]:
    passage = answer.passages[span.passage_number - 1]
    return {
        **_values(span, "start end passage_id passage_start passage_end"),
        "text": answer.text[span.start : span.end],
        "number": span.passage_number,
        "citation": passage.citation_at(span.passage_start),
    }
