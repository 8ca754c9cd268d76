"""The two seams of decoding: who guesses (Drafter) and who decides (Verifier)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ragaccel.decode.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decode.context import Context
    from ragaccel.decode.request import Request


class Drafter(Protocol):
    """Guesses the next tokens. Holds settings only; what a request teaches is in its context.

    A drafter that learns from the tokens the model nearly chose has an attribute
    ``num_runner_ups``: so many of them come with every choice, in ``context.last``.

    One that wants mask tokens under some nodes only has a method ``probe_gains(context, tree)``:
    how many tokens those under each node are expected to add to the pass after this one. Without it
    they hang under every node.
    """

    @property
    def probe_ids(self) -> Sequence[int]:
        """Mask tokens whose predictions are wanted, empty for all drafters but SPACE's.

        They hang as a chain under a node. Ids from the model's vocabulary size on are the masks of
        the SPACE adapter it wears.
        """
        ...

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Guess at most ``budget`` tokens in a tree rooted at the last token of ``context``."""
        ...


class NoDrafter:
    """Never guesses: plain autoregressive decoding, the baseline."""

    probe_ids: tuple[int, ...] = ()

    def draft(self, context: Context, budget: int) -> DraftTree:  # noqa: ARG002
        """Return the root alone."""
        return DraftTree.chain(context.token_ids[-1:])


PROBE_RANKS = 4
"""How many of the likeliest tokens are told of every probe."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the target model chose after every node of a tree, probes included.

    ``next_ids`` is [len(tree)]. ``runner_ups`` is [len(tree)] lists of the next likeliest tokens,
    likeliest first, when they were asked for. ``probed`` is [num_probes] lists of at most
    ``PROBE_RANKS`` pairs: the tokens most likely to follow each mask token, and how likely, the
    likeliest first; empty tells nothing of them.
    """

    next_ids: Sequence[int]
    runner_ups: Sequence[Sequence[int]] = ()
    probed: Sequence[Sequence[tuple[int, float]]] = ()


class Verifier(Protocol):
    """A target model and its KV cache over one sequence.

    One that can have mask tokens read together with the prompt, at no pass of their own, has a
    method ``foresee(probe_ids)``, to be called first, and then ``foreseen``: as
    ``Choices.probed``, for the first tokens of the answer. One with an attribute ``vocab_size``
    is shown guesses of token ids below it only.
    """

    @property
    def max_rows(self) -> int:
        """The most nodes one verify pass takes: root, guesses and probes."""
        ...

    @property
    def chains_only(self) -> bool:
        """Whether trees must not branch."""
        ...

    def prefill(self, request: Request) -> None:
        """Cache the prompt but for its last token, which is the root of the first tree.

        Raises:
            CapacityError: the prompt and its answer do not fit.
        """
        ...

    def verify(self, tree: DraftTree, num_runner_ups: int = 0) -> Choices:
        """Choose the next token after every node, in one forward pass."""
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes of the last verified tree in the KV cache and forget the others.

        ``path`` starts with the root and follows parents to children; an empty one keeps none.
        Recorded now, moved at the start of the next pass.
        """
        ...

    def cost_seconds(self, rows: int) -> float:
        """Estimate how long a verify pass over ``rows`` nodes takes at the present length."""
        ...

    def close(self) -> None:
        """Give the cache back; whoever opened the verifier calls it."""
        ...
