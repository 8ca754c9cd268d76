"""Suffix arrays: every place of a text where a context occurs, and what followed each token.

A *place* is an index into the tokens; its context is what stands before it. All places are kept in
the order of their contexts, read backwards, as a suffix array keeps suffixes: the neighbours of a
context in that order are its longest matches, whatever their length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ragaccel.drafting.arrays import Table, compiled, concatenate, inlined
from ragaccel.drafting.ngram import BOUNDARY

SORT_DEPTH = 8
"""Tokens of context that places are sorted by; longer matches are counted, not sorted by."""
MAX_MATCH = 16
"""The longest match that is told apart from longer ones."""
MAX_GAP = 8
"""Tokens compared beyond the first that differs."""
ROOT = -2  # stands for a place where there is none: of a tree's root, which is no guess
CONTEXT = MAX_MATCH + 1 + MAX_GAP
"""Tokens of context that are looked at, and boundaries that must stand before all text."""

Ids = npt.NDArray[np.int32]
Kinds = npt.NDArray[np.int8]


class SuffixArray(NamedTuple):
    """Texts with a boundary before each, and the places that follow a token, in order.

    ``token_ids`` [N] begins with ``CONTEXT`` boundaries; ``kinds`` [N] says what each token is part
    of; of ``positions`` the first ``num_positions`` count. ``bucket_starts`` [largest id + 2] says
    where the positions that follow each token begin among them; it may be empty.
    """

    token_ids: Ids
    kinds: Kinds
    positions: Ids
    num_positions: int
    bucket_starts: Ids


def empty_suffix_array() -> SuffixArray:
    """A corpus of no text."""
    none = np.zeros(0, np.int32)
    return SuffixArray(
        np.full(CONTEXT, BOUNDARY, np.int32), np.zeros(CONTEXT, np.int8), none, 0, none
    )


@inlined
def is_before(token_ids: Ids, position: int, context: Ids, end: int) -> bool:
    """Whether a place stands before the context ``context[:end]`` in the order of contexts."""
    for i in range(1, SORT_DEPTH + 1):
        one, other = token_ids[position - i], context[end - i]
        if one != other:
            return bool(one < other)
        if one < 0:
            return False
    return False


@compiled
def insertion_rank(suffix_array: SuffixArray, context: Ids, end: int) -> int:
    """Where the context ``context[:end]`` would stand among the places."""
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
    """How many tokens before a place are those before ``end``, up to ``MAX_MATCH``."""
    length = 0
    while length < MAX_MATCH:
        token = token_ids[position - 1 - length]
        if token < 0 or token != context[end - 1 - length]:
            break
        length += 1
    return length


@inlined
def match_beyond(token_ids: Ids, position: int, context: Ids, end: int) -> int:
    """How many tokens agree beyond the first that differs, up to ``MAX_GAP``.

    The one that differs may have been substituted, inserted or left out: an answer that changes a
    word of what it copies goes on copying.
    """
    best = 0
    first = 0 if token_ids[position - 1] >= 0 and context[end - 1] >= 0 else 3  # a text ends here
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
    """Write tokens from ``end`` on and take in their places, behind ``num_positions`` others."""
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
    """Take a place in, behind ``num_positions`` others; its token may be of use from now on."""
    positions = suffix_array.positions
    low = insertion_rank(suffix_array, suffix_array.token_ids, position)
    later = positions[low : suffix_array.num_positions].copy()
    positions[low + 1 : suffix_array.num_positions + 1] = later
    positions[low] = position


WIDTH = 16
"""How many successors of a token are remembered."""
ROW_BYTES = WIDTH * 12 + 20  # ids and counts; total, distinct, and the row's number
_MAX_ROW_TOTAL = 1 << 12  # a row whose total exceeds this is halved


class BigramTable(NamedTuple):
    """Rows of the commonest successors, the commonest first.

    ``row_of`` [V] is a token's row or -1; ``token_ids`` and ``counts`` are [rows, WIDTH], free
    places having count 0; ``totals`` and ``distinct`` [rows] count what followed in all, and how
    often it was something new. When a row is full the rarest gives way, so that what is said again
    and again gets in: a bounded adjacency table, as Token Recycling keeps one (Luo et al., 2024,
    arXiv 2408.08696), with counts.
    """

    row_of: Ids
    token_ids: Ids
    counts: Table
    totals: Table
    distinct: Table


def empty_bigrams() -> BigramTable:
    """A table that knows no token."""
    nothing = np.zeros(0, np.int32)
    return BigramTable(
        nothing, np.zeros((0, WIDTH), np.int32), np.zeros((0, WIDTH)),
        np.zeros(0), np.zeros(0),
    )  # fmt: skip


def with_bigrams(table: BigramTable, token_ids: Ids, weights: Table, max_rows: int) -> BigramTable:
    """A new table that has seen each token follow the one before it, with the weight given.

    ``token_ids`` and ``weights`` are [N]; nothing follows a boundary, or is one. Tokens beyond the
    first ``max_rows`` different ones get no row.
    """
    made = with_rows(table, np.unique(token_ids[token_ids >= 0]), max_rows)
    count_bigrams(made, token_ids, weights)
    return made


def with_rows(table: BigramTable, tokens: Ids, max_rows: int) -> BigramTable:
    """A copy of a table with rows for some different tokens, as far as there may be so many."""
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
    """Count, in place, how each token follows the one before it."""
    for i in range(1, len(token_ids)):
        before = token_ids[i - 1]
        if token_ids[i] >= 0 and before >= 0 and table.row_of[before] >= 0:
            count_bigram(table, table.row_of[token_ids[i - 1]], token_ids[i], weights[i])


@compiled
def count_bigram(table: BigramTable, row: int, token: int, weight: float) -> None:
    """Count one pair; rows stay in order."""
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
