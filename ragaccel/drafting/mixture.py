"""The mixture: several drafters, one tree, one budget."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Any

from ragaccel.decoding.tree import behind, merge
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel.decoding.session import Context, Drafter
    from ragaccel.decoding.tree import DraftTree


NUM_CONTINUED = 3
"""How many of the model's own guesses others go on from."""
LEAST_CONTINUED = 0.1
"""The least chance of a guess that others go on from."""


class Mixture:
    """Merges what its drafters guess and keeps the likeliest nodes of all.

    A node that several guessed counts as likely as the surest of them says. Where one drafter
    wants probes and so guesses a few tokens of the model's own, drafters with a method
    ``draft_after`` go on from the likeliest of these: the model chooses what to quote, and what
    follows is copied.

    Raises:
        ConfigurationError: no drafter, or two that want probes: a verify pass has one set.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise ConfigurationError("a mixture needs at least one drafter")
        probing = [drafter for drafter in drafters if drafter.probe_ids]
        if len(probing) > 1:
            raise ConfigurationError("two drafters of a mixture want probes: take one of them")
        self.drafters = drafters
        self.probe_ids: Sequence[int] = probing[0].probe_ids if probing else ()
        self.num_runner_ups = max(getattr(drafter, "num_runner_ups", 0) for drafter in drafters)
        # It judges the merged tree: where others guess well, its probes have less to add.
        self.probe_gains = getattr(probing[0], "probe_gains", None) if probing else None
        self._probing = probing[0] if probing else None
        self._continuing: list[Any] = [
            drafter for drafter in drafters if hasattr(drafter, "draft_after")
        ]

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess at most ``budget`` tokens, from all drafters together."""
        trees = [drafter.draft(context, budget) for drafter in self.drafters]
        for drafter, tree in zip(self.drafters, tuple(trees), strict=True):
            if drafter is self._probing:
                trees += self._continued(context, tree, budget)
        return merge(trees, budget)

    def _continued(self, context: Context, tree: DraftTree, budget: int) -> Iterator[DraftTree]:
        """Let others go on from the likeliest guesses of a tree."""
        probs = tree.path_probs
        for node in nlargest(NUM_CONTINUED, range(1, len(tree)), key=probs.__getitem__):
            if probs[node] >= LEAST_CONTINUED:
                guesses = [tree.token_ids[i] for i in tree.path(node)[1:]]
                for drafter in self._continuing:
                    branch = drafter.draft_after(context, guesses, budget)
                    yield behind(tree, node, branch)
