"""Token budgets: how many guesses are worth verifying at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.decode.tree import likeliest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragaccel.decode.tree import DraftTree


def worth_verifying(
    tree: DraftTree, cost_seconds: Callable[[int], float], rows_per_node: int = 1
) -> DraftTree:
    """Keep the guesses that give the most tokens a second, by their chances and the pass's cost.

    A pass over the k likeliest guesses emits 1 + sum(path_probs) tokens on average and costs
    ``cost_seconds((1 + k) * rows_per_node)``; k is taken where the quotient is greatest, the
    smaller one of equals. Where no guess pays, the root remains: plain decoding's own pass, which
    is what keeps drafting from ever being slower.
    """
    probs = sorted(tree.path_probs[1:], reverse=True)
    expected = 1.0
    best_k, best_rate = 0, expected / cost_seconds(rows_per_node)
    for k, prob in enumerate(probs, start=1):
        expected += prob
        rate = expected / cost_seconds((1 + k) * rows_per_node)
        if rate > best_rate:
            best_k, best_rate = k, rate
    return likeliest(tree, best_k)
