"""Row blocks: tables that tell attention kernels which tokens each row of a pass attends to.

Shapes: N rows of a pass with its padding, T row blocks, n rows of one sequence, W words of 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

BLOCK_ROWS = 16  # most rows of a block
SPLIT = 256  # tokens of a sequence that one kernel program attends to, at the sequence's start
STAGES = ((16, 1), (12, 4), (0, 8))
"""Numbers of consecutive splits and their lengths in ``SPLIT``; the last goes on without an end.

Short sequences need many programs, or most of a device has no work; of long ones, many splits would
be combined. Lengths depend on the position alone, so that a row's result does not depend on the
pass."""
WORD = 64
COLUMNS = 8  # of the table: six are used; two align each block's entry to 32 bytes
"""Of a block: its first row, its number of rows (0 if unused), the slot of its sequence's first
token, the number of tokens cached before the pass, the first row of its sequence, and 1 if
attention is causal, so that ``sees`` is not read."""


@dataclass(frozen=True, slots=True)
class BlockSegment:
    """The consecutive rows of one sequence in a pass.

    ``sees`` is each row's attention to the others, itself included and none after it; ``None``
    means causal attention. Every row also attends to the cached tokens. ``positions`` default to
    the depths that ``sees`` implies.
    """

    first: int  # index of its first row in the pass
    num_rows: int
    base: int  # slot of the sequence's first token
    start: int  # tokens cached before this pass
    sees: NDArray[np.bool_] | None = None  # [n, n]
    positions: Sequence[int] | NDArray[np.integer] | None = None


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Tables of one pass, views of one buffer, so that a single copy moves them to a device.

    A block is up to ``block_rows`` consecutive rows of one sequence. For a CUDA graph, make the
    tables once with ``empty``, and fill them with ``copy_`` before each replay.
    """

    buffer: Tensor  # [..] int64, the memory of all tensors below
    table: Tensor  # [T, COLUMNS] int32, see ``COLUMNS``
    positions: Tensor  # [N] int32
    stops: Tensor  # [N] int32: tokens of the sequence up to and including the row; 0 for padding
    sees: Tensor  # [N, W] int64: bit j is set if the row attends to row j of its sequence
    block_rows: int

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_blocks: int,
        num_words: int = 1,
        *,
        block_rows: int = BLOCK_ROWS,
        device: torch.device | str = "cpu",
    ) -> RowBlocks:
        """Make tables in which every row is padding and every block unused."""
        # Align parts to 16 bytes: Triton compiles another kernel for unaligned pointers.
        words, rows = _even(num_rows * num_words), _even(-(-num_rows // 2))
        entries = num_blocks * COLUMNS // 2
        buffer = torch.zeros(words + 2 * rows + entries, dtype=torch.int64, device=device)
        ends = (words, words + rows, words + 2 * rows)
        positions, stops, table = (part.view(torch.int32) for part in buffer.tensor_split(ends)[1:])
        return cls(
            buffer=buffer,
            table=table.view(num_blocks, COLUMNS),
            positions=positions[:num_rows],
            stops=stops[:num_rows],
            sees=buffer[: num_rows * num_words].view(num_rows, num_words),
            block_rows=block_rows,
        )

    def copy_(self, other: RowBlocks) -> None:
        """Copy tables of the same sizes, without waiting for the device.

        Raises:
            ValueError: the sizes differ.
        """
        if (self.table.shape, self.sees.shape) != (other.table.shape, other.sees.shape):
            raise ValueError("the tables differ in size: pad to the same rows, blocks and words")
        if self.block_rows != other.block_rows:
            raise ValueError(
                f"the tables have blocks of {other.block_rows} rows, not of {self.block_rows}"
            )
        self.buffer.copy_(other.buffer, non_blocking=True)


def block_table(
    segments: Sequence[BlockSegment],
    *,
    num_rows: int,
    num_blocks: int,
    num_words: int = 1,
    block_rows: int = BLOCK_ROWS,
) -> RowBlocks:
    """Make the tables of several sequences' rows, padded to fixed sizes, in host memory.

    Raises:
        ValueError: the rows, their blocks or their bits do not fit in these sizes.
    """
    blocks = RowBlocks.empty(num_rows, num_blocks, num_words, block_rows=block_rows)
    entries = []
    for segment in segments:
        rows = slice(segment.first, segment.first + segment.num_rows)
        if segment.num_rows < 1 or not 0 <= rows.start < rows.stop <= num_rows:
            raise ValueError(f"rows {rows.start} to {rows.stop} are not among {num_rows} rows")
        causal = int(segment.sees is None)
        for first in range(rows.start, rows.stop, block_rows):
            count = min(block_rows, rows.stop - first)
            entries.append((first, count, segment.base, segment.start, rows.start, causal))
        blocks.positions.numpy()[rows] = _positions(segment)
        length = segment.start + segment.num_rows
        blocks.stops.numpy()[rows] = np.arange(segment.start + 1, length + 1)
        if segment.sees is not None:
            blocks.sees.numpy()[rows] = pack_bits(segment.sees, num_words)
    if len(entries) > num_blocks:
        raise ValueError(f"the rows need {len(entries)} blocks, not {num_blocks}")
    if entries:
        blocks.table.numpy()[: len(entries), :6] = entries
    return blocks


def pack_bits(sees: NDArray[np.bool_], num_words: int) -> NDArray[np.int64]:
    """Pack a boolean matrix into words of 64 bits, the first column in the lowest bit. [n, W]."""
    n = len(sees)
    if n > WORD * num_words:
        raise ValueError(f"{n} rows do not fit in {num_words} words of {WORD} bits")
    packed = np.zeros((n, num_words * 8), dtype=np.uint8)
    packed[:, : (n + 7) // 8] = np.packbits(sees, axis=1, bitorder="little")
    return packed.view("<i8").astype(np.int64, copy=False)


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
    count = 0
    for number, factor in STAGES:
        needed = -(-length // (factor * split))
        if not number or needed <= number:
            return count + max(0, needed)
        count, length = count + number, length - number * factor * split
    return count


def _positions(segment: BlockSegment) -> NDArray[np.integer]:
    if segment.positions is not None:
        return np.asarray(segment.positions)
    if segment.sees is None:
        return np.arange(segment.start, segment.start + segment.num_rows)
    depths: NDArray[np.integer] = segment.sees.sum(axis=1) - 1
    return segment.start + depths


def _even(count: int) -> int:
    return count + count % 2
