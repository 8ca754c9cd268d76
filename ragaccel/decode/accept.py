"""Acceptance: keeping guesses for exactly as long as they are the target model's own choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragaccel.decode.interfaces import Choices
    from ragaccel.decode.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of one draft tree.

    ``path`` holds the nodes that agree with the target model, from the root down; after each of
    them stands one token the target model chose. The first ``num_emitted`` of these tokens are
    emitted: all of them, unless the answer ends among them.
    """

    tree: DraftTree
    choices: Choices
    path: tuple[int, ...]
    num_emitted: int

    @property
    def emitted(self) -> list[int]:
        """The emitted tokens: accepted guesses, then the bonus token unless it was cut."""
        return [self.choices.next_ids[node] for node in self.committed]

    @property
    def committed(self) -> tuple[int, ...]:
        """The nodes the KV cache keeps: all that precedes the last emitted token."""
        return self.path[: self.num_emitted]

    @property
    def accepted(self) -> tuple[int, ...]:
        """The nodes whose guesses were emitted; the bonus token has none."""
        return self.path[1 : self.num_emitted + 1]

    @property
    def num_accepted(self) -> int:
        """How many emitted tokens had been guessed."""
        return len(self.accepted)

    def cut(self, num_emitted: int) -> Acceptance:
        """Keep only the first ``num_emitted`` tokens, as if the others had never been chosen."""
        return replace(self, num_emitted=num_emitted)


def accept(tree: DraftTree, choices: Choices) -> Acceptance:
    """Walk down from the root along the target model's choices for as long as the tree holds them.

    Every emitted token is one the target model chose for exactly its context, so the output is
    that of decoding one token at a time, greedy and sampled alike.
    """
    child = {
        (tree.parents[node], tree.token_ids[node]): node for node in range(1, 1 + tree.num_drafts)
    }
    path = [0]
    while (node := child.get((path[-1], choices.next_ids[path[-1]]))) is not None:
        path.append(node)
    return Acceptance(tree, choices, tuple(path), len(path))
