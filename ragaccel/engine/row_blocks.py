"""Row blocks: tables that tell attention kernels which tokens each row of a pass attends to.

Shapes: N rows of a pass with its padding, T row blocks, n rows of one sequence, W words of 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

BLOCK_ROWS = 16  # most rows of a block
SPLIT = 256  # tokens of a sequence that one kernel program attends to, at the sequence's start
SHORT_SPLITS, LONGER = 8, 4
"""Number of the first splits, and how many times as long all later ones are.

Short sequences need many programs, or most of a device has no work; of long ones, many splits would
be combined. Lengths depend on the position alone, so that a row's result does not depend on the
pass."""
WORD = 64
COLUMNS = 8  # of the table: six are used; two align each block's entry to 32 bytes
"""Of a block: its first row, its number of rows (0 if unused), the slot of its sequence's first
token, the number of tokens cached before the pass, the first row of its sequence, and 1 if
attention is causal, so that ``sees`` is not read."""


class BlockSegment(NamedTuple):
    """The consecutive rows of one sequence in a pass.

    ``sees`` is each row's attention to the others, itself included and none after it, as an integer
    in which bit j is set if the row attends to row j; ``None`` means causal attention. Every row
    also attends to the cached tokens.
    """

    first: int  # index of its first row in the pass
    num_rows: int
    base: int  # slot of the sequence's first token
    start: int  # tokens cached before this pass
    sees: Sequence[int] | None  # [n]
    positions: NDArray[np.integer]  # [n]


class TableArrays(NamedTuple):
    """NumPy views of the tables of a ``RowBlocks`` in host memory, made once."""

    table: NDArray[np.int32]
    positions: NDArray[np.int32]
    stops: NDArray[np.int32]
    sees: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Tables of one pass, views of one buffer, so that a single copy moves them to a device.

    A block is up to ``block_rows`` consecutive rows of one sequence. For a CUDA graph, make the
    tables once, and fill them before each replay.
    """

    table: Tensor  # [T, COLUMNS] int32, see ``COLUMNS``
    positions: Tensor  # [N] int32
    stops: Tensor  # [N] int32: tokens of the sequence up to and including the row; 0 for padding
    sees: Tensor  # [N, W] int64: bit j is set if the row attends to row j of its sequence
    block_rows: int

    @classmethod
    def over(
        cls,
        buffer: Tensor,
        num_rows: int,
        num_blocks: int,
        num_words: int = 1,
        *,
        block_rows: int = BLOCK_ROWS,
    ) -> RowBlocks:
        """Make tables that are views of a buffer of ``table_size`` integers, all zero."""
        words, rows, _, _ = _part_sizes(num_rows, num_blocks, num_words)
        ends = (words, words + rows, words + 2 * rows)
        positions, stops, table = (part.view(torch.int32) for part in buffer.tensor_split(ends)[1:])
        return cls(
            table=table.view(num_blocks, COLUMNS),
            positions=positions[:num_rows],
            stops=stops[:num_rows],
            sees=buffer[: num_rows * num_words].view(num_rows, num_words),
            block_rows=block_rows,
        )

    def arrays(self) -> TableArrays:
        """Return NumPy views of the tables, which must be in host memory."""
        parts = (self.table, self.positions, self.stops, self.sees)
        return TableArrays(*(part.numpy() for part in parts))


def table_size(num_rows: int, num_blocks: int, num_words: int = 1) -> int:
    """Return how many 64-bit integers the tables of such a pass take, an even number."""
    return sum(_part_sizes(num_rows, num_blocks, num_words))


def fill_tables(arrays: TableArrays, segments: Sequence[BlockSegment], block_rows: int) -> None:
    """Write several sequences' rows into tables that are all zero.

    Raises:
        ValueError: the rows, their blocks or their bits do not fit in these sizes.
    """
    (num_rows, num_words), num_blocks = arrays.sees.shape, len(arrays.table)
    entries = []
    for segment in segments:
        begin, end = segment.first, segment.first + segment.num_rows
        if not 0 <= begin < end <= num_rows:
            raise ValueError(f"rows {begin} to {end} are not among {num_rows} rows")
        causal = int(segment.sees is None)
        for first in range(begin, end, block_rows):
            count = min(block_rows, end - first)
            entries.append((first, count, segment.base, segment.start, begin, causal))
        arrays.positions[begin:end] = segment.positions
        arrays.stops[begin:end] = np.arange(
            segment.start + 1, segment.start + segment.num_rows + 1, dtype=np.int32
        )
        if segment.sees is not None:
            arrays.sees[begin:end] = pack_bits(segment.sees, num_words)
    if len(entries) > num_blocks:
        raise ValueError(f"the rows need {len(entries)} blocks, not {num_blocks}")
    if entries:
        arrays.table[: len(entries), :6] = entries


def pack_bits(sees: Sequence[int], num_words: int) -> NDArray[np.int64]:
    """Cut one integer per row into words of 64 bits, the lowest first. [n, W]."""
    n = len(sees)
    if n > WORD * num_words:
        raise ValueError(f"{n} rows do not fit in {num_words} words of {WORD} bits")
    width = WORD // 8 * num_words
    packed = b"".join([row.to_bytes(width, "little") for row in sees])
    return np.frombuffer(packed, "<i8").reshape(n, num_words)


def rows_per_block(group: int) -> int:
    """Return how many rows a block has if ``group`` query heads share a KV head.

    The matrices of a block have one row for each row and query head: 64 if heads are grouped. That
    is large enough for a matrix unit, and small enough that a pass of one row costs little more
    than reading its keys and values.
    """
    rows = BLOCK_ROWS
    while rows > 1 and rows * group > 4 * BLOCK_ROWS:
        rows //= 2
    return rows


def num_splits(length: int, split: int = SPLIT) -> int:
    """Count the splits of a sequence of ``length`` tokens, the rows of its pass included."""
    units = -(-length // split)
    return units if units <= SHORT_SPLITS else SHORT_SPLITS - (SHORT_SPLITS - units) // LONGER


def _part_sizes(num_rows: int, num_blocks: int, num_words: int) -> tuple[int, int, int, int]:
    """Return the sizes of the words, positions, stops and block entries, in 64-bit integers."""
    # Align parts to 16 bytes: Triton compiles another kernel for unaligned pointers.
    rows = _even(-(-num_rows // 2))
    return _even(num_rows * num_words), rows, rows, num_blocks * COLUMNS // 2


def _even(count: int) -> int:
    return count + count % 2
