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
from ragaccel.engine.memory_limits import is_out_of_memory, memory_share
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
_KEPT_SHARE = 0.05  # of the device's memory

logger = logging.getLogger("ragaccel")


class CaptureError(RuntimeError):
    """A pass cannot be captured: the model waits for the device, or does what no graph can."""


class StepGraphs:
    """Runs passes over static buffers, captured as CUDA graphs where the device has them.

    The passes that were not used for longest go first when there are too many.

    Args:
        compute: the model over a static pass: token ids and positions in, logits [N, V] out, with
            the pass's ``attend`` in every layer.
        arena: where the caches of all passes lie.
        make_kernel: makes attention over it, for each size of pass.
        group: query heads that share a KV head.
        capture: replay graphs; else ``compute`` runs anew for every pass, the same operations.
        max_passes: most sizes of pass that are kept; what a graph takes of the driver's memory is
            not counted in bytes.
        max_bytes: most bytes of buffers and logits kept; ``None`` is a twentieth of the device's
            memory. The last pass is kept whatever it takes.
    """

    def __init__(
        self,
        compute: Callable[[StaticPass], Tensor],
        arena: Arena,
        make_kernel: Callable[[], Kernel],
        *,
        group: int,
        capture: bool,
        max_passes: int = 128,
        max_bytes: int | None = None,
    ) -> None:
        self._compute, self._arena, self._group = compute, arena, group
        self._make_kernel, self._capture = make_kernel, capture
        self._version = arena.version
        if max_bytes is None:
            max_bytes = memory_share(arena.layout.device, _KEPT_SHARE)
        self._max_passes, self._max_bytes = max_passes, max_bytes
        self._passes: dict[Size, StaticPass] = {}  # the last used last
        self._pool: Any = None
        self._aside: Any = None  # a stream for runs that are not captured
        self.num_captures = 0
        """How many passes were captured so far, or ran for the first time."""
        self.running: Callable[[], AbstractContextManager[Any]] = nullcontext
        """A context around what the device computes of every pass, for who measures it."""

    @property
    def num_bytes(self) -> int:
        """Memory of the device that is kept for passes to come, in bytes."""
        return sum(static.num_bytes for static in self._passes.values())

    def takes(self, rows: Rows) -> bool:
        """Whether a pass fits: few enough rows and sequences, all of them in the arena.

        Exact ones do not: how many splits are reduced follows the attended tokens.
        """
        return (
            not rows.exact
            and rows.num_rows <= ROW_BUCKETS[-1]
            and len(rows.spans) <= _SEQUENCE_BUCKETS[-1]
            and all(isinstance(span.cache, ArenaCache) for span in rows.spans)
        )

    def clear(self) -> None:
        """Free what is kept; passes are captured anew, as when what they read has moved."""
        self._passes.clear()

    def run(self, rows: Rows) -> Tensor:
        """Run a pass; return its logits, [n, V], valid until the next one of this size.

        Whatever is raised, no move is lost.

        Raises:
            CaptureError: it cannot be captured; nothing was computed.
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
        static = self._passes.pop(size, None)
        is_new = static is None
        if static is None:
            self.num_captures += 1
            static = StaticPass(size, self._arena, self._make_kernel(), self._group)
            if self._capture:
                for span in rows.spans:
                    span.cache.settle()  # a capture runs the pass several times, moves only once
                static.fill(rows)
                static.recorded = self._captured_or_refused(static)
        logits = self._launch(static, rows)
        self._passes[size] = static
        if is_new:
            static.logits_bytes = logits.nbytes
            self._drop_oldest()
        return logits[: rows.num_rows]

    def _launch(self, static: StaticPass, rows: Rows) -> Tensor:
        """Put a pass into its buffers and run it; if that fails, its moves are to be done yet."""
        caches = [in_arena(span.cache) for span in rows.spans]
        waiting = [(cache, cache.moves) for cache in caches]
        try:
            static.fill(rows)
            with self.running():
                if static.recorded is not None:
                    graph, logits = static.recorded
                    graph.replay()
                    return logits
                static.move()
                waiting.clear()
                return self._compute(static)
        except Exception:
            for cache, moves in waiting:
                cache.put_back(moves)
            raise

    def _drop_oldest(self) -> None:
        """Drop passes beyond the bounds. The device has run them: their choices were read."""
        while len(self._passes) > 1 and (
            len(self._passes) > self._max_passes or self.num_bytes > self._max_bytes
        ):
            del self._passes[next(iter(self._passes))]

    def _captured_or_refused(self, static: StaticPass) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        try:
            return self._captured(static)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CaptureError(str(error)) from error

    def _captured(self, static: StaticPass) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a pass over its static buffers, after runs that make what is made lazily."""
        # One for all captures: what was allocated on a stream, and freed, serves that one alone.
        stream = self._aside = self._aside or cast("Any", torch.cuda).Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step(static)
        torch.cuda.current_stream().wait_stream(stream)
        if not self._passes:
            self._pool = None  # a pool ends with the last graph in it
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: an embedder, a request that is closed.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(static)
        self._pool = self._pool or graph.pool()
        return graph, logits

    def _step(self, static: StaticPass) -> Tensor:
        static.move()
        return self._compute(static)

    def _size(self, rows: Rows) -> Size:
        count = _at_least(rows.num_rows, ROW_BUCKETS)
        sequences = _at_least(len(rows.spans), _SEQUENCE_BUCKETS)
        # Every sequence may leave its last block partly empty.
        blocks = -(-count // rows_per_block(self._group)) + sequences - 1
        splits = num_splits(rows.attended)
        has_masks = rows.is_probe is not None
        return Size(count, blocks, 1 << (splits - 1).bit_length(), has_masks)


def _settle_most(rows: Rows) -> None:
    """Do moves beforehand that a pass has no room for, of the caches that have most of them."""
    caches = sorted((in_arena(span.cache) for span in rows.spans), key=lambda one: one.num_moves)
    while sum(cache.num_moves for cache in caches) > MAX_MOVES:
        caches.pop().settle()


def _at_least(number: int, buckets: tuple[int, ...]) -> int:
    return next(bucket for bucket in buckets if bucket >= number)
