"""XQuAD: people's questions on Wikipedia paragraphs, each among three of other articles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eval.examples import Example, in_data, read_unified

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.passage import Passage

_FIRST = 2910  # the lines before hold SQuAD questions
_NUM_OTHERS = 3
_APART = 97  # examples between a question and each of its other paragraphs


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    """Spread over the articles; the paragraph with the answer takes each of four places in turn."""
    rows = read_unified(in_data("rag/squad_like.jsonl", data))[_FIRST:]
    count = len(rows) if limit is None else min(limit, len(rows))
    chosen = [number * len(rows) // count for number in range(count)]
    return [_among_others(rows, number, turn) for turn, number in enumerate(chosen)]


def _among_others(rows: list[Example], number: int, turn: int) -> Example:
    example = rows[number]
    texts = {passage.text for passage in example.passages}
    others: list[Passage] = []
    at = number
    while len(others) < _NUM_OTHERS:
        at += _APART
        other = rows[at % len(rows)].passages[0]
        if other.text not in texts:
            texts.add(other.text)
            others.append(other)
    place = turn % (_NUM_OTHERS + 1)
    return replace(example, passages=(*others[:place], *example.passages, *others[place:]))
