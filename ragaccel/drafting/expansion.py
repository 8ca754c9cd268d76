"""Tree expansion: match weights, scores of candidate tokens, the best-first tree."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragaccel.decoding.tree import DraftTree
from ragaccel.drafting.arrays import Table, compiled, inlined
from ragaccel.drafting.suffix_array import (
    CONTEXT,
    ROOT,
    WIDTH,
    Corpus,
    Ids,
    Successors,
    match_beyond,
    match_length,
    position,
)
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.tree import Origin


REFERENCE, PROMPT, OUTPUT, PAST_PROMPT, PAST_ANSWER, FREQUENT = range(6)
SOURCES = ("reference", "prompt", "output", "past prompt", "past answer", "frequent")
"""Names of the kinds of text a token can be guessed from; the last is no text: common tokens."""
LONGEST_SUPPORT = 8  # log2 of the number of equally long matches


class Evidence(NamedTuple):
    """Weights of votes. Every matching place votes for the token that follows it.

    A token's chance is its votes over all votes and the *doubt*, the weight of what no match
    foretells. It is attention over all earlier places with a learned key: how long the match is
    (``length`` [5 kinds, 17]) and how much agrees beyond the first token that differs (``beyond``
    [this request or past ones, 5 lengths, 9]).

    The doubt is a product, for this request and past ones each: ``doubt`` [2, 17] goes by the
    longest match, ``support`` [2, 9] by how many are as long. It is shared out to what followed the
    last token in past requests, less the more often that was something new (``frequency[2]`` times
    that); what is left goes to tokens by their frequency in this request (``frequency[0]``) and in
    past ones (``frequency[1]``), and to tokens never seen.

    Fitted to recorded answers by ``python -m eval.fit_evidence``.
    """

    length: Table
    beyond: Table
    doubt: Table
    support: Table
    frequency: Table


@cache
def default_evidence() -> Evidence:
    """Load the weights that ship; the file holds logarithms."""
    path = Path(__file__).with_name("evidence.json")
    tables = json.loads(path.read_text(encoding="utf-8"))
    return Evidence(*(np.exp(np.array(tables[name])) for name in Evidence._fields))


MAX_VOTES, MAX_PAST_VOTES = 20, 8
"""How many matching places of this request and of past ones are heard, the longest first."""
LEAST_PAST = 2
"""The shortest match heard in past requests; what follows a single token is counted instead."""
CLEAR = 4
"""Where so many tokens match in this request, past ones are not searched: it would take longest."""
SUPPORT = np.rint(np.log2(np.arange(MAX_VOTES + 1) + 1)).astype(np.int8)
"""By the number of equally long matches, its binary logarithm, rounded."""
BEYOND_UP_TO = 4  # tokens of match; what agrees beyond longer ones tells the same for all


class Votes(NamedTuple):
    """Who votes for which token: scratch arrays of one growth, [all votes there may be].

    ``kinds``, ``lengths`` and ``places`` tell of the first vote for each that was heard.
    """

    token_ids: Ids
    weights: Table
    kinds: Ids
    lengths: Ids
    places: Ids


def new_votes() -> Votes:
    """Scratch arrays for growing a tree."""
    size = MAX_VOTES + MAX_PAST_VOTES + WIDTH
    ids = [np.zeros(size, np.int32) for _ in range(4)]
    return Votes(ids[0], np.zeros(size), *ids[1:])


@compiled
def add_vote(
    votes: Votes, count: int, token: int, weight: float, kind: int, length: int, place: int
) -> int:
    """Add a vote to its token; return how many tokens there are now."""
    i = 0
    while i < count and votes.token_ids[i] != token:
        i += 1
    if i < count:
        votes.weights[i] += weight
    else:
        votes.token_ids[count], votes.weights[count] = token, weight
        votes.kinds[count], votes.lengths[count], votes.places[count] = kind, length, place
        count += 1
    return count


@compiled
def collect(
    corpus: Corpus, at: int, context: Ids, end: int, most: int, least: int, evidence: Evidence,
    votes: Votes, count: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Hear at most so many places around position ``at``, the longest matches first.

    No match shorter than ``least`` is heard.

    Returns how many tokens have votes, how long the longest match is, and how many are as long.
    """
    token_ids, places = corpus.token_ids, corpus.places
    before, after = at - 1, at
    left = right = 0
    if before >= 0:
        left = match_length(token_ids, places[before], context, end)
    if after < corpus.num_places:
        right = match_length(token_ids, places[after], context, end)
    longest, num_longest = max(left, right), 0
    for _ in range(most):
        length = max(left, right)
        if length < least:
            break
        if left >= right:
            place = places[before]
            before -= 1
            left = 0
            if before >= 0:
                left = min(length, match_length(token_ids, places[before], context, end))
        else:
            place = places[after]
            after += 1
            right = 0
            if after < corpus.num_places:
                right = min(length, match_length(token_ids, places[after], context, end))
        num_longest += length == longest
        kind = corpus.kinds[place]
        beyond = match_beyond(token_ids, place - length, context, end - length)
        weight = evidence.length[kind, length]
        weight *= evidence.beyond[int(kind >= PAST_PROMPT), min(length, BEYOND_UP_TO), beyond]

        count = add_vote(votes, count, token_ids[place], weight, kind, length, place)
    return count, longest, num_longest


@compiled
def poll(
    request: Corpus, past: Corpus, successors: Successors, context: Ids, end: int,
    evidence: Evidence, shares: Table, votes: Votes,
) -> tuple[float, float, int]:  # fmt: skip
    """Hear all that match the context.

    ``shares`` [vocabulary] are those of each token where nothing matches. Returns the doubt that is
    left for tokens without votes, the weight of doubt and all votes, and how many tokens have some.
    """
    at = position(request, context, end)
    count, longest, num = collect(request, at, context, end, MAX_VOTES, 1, evidence, votes, 0)
    longest_past = num_past = 0
    if longest < CLEAR:
        at = position(past, context, end)
        count, longest_past, num_past = collect(
            past, at, context, end, MAX_PAST_VOTES, LEAST_PAST, evidence, votes, count
        )
    doubt = evidence.doubt[0, longest] * evidence.support[0, SUPPORT[num]]
    doubt *= evidence.doubt[1, longest_past] * evidence.support[1, SUPPORT[num_past]]
    weight = doubt
    for i in range(count):
        weight += votes.weights[i]
    doubt, count = follow_on(successors, context[end - 1], doubt, evidence, votes, count)
    for i in range(count):
        token = votes.token_ids[i]
        if token < len(shares):  # the answer may hold tokens that nothing held when it began
            votes.weights[i] += doubt * shares[token]
    return doubt, weight, count


@compiled
def follow_on(
    successors: Successors, last: int, doubt: float, evidence: Evidence, votes: Votes, count: int
) -> tuple[float, int]:
    """Give a part of the doubt to what followed the last token before; return what is left."""
    if not 0 <= last < len(successors.row_of) or successors.row_of[last] < 0:
        return doubt, count
    row = successors.row_of[last]
    total = successors.totals[row]
    part = doubt / (total + evidence.frequency[2] * successors.distinct[row] + 1e-9)
    for i in range(WIDTH):
        times = successors.counts[row, i]
        if times == 0.0:
            break
        token = successors.token_ids[row, i]
        count = add_vote(votes, count, token, part * times, FREQUENT, 1, -1)
    return max(0.0, doubt - part * total), count


@inlined
def has_votes(votes: Votes, count: int, token: int) -> bool:
    """Whether a token has votes already."""
    i = 0
    while i < count and votes.token_ids[i] != token:
        i += 1
    return i < count


@compiled
def keep_weightiest(votes: Votes, count: int, most: int) -> None:
    """Bring the ``most`` weightiest tokens to the front."""
    for i in range(most):
        best = i
        for j in range(i + 1, count):
            if votes.weights[j] > votes.weights[best]:
                best = j
        if best != i:
            for ids in (votes.token_ids, votes.kinds, votes.lengths, votes.places):
                ids[i], ids[best] = ids[best], ids[i]
            votes.weights[i], votes.weights[best] = votes.weights[best], votes.weights[i]


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
