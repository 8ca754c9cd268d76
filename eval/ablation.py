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
from ragaccel.drafting import expansion as votes
from ragaccel.drafting.arrays import compiled
from ragaccel.drafting.calibration import Calibration
from ragaccel.drafting.expansion import SOURCES, Evidence, Votes, collect, default_evidence
from ragaccel.drafting.history import History, first_of
from ragaccel.drafting.suffix_array import Corpus, Ids, Successors, match_length, no_successors
from ragaccel.drafting.trie import NoPast, PastTexts, TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eval.recordings import Recorded
    from ragaccel.decoding.session import Context

DRAFTERS = {"64_history": (64, True), "16": (16, False)}
Figures = dict[str, float]


def variants(past: PastTexts, nodes: int) -> dict[str, TrieDrafter]:
    """The full drafter and others that each lack one thing; without a past, none of it is lost."""
    weights = default_evidence()
    drafter: Callable[..., TrieDrafter] = partial(TrieDrafter, nodes, past=past)
    made = {
        "full": drafter(),
        "longest_only": LongestOnly(nodes, past=past),
        "no_beyond": drafter(evidence=weights._replace(beyond=np.ones_like(weights.beyond))),
        "one_branch": drafter(mode="one"),
        "parallel_branches": drafter(mode="parallel"),
        "no_calibration": drafter(calibration=Unlearning()),
        "no_support": drafter(evidence=weights._replace(support=np.ones_like(weights.support))),
        "no_frequent": drafter(evidence=without_frequency(weights)),
    }
    for source in ("reference", "prompt", "output"):
        made[f"no_{source}"] = WithoutSource(nodes, past=past, kind=SOURCES.index(source))
    if not isinstance(past, NoPast):
        for source in ("past prompt", "past answer"):
            name = f"no_{source.replace(' ', '_')}"
            made[name] = drafter(past=PartOfPast(past, hidden=SOURCES.index(source)))
        made["no_successors"] = drafter(past=PartOfPast(past, has_successors=False))
        made["no_past"] = drafter(past=NoPast())
    return made


class Unlearning(Calibration):
    """Corrections that stay 1."""

    def learn(self, *_outcomes: Any) -> None:
        """Learn nothing."""


def without_frequency(weights: Evidence) -> Evidence:
    """No token is likelier for being frequent, whether something matches or not."""
    frequency = weights.frequency.copy()
    frequency[:2] = 0.0
    return weights._replace(frequency=frequency)


class PartOfPast:
    """Past requests without one kind of text, or without what followed each token."""

    def __init__(self, past: PastTexts, *, hidden: int = -1, has_successors: bool = True) -> None:
        self._past, self._hidden, self._has_successors = past, hidden, has_successors

    def corpus(self) -> Corpus:
        """Return what is left to search."""
        left = without(self._past.corpus(), self._hidden)
        return left._replace(first_of=first_of(left.token_ids, left.places))

    def counts(self) -> Ids:
        """Return how often each token occurs, in what is hidden too."""
        return self._past.counts()

    def successors(self) -> Successors:
        """Return what follows each token, or a table that knows no token."""
        return self._past.successors() if self._has_successors else no_successors()


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
    def corpus(self) -> Corpus:
        """What can be searched now."""
        return without(self._text.corpus, self._kind)


def without(corpus: Corpus, kind: int) -> Corpus:
    """A corpus in which no place of a kind is found; ``first_of`` is not made anew."""
    places = corpus.places[: corpus.num_places]
    places = places[corpus.kinds[places] != kind]
    return corpus._replace(places=places, num_places=len(places))


@compiled
def collect_longest(
    corpus: Corpus, at: int, context: Ids, end: int, most: int, least: int, evidence: Evidence,
    votes: Votes, count: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Hear the places whose match is as long as the longest, and no others."""
    for i in (at - 1, at):
        if 0 <= i < corpus.num_places:
            least = max(least, match_length(corpus.token_ids, corpus.places[i], context, end))
    return collect(corpus, at, context, end, most, least, evidence, votes, count)


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

    _poll = calling(votes.poll, collect=collect_longest)
    _grow = calling(growth.grow, think=calling(growth.think, poll=_poll))
    _grown = calling(TrieDrafter._grown, grow=_grow)


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
