"""The recycling drafter: Token Recycling (arXiv 2408.08696), for comparison only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ragaccel.decoding.tree import Origin
from ragaccel.drafting.arrays import Table, compiled
from ragaccel.drafting.calibration import Calibration
from ragaccel.drafting.expansion import (
    MIN_PROB,
    Limits,
    MatchWeights,
    build_tree,
    default_match_weights,
    new_candidates,
    new_scores,
    tree_of,
)
from ragaccel.drafting.ngram import BOUNDARY
from ragaccel.drafting.suffix_array import (
    CONTEXT,
    ROW_BYTES,
    WIDTH,
    BigramTable,
    Ids,
    count_bigram,
    empty_bigrams,
    empty_suffix_array,
    with_rows,
)

if TYPE_CHECKING:
    from ragaccel.decoding.session import Context
    from ragaccel.decoding.tree import DraftTree

_FADE = 0.5  # of what was seen of a token, when it is seen again


class Adjacency:
    """What the target model ranked highest after each token, in a table of bounded size.

    A row is the last few rankings after one token, the latest counting most. When all rows are
    taken, tokens without one are not learned.
    """

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._max_rows = max_bytes // ROW_BYTES
        self.table: BigramTable = empty_bigrams()

    def learn(self, token_ids: Ids, ranked: Ids) -> None:
        """See what was ranked highest [N, K] after each of some tokens [N], the best first.

        Places below 0 are empty.
        """
        tokens = np.unique(token_ids[token_ids >= 0])
        table = with_rows(self.table, tokens, self._max_rows)
        weights = np.array([0.5**rank for rank in range(ranked.shape[1])])
        recycle(table, token_ids, ranked, weights)
        self.table = table


@compiled
def recycle(table: BigramTable, token_ids: Ids, ranked: Ids, weights: Table) -> None:
    """Write rankings into a table, in place."""
    for i in range(len(token_ids)):
        if not 0 <= token_ids[i] < len(table.row_of) or table.row_of[token_ids[i]] < 0:
            continue
        row = table.row_of[token_ids[i]]
        table.counts[row] *= _FADE
        table.totals[row] *= _FADE
        table.distinct[row] *= _FADE
        for rank in range(ranked.shape[1]):
            if ranked[i, rank] >= 0:
                count_bigram(table, row, ranked[i, rank], weights[rank])


@dataclass(frozen=True, slots=True, eq=False)
class RecyclingDrafter:
    """Drafts from what the target model ranked highest after each token before.

    Every verified row yields the runner-ups of the model's choice, and these are guessed the next
    time. The tree is not of a fixed shape: it grows by the chance of acceptance, a token's share of
    its row, which ``calibration`` corrects by depth.
    """

    adjacency: Adjacency = field(default_factory=Adjacency)
    calibration: Calibration = field(default_factory=Calibration)
    decoding_length: int = 64
    branch_length: int = 12
    match_weights: MatchWeights = field(default_factory=default_match_weights)

    mask_ids: ClassVar[tuple[int, ...]] = ()
    num_alternatives: ClassVar[int] = 7

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Learn from the last verify pass, then guess at most ``budget`` tokens."""
        grown: _Grown = context.shared(self._open)
        self._learn(context, grown)
        budget = max(0, min(budget, self.decoding_length))
        limits = Limits(budget, self.branch_length, WIDTH, WIDTH, MIN_PROB, prior=1.0)
        text = np.array([BOUNDARY] * (CONTEXT - 1) + context.token_ids[-1:], np.int32)
        candidates, empty, grown.num_tokens = grown.candidates, grown.empty, len(context.token_ids)
        candidates.token_ids[0] = context.token_ids[-1]
        nodes = grown.nodes = build_tree(
            empty._replace(token_ids=text), empty, self.adjacency.table, text, self.match_weights,
            self.calibration.odds, grown.none, grown.no_shares, limits, grown.scores, candidates,
        )  # fmt: skip
        origins = ((), *[(Origin("recycled", 1),)] * (len(nodes) - 1))
        return tree_of(candidates, nodes, origins)

    def _open(self, context: Context) -> _Grown:  # noqa: ARG002
        return _Grown(self.decoding_length)

    def _learn(self, context: Context, grown: _Grown) -> None:
        last = context.last
        if last is None or last is grown.learned:
            return
        grown.learned = last
        came = context.token_ids[grown.num_tokens :]
        if len(grown.nodes) and came:
            self.calibration.learn(grown.candidates, grown.nodes, np.array(came, np.int32))
        if not last.sampled.alternatives:
            return
        num = last.tree.num_drafts + 1
        ranked = np.full((num, 1 + self.num_alternatives), -1, np.int32)
        ranked[:, 0] = last.sampled.next_ids[:num]
        for node, others in enumerate(last.sampled.alternatives[:num]):
            ranked[node, 1 : 1 + len(others)] = others[: self.num_alternatives]
        self.adjacency.learn(np.array(last.tree.token_ids[:num], np.int32), ranked)


class _Grown:
    """What was grown last for one request, and the arrays it is grown in."""

    def __init__(self, budget: int) -> None:
        self.empty = empty_suffix_array()
        self.none, self.no_shares = np.zeros(0, np.int32), np.zeros(0)
        self.scores, self.candidates = new_scores(), new_candidates(budget, 0)
        self.nodes: Ids = np.zeros(0, np.int32)
        self.learned: object = None
        self.num_tokens = 0  # of the context, when it was grown
