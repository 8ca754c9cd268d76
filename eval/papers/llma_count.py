"""LLMA's count: the passes its published rules take, counted anew beside our drafter's.

    python -m eval.papers.llma_count --data DATA

The rules are written here a second time, plainly and apart from our drafter, session and verifier:
from the last ``longest`` tokens of the output down to ``n``, the first place in the first reference
where they stand is copied from; of ``k`` tokens fed at once one is known already; guesses hold as
long as they are the answer's, and one token more comes with every pass. The result has tokens a
pass of both, which must be the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eval.papers.decoders import llma
from eval.papers.llma_layout import llma_count_table
from eval.papers.published import published
from eval.papers.recorded_sets import (
    ORIGINAL,
    UNIFIED,
    add_replayed_options,
    answered_rows,
    chosen_models,
    describe_paper_run,
    laid_out,
    set_paths,
)
from eval.replay import replay_set
from eval.script import measured, new_parser, note, result

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from eval.recordings import Recorded

LONGEST, PASSAGE_TOKENS = 5, 768
SETTINGS = ((1, 20), (1, 15), (2, 20))
"""The (n, k) that are compared: the one the repository runs, a shorter copy, a longer match."""


@dataclass(slots=True)
class Count:
    """Tokens, passes, how many of these had guesses, and how many guesses in all."""

    tokens: int = 0
    passes: int = 0
    triggered: int = 0
    drafted: int = 0

    def figures(self) -> dict[str, Any]:
        """Lay out the count under the names that replayed counts have."""
        passes = max(1, self.passes)
        return {
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": round(self.tokens / passes, 4),
            "drafted_per_pass": round(self.drafted / passes, 4),
            "triggered": round(self.triggered / passes, 4),
        }


def count(
    references: Sequence[Sequence[int]], answer: Sequence[int], n: int = 1, k: int = 20
) -> Count:
    """Count what LLMA's rules take to say an answer, its end token included."""
    passages = [list(reference[:PASSAGE_TOKENS]) for reference in references]
    said, counted = 0, Count(tokens=len(answer))
    while said < len(answer):
        guessed = _copied(passages, list(answer[:said]), n, k)
        held = 0
        while said + held < len(answer) and guessed[held : held + 1] == [answer[said + held]]:
            held += 1
        said += held + 1
        counted.passes += 1
        counted.triggered += bool(guessed)
        counted.drafted += len(guessed)
    return counted


def _copied(passages: list[list[int]], output: list[int], n: int, k: int) -> list[int]:
    for length in range(min(LONGEST, len(output)), n - 1, -1):
        last = output[-length:]
        for passage in passages:
            for start in range(len(passage) - length + 1):
                if passage[start : start + length] == last:
                    return passage[start + length : start + length + k - 1]
    return []


def counted_of(recordings: Iterable[Recorded], n: int, k: int) -> Count:
    """Count over all answers of a set, passages tokenized apart."""
    total = Count()
    for recorded in recordings:
        one = count([part.token_ids for part in recorded.apart], recorded.answer_ids, n, k)
        total.tokens += one.tokens
        total.passes += one.passes
        total.triggered += one.triggered
        total.drafted += one.drafted
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.llma_count", measure, parse(arguments))
    print(llma_count_table(document))
    print(json.dumps(document["grid"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.llma_count", __doc__)
    add_replayed_options(parser, (ORIGINAL, UNIFIED))
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replay and count every set with every setting."""
    _, tokenizer = chosen_models(options)
    grid = []
    for name, path in set_paths(options, options.sets).items():
        recordings = laid_out(answered_rows(path, options.limit), tokenizer)
        for n, k in SETTINGS:
            counted = counted_of(recordings, n, k)
            replayed = replay_set(recordings, llma(n, k).replayed())
            point = {"set": name, "n": n, "k": k, **replayed, "counted": counted.figures()}
            grid.append(point)
            note(f"{name} n={n} k={k}: {point['passes']} and {counted.passes} passes")
    return result(
        "llma_count",
        describe_paper_run(options),
        module="papers.llma_count",
        grid=grid,
        published=published("llma"),
    )


if __name__ == "__main__":
    main()
