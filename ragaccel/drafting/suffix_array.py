"""Suffix arrays: every position where a context occurs, and what followed each token.

A *position* is an index into the tokens; its context is the tokens before it. Positions are sorted
by their contexts, read backwards, as a suffix array sorts suffixes. The positions next to a context
in that order are therefore its longest matches, whatever their length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ragaccel.drafting.arrays import Table, concatenate
from ragaccel.drafting.ngram import BOUNDARY
from ragaccel.jit import compiled, inlined

SORT_DEPTH = 8
"""Number of tokens of context by which positions are sorted; longer matches are only measured."""
MAX_MATCH = 16
"""Longest match length that is measured."""
MAX_GAP = 8
"""Number of tokens compared beyond the first mismatch."""
ROOT = -2  # the position of a tree's root, which is not a draft token
CONTEXT = MAX_MATCH + 1 + MAX_GAP
"""Number of tokens of context that are read, and of boundaries that must precede all text."""

Ids = npt.NDArray[np.int32]
Kinds = npt.NDArray[np.int8]


class SuffixArray(NamedTuple):
    """Texts with a boundary before each, and the sorted positions that follow a token.

    ``token_ids`` [N] begins with ``CONTEXT`` boundaries. ``kinds`` [N] gives the kind of text of
    each token. The first ``num_positions`` of ``positions`` are valid. ``bucket_starts`` [largest
    id + 2] gives the index where the positions after each token begin; it shortens the search and
    may be empty.
    """

    token_ids: Ids
    kinds: Kinds
    positions: Ids
    num_positions: int
    bucket_starts: Ids


def empty_suffix_array() -> SuffixArray:
    """Return a suffix array of no text."""
    none = np.zeros(0, np.int32)
    return SuffixArray(
        np.full(CONTEXT, BOUNDARY, np.int32), np.zeros(CONTEXT, np.int8), none, 0, none
    )


@inlined
def is_before(token_ids: Ids, position: int, context: Ids, end: int) -> bool:
    """Return whether the context of a position sorts before ``context[:end]``."""
    for i in range(1, SORT_DEPTH + 1):
        one, other = token_ids[position - i], context[end - i]
        if one != other:
            return bool(one < other)
        if one < 0:
            return False
    return False


@compiled
def insertion_rank(suffix_array: SuffixArray, context: Ids, end: int) -> int:
    """Return the index at which ``context[:end]`` belongs among the sorted positions."""
    low, high = 0, suffix_array.num_positions
    if len(suffix_array.bucket_starts):
        last = min(context[end - 1], len(suffix_array.bucket_starts) - 2)
        low, high = suffix_array.bucket_starts[last], suffix_array.bucket_starts[last + 1]
        if last < context[end - 1]:
            low = high
    while low < high:
        middle = (low + high) // 2
        if is_before(suffix_array.token_ids, suffix_array.positions[middle], context, end):
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def match_length(token_ids: Ids, position: int, context: Ids, end: int) -> int:
    """Return how many tokens before a position equal those before ``end``, up to ``MAX_MATCH``."""
    length = 0
    while length < MAX_MATCH:
        token = token_ids[position - 1 - length]
        if token < 0 or token != context[end - 1 - length]:
            break
        length += 1
    return length


@inlined
def match_beyond(token_ids: Ids, position: int, context: Ids, end: int) -> int:
    """Return how many tokens agree beyond the first mismatch, up to ``MAX_GAP``.

    The mismatch may be a substitution, an insertion or a deletion: an answer that changes one word
    of a copied text continues to copy.
    """
    best = 0
    # If a text begins at the mismatch, there is nothing beyond it to compare.
    first = 0 if token_ids[position - 1] >= 0 and context[end - 1] >= 0 else 3
    for change in range(first, 3):
        here = position - 1 - (change != 1)
        there = end - 1 - (change != 2)
        length = 0
        while (
            length < MAX_GAP
            and token_ids[here - length] >= 0
            and token_ids[here - length] == context[there - length]
        ):
            length += 1
        best = max(best, length)
    return best


@compiled
def append(suffix_array: SuffixArray, end: int, gained: Ids) -> None:
    """Append the tokens ``gained`` to a text that ends at ``end``, and insert their positions."""
    for i in range(len(gained)):
        suffix_array.token_ids[end + i] = gained[i]
        num_positions = suffix_array.num_positions + i
        so_far = SuffixArray(
            suffix_array.token_ids, suffix_array.kinds, suffix_array.positions, num_positions,
            suffix_array.bucket_starts,
        )  # fmt: skip
        insert(so_far, end + i)


@compiled
def insert(suffix_array: SuffixArray, position: int) -> None:
    """Insert a position into the sorted ones, so that its token can be drafted from now on."""
    positions = suffix_array.positions
    low = insertion_rank(suffix_array, suffix_array.token_ids, position)
    later = positions[low : suffix_array.num_positions].copy()
    positions[low + 1 : suffix_array.num_positions + 1] = later
    positions[low] = position


WIDTH = 16
"""Maximum number of successors stored for a token."""
ROW_BYTES = WIDTH * 12 + 20  # ids and counts; total, distinct, and the row's number
_MAX_ROW_TOTAL = 1 << 12  # a row whose total exceeds this is halved


class BigramTable(NamedTuple):
    """The most frequent successors of each token, the most frequent first.

    ``row_of`` [V] is the row of a token, or -1. ``token_ids`` and ``counts`` are [rows, WIDTH];
    free slots have count 0. ``totals`` [rows] counts all successors, ``distinct`` [rows] those that
    were new. In a full row a new successor replaces the rarest one, so that repeated ones get in.
    This is the bounded adjacency table of Token Recycling (Luo et al., 2024, arXiv 2408.08696),
    with counts.
    """

    row_of: Ids
    token_ids: Ids
    counts: Table
    totals: Table
    distinct: Table


def empty_bigrams() -> BigramTable:
    """Return a table without rows."""
    nothing = np.zeros(0, np.int32)
    return BigramTable(
        nothing, np.zeros((0, WIDTH), np.int32), np.zeros((0, WIDTH)),
        np.zeros(0), np.zeros(0),
    )  # fmt: skip


def with_bigrams(table: BigramTable, token_ids: Ids, weights: Table, max_rows: int) -> BigramTable:
    """Return a copy of a table that also counts each token after the one before it.

    ``token_ids`` and ``weights`` are [N]. Pairs across a boundary are not counted. Distinct tokens
    beyond the first ``max_rows`` get no row.
    """
    made = with_rows(table, np.unique(token_ids[token_ids >= 0]), max_rows)
    count_bigrams(made, token_ids, weights)
    return made


def with_rows(table: BigramTable, tokens: Ids, max_rows: int) -> BigramTable:
    """Return a copy of a table with rows for more distinct tokens, ``max_rows`` in all."""
    size = max(len(table.row_of), int(tokens.max(initial=-1)) + 1)
    row_of = np.concatenate([table.row_of, np.full(size - len(table.row_of), -1, np.int32)])
    num_rows = len(table.totals)
    new = tokens[row_of[tokens] < 0][: max(0, max_rows - num_rows)]
    row_of[new] = np.arange(num_rows, num_rows + len(new))
    parts = (
        concatenate([part, np.zeros((len(new), *part.shape[1:]), part.dtype)])
        for part in (table.token_ids, table.counts, table.totals, table.distinct)
    )
    return BigramTable(row_of, *parts)


@compiled
def count_bigrams(table: BigramTable, token_ids: Ids, weights: Table) -> None:
    """Add the weight of each token to its count after the one before it, in place."""
    for i in range(1, len(token_ids)):
        before = token_ids[i - 1]
        if token_ids[i] >= 0 and before >= 0 and table.row_of[before] >= 0:
            count_bigram(table, table.row_of[token_ids[i - 1]], token_ids[i], weights[i])


@compiled
def count_bigram(table: BigramTable, row: int, token: int, weight: float) -> None:
    """Add a weight to the count of a successor in a row, and keep the row sorted."""
    tokens, counts = table.token_ids[row], table.counts[row]
    at = 0
    while at < WIDTH - 1 and counts[at] > 0.0 and tokens[at] != token:
        at += 1
    if counts[at] == 0.0 or tokens[at] != token:
        table.distinct[row] += 1.0
        tokens[at] = token
        counts[at] = 0.0
    counts[at] += weight
    table.totals[row] += weight
    while at > 0 and counts[at] > counts[at - 1]:
        tokens[at], tokens[at - 1] = tokens[at - 1], tokens[at]
        counts[at], counts[at - 1] = counts[at - 1], counts[at]
        at -= 1
    if table.totals[row] > _MAX_ROW_TOTAL:
        for i in range(WIDTH):
            counts[i] *= 0.5
        table.totals[row] *= 0.5
        table.distinct[row] *= 0.5
