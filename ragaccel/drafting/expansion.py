"""Tree expansion: match weights, scores of candidate tokens, the best-first tree."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ragaccel.decoding.tree import DraftTree
from ragaccel.drafting.arrays import Table
from ragaccel.drafting.suffix_array import (
    CONTEXT,
    ROOT,
    WIDTH,
    BigramTable,
    Ids,
    Kinds,
    SuffixArray,
    insertion_rank,
    match_beyond,
    match_length,
)
from ragaccel.jit import compiled, inlined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.tree import Origin


REFERENCE, PROMPT, OUTPUT, PAST_PROMPT, PAST_ANSWER, FREQUENT = range(6)
SOURCES = ("reference", "prompt", "output", "past prompt", "past answer", "frequent")
"""Names of the kinds of text that a token is drafted from; the last one is for frequent tokens."""
MAX_SUPPORT = 8  # largest bucket of ``support``


class MatchWeights(NamedTuple):
    """Weights of matches. Every matching position adds a weight to the score of its next token.

    The probability of a token is its score over the sum of all scores and the *back-off mass*, the
    weight of everything that no match predicts. This is attention over all earlier positions with a
    learned key: the length of the match (``length`` [5 kinds, 17]) and how much agrees beyond the
    first mismatch (``beyond`` [this request or past ones, 5 lengths, 9]).

    The back-off mass is a product over this request and past ones. ``backoff`` [2, 17] depends on
    the longest match, ``support`` [2, 9] on the number of matches of that length. The mass is
    shared among the tokens that followed the last token in past requests, reduced by how often a
    successor was new (``frequency[2]`` times that). The rest goes to tokens by their frequency in
    this request (``frequency[0]``) and in past ones (``frequency[1]``), and to unseen tokens.

    Fitted to recorded answers by ``python -m eval fit_evidence``.
    """

    length: Table
    beyond: Table
    backoff: Table
    support: Table
    frequency: Table


@cache
def default_match_weights() -> MatchWeights:
    """Return the weights that the package ships; their file holds logarithms."""
    path = Path(__file__).with_name("match_weights.json")
    tables = json.loads(path.read_text(encoding="utf-8"))
    return MatchWeights(*(np.exp(np.array(tables[name])) for name in MatchWeights._fields))


MAX_MATCHES, MAX_PAST_MATCHES = 20, 8
"""Maximum number of matching positions scored in this request, and in past ones."""
MIN_PAST_MATCH = 2
"""Shortest match scored in past requests; the bigram table covers single tokens."""
MIN_CLEAR_MATCH = 4
"""Match length in this request from which past requests are not searched: that is slowest."""
SUPPORT_BUCKETS = np.rint(np.log2(np.arange(MAX_MATCHES + 1) + 1)).astype(np.int8)
"""Bucket of ``support`` for each number of equally long matches: round(log2(1 + number))."""
MIN_SAME_QUESTION = 12
"""Match length from which a past answer's match counts what it matches of the prompt as well."""
TIE_BREAK = 1e-3
"""Part of its weight that a match at the end of this request loses: the first of equals wins."""
MAX_BEYOND_MATCH = 4  # longer matches share one row of ``beyond``


class Scores(NamedTuple):
    """Scores of candidate tokens: scratch arrays, as long as one expansion can need.

    ``kinds``, ``lengths`` and ``positions`` describe the first match of each token.
    """

    token_ids: Ids
    weights: Table
    kinds: Ids
    lengths: Ids
    positions: Ids


@compiled
def new_scores() -> Scores:
    """Return new scratch arrays for building a tree."""
    size = MAX_MATCHES + MAX_PAST_MATCHES + WIDTH
    return Scores(
        np.empty(size, np.int32), np.empty(size), np.empty(size, np.int32),
        np.empty(size, np.int32), np.empty(size, np.int32),
    )  # fmt: skip


@compiled
def add_score(
    scores: Scores, count: int, token: int, weight: float, kind: int, length: int, position: int
) -> int:
    """Add a weight to a token's score; return the number of tokens that have one.

    ``kind``, ``length`` and ``position`` describe the match; they are kept for a token's first.
    """
    i = 0
    while i < count and scores.token_ids[i] != token:
        i += 1
    if i < count:
        scores.weights[i] += weight
    else:
        scores.token_ids[count], scores.weights[count] = token, weight
        scores.kinds[count], scores.lengths[count], scores.positions[count] = kind, length, position
        count += 1
    return count


@inlined
def length_in_answer(kinds: Kinds, position: int, length: int) -> int:
    """Return how many tokens of a match at a position in a past answer are the answer's own.

    Prompts end alike, so a match that reaches into one tells little, unless it is so long that the
    question is probably the same: it counts in full then.
    """
    own = 0
    while own < length and kinds[position - 1 - own] == PAST_ANSWER:
        own += 1
    return length if length >= MIN_SAME_QUESTION else own


@compiled
def score_matches(
    suffix_array: SuffixArray, at: int, context: Ids, end: int, max_matches: int, min_length: int,
    match_weights: MatchWeights, scores: Scores, count: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Score the tokens at ``max_matches`` positions next to rank ``at``, longest matches first.

    Matches shorter than ``min_length`` are skipped. Returns the number of tokens with a score, the
    length of the longest match, and the number of matches of that length.
    """
    token_ids, positions = suffix_array.token_ids, suffix_array.positions
    before, after = at - 1, at
    left = right = 0
    if before >= 0:
        left = match_length(token_ids, positions[before], context, end)
    if after < suffix_array.num_positions:
        right = match_length(token_ids, positions[after], context, end)
    longest, num_longest = min(max(left, right), min_length - 1), 0
    for _ in range(max_matches):
        length = max(left, right)
        if length < min_length:
            break
        if left >= right:
            position = positions[before]
            before -= 1
            left = 0
            if before >= 0:
                left = min(length, match_length(token_ids, positions[before], context, end))
        else:
            position = positions[after]
            after += 1
            right = 0
            if after < suffix_array.num_positions:
                right = min(length, match_length(token_ids, positions[after], context, end))
        kind = suffix_array.kinds[position]
        beyond = match_beyond(token_ids, position - length, context, end - length)
        if kind == PAST_ANSWER:
            length = length_in_answer(suffix_array.kinds, position, length)
            if length < min_length:
                continue
        if length > longest:
            longest, num_longest = length, 0
        num_longest += length == longest
        weight = match_weights.length[kind, length]
        is_past = int(kind >= PAST_PROMPT)
        weight *= match_weights.beyond[is_past, min(length, MAX_BEYOND_MATCH), beyond]
        if kind < OUTPUT:
            weight *= 1.0 - TIE_BREAK * position / len(token_ids)
        count = add_score(scores, count, token_ids[position], weight, kind, length, position)
    return count, longest, num_longest


@compiled
def score_candidates(
    request: SuffixArray, past: SuffixArray, bigrams: BigramTable, context: Ids, end: int,
    match_weights: MatchWeights, shares: Table, scores: Scores,
) -> tuple[float, float, int]:  # fmt: skip
    """Score every token that follows a match of the context.

    ``shares`` [vocabulary] is each token's share of the back-off mass. Returns the back-off mass
    left for tokens without a score, the sum of all scores and the back-off mass, and the number of
    tokens with a score.
    """
    at = insertion_rank(request, context, end)
    count, longest, num = score_matches(
        request, at, context, end, MAX_MATCHES, 1, match_weights, scores, 0
    )
    longest_past = num_past = 0
    if longest < MIN_CLEAR_MATCH:
        at = insertion_rank(past, context, end)
        count, longest_past, num_past = score_matches(
            past, at, context, end, MAX_PAST_MATCHES, MIN_PAST_MATCH, match_weights, scores, count
        )
    backoff = match_weights.backoff[0, longest] * match_weights.support[0, SUPPORT_BUCKETS[num]]
    backoff *= (
        match_weights.backoff[1, longest_past] * match_weights.support[1, SUPPORT_BUCKETS[num_past]]
    )
    weight = backoff
    for i in range(count):
        weight += scores.weights[i]
    backoff, count = score_bigrams(bigrams, context[end - 1], backoff, match_weights, scores, count)
    for i in range(count):
        token = scores.token_ids[i]
        if token < len(shares):  # tokens first seen in the answer have no share
            scores.weights[i] += backoff * shares[token]
    return backoff, weight, count


@compiled
def score_bigrams(
    bigrams: BigramTable,
    last: int,
    backoff: float,
    match_weights: MatchWeights,
    scores: Scores,
    count: int,
) -> tuple[float, int]:
    """Give part of the back-off mass to past successors of the last token; return the rest."""
    if not 0 <= last < len(bigrams.row_of) or bigrams.row_of[last] < 0:
        return backoff, count
    row = bigrams.row_of[last]
    total = bigrams.totals[row]
    part = backoff / (total + match_weights.frequency[2] * bigrams.distinct[row] + 1e-9)
    for i in range(WIDTH):
        times = bigrams.counts[row, i]
        if times == 0.0:
            break
        token = bigrams.token_ids[row, i]
        count = add_score(scores, count, token, part * times, FREQUENT, 1, -1)
    return max(0.0, backoff - part * total), count


@inlined
def has_score(scores: Scores, count: int, token: int) -> bool:
    """Return whether a token has a score."""
    i = 0
    while i < count and scores.token_ids[i] != token:
        i += 1
    return i < count


@compiled
def move_best_first(scores: Scores, count: int, num_best: int) -> None:
    """Move the ``num_best`` tokens with the highest scores to the front."""
    for i in range(num_best):
        best = i
        for j in range(i + 1, count):
            if scores.weights[j] > scores.weights[best]:
                best = j
        if best != i:
            for ids in (scores.token_ids, scores.kinds, scores.lengths, scores.positions):
                ids[i], ids[best] = ids[best], ids[i]
            scores.weights[i], scores.weights[best] = scores.weights[best], scores.weights[i]


MIN_PROB = 1e-4
"""Lowest acceptance probability that is worth a node."""
ODDS_LENGTHS, ODDS_DEPTHS = 8, 7  # larger values are clipped to these


class Limits(NamedTuple):
    """Limits of a tree: draft tokens, depth, children of the root and of others, probability.

    ``prior`` bounds the probability of a child of a frequent token, relative to its parent's. If
    even that bound is below the useful minimum, the node is not expanded.
    """

    budget: int
    depth: int
    root_children: int
    children: int
    min_prob: float
    prior: float


NODE = np.dtype(
    [
        ("path_prob", np.float64),
        ("token_id", np.int32),
        ("parent", np.int32),
        ("depth", np.int32),
        ("kind", np.int32),
        ("length", np.int32),
        ("position", np.int32),
    ]
)
"""A node, or a candidate for one. ``parent`` is the index of a node, -1 for the root.

``kind``, ``length`` and ``position`` describe the first match: its kind of text, its length, and
its position.
"""
Nodes = npt.NDArray[np.void]


def tree_of(nodes: Nodes, origins: Sequence[tuple[Origin, ...]]) -> DraftTree:
    """Return the draft tree of nodes, the root first."""
    return DraftTree(
        tuple(nodes["token_id"].tolist()),
        tuple(nodes["parent"].tolist()),
        tuple(nodes["path_prob"].tolist()),
        origins,
    )


@compiled
def write_path(nodes: Nodes, node: int, context: Ids) -> None:
    """Write the draft tokens on the path to a node after the first ``CONTEXT`` of ``context``."""
    while node > 0:
        context[CONTEXT + nodes[node]["depth"] - 1] = nodes[node]["token_id"]
        node = nodes[node]["parent"]


@compiled
def insert_sorted(probs: Table, frontier: Ids, head: int, tail: int, slots: int, new: int) -> int:
    """Insert a candidate into ``frontier[head:tail]``, cut to ``slots`` entries; return its end."""
    if tail - head >= slots:
        tail = head + slots
        if probs[frontier[tail - 1]] >= probs[new]:
            return tail
        tail -= 1
    at = tail
    while at > head and probs[frontier[at - 1]] < probs[new]:
        frontier[at] = frontier[at - 1]
        at -= 1
    frontier[at] = new
    return tail + 1


@compiled
def build_tree(
    request: SuffixArray, past: SuffixArray, bigrams: BigramTable, before: Ids,
    match_weights: MatchWeights, odds: Table, common: Ids, shares: Table, limits: Limits,
) -> Nodes:  # fmt: skip
    """Build a tree best-first, with the last of the tokens ``before`` [CONTEXT] as its root.

    ``shares`` [vocabulary] is each token's share of the back-off mass; ``common`` lists the tokens
    of greatest share, in descending order. Returns the nodes [at most budget + 1], the root first.
    """
    scores = new_scores()
    nodes = np.empty(limits.budget + 1, NODE)
    most = (limits.budget + 1) * (len(scores.weights) + len(common))
    candidates = np.empty(most, NODE)
    frontier = np.empty(limits.budget + 1, np.int32)  # the likeliest first
    context = np.empty(CONTEXT + limits.depth, np.int32)
    context[:CONTEXT] = before
    add_node(nodes, 0, before[-1], -1, 1.0, 0, REFERENCE, 0, ROOT)
    head = tail = num_candidates = 0
    num_nodes = 1
    while True:
        node = num_nodes - 1
        slots = limits.budget - node
        depth, prob = nodes[node]["depth"], nodes[node]["path_prob"]
        min_prob = min_useful_prob(
            candidates["path_prob"], frontier, head, tail, slots, limits.min_prob
        )
        if nodes[node]["kind"] == FREQUENT:
            prob *= limits.prior
        if slots > 0 and depth < limits.depth and prob > min_prob:
            write_path(nodes, node, context)
            first = num_candidates
            num_candidates = expand(
                request, past, bigrams, context, match_weights, odds, common, shares, limits,
                scores, nodes, node, min_prob, candidates, first,
            )  # fmt: skip
            for new in range(first, num_candidates):
                tail = insert_sorted(candidates["path_prob"], frontier, head, tail, slots, new)
        if slots == 0 or head == tail:
            return nodes[:num_nodes]
        nodes[num_nodes] = candidates[frontier[head]]
        head += 1
        num_nodes += 1


@inlined
def add_node(
    nodes: Nodes, at: int, token: int, parent: int, path_prob: float, depth: int, kind: int,
    length: int, position: int,
) -> None:  # fmt: skip
    """Write a node or a candidate."""
    node = nodes[at]
    node["token_id"], node["parent"], node["path_prob"] = token, parent, path_prob
    node["depth"], node["kind"], node["length"], node["position"] = depth, kind, length, position


@compiled
def min_useful_prob(
    probs: Table, frontier: Ids, head: int, tail: int, slots: int, min_prob: float
) -> float:
    """Return the probability that a candidate must exceed to be chosen, given the free slots."""
    if 0 < slots <= tail - head:
        return float(max(min_prob, probs[frontier[head + slots - 1]]))
    return min_prob


@compiled
def expand(
    request: SuffixArray, past: SuffixArray, bigrams: BigramTable, context: Ids,
    match_weights: MatchWeights, odds: Table, common: Ids, shares: Table, limits: Limits,
    scores: Scores, nodes: Nodes, node: int, min_prob: float, candidates: Nodes, count: int,
) -> int:  # fmt: skip
    """Append the children of a node that are likelier than ``min_prob`` to the candidates.

    Returns the new number of candidates.
    """
    prob, depth = nodes[node]["path_prob"], nodes[node]["depth"]
    backoff, weight, num_tokens = score_candidates(
        request, past, bigrams, context, CONTEXT + depth, match_weights, shares, scores
    )
    max_children = limits.root_children if node == 0 else limits.children
    num_scored = min(num_tokens, max_children)
    if max_children < num_tokens:
        move_best_first(scores, num_tokens, max_children)
    for i in range(num_scored):
        kind, length = scores.kinds[i], scores.lengths[i]
        share = min(1.0, scores.weights[i] / weight)
        factor = odds[kind, min(length, ODDS_LENGTHS), min(depth, ODDS_DEPTHS)]
        path_prob = min(prob, prob * share * factor / (1.0 - share + share * factor))
        if path_prob > min_prob:
            add_node(
                candidates, count, scores.token_ids[i], node, path_prob, depth + 1, kind, length,
                scores.positions[i],
            )  # fmt: skip
            count += 1
    factor = odds[FREQUENT, 0, min(depth, ODDS_DEPTHS)]
    for i in range(min(len(common), max_children - num_scored)):
        share = backoff * shares[common[i]] / weight
        path_prob = min(prob, prob * share * factor / (1.0 - share + share * factor))
        if path_prob <= min_prob:
            break
        if not has_score(scores, num_tokens, common[i]):
            add_node(candidates, count, common[i], node, path_prob, depth + 1, FREQUENT, 0, -1)
            count += 1
    return count
