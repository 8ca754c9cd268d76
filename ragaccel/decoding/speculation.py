"""Token budgets: how many guesses are worth verifying at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from ragaccel.decoding.tree import keep_likeliest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.decoding.tree import DraftTree


def select_drafts(
    tree: DraftTree, cost_seconds: Callable[[int], float], rows_per_node: int = 1
) -> DraftTree:
    """Keep the guesses that give the most tokens a second, by their chances and the pass's cost.

    A pass over the k likeliest guesses emits 1 + sum(path_probs) tokens on average and costs
    ``cost_seconds((1 + k) * rows_per_node)``; k is taken where the quotient is greatest, the
    smaller one of equals. Where no guess pays, the root remains: plain decoding's own pass, which
    is what keeps drafting from ever being slower.
    """
    tokens = accumulate(sorted(tree.path_probs[1:], reverse=True), initial=1.0)
    rates = [
        expected / cost_seconds(nodes * rows_per_node)
        for nodes, expected in enumerate(tokens, start=1)
    ]
    return keep_likeliest(tree, rates.index(max(rates)))


def select_drafts_jointly(
    trees: Sequence[DraftTree],
    cost_seconds: Callable[[int], float],
    rows_per_node: Sequence[int],
    *,
    max_rows: int | None = None,
    expected_elsewhere: float = 0.0,
) -> list[DraftTree]:
    """Keep those guesses of several trees that give the most tokens a second in one pass.

    One budget for all, given to the likeliest guesses wherever they stand: a sequence that copies
    takes rows that would be lost on one that writes. As ``select_drafts`` for a single tree; a
    guess with probes under it costs its rows and theirs.

    Args:
        trees: what was drafted.
        cost_seconds: what a pass takes, by the rows of these trees that are in it.
        rows_per_node: of each tree, the probes under a node and itself.
        max_rows: most rows of these trees in the pass, the roots included.
        expected_elsewhere: tokens that the pass is expected to give others.
    """
    drafts = sorted(
        (-prob / rows_per_node[i], i)
        for i, tree in enumerate(trees)
        for prob in tree.path_probs[1:]
    )
    rows, tokens = sum(rows_per_node), len(trees) + expected_elsewhere
    best, best_rate = 0, tokens / cost_seconds(rows)
    for count, (negative, i) in enumerate(drafts, start=1):
        rows += rows_per_node[i]
        if max_rows is not None and rows > max_rows:
            break
        tokens -= negative * rows_per_node[i]
        if tokens > best_rate * cost_seconds(rows):
            best, best_rate = count, tokens / cost_seconds(rows)
    num_kept = Counter(i for _, i in drafts[:best])
    return [keep_likeliest(tree, num_kept[i]) for i, tree in enumerate(trees)]


@dataclass(frozen=True, slots=True)
class MaskGroup:
    """Probes that may hang under a node: how many rows, and what they are expected to add.

    ``owner`` tells whose node it is where several sequences share a pass.
    """

    node: int
    rows: int
    gain: float
    owner: int = 0


def select_masks(
    groups: Sequence[MaskGroup],
    cost_seconds: Callable[[int], float],
    *,
    rows: int,
    expected: float,
    max_rows: int,
) -> list[MaskGroup]:
    """Keep the groups of probes that give the most tokens a second, now and in the next pass.

    What a group adds to the next pass is counted as if this one emitted it, since it is this one
    that pays for its rows. Groups are taken by their gain per row for as long as the quotient of
    ``select_drafts`` grows.

    Args:
        groups: what may hang, of all sequences in the pass.
        cost_seconds: what a pass takes, by its rows.
        rows: those of the pass without probes.
        expected: the tokens it emits on average.
        max_rows: most rows of the pass.
    """
    order = sorted(groups, key=lambda group: -group.gain / group.rows)
    best, best_rate = 0, expected / cost_seconds(rows)
    for count, group in enumerate(order, start=1):
        rows, expected = rows + group.rows, expected + group.gain
        if group.gain <= 0.0 or rows > max_rows:
            break
        if expected > best_rate * cost_seconds(rows):
            best, best_rate = count, expected / cost_seconds(rows)
    return order[:best]


INITIAL_GAIN = 1.0
"""The average gain at the start, in plain passes: an answer may begin with words of its own."""
SMOOTHING = 0.05
"""How much one draft moves the average."""
MAX_MISSES = 6
"""Drafts in a row that add nothing before drafting rests, if it has been losing."""
MAX_LOSS = 0.3
"""An average loss, in plain passes, that chance explains while some drafts still add tokens."""
RETRY_SHARE = 0.01
"""The share of plain decoding's time that trying again may cost."""
MAX_DISABLED_STEPS = 48
"""Passes after which drafting is tried again, even if that costs more than this share."""
INITIAL_LENGTH = 16
"""Guesses asked for at first."""


class SpeculationController:
    """What drafting has returned of late, and so how many guesses to ask for next.

    Each draft's gain is counted in plain passes: the tokens it added, less what its rows cost more
    and what drafting took. When several in a row add nothing and the recent average is a loss, or
    it is a great one, drafting rests: the longer the greater the loss, so that trying again costs
    about a hundredth of plain decoding's time (more where a try loses half a pass or more). The
    width follows what was worth verifying: a drafter is not asked for sixty guesses where ten pay.
    """

    def __init__(self) -> None:
        self._average = INITIAL_GAIN
        self._misses = 0  # drafts in a row that added no token
        self._disabled_steps = 0
        self._is_retry = False  # with the first draft after a rest
        self._length = INITIAL_LENGTH

    @property
    def disabled(self) -> bool:
        """Whether nothing will be drafted for the next pass."""
        return self._disabled_steps > 0

    def next_length(self, budget: int) -> int:
        """How many guesses to ask for now, ``budget`` at most; 0 while drafting rests."""
        if self._disabled_steps > 0:
            self._disabled_steps -= 1
            self._is_retry = self._disabled_steps == 0
            return 0
        return min(budget, self._length)

    def record_length(self, num_drafts: int, requested: int) -> None:
        """Note how many of the guesses asked for were worth verifying."""
        if 2 * num_drafts > requested >= self._length:
            self._length *= 2
        elif 8 * num_drafts < self._length:
            self._length = max(INITIAL_LENGTH // 2, self._length // 2)

    def record(self, num_added: int, gain: float) -> None:
        """Note how many tokens a draft added and what it gained, in plain passes."""
        self._misses = 0 if num_added > 0 else self._misses + 1
        self._average += SMOOTHING * (gain - self._average)
        if self._is_retry and gain > 0.0:
            self._average = max(-MAX_LOSS, self._average)  # the text may have changed
        self._is_retry = False
        if self._average < (0.0 if self._misses >= MAX_MISSES else -MAX_LOSS):
            self._disabled_steps = min(MAX_DISABLED_STEPS, int(-self._average / RETRY_SHARE))
