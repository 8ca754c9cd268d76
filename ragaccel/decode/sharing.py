"""Sharing: one pass for the trees of several sessions, and what each of them pays for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.decode.budget import worth_verifying_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.decode.session import Session
    from ragaccel.decode.tree import DraftTree


def settle_together(
    sessions: Sequence[Session],
    trees: Sequence[DraftTree],
    cost_seconds: Callable[[int], float],
    max_rows: int,
) -> list[DraftTree]:
    """Narrow drafted trees to what is worth verifying in one pass of all, and settle them.

    Sessions with a given number of guesses keep theirs; the others share one budget. A guess is
    charged its part of what all guesses add to a pass of the roots alone, in shares of what such
    a pass takes for each sequence.
    """
    widths = [session.rows_per_node for session in sessions]
    free = [i for i, session in enumerate(sessions) if session.chooses_width]
    kept = list(trees)
    fixed = [i for i in range(len(kept)) if i not in set(free)]
    given = sum(len(kept[i]) * widths[i] for i in fixed)
    if free:
        narrowed = worth_verifying_together(
            [trees[i] for i in free],
            lambda rows: cost_seconds(given + rows),
            [widths[i] for i in free],
            max_rows=max_rows - given,
            expected_besides=sum(sum(kept[i].path_probs) for i in fixed),
        )
        for i, tree in zip(free, narrowed, strict=True):
            kept[i] = tree
    roots = cost_seconds(sum(widths))
    whole = cost_seconds(sum(len(tree) * width for tree, width in zip(kept, widths, strict=True)))
    plain = roots / len(sessions)
    guesses = max(1, sum(tree.num_drafts for tree in kept))
    price = max(0.0, whole - roots) / guesses / max(1e-9, plain)
    return [
        session.settle(tree, price * tree.num_drafts, plain)
        for session, tree in zip(sessions, kept, strict=True)
    ]
