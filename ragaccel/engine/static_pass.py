"""Static passes: the buffers of one size of pass, at addresses that a CUDA graph can hold on to.

Sizes are rounded up to buckets; what is too much is padding, its states go to the arena's trash.
Each run first moves the rows that the last pass left in the wrong place.

Shapes: N rows with padding, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from ragaccel.engine.arena import TRASH, Arena, ArenaCache
from ragaccel.engine.row_blocks import RowBlocks, Segment, block_table, rows_per_block

if TYPE_CHECKING:
    from torch import Tensor

    from ragaccel.engine.layout import Rows

MAX_MOVES = 64
"""Most rows that one pass moves to where they belong."""


class Kernel(Protocol):
    """Attention over an arena in passes of one size; see ``triton_attention.attend``."""

    @property
    def num_bytes(self) -> int:
        """Memory that it keeps from pass to pass, in bytes."""
        ...

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: RowBlocks,
        *,
        scaling: float,
        num_splits: int,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend with rows [N, H, D] to one layer's states [K, S, D]; return [N, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Size:
    """The bucket of a pass: rows, row blocks and splits of the attended tokens.

    ``has_masks`` tells that some rows may be mask tokens: what acts on them is left out of others.
    """

    rows: int
    blocks: int
    splits: int
    has_masks: bool = False


class StaticPass:
    """The buffers of one size of pass, and its attention. Filled before every run.

    ``recorded`` is the graph of the pass with the logits that it writes, once it was captured;
    ``logits_bytes`` what those take.
    """

    def __init__(self, size: Size, arena: Arena, kernel: Kernel, group: int) -> None:
        device, rows = arena.layout.device, size.rows
        self.size, self._arena, self._kernel = size, arena, kernel
        self._block_rows = rows_per_block(group)
        self.recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self.logits_bytes = 0
        pinned = device.type == "cuda"
        self._host = torch.zeros(3 * rows + 2 * MAX_MOVES, dtype=torch.int64, pin_memory=pinned)
        self._inputs = torch.zeros_like(self._host, device=device)
        self._copied: Any = cast("Any", torch.cuda).Event() if pinned else None
        parts = torch.split(self._inputs, [rows, rows, rows, MAX_MOVES, MAX_MOVES])
        self.token_ids, self.positions = parts[0][None], parts[1][None]
        self._slots, self._sources, self._targets = parts[2:]
        self._words = -(-min(rows, 256) // 64)
        self._blocks = RowBlocks.empty(
            rows, size.blocks, self._words, block_rows=self._block_rows, device=device
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the device that it keeps, in bytes."""
        tables = self._inputs.nbytes + self._blocks.buffer.nbytes
        return tables + self._kernel.num_bytes + self.logits_bytes

    def fill(self, rows: Rows) -> None:
        """Put a pass into the buffers; waits for the device only until it has read the last one."""
        if self._copied is not None:
            self._copied.synchronize()  # after a prefill pass, nobody waited for what it chose
        size = self.size
        ids, positions, slots, sources, targets = np.split(
            self._host.numpy(), np.cumsum([size.rows, size.rows, size.rows, MAX_MOVES])
        )
        for part, padding in ((ids, 0), (positions, 0), (slots, TRASH)):
            part[:] = padding
        sources[:], targets[:] = TRASH, TRASH
        n = rows.num_rows
        ids[:n], positions[:n] = rows.token_ids[0].numpy(), rows.positions[0].numpy()
        moved, segments = 0, []
        for span in rows.spans:
            cache = in_arena(span.cache)
            slots[span.rows] = np.arange(span.num_rows) + cache.base + span.start
            found = cache.take_moves()
            stop = moved + len(found[0])
            sources[moved:stop], targets[moved:stop] = found
            moved = stop
            sees = None if span.sees is None else span.sees.numpy()
            where = (span.first, span.num_rows, cache.base, span.start)
            segments.append(Segment(*where, sees, positions[span.rows]))
        self._inputs.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._inputs.device))
        table = block_table(
            segments,
            num_rows=size.rows,
            num_blocks=size.blocks,
            num_words=self._words,
            block_rows=self._block_rows,
        )
        self._blocks.copy_(table)

    def move(self) -> None:
        """Move what the last passes left in the wrong place."""
        states = self._arena.states
        states.index_copy_(2, self._targets, states.index_select(2, self._sources))

    def attend(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the rows' keys and values; return what each row attends to. [1, N, H, D].

        ``states`` are queries [1, H, N, D], keys and values [1, K, N, D].
        """
        queries, keys, values = states
        all_keys, all_values = self._arena.states[2 * layer : 2 * layer + 2].unbind(0)
        all_keys.index_copy_(1, self._slots, keys[0])
        all_values.index_copy_(1, self._slots, values[0])
        found = self._kernel(
            queries[0].transpose(0, 1),
            all_keys,
            all_values,
            self._blocks,
            scaling=scaling,
            num_splits=self.size.splits,
            window=window,
            softcap=softcap,
        )
        return found[None]


def in_arena(cache: object) -> ArenaCache:
    """Tell the type checker, and whoever errs, that a cache lies in an arena.

    Raises:
        TypeError: it does not.
    """
    if not isinstance(cache, ArenaCache):
        raise TypeError("static passes run over caches of an arena")
    return cache
