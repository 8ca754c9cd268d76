"""Growing: a draft tree whose likeliest node comes first, by the votes of matching places."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragaccel.decoding.tree import DraftTree
from ragaccel.draft.corpus import CONTEXT, ROOT, Corpus, Ids
from ragaccel.draft.evidence import FREQUENT, Evidence, Table
from ragaccel.draft.jit import compiled
from ragaccel.draft.successors import WIDTH, Successors
from ragaccel.draft.votes import MAX_PAST_VOTES, MAX_VOTES, Votes, has_votes, keep_weightiest, poll
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.tree import Origin

LEAST_PROB = 1e-4
"""The least chance of acceptance that is worth a node."""
ODDS_LENGTHS, ODDS_DEPTHS = 8, 7  # beyond, all count as these


class Limits(NamedTuple):
    """How large a tree may grow: guesses, tokens in a row, children of the root and of others.

    ``hope`` is the greatest share of its parent's chance that a child of a frequent token is hoped
    to have: where even that would be no use, nothing is searched.
    """

    budget: int
    depth: int
    root_children: int
    children: int
    least_prob: float
    hope: float


class Pool(NamedTuple):
    """Guesses that were thought of, the root first: arrays of one growth.

    ``parents`` are numbers of tree nodes; ``kinds``, ``lengths`` and ``places`` tell of the
    first vote heard: the kind of text, how much of it matches, and where it stands.
    """

    token_ids: Ids
    parents: Ids
    path_probs: Table
    depths: Ids
    kinds: Ids
    lengths: Ids
    places: Ids


def new_pool(budget: int, num_common: int) -> Pool:
    """Arrays for all that can be thought of while a tree of so many guesses grows."""
    size = 1 + (budget + 1) * (MAX_VOTES + MAX_PAST_VOTES + WIDTH + num_common)
    ids = [np.zeros(size, np.int32) for _ in range(6)]
    return Pool(ids[0], ids[1], np.zeros(size), *ids[2:])


def tree_of(pool: Pool, nodes: Ids, origins: Sequence[tuple[Origin, ...]]) -> DraftTree:
    """Make the draft tree of the nodes that were grown."""
    return DraftTree(
        tuple(pool.token_ids[nodes].tolist()),
        tuple(pool.parents[nodes].tolist()),
        tuple(pool.path_probs[nodes].tolist()),
        origins,
    )


def require_lengths(decoding_length: int, branch_length: int) -> None:
    """Raise ConfigurationError for a tree of no guesses or branches of none."""
    lengths = {"decoding_length": decoding_length, "branch_length": branch_length}
    for name, length in lengths.items():
        if length < 1:
            raise ConfigurationError(f"{name} must be 1 or more, not {length}")


@compiled
def write_path(pool: Pool, nodes: Ids, node: int, context: Ids) -> None:
    """Write the guesses down to a node behind the context they follow."""
    while node > 0:
        guess = nodes[node]
        context[CONTEXT + pool.depths[guess] - 1] = pool.token_ids[guess]
        node = pool.parents[guess]


@compiled
def put_in_order(probs: Table, waiting: Ids, head: int, tail: int, room: int, new: int) -> int:
    """Put a guess in its place in ``waiting[head:tail]``, of which only ``room`` can be taken."""
    if tail - head >= room:
        tail = head + room
        if probs[waiting[tail - 1]] >= probs[new]:
            return tail
        tail -= 1
    at = tail
    while at > head and probs[waiting[at - 1]] < probs[new]:
        waiting[at] = waiting[at - 1]
        at -= 1
    waiting[at] = new
    return tail + 1


@compiled
def grow(
    request: Corpus, past: Corpus, successors: Successors, before: Ids, evidence: Evidence,
    odds: Table, common: Ids, shares: Table, limits: Limits, votes: Votes, pool: Pool,
) -> Ids:  # fmt: skip
    """Grow a tree under the last of the tokens ``before`` [CONTEXT]: the likeliest guess first.

    ``shares`` [vocabulary] are those of each token where nothing matches, ``common`` the tokens of
    greatest share, the greatest first. Returns the pool's indices of the nodes [budget + 1 at
    most], the root first.
    """
    nodes = np.zeros(limits.budget + 1, np.int32)
    waiting = np.zeros(limits.budget + 1, np.int32)  # the likeliest first
    context = np.empty(CONTEXT + limits.depth, np.int32)
    context[:CONTEXT] = before
    pool.path_probs[0], pool.depths[0], pool.parents[0], pool.places[0] = 1.0, 0, -1, ROOT
    head = tail = 0
    num_nodes = num_thought = 1
    while True:
        node = num_nodes - 1
        room = limits.budget - node
        depth = pool.depths[nodes[node]]
        least = least_of_use(pool.path_probs, waiting, head, tail, room, limits.least_prob)
        prob = pool.path_probs[nodes[node]]
        if node > 0 and pool.kinds[nodes[node]] == FREQUENT:
            prob *= limits.hope
        if room > 0 and depth < limits.depth and prob > least:
            write_path(pool, nodes, node, context)
            first = num_thought
            num_thought = think(
                request, past, successors, context, CONTEXT + depth, evidence, odds, common,
                shares, limits, votes, pool, nodes, node, least, first,
            )  # fmt: skip
            for new in range(first, num_thought):
                tail = put_in_order(pool.path_probs, waiting, head, tail, room, new)
        if room == 0 or head == tail:
            return nodes[:num_nodes]
        nodes[num_nodes] = waiting[head]
        head += 1
        num_nodes += 1


@compiled
def least_of_use(
    probs: Table, waiting: Ids, head: int, tail: int, room: int, least: float
) -> float:
    """The chance a guess must exceed to be taken: that of the last one there is room for."""
    if 0 < room <= tail - head:
        return float(max(least, probs[waiting[head + room - 1]]))
    return least


@compiled
def think(
    request: Corpus, past: Corpus, successors: Successors, context: Ids, end: int,
    evidence: Evidence, odds: Table, common: Ids, shares: Table, limits: Limits,
    votes: Votes, pool: Pool, nodes: Ids, node: int, least: float, num_thought: int,
) -> int:  # fmt: skip
    """Put the children of a node that are likelier than ``least`` into the pool, behind others.

    Returns how many guesses the pool holds then.
    """
    doubt, weight, count = poll(request, past, successors, context, end, evidence, shares, votes)
    most = limits.root_children if node == 0 else limits.children
    num_voted = min(count, most)
    if most < count:
        keep_weightiest(votes, count, most)
    prob, depth = pool.path_probs[nodes[node]], pool.depths[nodes[node]]
    for i in range(num_voted):
        kind, length = votes.kinds[i], votes.lengths[i]
        share = min(1.0, votes.weights[i] / weight)
        factor = odds[kind, min(length, ODDS_LENGTHS), min(depth, ODDS_DEPTHS)]
        guess = min(prob, prob * share * factor / (1.0 - share + share * factor))
        if guess > least:
            pool.token_ids[num_thought], pool.parents[num_thought] = votes.token_ids[i], node
            pool.path_probs[num_thought], pool.depths[num_thought] = guess, depth + 1
            pool.kinds[num_thought], pool.lengths[num_thought] = kind, length
            pool.places[num_thought] = votes.places[i]
            num_thought += 1
    factor = odds[FREQUENT, 0, min(depth, ODDS_DEPTHS)]
    for i in range(min(len(common), most - num_voted)):
        share = doubt * shares[common[i]] / weight
        guess = min(prob, prob * share * factor / (1.0 - share + share * factor))
        if guess <= least:
            break
        if not has_votes(votes, count, common[i]):
            pool.token_ids[num_thought], pool.parents[num_thought] = common[i], node
            pool.path_probs[num_thought], pool.depths[num_thought] = guess, depth + 1
            pool.kinds[num_thought], pool.lengths[num_thought] = FREQUENT, 0
            pool.places[num_thought] = -1
            num_thought += 1
    return num_thought
