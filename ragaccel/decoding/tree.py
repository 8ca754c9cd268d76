"""Draft trees: what a drafter guesses and the target model verifies in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import ge, le, lt
from typing import TYPE_CHECKING

from ragaccel.errors import RagaccelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class MalformedTreeError(RagaccelError, ValueError):
    """A drafter returned something that is no tree of guesses for the present context."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who guessed a token, and why.

    ``match_length`` is how many tokens before the guess were found at its source.
    ``offset`` is the guess's index in the token ids of the passage ``passage_id``, or in the
    running text when that is where it was copied from; -1 when it was not copied.
    """

    source: str
    match_length: int
    passage_id: str = ""
    offset: int = -1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guesses for the next tokens, as a tree in topological order.

    Node 0 is the root: the last committed-to token, which the KV cache does not hold yet.
    A parent always comes before its children; a chain has ``parents == (-1, 0, 1, ...)``.
    Row ``i`` of the verify pass is node ``i``. ``path_probs[i]`` estimates the chance that node
    ``i`` is accepted; it never grows from parent to child, so the likeliest nodes always form a
    tree. ``origins[i]`` holds every source that guessed node ``i``, the surest first.
    ``num_masks`` counts the mask tokens hung under chosen nodes; they stand at the end.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    path_probs: tuple[float, ...]
    origins: Sequence[tuple[Origin, ...]]
    num_masks: int = 0

    def __len__(self) -> int:
        """Count all rows: root, guesses and probes."""
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """How many nodes are guesses: neither the root nor a probe."""
        return len(self.token_ids) - 1 - self.num_masks

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it, so that a causal mask is enough."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int],
        path_probs: Sequence[float] | None = None,
        origins: Sequence[tuple[Origin, ...]] | None = None,
    ) -> DraftTree:
        """Make a tree of one branch, its first token the root.

        ``path_probs`` default to 1.0 and ``origins`` to none; both count the root.
        """
        n = len(token_ids)
        return cls(
            tuple(token_ids),
            tuple(range(-1, n - 1)),
            (1.0,) * n if path_probs is None else tuple(path_probs),
            ((),) * n if origins is None else tuple(origins),
        )

    def depths(self) -> list[int]:
        """Measure each node's distance from the root: its position, less the cache length."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def path(self, node: int) -> list[int]:
        """List the nodes from the root to ``node``, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def masks_under(self, node: int) -> list[int]:
        """List the chain of probe nodes that hangs under a node; empty when it has none."""
        chain: list[int] = []
        for mask in range(len(self.token_ids) - self.num_masks, len(self.token_ids)):
            if self.parents[mask] == (chain[-1] if chain else node):
                chain.append(mask)
        return chain


def merge(trees: Iterable[DraftTree], budget: int) -> DraftTree:
    """Unite trees that share a root and keep the ``budget`` likeliest nodes beside the root.

    A node guessed by several trees keeps its best estimate and all its origins. The result is
    again a tree, because no child is likelier than its parent. Probes are hung after merging.

    Raises:
        ValueError: no tree was given, or they differ in their root, or one holds probes.
    """
    node_of: dict[tuple[int, int], int] = {}
    token_ids: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    origins: list[list[tuple[float, tuple[Origin, ...]]]] = []
    for tree in trees:
        if tree.num_masks:
            raise ValueError("merge trees first and attach probes to the result")
        union_node: list[int] = []  # by node of this tree
        for token, parent, prob, sources in zip(
            tree.token_ids, tree.parents, tree.path_probs, tree.origins, strict=True
        ):
            key = (union_node[parent] if parent >= 0 else -1, token)
            node = node_of.setdefault(key, len(token_ids))
            if node == len(token_ids):
                token_ids.append(token)
                parents.append(key[0])
                probs.append(prob)
                origins.append([])
            probs[node] = max(probs[node], prob)
            origins[node].append((prob, sources))
            union_node.append(node)
    if parents.count(-1) != 1:
        raise ValueError(f"merge needs trees of one common root, got {parents.count(-1)} roots")
    union = DraftTree(
        tuple(token_ids), tuple(parents), tuple(probs), tuple(_order_origins(o) for o in origins)
    )
    return keep_likeliest(union, budget)


def graft(tree: DraftTree, node: int, branch: DraftTree) -> DraftTree:
    """Hang a branch, whose root is the token of a node, under that node alone.

    What is left of the tree is the path to it. The branch's chances count if the node is right.
    """
    path = tree.path(node)
    end, prob = len(path) - 1, tree.path_probs[node]
    return DraftTree(
        (*(tree.token_ids[i] for i in path), *branch.token_ids[1:]),
        (*range(-1, end), *(parent + end for parent in branch.parents[1:])),
        (*(tree.path_probs[i] for i in path), *(prob * own for own in branch.path_probs[1:])),
        (*(tree.origins[i] for i in path), *branch.origins[1:]),
    )


def keep_likeliest(tree: DraftTree, budget: int) -> DraftTree:
    """Keep the ``budget`` likeliest guesses of a tree without probes, the earlier of equals."""
    if tree.num_drafts <= budget:
        return tree
    probs = tree.path_probs
    if all(map(ge, probs, probs[1:])):
        return _keep_first(tree, 1 + max(0, budget))
    draft_nodes = sorted(range(1, len(tree)), key=lambda node: -tree.path_probs[node])
    return _keep_nodes(tree, [0, *sorted(draft_nodes[: max(0, budget)])])


def likeliest_chain(tree: DraftTree) -> DraftTree:
    """Keep the branch that is likely to go furthest: that of the greatest sum of path_probs."""
    if tree.is_chain or tree.num_masks:
        return tree
    sums = list(tree.path_probs)
    for node in range(1, len(tree)):
        sums[node] += sums[tree.parents[node]]
    end = max(range(len(tree)), key=sums.__getitem__)
    return _keep_nodes(tree, tree.path(end))


def _keep_first(tree: DraftTree, count: int) -> DraftTree:
    """Keep so many nodes, the first ones."""
    return DraftTree(
        tree.token_ids[:count], tree.parents[:count], tree.path_probs[:count], tree.origins[:count]
    )


def limit_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Keep the nodes of a tree without probes that are at most so far from the root."""
    if tree.num_drafts <= depth:
        return tree
    kept = [node for node, own in enumerate(tree.depths()) if own <= depth]
    return tree if len(kept) == len(tree) else _keep_nodes(tree, kept)


def limit_vocabulary(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Keep the guesses that a model can choose, of a tree without probes: ids below a size."""
    if max(tree.token_ids[1:], default=0) < vocab_size:
        return tree
    kept, is_kept = [0], {0}
    for node in range(1, len(tree)):
        if tree.token_ids[node] < vocab_size and tree.parents[node] in is_kept:
            kept.append(node)
            is_kept.add(node)
    return _keep_nodes(tree, kept)


def _keep_nodes(tree: DraftTree, kept: Sequence[int]) -> DraftTree:
    """Keep some nodes, parents before children and with them."""
    new_node = {node: i for i, node in enumerate(kept)}
    new_node[-1] = -1
    return DraftTree(
        token_ids=tuple(tree.token_ids[node] for node in kept),
        parents=tuple(new_node[tree.parents[node]] for node in kept),
        path_probs=tuple(tree.path_probs[node] for node in kept),
        origins=tuple(tree.origins[node] for node in kept),
    )


def attach_masks(tree: DraftTree, mask_ids: Sequence[int], nodes: Sequence[int]) -> DraftTree:
    """Hang one chain of the mask tokens ``mask_ids`` under each of ``nodes``.

    Follows SPACE (Yi et al., 2024): the target model's choices after the mask tokens under the
    accepted leaf are the next guesses. Probes are never accepted, so their ``path_probs`` are 0.
    """
    if not mask_ids or not nodes:
        return tree
    token_ids, parents = list(tree.token_ids), list(tree.parents)
    for node in nodes:
        parent = node
        for mask in mask_ids:
            parents.append(parent)
            parent = len(token_ids)
            token_ids.append(mask)
    added = len(token_ids) - len(tree)
    return replace(
        tree,
        token_ids=tuple(token_ids),
        parents=tuple(parents),
        path_probs=tree.path_probs + (0.0,) * added,
        origins=(*tree.origins, *[()] * added),
        num_masks=tree.num_masks + added,
    )


def check_tree(tree: DraftTree, root: int, budget: int) -> None:
    """Verify that a tree is a tree of at most ``budget`` guesses under the token ``root``.

    One pass over a few dozen nodes, so that a wrong drafter can cost an error but never a token.

    Raises:
        MalformedTreeError: says which node breaks which rule.
    """
    if not isinstance(tree, DraftTree):
        raise MalformedTreeError(f"a {type(tree).__name__} is not a DraftTree")
    n = len(tree.token_ids)
    if n == 0 or not n == len(tree.parents) == len(tree.path_probs) == len(tree.origins):
        raise MalformedTreeError(
            f"token_ids, parents, path_probs and origins need one common length of at least 1, got "
            f"{n}, {len(tree.parents)}, {len(tree.path_probs)} and {len(tree.origins)}"
        )
    if tree.num_masks:
        raise MalformedTreeError("it holds probes, which the session attaches itself")
    if tree.token_ids[0] != root or tree.parents[0] != -1:
        raise MalformedTreeError(
            f"node 0 must be the last token of the context ({root}) with parent -1, got token "
            f"{tree.token_ids[0]} with parent {tree.parents[0]}"
        )
    if n - 1 > budget:
        raise MalformedTreeError(f"{n - 1} guesses exceed the budget of {budget}")
    _check_nodes(tree)


def _check_nodes(tree: DraftTree) -> None:
    parents, probs = tree.parents, tree.path_probs
    later = parents[1:]
    if not (
        min(later, default=0) >= 0
        and all(map(lt, later, range(1, len(parents))))
        and min(tree.token_ids[1:], default=0) >= 0
        and len(set(zip(parents, tree.token_ids, strict=True))) == len(parents)
        and min(probs) >= 0.0
        and all(map(le, probs[1:], map(probs.__getitem__, later)))
    ):
        _explain_nodes(tree)  # only to say which node is wrong: this takes several times as long


def _explain_nodes(tree: DraftTree) -> None:
    seen: set[tuple[int, int]] = set()
    for node in range(1, len(tree.token_ids)):
        parent, token = tree.parents[node], tree.token_ids[node]
        if not 0 <= parent < node:
            raise MalformedTreeError(f"node {node} has parent {parent}: parents come first")
        if token < 0:
            raise MalformedTreeError(f"node {node} has the negative token id {token}")
        if (parent, token) in seen:
            raise MalformedTreeError(f"node {node} repeats token {token} under node {parent}")
        if not 0.0 <= tree.path_probs[node] <= tree.path_probs[parent]:
            raise MalformedTreeError(
                f"node {node} has path_prob {tree.path_probs[node]}, not between 0 and its "
                f"parent's {tree.path_probs[parent]}"
            )
        seen.add((parent, token))


def _order_origins(
    origins_by_prob: list[tuple[float, tuple[Origin, ...]]],
) -> tuple[Origin, ...]:
    origins_by_prob.sort(key=lambda item: -item[0])
    return tuple(dict.fromkeys(origin for _, origins in origins_by_prob for origin in origins))
