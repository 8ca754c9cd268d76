"""Successors: which tokens most often follow each token, in a table of bounded size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ragaccel.draft.corpus import Ids
from ragaccel.draft.evidence import Table
from ragaccel.draft.jit import compiled
from ragaccel.draft.large_arrays import joined

WIDTH = 16
"""How many successors of a token are remembered."""
ROW_BYTES = WIDTH * 12 + 20  # ids and counts; total, distinct, and the row's number
_FADING = 1 << 12  # a row whose total exceeds this is halved


class Successors(NamedTuple):
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


def no_successors() -> Successors:
    """A table that knows no token."""
    nothing = np.zeros(0, np.int32)
    return Successors(
        nothing, np.zeros((0, WIDTH), np.int32), np.zeros((0, WIDTH)),
        np.zeros(0), np.zeros(0),
    )  # fmt: skip


def with_pairs(table: Successors, token_ids: Ids, weights: Table, max_rows: int) -> Successors:
    """A new table that has seen each token follow the one before it, with the weight given.

    ``token_ids`` and ``weights`` are [N]; nothing follows a boundary, or is one. Tokens beyond the
    first ``max_rows`` different ones get no row.
    """
    made = with_rows(table, np.unique(token_ids[token_ids >= 0]), max_rows)
    count_pairs(made, token_ids, weights)
    return made


def with_rows(table: Successors, tokens: Ids, max_rows: int) -> Successors:
    """A copy of a table with rows for some different tokens, as far as there may be so many."""
    size = max(len(table.row_of), int(tokens.max(initial=-1)) + 1)
    row_of = np.concatenate([table.row_of, np.full(size - len(table.row_of), -1, np.int32)])
    num_rows = len(table.totals)
    new = tokens[row_of[tokens] < 0][: max(0, max_rows - num_rows)]
    row_of[new] = np.arange(num_rows, num_rows + len(new))
    parts = (
        joined([part, np.zeros((len(new), *part.shape[1:]), part.dtype)])
        for part in (table.token_ids, table.counts, table.totals, table.distinct)
    )
    return Successors(row_of, *parts)


@compiled
def count_pairs(table: Successors, token_ids: Ids, weights: Table) -> None:
    """Count, in place, how each token follows the one before it."""
    for i in range(1, len(token_ids)):
        before = token_ids[i - 1]
        if token_ids[i] >= 0 and before >= 0 and table.row_of[before] >= 0:
            count_pair(table, table.row_of[token_ids[i - 1]], token_ids[i], weights[i])


@compiled
def count_pair(table: Successors, row: int, token: int, weight: float) -> None:
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
    if table.totals[row] > _FADING:
        for i in range(WIDTH):
            counts[i] *= 0.5
        table.totals[row] *= 0.5
        table.distinct[row] *= 0.5
