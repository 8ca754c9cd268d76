"""SPACE (arXiv 2402.11809): draft trees from a model's predictions at mask tokens.

Follows SPACE (Yi et al., 2024). Mask tokens are attached to nodes of the tree that is verified. The
predictions at the mask tokens under the accepted leaf become the next draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, takewhile
from operator import mul
from typing import TYPE_CHECKING

from ragaccel.decoding.session import Drafter
from ragaccel.decoding.tree import DraftTree, Origin
from ragaccel.drafting.calibration import Ending, Predictions, SpaceCalibration
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.session import Acceptance, Context


SOURCE = "space"
MIN_PROB = 0.01
"""Lowest acceptance probability that is worth a node."""


@dataclass(frozen=True, slots=True, eq=False)
class SpaceDrafter(Drafter):
    """A drafter of the likeliest mask predictions, which requests masks where they pay.

    The paper attaches mask tokens to every candidate. This drafter estimates how many tokens those
    under each node would add, from the probability that decoding ends there and from what they
    added before; only masks worth their rows are verified. Where the model is uncertain it drafts
    several tokens per position instead of one. ``calibration`` learns these estimates.

    Args:
        mask_ids: the mask tokens, one per position ahead (``LLM.mask_ids``).
        calibration: corrections of the predictions; one per namespace.

    Raises:
        ConfigurationError: there is no mask token.
    """

    mask_ids: Sequence[int] = field()
    calibration: SpaceCalibration = field(default_factory=SpaceCalibration)

    selects_masks = True

    def __post_init__(self) -> None:
        check_masks(self.mask_ids)

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Learn from the last draft; return a tree of at most ``budget`` draft tokens."""
        state: _SpaceState = context.shared(self._open)
        self._learn(context, state)
        state.predictions = (
            predictions_after(context.last)
            if context.last
            else [list(row) for row in context.mask_predictions]
        )
        state.num_tokens = len(context.token_ids)
        chances = self.calibration.corrected(state.predictions)
        return best_first_tree(context.token_ids[-1], chances, budget)

    def mask_gains(self, context: Context, tree: DraftTree) -> list[float]:  # noqa: ARG002
        """Return [len(tree)] the tokens that mask tokens under each node are expected to add."""
        leaf = list(tree.path_probs)
        has_children = [False] * len(tree)
        for node in range(1, len(tree)):
            leaf[tree.parents[node]] -= tree.path_probs[node]
            has_children[tree.parents[node]] = True
        values = self.calibration.values
        return [
            max(0.0, leaf[node]) * values[Ending.of(node, has_children=has_children[node])]
            for node in range(len(tree))
        ]

    def _learn(self, context: Context, state: _SpaceState) -> None:
        last = context.last
        if last is None or last is state.learned:
            return
        state.learned = last
        actual = context.token_ids[state.num_tokens :] if state.num_tokens else []
        self.calibration.learn(state.predictions, actual)
        if state.ending is None:
            self.calibration.decay()
        elif state.predictions:
            self.calibration.record(state.ending, num_added_by_space(last))
        state.ending = _ending(last)

    def _open(self, context: Context) -> _SpaceState:  # noqa: ARG002
        return _SpaceState()


@dataclass(frozen=True, slots=True, eq=False)
class PaperSpaceDrafter(Drafter):
    """The drafter of the SPACE paper: one candidate per position, mask tokens under all of them.

    With k mask tokens and a budget of k the verification pass has the paper's (k + 1)^2 rows: the
    last token and k candidates, each with a group of k mask tokens.

    Args:
        mask_ids: the mask tokens, one per position ahead (``LLM.mask_ids``).

    Raises:
        ConfigurationError: there is no mask token.
    """

    mask_ids: Sequence[int] = field()

    def __post_init__(self) -> None:
        check_masks(self.mask_ids)

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Return a chain of the likeliest token at each mask, at most ``budget`` tokens."""
        best = [row[0] for row in takewhile(len, predictions_after(context.last))][:budget]
        probs = accumulate((chance for _, chance in best), mul, initial=1.0)
        origins = ((), *[(Origin(SOURCE, 0),)] * len(best))
        return DraftTree.chain(
            [context.token_ids[-1], *(token for token, _ in best)], list(probs), origins
        )


class _SpaceState:
    """The state of one request that a ``SpaceDrafter`` keeps from one draft to the next."""

    def __init__(self) -> None:
        self.predictions: Predictions = []
        self.num_tokens = 0  # length of the context at the last draft
        self.ending: Ending | None = None  # of the last pass, if its mask tokens were read
        self.learned: Acceptance | None = None


def check_masks(mask_ids: Sequence[int]) -> None:
    """Raise ConfigurationError if there is no mask token."""
    if not len(mask_ids):
        raise ConfigurationError(
            "SPACE needs mask tokens, got none: load the model with a SPACE adapter (space=...) "
            "and pass llm.mask_ids"
        )


def predictions_after(last: Acceptance | None) -> Predictions:
    """Return the predictions at the mask tokens under the accepted leaf of the last pass.

    The leaf's next token is already emitted, so the first mask predicts the token after that one.
    """
    if last is None or not last.committed or not last.sampled.mask_predictions:
        return []
    tree = last.tree
    first = len(tree) - tree.num_masks
    masks = tree.masks_under(last.committed[-1])
    return [list(last.sampled.mask_predictions[mask - first]) for mask in masks]


def best_first_tree(root: int, chances: Predictions, budget: int) -> DraftTree:
    """Return a best-first tree of tokens predicted for each position ahead.

    A token for one position may follow any token for the position before.

    Args:
        root: the last token.
        chances: for each position ahead, tokens and their probabilities given that all before are
            right.
        budget: the maximum number of draft tokens.
    """
    tokens, parents, probs = [root], [-1], [1.0]
    depths = [0]
    frontier: list[tuple[float, int, int]] = []
    while True:
        node = len(tokens) - 1
        if depths[node] < len(chances):
            seen: set[int] = set()
            for token, chance in chances[depths[node]]:
                prob = probs[node] * min(1.0, chance)
                if prob >= MIN_PROB and token not in seen:
                    seen.add(token)
                    heappush(frontier, (-prob, node, token))
        if not frontier or len(tokens) > budget:
            break
        prob, parent, token = heappop(frontier)
        tokens.append(token)
        parents.append(parent)
        probs.append(-prob)
        depths.append(depths[parent] + 1)
    origins = ((), *[(Origin(SOURCE, 0),)] * (len(tokens) - 1))
    return DraftTree(tuple(tokens), tuple(parents), tuple(probs), origins)


def num_added_by_space(acceptance: Acceptance) -> int:
    """Return the number of accepted tokens that no drafter other than SPACE proposed."""
    origins = acceptance.tree.origins
    return sum(
        all(origin.source == SOURCE for origin in origins[node]) for node in acceptance.accepted
    )


def _ending(acceptance: Acceptance) -> Ending | None:
    """Return where a pass ended, or None if its accepted leaf had no mask tokens."""
    if not acceptance.committed or not acceptance.tree.num_masks:
        return None
    leaf, tree = acceptance.committed[-1], acceptance.tree
    if not tree.masks_under(leaf):
        return None
    has_children = leaf in tree.parents[1 : 1 + tree.num_drafts]
    return Ending.of(leaf, has_children=has_children)
