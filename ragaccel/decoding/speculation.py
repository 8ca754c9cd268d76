"""Speculation length: how many draft tokens are worth verifying."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragaccel.decoding.tree import keep_likeliest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.decoding.tree import DraftTree


def select_drafts_jointly(
    trees: Sequence[DraftTree],
    cost_seconds: Callable[[int], float],
    rows_per_node: Sequence[int],
    *,
    max_rows: int | None = None,
    expected_elsewhere: float = 0.0,
) -> list[DraftTree]:
    """Keep the draft tokens of several trees that maximise tokens per second in one shared pass.

    A pass over the k likeliest draft tokens of all trees emits one token for each tree, plus the
    sum of the k path probabilities, on average. Take the k with the greatest quotient of emitted
    tokens and ``cost_seconds``, the smaller one on a tie. If no draft token pays, return the roots
    alone: that is a plain decoding step, so drafting is never slower. A draft token with mask
    tokens under it costs its own row and theirs.

    Args:
        trees: the drafted trees.
        cost_seconds: the cost of a pass, by the number of its rows that belong to these trees.
        rows_per_node: for each tree, the rows of one node and of the mask tokens under it.
        max_rows: the maximum number of rows of these trees in the pass, roots included.
        expected_elsewhere: tokens that the pass is expected to emit for other sequences.
    """
    rows, tokens = sum(rows_per_node), len(trees) + expected_elsewhere
    best, best_rate = 0, tokens / cost_seconds(rows)
    if rows == 1:  # one tree without mask tokens, the usual case
        limit = None if max_rows is None else max_rows - 1
        for count, prob in enumerate(sorted(trees[0].path_probs[1:], reverse=True)[:limit], 1):
            tokens += prob
            rate = tokens / cost_seconds(1 + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return [keep_likeliest(trees[0], best)]
    drafts = sorted(
        (-prob / rows_per_node[i], i)
        for i, tree in enumerate(trees)
        for prob in tree.path_probs[1:]
    )
    for count, (negative, i) in enumerate(drafts, start=1):
        rows += rows_per_node[i]
        if max_rows is not None and rows > max_rows:
            break
        tokens -= negative * rows_per_node[i]
        rate = tokens / cost_seconds(rows)
        if rate > best_rate:
            best, best_rate = count, rate
    num_kept = Counter(i for _, i in drafts[:best])
    return [keep_likeliest(tree, num_kept[i]) for i, tree in enumerate(trees)]


@dataclass(frozen=True, slots=True)
class MaskGroup:
    """Mask tokens that may be attached to a node.

    ``rows`` is their number, ``gain`` the number of tokens they are expected to add to the next
    pass, ``owner`` the index of the sequence in a shared pass.
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
    mask_seconds: float = 0.0,
) -> list[MaskGroup]:
    """Keep the groups of mask tokens that maximise tokens per second over this pass and the next.

    The gain of a group arrives in the next pass but counts here, because this pass pays for its
    rows. Take groups in order of gain per row while the quotient of ``select_drafts_jointly``
    grows.

    Args:
        groups: the candidates, of all sequences in the pass.
        cost_seconds: the cost of a pass, by its number of rows.
        rows: the rows of the pass without mask tokens.
        expected: the tokens that the pass emits on average.
        max_rows: the maximum number of rows of the pass.
        mask_seconds: added to the cost of the pass if any group is kept.
    """
    order = sorted(groups, key=lambda group: -group.gain / group.rows)
    best, best_rate = 0, expected / cost_seconds(rows)
    for count, group in enumerate(order, start=1):
        rows, expected = rows + group.rows, expected + group.gain
        if group.gain <= 0.0 or rows > max_rows:
            break
        rate = expected / (cost_seconds(rows) + mask_seconds)
        if rate > best_rate:
            best, best_rate = count, rate
    return order[:best]


INITIAL_GAIN = 1.0
"""Average gain at the start, in plain passes: high, as an answer may copy only after its start."""
SMOOTHING = 0.05
"""Weight of the latest draft in the moving average of gains."""
MAX_MISSES = 6
"""Drafts in a row without an accepted token that disable drafting if the average is a loss."""
MAX_LOSS = 0.3
"""Average loss, in plain passes, that is tolerated while some drafts still add tokens."""
RETRY_SHARE = 0.01
"""Share of plain decoding's time that retries may cost."""
MAX_DISABLED_STEPS = 48
"""Disabled steps after which drafting is retried even if that costs more than ``RETRY_SHARE``."""
INITIAL_LENGTH = 16
"""Number of draft tokens to request at first."""


class SpeculationController:
    """A controller of the number of draft tokens to request, by what recent drafts gained.

    The gain of a draft is counted in plain passes: the tokens it added, less the extra cost of its
    rows and of drafting. Drafting is disabled after several drafts in a row that added nothing
    while the average is a loss, and after a large average loss. The greater the loss, the longer
    it stays disabled: retries cost about one percent of plain decoding's time, or more if one
    retry loses half a pass. The requested length follows the number of draft tokens that were
    worth verifying.
    """

    def __init__(self) -> None:
        self._average = INITIAL_GAIN
        self._misses = 0  # drafts in a row without an accepted token
        self._disabled_steps = 0
        self._is_retry = False  # the first draft after being disabled
        self._length = INITIAL_LENGTH

    @property
    def disabled(self) -> bool:
        """Return whether the next step drafts nothing."""
        return self._disabled_steps > 0

    def next_length(self, budget: int) -> int:
        """Return how many draft tokens to request, at most ``budget``; 0 while disabled."""
        if self._disabled_steps > 0:
            self._disabled_steps -= 1
            self._is_retry = self._disabled_steps == 0
            return 0
        return min(budget, self._length)

    def record_length(self, num_drafts: int, requested: int) -> None:
        """Record how many of the requested draft tokens were worth verifying."""
        if 2 * num_drafts > requested >= self._length:
            self._length *= 2
        elif 8 * num_drafts < self._length:
            self._length = max(INITIAL_LENGTH // 2, self._length // 2)

    def record(self, num_added: int, gain: float) -> None:
        """Record how many tokens a draft added and its gain in plain passes."""
        self._misses = 0 if num_added > 0 else self._misses + 1
        self._average += SMOOTHING * (gain - self._average)
        if self._is_retry and gain > 0.0:
            self._average = max(-MAX_LOSS, self._average)  # the text may have changed
        self._is_retry = False
        if self._average < (0.0 if self._misses >= MAX_MISSES else -MAX_LOSS):
            self._disabled_steps = min(MAX_DISABLED_STEPS, int(-self._average / RETRY_SHARE))
