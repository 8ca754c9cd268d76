"""Graphs: one CUDA graph per size of pass, replayed over static buffers.

A pass over a few rows is hundreds of kernels of some microseconds each; launched one by one they
leave a fast device waiting for the host. Captured once and replayed, they cost one launch. Sizes
are rounded up to buckets of rows, sequences and attended tokens; what is too much is padding, its
states go to the arena's trash. Each replay first moves the rows that the last pass left in the
wrong place.

Shapes: N rows with padding, H query heads, K KV heads, D head size, M moves.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from ragaccel.engine.arena import TRASH, Arena, ArenaCache
from ragaccel.engine.cost import ROW_BUCKETS
from ragaccel.engine.row_blocks import (
    RowBlocks,
    Segment,
    block_table,
    num_splits,
    rows_per_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ragaccel.engine.layout import Rows

_SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32)
_MAX_MOVES = 64
_WARM_UPS = 2

logger = logging.getLogger("ragaccel")


class CaptureError(RuntimeError):
    """A pass cannot be captured: the model waits for the device, or does what no graph can."""


class Kernel(Protocol):
    """Attention over an arena; see ``triton_attention.attend``."""

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
    """The bucket of a pass: rows, row blocks and splits of the attended tokens."""

    rows: int
    blocks: int
    splits: int


class StaticPass:
    """The buffers of one size of pass, and its attention. Filled before every run."""

    def __init__(self, size: Size, arena: Arena, kernel: Kernel, group: int) -> None:
        device, rows = arena.layout.device, size.rows
        self.size, self._arena, self._kernel = size, arena, kernel
        self._block_rows = rows_per_block(group)
        pinned = device.type == "cuda"
        self._host = torch.zeros(3 * rows + 2 * _MAX_MOVES, dtype=torch.int64, pin_memory=pinned)
        self._inputs = torch.zeros_like(self._host, device=device)
        self._copied: Any = cast("Any", torch.cuda).Event() if pinned else None
        parts = torch.split(self._inputs, [rows, rows, rows, _MAX_MOVES, _MAX_MOVES])
        self.token_ids, self.positions = parts[0][None], parts[1][None]
        self._slots, self._sources, self._targets = parts[2:]
        self._words = -(-min(rows, 256) // 64)
        self._blocks = RowBlocks.empty(
            rows, size.blocks, self._words, block_rows=self._block_rows, device=device
        )

    def fill(self, rows: Rows) -> None:
        """Put a pass into the buffers; waits for the device only until it has read the last one."""
        if self._copied is not None:
            self._copied.synchronize()  # after a prefill pass, nobody waited for what it chose
        size = self.size
        ids, positions, slots, sources, targets = np.split(
            self._host.numpy(), np.cumsum([size.rows, size.rows, size.rows, _MAX_MOVES])
        )
        for part, padding in ((ids, 0), (positions, 0), (slots, TRASH)):
            part[:] = padding
        sources[:], targets[:] = TRASH, TRASH
        n = rows.num_rows
        ids[:n], positions[:n] = rows.token_ids[0].numpy(), rows.positions[0].numpy()
        moved, segments = 0, []
        for span in rows.spans:
            cache = _in_arena(span.cache)
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


class StepGraphs:
    """Runs passes over static buffers, captured as CUDA graphs where the device has them.

    Args:
        compute: the model over a static pass: token ids and positions in, logits [N, V] out, with
            the pass's ``attend`` in every layer.
        arena: where the caches of all passes lie.
        kernel: attention over it.
        group: query heads that share a KV head.
        capture: replay graphs; else ``compute`` runs anew for every pass, the same operations.
    """

    def __init__(
        self,
        compute: Callable[[StaticPass], Tensor],
        arena: Arena,
        kernel: Kernel,
        *,
        group: int,
        capture: bool,
    ) -> None:
        self._compute, self._arena, self._kernel, self._group = compute, arena, kernel, group
        self._capture = capture
        self._version = arena.version
        self._passes: dict[Size, StaticPass] = {}
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self.running: Callable[[], AbstractContextManager[Any]] = nullcontext
        """A context around what the device computes of every pass, for who measures it."""

    def takes(self, rows: Rows) -> bool:
        """Whether a pass fits: few enough rows, sequences and moves, all of them in the arena.

        Exact ones do not: how many splits are reduced follows the attended tokens.
        """
        return (
            not rows.exact
            and rows.num_rows <= ROW_BUCKETS[-1]
            and len(rows.spans) <= _SEQUENCE_BUCKETS[-1]
            and rows.is_probe is None
            and all(isinstance(span.cache, ArenaCache) for span in rows.spans)
            and sum(_in_arena(span.cache).num_moves for span in rows.spans) <= _MAX_MOVES
        )

    def clear(self) -> None:
        """Capture anew: what the graphs read has moved."""
        self._graphs.clear()
        self._passes.clear()
        self._pool = None  # a pool ends with the last graph in it

    def run(self, rows: Rows) -> Tensor:
        """Run a pass; return its logits, [n, V], valid until the next one of this size.

        Raises:
            CaptureError: it cannot be captured; nothing was computed, no move is lost.
        """
        if not self._capture:
            return self._run(rows)
        with torch.cuda.device(self._arena.layout.device):  # else another device's stream
            return self._run(rows)

    def _run(self, rows: Rows) -> Tensor:
        if self._version != self._arena.version:  # the graphs read where the states were
            self.clear()
            self._version = self._arena.version
        size = self._size(rows)
        static = self._passes.get(size)
        if static is None:
            static = StaticPass(size, self._arena, self._kernel, self._group)
            self._passes[size] = static
        if not self._capture:
            static.fill(rows)
            with self.running():
                return self._step(static)[: rows.num_rows]
        if size not in self._graphs:
            for span in rows.spans:
                span.cache.settle()  # a capture runs the pass several times, moves only once
            static.fill(rows)
            self._graphs[size] = self._captured_or_refused(static)
        else:
            static.fill(rows)
        graph, logits = self._graphs[size]
        with self.running():
            graph.replay()
        return logits[: rows.num_rows]

    def _step(self, static: StaticPass) -> Tensor:
        static.move()
        return self._compute(static)

    def _captured_or_refused(self, static: StaticPass) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        try:
            return self._captured(static)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CaptureError(str(error)) from error

    def _captured(self, static: StaticPass) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a pass over its static buffers, after runs that make what is made lazily."""
        stream: Any = cast("Any", torch.cuda).Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: an embedder, a request that is closed.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(static)
        self._pool = self._pool or graph.pool()
        return graph, logits

    def _size(self, rows: Rows) -> Size:
        count = _at_least(rows.num_rows, ROW_BUCKETS)
        sequences = _at_least(len(rows.spans), _SEQUENCE_BUCKETS)
        # Every sequence may leave its last block partly empty.
        blocks = -(-count // rows_per_block(self._group)) + sequences - 1
        splits = num_splits(rows.attended)
        return Size(count, blocks, 1 << (splits - 1).bit_length())


def _in_arena(cache: object) -> ArenaCache:
    if not isinstance(cache, ArenaCache):
        raise TypeError("static passes run over caches of an arena")
    return cache


def _at_least(number: int, buckets: tuple[int, ...]) -> int:
    return next(bucket for bucket in buckets if bucket >= number)
