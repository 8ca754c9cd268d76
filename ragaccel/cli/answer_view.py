"""The output of an answer: its sources, its statistics and its JSON document."""

from __future__ import annotations

import os
import textwrap
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ragaccel.cli.terminal import number_mark, passage_style, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.answer import Answer, CopiedSpan
    from ragaccel.cli.terminal import Terminal
    from ragaccel.passage import NearestSentence, Passage


_INDENT = "      "
_EXCERPT = 300  # characters of a passage that a list prints


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
    """List the passages that an answer uses, one ``file:page`` or ``file:line`` a line.

    ``everything`` lists all passages that the model read, with scores and excerpts.
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
            terminal.write(Text(excerpt(passage, terminal.wrap_width), style="dim"), end="\n")


def refusal_line(answer: Answer) -> str:
    """Return one line that says why a question is not answered and what may help."""
    from ragaccel.rag import FOREIGN_SCRIPT, NO_QUOTE, NOT_NEAR, NOT_TOLD

    documents = "more documents or a higher -k may help"
    model = "a larger model may answer it (--model NAME)"
    reason, advice = {
        NOT_TOLD: ("no passage that was found answers it", documents),
        NOT_NEAR: ("no passage that was found is similar enough to the question", documents),
        FOREIGN_SCRIPT: (
            "the bundled reader cannot read the script of the question or the passages",
            model,
        ),
        NO_QUOTE: ("the bundled reader did not quote a sentence that answers it", model),
    }[answer.refusal]
    return f"not answered: {reason} ({advice})"


def show_nearest(terminal: Terminal, answer: Answer) -> None:
    """List the passages nearest to an unanswered question, the best sentence of each marked."""
    if answer.nearest:
        terminal.write("\nNearest in the documents:\n")
    for number, nearest in enumerate(answer.nearest, start=1):
        line = source_line(terminal, number, nearest.passage, score=False, at=nearest.start)
        terminal.write(line, end="\n")
        terminal.write(_marked_excerpt(terminal, number, nearest), end="\n")


def _marked_excerpt(terminal: Terminal, number: int, nearest: NearestSentence) -> Text:
    """Return a passage's best sentence in marks with the text around it, indented and dim."""
    text = nearest.passage.text
    opened, closed = ("«", "»") if terminal.unicode else ("<<", ">>")
    best = opened + _line(nearest.text)[:_EXCERPT] + closed
    spare = max(0, _EXCERPT - len(best)) // 2
    before, after = _line(text[: nearest.start]), _line(text[nearest.end :])
    if len(before) > spare:
        before = "…" + before[len(before) - spare :]
    if len(after) > spare:
        after = after[:spare] + "…"
    line = " ".join(part for part in (before, best, after) if part)
    body = _indented(line, terminal.wrap_width)
    marked = Text(body, style="dim")
    if terminal.colored:
        first, last = body.find(opened), body.rfind(closed)
        marked.stylize(f"not dim {passage_style(number)}", first, last + len(closed))
    return marked


def _line(text: str) -> str:
    return " ".join(printable(text).split())


def source_line(
    terminal: Terminal, number: int, passage: Passage, *, score: bool, at: int = 0
) -> Text:
    """Return the line of a source: its number in its colour, its citation and its title.

    ``at`` is an offset in the passage's text; the citation gives the page or line there.
    """
    style = passage_style(number) if terminal.colored else ""
    line = Text("  ").append(number_mark(terminal, number), style=style)
    line.append(" " + printable(passage.citation_at(at)), style=style)
    if score:
        line.append(f"  score {passage.score:.3f}", style="dim")
    if passage.title and not is_name(passage.title, passage.path):
        title = Text("  " + printable(passage.title), style="dim")
        if terminal.wrap_width is not None:
            title.truncate(max(0, terminal.wrap_width - line.cell_len), overflow="ellipsis")
        line.append_text(title)
    return line


def is_name(title: str, path: str) -> bool:
    """Return whether a title only repeats the file's name."""
    name = os.path.basename(path)
    return title in (path, name, os.path.splitext(name)[0])


def excerpt(passage: Passage, width: int | None) -> str:
    """Return the start of a passage's text, indented; wrapped if ``width`` is given."""
    text = _line(passage.text)
    text = text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"
    return _indented(text, width)


def _indented(line: str, width: int | None) -> str:
    if width is None:
        return _INDENT + line
    return textwrap.fill(line, width, initial_indent=_INDENT, subsequent_indent=_INDENT)


def speed_line(answer: Answer, comparison: Comparison | None) -> str:
    """Return the speed of an answer in one line, next to plain decoding if it was compared."""
    stats = answer.stats
    parts = [
        f"{stats.tokens_per_second:.0f} tokens/s",
        f"acceptance length {stats.acceptance_length:.1f}",
    ]
    if comparison is None:
        parts.append(f"{stats.new_tokens} tokens in {stats.total_seconds:.2f} s")
    else:
        parts += [
            f"{comparison.speed_up:.1f}× plain decoding"
            f" ({comparison.plain_tokens_per_second:.0f} tokens/s)",
            f"same tokens: {'yes' if comparison.same_tokens else 'NO'}",
        ]
    return " · ".join(parts)


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
    """Return an answer as a JSON object: text, passages, sources, copied spans, timings and acceptance."""
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
