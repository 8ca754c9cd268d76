"""Ablation: what is each idea and each source of the trie drafter worth, in tokens a verify pass?

    python -m eval.ablation --data DATA --out eval/results/ablation.json

Recorded answers as in ``eval.replay``, through the full drafter and through others that each lack
one thing. The weights of votes are not fitted again for what is left, so a difference is what is
lost by taking something out of this drafter, and more than what it would lose that had never had
it. A source that is left out is not copied from; its tokens still count in how frequent tokens are,
and past texts in what follows a token. All variants of a set know the same past requests; each
learns its own corrections of chances. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.recordings import add_set_options, read_recorded, set_files, set_tokenizer
from eval.replay import Contender, Tally
from eval.script import measured, new_parser, note, result
from ragaccel.drafting import expansion as growth
from ragaccel.drafting import expansion as scores
from ragaccel.drafting.arrays import compiled
from ragaccel.drafting.calibration import Calibration
from ragaccel.drafting.expansion import (
    SOURCES,
    MatchWeights,
    Scores,
    default_match_weights,
    score_matches,
)
from ragaccel.drafting.history import History, bucket_starts
from ragaccel.drafting.suffix_array import (
    BigramTable,
    Ids,
    SuffixArray,
    empty_bigrams,
    match_length,
)
from ragaccel.drafting.trie import NoPast, PastTexts, TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eval.recordings import Recorded
    from ragaccel.decoding.session import Context

DRAFTERS = {"64_history": (64, True), "16": (16, False)}
Figures = dict[str, float]


def variants(past: PastTexts, nodes: int) -> dict[str, TrieDrafter]:
    """The full drafter and others that each lack one thing; without a past, none of it is lost."""
    weights = default_match_weights()
    drafter: Callable[..., TrieDrafter] = partial(TrieDrafter, nodes, past=past)
    made = {
        "full": drafter(),
        "longest_only": LongestOnly(nodes, past=past),
        "no_beyond": drafter(match_weights=weights._replace(beyond=np.ones_like(weights.beyond))),
        "one_branch": drafter(mode="one"),
        "parallel_branches": drafter(mode="parallel"),
        "no_calibration": drafter(calibration=Unlearning()),
        "no_support": drafter(
            match_weights=weights._replace(support=np.ones_like(weights.support))
        ),
        "no_frequent": drafter(match_weights=without_frequency(weights)),
    }
    for source in ("reference", "prompt", "output"):
        made[f"no_{source}"] = WithoutSource(nodes, past=past, kind=SOURCES.index(source))
    if not isinstance(past, NoPast):
        for source in ("past prompt", "past answer"):
            name = f"no_{source.replace(' ', '_')}"
            made[name] = drafter(past=PartOfPast(past, hidden=SOURCES.index(source)))
        made["no_successors"] = drafter(past=PartOfPast(past, has_bigrams=False))
        made["no_past"] = drafter(past=NoPast())
    return made


class Unlearning(Calibration):
    """Corrections that stay 1."""

    def learn(self, *_outcomes: Any) -> None:
        """Learn nothing."""


def without_frequency(weights: MatchWeights) -> MatchWeights:
    """No token is likelier for being frequent, whether something matches or not."""
    frequency = weights.frequency.copy()
    frequency[:2] = 0.0
    return weights._replace(frequency=frequency)


class PartOfPast:
    """Past requests without one kind of text, or without what followed each token."""

    def __init__(self, past: PastTexts, *, hidden: int = -1, has_bigrams: bool = True) -> None:
        self._past, self._hidden, self._has_bigrams = past, hidden, has_bigrams

    def suffix_array(self) -> SuffixArray:
        """Return what is left to search."""
        left = without(self._past.suffix_array(), self._hidden)
        return left._replace(bucket_starts=bucket_starts(left.token_ids, left.positions))

    def counts(self) -> Ids:
        """Return how often each token occurs, in what is hidden too."""
        return self._past.counts()

    def bigrams(self) -> BigramTable:
        """Return what follows each token, or a table that knows no token."""
        return self._past.bigrams() if self._has_bigrams else empty_bigrams()


@dataclass(frozen=True, slots=True, eq=False)
class WithoutSource(TrieDrafter):
    """A drafter that does not copy from one kind of the request's own text."""

    kind: int = 0

    def _open(self, context: Context) -> Any:
        request: Any = TrieDrafter._open(self, context)
        request.text = HiddenText(request.text, self.kind)
        return request


class HiddenText:
    """The searched text of a request, in which the places of one kind are not found."""

    def __init__(self, text: Any, kind: int) -> None:
        self._text, self._kind = text, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    @property
    def suffix_array(self) -> SuffixArray:
        """What can be searched now."""
        return without(self._text.suffix_array, self._kind)


def without(suffix_array: SuffixArray, kind: int) -> SuffixArray:
    """A corpus in which no place of a kind is found; ``bucket_starts`` is not made anew."""
    positions = suffix_array.positions[: suffix_array.num_positions]
    positions = positions[suffix_array.kinds[positions] != kind]
    return suffix_array._replace(positions=positions, num_positions=len(positions))


@compiled
def score_longest_matches(
    suffix_array: SuffixArray, at: int, context: Ids, end: int, max_matches: int, min_length: int,
    match_weights: MatchWeights, scores: Scores, count: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Hear the places whose match is as long as the longest, and no others."""
    for i in (at - 1, at):
        if 0 <= i < suffix_array.num_positions:
            length = match_length(suffix_array.token_ids, suffix_array.positions[i], context, end)
            min_length = max(min_length, length)
    return score_matches(
        suffix_array, at, context, end, max_matches, min_length, match_weights, scores, count
    )


def calling(function: Any, **others: Any) -> Any:
    """The same function, which calls others in place of those of these names.

    What numba keeps on disk goes by the code alone, which is the same: so this is not kept.
    """
    plain = getattr(function, "py_func", function)
    unknown = others.keys() - set(plain.__code__.co_names)
    if unknown:
        raise ValueError(f"{plain.__name__} knows no {', '.join(unknown)}")
    made = FunctionType(plain.__code__, {**plain.__globals__, **others}, plain.__name__)
    if plain is function:
        return made
    import numba

    return numba.njit(nogil=True)(made)


class LongestOnly(TrieDrafter):
    """Of this request and of past ones each, only the longest matches have votes."""

    _poll = calling(scores.score_candidates, score_matches=score_longest_matches)
    _grow = calling(growth.build_tree, expand=calling(growth.expand, score_candidates=_poll))
    _build = calling(TrieDrafter._build, build_tree=_grow)


def ablate(rows: Sequence[Recorded], nodes: int, *, has_past: bool) -> dict[str, float]:
    """Replay the rows of one set through all variants: tokens a pass."""
    history = History()
    made = variants(history if has_past else NoPast(), nodes)
    runs = {name: Contender(lambda one=one: one, nodes) for name, one in made.items()}
    tallies = {name: Tally() for name in runs}
    for recorded in rows:
        for name, run in runs.items():
            run.replay(recorded, tallies[name])
        history.add(recorded.prompt_ids, recorded.answer_ids)
    return {name: tally.figures()["tokens_per_pass"] for name, tally in tallies.items()}


def tabulated(by_set: dict[str, dict[str, float]]) -> dict[str, dict[str, Figures]]:
    """Turn {set: {variant: tokens a pass}} round, the difference to the full drafter added."""
    names = list(next(iter(by_set.values())))
    return {
        name: {
            title: {
                "tokens_per_pass": row[name],
                "difference": round(row[name] - row["full"], 3),
            }
            for title, row in by_set.items()
        }
        for name in names
    }


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("ablation", measure, parse(arguments))
    print(json.dumps(document["drafters"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("ablation", __doc__)
    add_set_options(parser)
    parser.add_argument("--out", type=Path, help="result file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ablate both drafters on every set."""
    paths = set_files(options.sets.split(","), options.data)
    tokenizer = set_tokenizer(options.tokenizer, options.data)
    found: dict[str, dict[str, dict[str, float]]] = {label: {} for label in DRAFTERS}
    for path in paths:
        rows = list(read_recorded(path, tokenizer, options.limit))
        for label, (nodes, has_past) in DRAFTERS.items():
            found[label][path.stem] = ablate(rows, nodes, has_past=has_past)
            note(f"{path.stem}, {label}: {found[label][path.stem]}")
    drafters = {label: tabulated(by_set) for label, by_set in found.items()}
    settings = {"tokenizer": options.tokenizer, "rows": options.limit}
    return result("ablation", settings, drafters=drafters)


if __name__ == "__main__":
    main()
