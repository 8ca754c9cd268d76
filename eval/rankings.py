"""Rankings: how well a list of found passages answers to what was to be found.

A question has relevant passages; its *ranks* are the places, from 1, at which a search put them.
Relevant is or is not: there are no grades. Every figure is for one question; over a set they are
averaged, each question counting once.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    Metric = Callable[[Sequence[int], int], float]

DEPTH = 10


def ranks_of(relevant: Collection[str], found: Sequence[str]) -> list[int]:
    """Return the places of the relevant passages among the found ones, from 1, ascending."""
    return [rank for rank, name in enumerate(found, 1) if name in relevant]


def hit(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:  # noqa: ARG001
    """1 if a relevant passage is among the first ``depth``, else 0."""
    return float(any(rank <= depth for rank in ranks))


def recall(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:
    """The share of the relevant passages that are among the first ``depth``."""
    return sum(rank <= depth for rank in ranks) / num_relevant if num_relevant else 0.0


def reciprocal_rank(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:  # noqa: ARG001
    """1 / the place of the first relevant passage, 0 if that is beyond ``depth``."""
    first = min(ranks, default=depth + 1)
    return 1 / first if first <= depth else 0.0


def ndcg(ranks: Sequence[int], num_relevant: int, *, depth: int = DEPTH) -> float:
    """Discounted gain, 1 / log2(1 + rank) a relevant passage, over that of the best order."""
    best = sum(1 / math.log2(1 + rank) for rank in range(1, min(num_relevant, depth) + 1))
    gained = sum(1 / math.log2(1 + rank) for rank in ranks if rank <= depth)
    return gained / best if best else 0.0


METRICS: Mapping[str, Metric] = {
    "hit@1": partial(hit, depth=1),
    "hit@3": partial(hit, depth=3),
    "hit@6": partial(hit, depth=6),
    "hit@10": hit,
    "mrr@10": reciprocal_rank,
    "ndcg@10": ndcg,
    "recall@10": recall,
}
