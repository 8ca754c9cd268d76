"""Graphs: one CUDA graph per size of pass, replayed over static buffers.

A pass over a few rows is hundreds of kernels of some microseconds each; launched one by one they
leave a fast device waiting for the host. Captured once and replayed, they cost one launch. Sizes
are rounded up to buckets of rows, sequences and attended tokens.

Shapes: n rows, N of them with padding, V vocabulary.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from ragaccel.engine.arena import ArenaCache
from ragaccel.engine.cost import ROW_BUCKETS
from ragaccel.engine.row_blocks import num_splits, rows_per_block
from ragaccel.engine.static_pass import MAX_MOVES, Size, StaticPass, in_arena

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ragaccel.engine.arena import Arena
    from ragaccel.engine.layout import Rows
    from ragaccel.engine.static_pass import Kernel

_SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32)
_WARM_UPS = 2

logger = logging.getLogger("ragaccel")


class CaptureError(RuntimeError):
    """A pass cannot be captured: the model waits for the device, or does what no graph can."""


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
        self.num_captures = 0
        """How many passes were captured so far, or ran for the first time."""
        self.running: Callable[[], AbstractContextManager[Any]] = nullcontext
        """A context around what the device computes of every pass, for who measures it."""

    def takes(self, rows: Rows) -> bool:
        """Whether a pass fits: few enough rows and sequences, all of them in the arena.

        Exact ones do not: how many splits are reduced follows the attended tokens.
        """
        return (
            not rows.exact
            and rows.num_rows <= ROW_BUCKETS[-1]
            and len(rows.spans) <= _SEQUENCE_BUCKETS[-1]
            and rows.is_probe is None
            and all(isinstance(span.cache, ArenaCache) for span in rows.spans)
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
        _settle_most(rows)
        size = self._size(rows)
        static = self._passes.get(size)
        if static is None or (self._capture and size not in self._graphs):
            self.num_captures += 1
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


def _settle_most(rows: Rows) -> None:
    """Do moves beforehand that a pass has no room for, of the caches that have most of them."""
    caches = sorted((in_arena(span.cache) for span in rows.spans), key=lambda one: one.num_moves)
    while sum(cache.num_moves for cache in caches) > MAX_MOVES:
        caches.pop().settle()


def _at_least(number: int, buckets: tuple[int, ...]) -> int:
    return next(bucket for bucket in buckets if bucket >= number)
