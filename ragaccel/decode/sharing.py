"""Sharing: one pass for the trees of several sessions, and what each of them pays for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ragaccel.decode.budget import worth_probing, worth_verifying_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.decode.budget import Group
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
    groups = _probed(sessions, kept, cost_seconds, max_rows)
    added = [
        tree.num_drafts + sum(group.rows for group in own)
        for tree, own in zip(kept, groups, strict=True)
    ]
    roots = cost_seconds(len(sessions))
    whole = cost_seconds(len(sessions) + sum(added))
    plain = roots / len(sessions)
    price = max(0.0, whole - roots) / max(1, sum(added)) / max(1e-9, plain)
    return [
        session.settle(tree, price * rows, plain, own)
        for session, tree, rows, own in zip(sessions, kept, added, groups, strict=True)
    ]


def _probed(
    sessions: Sequence[Session],
    trees: Sequence[DraftTree],
    cost_seconds: Callable[[int], float],
    max_rows: int,
) -> list[list[Group]]:
    """Choose the probes of each session: all where it has no choice, else the most gainful."""
    kept: list[list[Group]] = []
    offered: list[Group] = []
    for i, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
        own = session.probe_groups(tree)
        kept.append([] if session.chooses_probes else own)
        offered += [replace(group, owner=i) for group in own if session.chooses_probes]
    taken = worth_probing(
        offered,
        cost_seconds,
        rows=sum(map(len, trees)) + sum(group.rows for own in kept for group in own),
        expected=sum(sum(tree.path_probs) for tree in trees),
        max_rows=max_rows,
    )
    for group in taken:
        kept[group.owner].append(group)
    return kept
