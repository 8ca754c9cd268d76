"""Votes: every earlier place whose context matches votes for the token that follows it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ragaccel.draft.corpus import (
    Corpus,
    Ids,
    match_beyond,
    match_length,
    position,
)  # fmt: skip
from ragaccel.draft.evidence import FREQUENT, PAST_PROMPT, Evidence, Table
from ragaccel.draft.jit import compiled, inlined
from ragaccel.draft.successors import WIDTH, Successors

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
