"""Tables of row blocks in memory of their own, and the segments that they are made of."""

import numpy as np
import torch

from ragaccel.engine import BlockSegment, RowBlocks
from ragaccel.engine.row_blocks import BLOCK_ROWS, fill_tables, table_size


def make_segment(first, num_rows, base, start, paths=None):
    """Make the rows of a draft tree of these paths, or of consecutive tokens."""
    depths = range(num_rows) if paths is None else [path.bit_count() - 1 for path in paths]
    return BlockSegment(first, num_rows, base, start, paths, start + np.array(depths))


def block_table(
    segments, *, num_rows, num_blocks, num_words=1, block_rows=BLOCK_ROWS, device="cpu"
):
    """Make the tables of several sequences' rows, padded to fixed sizes, on a device."""
    sizes = (num_rows, num_blocks, num_words)
    buffer = torch.zeros(table_size(*sizes), dtype=torch.int64)
    fill_tables(RowBlocks.over(buffer, *sizes).arrays(), segments, block_rows)
    return RowBlocks.over(buffer.to(device), *sizes, block_rows=block_rows)


def copy_tables(target, source):
    """Write tables into others of the same sizes."""
    for name in ("table", "positions", "stops", "sees"):
        getattr(target, name).copy_(getattr(source, name))


def path_matrix(paths):
    """Return which rows each row attends to, as a matrix [n, n] of booleans."""
    return np.array([[path >> j & 1 for j in range(len(paths))] for path in paths], dtype=np.bool_)
