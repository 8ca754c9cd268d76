"""Draft trees: the tokens that one forward pass of the target model verifies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import ge, le, lt
from typing import TYPE_CHECKING

from ragaccel.errors import RagaccelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class MalformedTreeError(RagaccelError, ValueError):
    """A drafter returned something other than a draft tree for the present context."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a draft token.

    ``match_length`` is the number of tokens before it that match at the source. ``offset`` is its
    index in the token ids of the passage ``passage_id``, or in the running text if it was copied
    from there; -1 if it was not copied.
    """

    source: str
    match_length: int
    passage_id: str = ""
    offset: int = -1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens as a tree in topological order.

    Node 0 is the root: the last committed token, which the KV cache does not hold yet. A parent
    always precedes its children; a chain has ``parents == (-1, 0, 1, ...)``. Row ``i`` of the
    verification pass is node ``i``. ``path_probs[i]`` estimates the probability that node ``i`` is
    accepted. It never increases from parent to child, so the likeliest nodes always form a tree.
    ``origins[i]`` holds every source that drafted node ``i``, the most confident first.
    ``num_masks`` counts the mask tokens attached to chosen nodes; they come last.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    path_probs: tuple[float, ...]
    origins: Sequence[tuple[Origin, ...]]
    num_masks: int = 0

    def __len__(self) -> int:
        """Return the number of rows: root, draft tokens and mask tokens."""
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """Return the number of draft tokens: nodes other than the root and mask tokens."""
        return len(self.token_ids) - 1 - self.num_masks

    @property
    def is_chain(self) -> bool:
        """Return whether every node is a child of the one before: a causal mask suffices then."""
        return tuple(self.parents) == tuple(range(-1, len(self.parents) - 1))

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int],
        path_probs: Sequence[float] | None = None,
        origins: Sequence[tuple[Origin, ...]] | None = None,
    ) -> DraftTree:
        """Make a tree with a single branch whose first token is the root.

        ``path_probs`` default to 1.0, ``origins`` to empty tuples; both include the root.
        """
        n = len(token_ids)
        return cls(
            tuple(token_ids),
            tuple(range(-1, n - 1)),
            (1.0,) * n if path_probs is None else tuple(path_probs),
            ((),) * n if origins is None else tuple(origins),
        )

    def depths(self) -> list[int]:
        """Return each node's distance from the root: its position minus the cache length."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to ``node``, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def masks_under(self, node: int) -> list[int]:
        """Return the chain of mask nodes attached to a node; [] if it has none."""
        chain: list[int] = []
        for mask in range(len(self.token_ids) - self.num_masks, len(self.token_ids)):
            if self.parents[mask] == (chain[-1] if chain else node):
                chain.append(mask)
        return chain


def merge(trees: Iterable[DraftTree], budget: int) -> DraftTree:
    """Merge trees with a common root and keep the ``budget`` likeliest nodes besides the root.

    A node that several trees contain keeps its highest probability and all its origins. The result
    is a tree, because no child is likelier than its parent. Attach masks after merging.

    Raises:
        ValueError: no tree was given, the roots differ, or a tree has mask tokens.
    """
    node_of: dict[tuple[int, int], int] = {}
    token_ids: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    origins: list[list[tuple[float, tuple[Origin, ...]]]] = []
    for tree in trees:
        if tree.num_masks:
            raise ValueError(
                "cannot merge trees that hold mask tokens: merge first, then call attach_masks"
            )
        union_node: list[int] = []  # for each node of this tree, its node in the union
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
        raise ValueError(f"merge needs trees with one common root, got {parents.count(-1)} roots")
    union = DraftTree(
        tuple(token_ids), tuple(parents), tuple(probs), tuple(_order_origins(o) for o in origins)
    )
    return keep_likeliest(union, budget)


def graft(tree: DraftTree, node: int, branch: DraftTree) -> DraftTree:
    """Return the path to one node with a branch attached to it; drop all other nodes.

    The root of the branch is the token of the node. The path probabilities of the branch are
    conditional on that node.
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
    """Keep the ``budget`` likeliest draft tokens of a tree without masks; earlier ones win ties."""
    if tree.num_drafts <= budget:
        return tree
    probs = tree.path_probs
    if all(map(ge, probs, probs[1:])):
        return _keep_first(tree, 1 + max(0, budget))
    draft_nodes = sorted(range(1, len(tree)), key=lambda node: -tree.path_probs[node])
    return _keep_nodes(tree, [0, *sorted(draft_nodes[: max(0, budget)])])


def likeliest_chain(tree: DraftTree) -> DraftTree:
    """Keep the branch with the greatest sum of path_probs: its expected accepted length."""
    if tree.is_chain or tree.num_masks:
        return tree
    sums = list(tree.path_probs)
    for node in range(1, len(tree)):
        sums[node] += sums[tree.parents[node]]
    end = max(range(len(tree)), key=sums.__getitem__)
    return _keep_nodes(tree, tree.path(end))


def _keep_first(tree: DraftTree, count: int) -> DraftTree:
    return DraftTree(
        tree.token_ids[:count], tree.parents[:count], tree.path_probs[:count], tree.origins[:count]
    )


def limit_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Keep the nodes of a tree without masks that are at most ``depth`` from the root."""
    if tree.num_drafts <= depth:
        return tree
    kept = [node for node, own in enumerate(tree.depths()) if own <= depth]
    return tree if len(kept) == len(tree) else _keep_nodes(tree, kept)


def limit_vocabulary(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Keep the nodes of a tree without masks whose path has only ids below ``vocab_size``."""
    if max(tree.token_ids[1:], default=0) < vocab_size:
        return tree
    kept, is_kept = [0], {0}
    for node in range(1, len(tree)):
        if tree.token_ids[node] < vocab_size and tree.parents[node] in is_kept:
            kept.append(node)
            is_kept.add(node)
    return _keep_nodes(tree, kept)


def _keep_nodes(tree: DraftTree, kept: Sequence[int]) -> DraftTree:
    """Keep the given nodes; ``kept`` is ascending and contains the parent of every node."""
    new_node = {node: i for i, node in enumerate(kept)}
    new_node[-1] = -1
    return DraftTree(
        token_ids=tuple(tree.token_ids[node] for node in kept),
        parents=tuple(new_node[tree.parents[node]] for node in kept),
        path_probs=tuple(tree.path_probs[node] for node in kept),
        origins=tuple(tree.origins[node] for node in kept),
    )


def attach_masks(tree: DraftTree, mask_ids: Sequence[int], nodes: Sequence[int]) -> DraftTree:
    """Attach one chain of the mask tokens ``mask_ids`` to each of ``nodes``.

    Follows SPACE (Yi et al., 2024): what the target model predicts at the mask tokens under the
    accepted leaf becomes the next draft. Masks are never accepted, so their ``path_probs`` are 0.
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
    """Check that a drafted tree is valid: under ``root``, with at most ``budget`` draft tokens.

    A faulty drafter then raises an error and never changes a token.

    Raises:
        MalformedTreeError: a node breaks a rule; the message names both.
    """
    if not isinstance(tree, DraftTree):
        raise MalformedTreeError(f"expected a DraftTree, got {type(tree).__name__}")
    n = len(tree.token_ids)
    if n == 0 or not n == len(tree.parents) == len(tree.path_probs) == len(tree.origins):
        raise MalformedTreeError(
            f"token_ids, parents, path_probs and origins need one common length of at least 1, got "
            f"{n}, {len(tree.parents)}, {len(tree.path_probs)} and {len(tree.origins)}"
        )
    if tree.num_masks:
        raise MalformedTreeError(
            "it holds mask tokens, which only the session attaches: return the draft tokens alone"
        )
    if tree.token_ids[0] != root or tree.parents[0] != -1:
        raise MalformedTreeError(
            f"node 0 must be the last token of the context ({root}) with parent -1, got token "
            f"{tree.token_ids[0]} with parent {tree.parents[0]}"
        )
    if n - 1 > budget:
        raise MalformedTreeError(f"{n - 1} draft tokens exceed the budget of {budget}")
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
        _explain_nodes(tree)  # several times slower, so only to name the faulty node


def _explain_nodes(tree: DraftTree) -> None:
    seen: set[tuple[int, int]] = set()
    for node in range(1, len(tree.token_ids)):
        parent, token = tree.parents[node], tree.token_ids[node]
        if not 0 <= parent < node:
            raise MalformedTreeError(
                f"node {node} has parent {parent}: a parent must precede its children"
            )
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
