"""LLMA over several turns: are earlier answers, and earlier passages, worth copying from?

    python -m eval.papers.llma_dialogue --data DATA
    python -m eval.papers.llma_dialogue --data DATA --model random:llama-135m --limit 20 --out FILE

References are this turn's passages; then earlier answers of the same conversation too; then also
the passages of its earlier turns, where these stand in the file (they do in mtrag_human_answers;
mtrag_un has one turn of each conversation). Steps are told by turn. The prompt holds the turns
before in every case: ours copies from it without being told, LLMA never does.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from eval.papers.decoders import NO_DRAFTS, TREES, llma, open_bench
from eval.papers.llma_layout import llma_dialogue_table
from eval.papers.published import published
from eval.papers.recorded_sets import (
    add_paper_options,
    answered_rows,
    chosen_models,
    describe_paper_run,
    set_paths,
)
from eval.recordings import encode_apart, lay_out
from eval.replay import Tally
from eval.script import measured, new_parser, note, result
from ragaccel.decoding.request import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eval.papers.decoders import Bench, Decoder
    from eval.papers.recorded_sets import Row
    from eval.recordings import Recorded

SETS = ("mtrag_un", "mtrag_human_answers")
KINDS = ("passages", "answers", "earlier passages")
LAST_TURN = 7  # told apart; later ones are few
DECODERS = (llma(), TREES)


@dataclass(frozen=True, slots=True)
class Turn:
    """A row laid out with what may be copied, and which turn of its conversation it is."""

    number: int
    recorded: Recorded

    @property
    def label(self) -> str:
        """How it is told by: the few late turns together."""
        return str(self.number) if self.number < LAST_TURN else f"{LAST_TURN} and later"


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.llma_dialogue", measure, parse(arguments))
    print(llma_dialogue_table(document))
    print(json.dumps(document["grid"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.llma_dialogue", __doc__)
    add_paper_options(parser, SETS)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replay every set with each kind of references, by turn; time the whole of it."""
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options)
    bench = open_bench(options, target, settings)
    grid: list[dict[str, Any]] = []
    for name, path in set_paths(options, options.sets).items():
        rows = answered_rows(path, options.limit)
        for kind in kinds_of(rows):
            turns = list(laid_out_turns(rows, tokenizer, kind))
            grid += _points(bench, f"{name}/{kind}", turns)
    return result(
        "llma_dialogue",
        settings,
        device=options.device,
        module="papers.llma_dialogue",
        grid=grid,
        published=published("llma"),
    )


def kinds_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The kinds of references there are: not earlier passages where no row has any."""
    return KINDS if any(earlier_passages(row, rows) for row in rows) else KINDS[:-1]


def _points(bench: Bench, name: str, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """One point a decoder and turn, and one of all turns, which alone is timed."""
    of_set, _, kind = name.partition("/")
    times = bench.times(name, [turn.recorded for turn in turns], [NO_DRAFTS, *DECODERS])
    for decoder in DECODERS:
        tallies = replayed(turns, decoder)
        for label, (answers, tally) in tallies.items():
            point = {
                **{"set": of_set, "references": kind, "decoder": decoder.name},
                **{"turn": label, "answers": answers, **tally.counts()},
            }
            yield point | (times.get(decoder.name, {}) if label == "all" else {})
        note(f"{name}: {decoder.name} {tallies['all'][1].counts()['tokens_per_pass']} a pass")


def replayed(turns: Sequence[Turn], decoder: Decoder) -> dict[str, tuple[int, Tally]]:
    """Replay turns in their order; answers and tally of each label, and of all."""
    labels = [*dict.fromkeys(turn.label for turn in sorted(turns, key=attrgetter("number"))), "all"]
    tallies = {label: Tally() for label in labels}
    answers: Counter[str] = Counter()
    contender = decoder.replayed()
    for turn in turns:
        one = Tally()
        contender.replay(turn.recorded, one)
        for label in (turn.label, "all"):
            tallies[label].add(one)
            answers[label] += 1
    return {label: (answers[label], tallies[label]) for label in labels}


def laid_out_turns(rows: Sequence[Row], tokenizer: Any, kind: str) -> Iterator[Turn]:
    """Lay out rows with what ``kind`` lets be copied, this turn's passages first.

    Earlier passages that this turn has too are not repeated.
    """
    for row in rows:
        recorded = lay_out(row, tokenizer)
        if recorded is None:
            continue
        texts = earlier_answers(row) if kind != "passages" else []
        if kind == "earlier passages":
            texts += earlier_passages(row, rows)
        known = tuple(
            Reference(encode_apart(text, tokenizer), passage_id=f"earlier/{number}")
            for number, text in enumerate(texts)
        )
        yield Turn(
            turn_of(row),
            replace(
                recorded,
                references=(*recorded.references, *known),
                apart=(*recorded.apart, *known),
            ),
        )


def turn_of(row: Row) -> int:
    """Count a row's turn from 1: the questions asked before it, and its own."""
    return 1 + sum(turn["role"] == "user" for turn in row.get("history", ()))


def earlier_answers(row: Row) -> list[str]:
    """What was answered before in the conversation."""
    return [t["text"].strip() for t in row.get("history", ()) if t["role"] != "user"]


def earlier_passages(row: Row, rows: Sequence[Row]) -> list[str]:
    """The passages of earlier turns of the conversation, as far as they stand in the file."""
    conversation = str(row["id"]).partition("<::>")[0]
    own = {passage["text"] for passage in row["passages"]}
    found = {
        passage["text"]: None
        for other in rows
        if str(other["id"]).partition("<::>")[0] == conversation and turn_of(other) < turn_of(row)
        for passage in other["passages"]
    }
    return [text for text in found if text not in own]


if __name__ == "__main__":
    main()
