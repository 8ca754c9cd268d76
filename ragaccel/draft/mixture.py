"""The mixture: several drafters, one tree, one budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.decode.tree import merge
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decode.context import Context
    from ragaccel.decode.interfaces import Drafter
    from ragaccel.decode.tree import DraftTree


class Mixture:
    """Merges what its drafters guess and keeps the likeliest nodes of all.

    A node that several guessed counts as likely as the surest of them says. Raises
    ConfigurationError for no drafter, or for two that want probes: a verify pass has one set.
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

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess at most ``budget`` tokens, from all drafters together."""
        return merge([drafter.draft(context, budget) for drafter in self.drafters], budget)
