"""CUDA graphs: static buffers, captured passes and their replay.

A pass over a few rows launches hundreds of kernels of some microseconds each: one by one, they
leave a fast device waiting for the host. Captured once and replayed, they cost one launch. Sizes
are rounded up to buckets of rows, sequences and attended tokens; the states of padding rows go to
the null slot.

A CUDA graph reads and writes fixed addresses, so the caches of requests have no buffers of their
own: each has a range of slots of the KV pool, and the base slots are inputs of a pass. Every run
first moves the rows that the last pass left in the wrong slots, for all layers at once.

Shapes: n rows, N of them with padding, H query heads, L layers, K KV heads, S slots, D head size,
V vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from ragaccel.engine.capture import CaptureError, GraphRecorder
from ragaccel.engine.interrupts import in_inference_mode, run_uninterrupted
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.latency import ROW_BUCKETS
from ragaccel.engine.memory import is_out_of_memory, memory_share
from ragaccel.engine.row_blocks import (
    BlockSegment,
    RowBlocks,
    fill_tables,
    num_splits,
    rows_per_block,
    table_size,
)
from ragaccel.engine.sampling import greedy_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from torch import Tensor

    from ragaccel.engine.model_input import Rows

    OnFull: TypeAlias = "Callable[[KVPool, int], None]"

FIRST_SLOTS = 16_384  # fewer if they exceed ``_FIRST_SHARE`` of the host's memory
_FIRST_SHARE = 0.1
_MAX_SLOTS = 65_536  # on a GPU, fewer if they exceed half of what is free once weights are loaded
_FREE_SHARE = 0.5
_MIN_SLOTS = 1024
NULL_SLOT = 0
"""The slot that padding rows are written to; it belongs to no sequence."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape, dtype and device of one token's keys and values."""

    num_layers: int
    num_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, cache: KVCache) -> StateLayout | None:
        """Return the layout of a cache's states, or None if layers differ or have no states."""
        kinds = {
            (*buffer.shape[1::2], buffer.dtype, buffer.device)
            for buffer in cache.buffers
            if buffer is not None
        }
        if len(kinds) != 1 or any(buffer is None for buffer in cache.buffers):
            return None
        return cls(len(cache.buffers) // 2, *kinds.pop())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's states in all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_size * self.dtype.itemsize


class KVPool:
    """Keys and values of all sequences in one tensor, [2L, K, S, D], alternating by layer.

    The pool grows by doubling from ``num_slots``; ``version`` changes when the tensor is replaced.
    On a GPU growth captures all graphs again and needs three times the memory for a moment, so the
    pool is large from the start.
    """

    def __init__(self, layout: StateLayout, num_slots: int | None = None) -> None:
        if num_slots is None:
            num_slots = max(_MIN_SLOTS, first_slots(layout))
        self.layout, self.version = layout, 0
        self.states = self._allocate_states(num_slots)
        self._free = [(1, num_slots)]  # free ranges of slots: first, end (exclusive)
        self._caches: weakref.WeakSet[PooledKVCache] = weakref.WeakSet()
        self._returned: deque[tuple[int, int]] = deque()  # freed ranges, to be merged
        self._lock = RLock()

    @property
    def num_slots(self) -> int:
        """Number of slots of the pool, the null slot included."""
        return self.states.shape[2]

    @property
    def num_free(self) -> int:
        """How many slots are free."""
        return sum(end - first for first, end in self._free_ranges())

    def new_cache(self, capacity: int | None = None, limit: int | None = None) -> PooledKVCache:
        """Return an empty cache in this KV pool; arguments are those of ``KVCache``."""
        cache = PooledKVCache(self, capacity, limit)
        self._caches.add(cache)
        return cache

    def allocate(self, num_slots: int) -> int:
        """Reserve consecutive slots; return the first.

        Raises:
            torch.OutOfMemoryError: the KV pool would have to grow, and the device is full.
        """
        with self._lock:
            while (base := self._find_free(num_slots)) is None:
                self._grow(num_slots)
            return base

    def free(self, first: int, end: int) -> None:
        """Free a range of slots, without a lock: garbage collection may call this at any time."""
        self._returned.append((first, end))

    def fits(self, num_slots: int, without: Sequence[PooledKVCache] = ()) -> bool:
        """Return whether so many consecutive slots are free, or would be without these caches."""
        with self._lock:
            free = _merge_ranges(
                [*self._free_ranges(), *(run for cache in without for run in cache.slot_ranges)]
            )
        return any(end - first >= num_slots for first, end in free)

    def can_grow(self, num_slots: int, idle: Sequence[PooledKVCache], kept_bytes: int) -> bool:
        """Return whether the pool may grow for ``num_slots`` more slots.

        It may if at most ``kept_bytes`` are left for idle caches afterwards.
        """
        held = sum(end - first for cache in idle for first, end in cache.slot_ranges)
        used = self.num_slots - self.num_free - held + num_slots
        return (self._size_after_growth(num_slots) - used) * self.layout.slot_bytes <= kept_bytes

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states of some slots to others, in all layers."""
        index = torch.tensor([sources, targets]).to(self.layout.device, non_blocking=True)
        with self._lock:  # the pool may grow for another request meanwhile
            self.states.index_copy_(2, index[1], self.states.index_select(2, index[0]))

    def _find_free(self, num_slots: int) -> int | None:
        free = self._free_ranges()
        for i, (first, end) in enumerate(free):
            if end - first >= num_slots:
                free[i : i + 1] = [(first + num_slots, end)] * (end - first > num_slots)
                return first
        return None

    def _free_ranges(self) -> list[tuple[int, int]]:
        """Merge freed ranges into the free ones; return all free ranges."""
        with self._lock:
            while self._returned:
                self._free = _merge_ranges([*self._free, self._returned.popleft()])
            return self._free

    def _size_after_growth(self, num_slots: int) -> int:
        """Return the number of slots after growing for ``num_slots`` more."""
        return max(2 * self.num_slots, self.num_slots + num_slots)

    def _grow(self, num_slots: int) -> None:
        old, count = self.states, self._size_after_growth(num_slots)
        states = self._allocate_states(count)
        states[:, :, : old.shape[2]] = old

        @in_inference_mode
        def replace() -> None:
            self.states = states
            self.version += 1
            for cache in list(self._caches):
                cache.bind()
            self.free(old.shape[2], count)

        run_uninterrupted(replace)  # or some caches would read the old states

    def _allocate_states(self, num_slots: int) -> Tensor:
        layout = self.layout
        shape = (2 * layout.num_layers, layout.num_heads, num_slots, layout.head_size)
        states = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        states[:, :, NULL_SLOT] = 0.0
        return states


def first_slots(layout: StateLayout) -> int:
    """Return how many slots a device's memory has room for at the start."""
    if layout.device.type == "cuda":
        torch.cuda.empty_cache()  # or what torch keeps of loading the weights would count as used
        free, _ = torch.cuda.mem_get_info(layout.device)
        return min(_MAX_SLOTS, int(_FREE_SHARE * free) // layout.slot_bytes)
    return min(FIRST_SLOTS, memory_share(layout.device, _FIRST_SHARE) // layout.slot_bytes)


def _merge_ranges(slot_ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges of slots; return them in order."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(slot_ranges):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return merged


class PooledKVCache(KVCache):
    """A KV cache in a range of slots of a KV pool.

    Recorded moves wait for a static pass, which does them, or for ``flush_moves``.
    """

    def __init__(self, kv_pool: KVPool, capacity: int | None, limit: int | None) -> None:
        super().__init__(capacity, limit)
        self.kv_pool = kv_pool
        self.on_full: weakref.WeakMethod[OnFull] | None = None
        """Called with the number of slots to allocate; may evict other caches first."""
        self.base = NULL_SLOT  # slot of the first token, once slots are allocated
        self._finalizer: weakref.finalize[..., PooledKVCache] | None = None

    def begin(self, num_rows: int) -> int:
        """Make room for a pass of ``num_rows``, without doing recorded moves.

        Returns:
            The slot of the first row.
        """
        if self._finalizer is None:
            self.reserve(0)
        return self._make_room(num_rows)

    @in_inference_mode
    def reserve(self, num_slots: int) -> None:
        """Allocate at least ``num_slots`` slots, or as many as the limit allows."""
        if self._finalizer is None or num_slots > self.capacity:
            wanted = max(num_slots, self.capacity)
            self._resize(wanted if self.limit is None else min(wanted, self.limit))

    @property
    def slot_ranges(self) -> tuple[tuple[int, int], ...]:
        """The cache's range of slots as (first, end); empty before the first allocation."""
        return () if self._finalizer is None else ((self.base, self.base + self.capacity),)

    @property
    def num_moves(self) -> int:
        """Number of rows in the recorded moves."""
        return sum(len(slots) for _, slots in self._moves)

    def moves(self) -> tuple[list[int], list[int]]:
        """Return the recorded moves, as source and target slots of the KV pool."""
        with self._lock:
            moves = list(self._moves)
        sources = [self.base + slot for _, slots in moves for slot in slots]
        targets = [self.base + first + i for first, slots in moves for i in range(len(slots))]
        return sources, targets

    def clear_moves(self) -> None:
        """Forget the recorded moves, which a static pass has done."""
        with self._lock:
            self._moves.clear()

    def bind(self) -> None:
        """Make views of the pool's states again, after the pool or the slots were replaced."""
        if self._finalizer is None:
            return
        own = self.kv_pool.states[:, :, self.base : self.base + self.capacity]
        self._keys = [states[None] for states in own[0::2]]
        self._values = [states[None] for states in own[1::2]]

    @in_inference_mode
    def flush_moves(self) -> None:
        """Do the recorded moves now, before a pass that does not do them itself."""
        with self._lock:
            sources, targets = self.moves()
            if sources:
                self.kv_pool.move(sources, targets)
            self._moves.clear()  # last: memory may run out while moving

    @in_inference_mode
    def _resize(self, capacity: int) -> None:
        # Rows that wait to be moved lie behind the committed tokens.
        used = max((slot + 1 for _, slots in self._moves for slot in slots), default=0)
        used = max(used, self.length)
        if used == 0:
            self._release()
        on_full = None if self.on_full is None else self.on_full()
        if on_full is not None:
            on_full(self.kv_pool, capacity)
        base = self.kv_pool.allocate(capacity)
        # Before the copy, which may fail: the slots are then free once this cache is.
        own = weakref.finalize(self, self.kv_pool.free, base, base + capacity)
        own.atexit = False
        states, old = self.kv_pool.states, self._finalizer
        if old is not None:
            states[:, :, base : base + used] = states[:, :, self.base : self.base + used]
        self.base, self.capacity, self._finalizer = base, capacity, own
        self.bind()
        if old is not None:
            old()

    def _release(self) -> None:
        """Free the cache's slots; ``reserve`` allocates others."""
        finalizer, self._finalizer, self.base = self._finalizer, None, NULL_SLOT
        self._keys, self._values = [], []
        if finalizer is not None:
            finalizer()


MAX_MOVES = 64
"""Most rows that one pass moves to their final slots."""


class AttentionKernel(Protocol):
    """Attention over a KV pool; see ``triton_attention.TritonKernel``."""

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The memory that the last pass wrote to; a captured pass writes to it again."""
        ...

    def move(self, states: Tensor, sources: Tensor, targets: Tensor, count: Tensor) -> None:
        """Copy the states of slots to others, in all planes and heads.

        Args:
            states: all states, [2L, K, S, D].
            sources: slots to copy, ascending for each sequence, [MAX_MOVES].
            targets: where to, none after its source, [MAX_MOVES].
            count: how many of them there are, [1]; nothing is read or written for others.
        """
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
        """Attend with queries [N, H, D] to one layer's states [K, S, D]; return [N, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The weight [E] and epsilon of an RMS norm."""

    weight: Tensor
    epsilon: float


class Weights(NamedTuple):
    """A linear layer: a matrix [O, E], and a bias [O] or None."""

    matrix: Tensor
    bias: Tensor | None


class LayerKernels(Protocol):
    """A layer's products of few rows, and what lies between them; see ``TritonLayers``."""

    def supports(self, states: Tensor, weights: Sequence[Weights]) -> bool:
        """Return whether ``multiply`` computes these products of rows [N, E]."""
        ...

    def multiply(self, states: Tensor, weights: Sequence[Weights]) -> list[Tensor]:
        """Multiply rows [N, E] by up to three matrices; return the products, [N, O] each."""
        ...

    def multiply_in_parts(self, states: Tensor, weights: Weights) -> Tensor:
        """Return sums over parts of E, for ``add_and_normalize``, [P, N, O]."""
        ...

    def multiply_gated(self, states: Tensor, gate: Weights, values: Weights) -> Tensor:
        """Return the SiLU of one product times another, [N, O]."""
        ...

    def normalize(self, states: Tensor, norm: LayerNorm) -> Tensor:
        """Return the RMS norm of rows [N, E]."""
        ...

    def add_and_normalize(
        self, states: Tensor, residual: Tensor, norm: LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """Add rows [N, E], or in parts [P, N, E]; return the norm of the sum, and the sum."""
        ...

    def rotate_and_store(
        self,
        states: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        slots: Tensor,
        norms: tuple[LayerNorm, LayerNorm] | None = None,
    ) -> Tensor:
        """Rotate queries and keys, and write keys and values; return the queries, [N, H, D]."""
        ...

    def gate(self, gates: Tensor, values: Tensor) -> Tensor:
        """Return values times the SiLU of gates."""
        ...


class PassSize(NamedTuple):
    """The size of a pass, rounded up: rows, row blocks and splits of the attended tokens.

    With ``has_masks``, rows may be mask tokens; other passes leave out the adapter's operations.
    """

    rows: int
    blocks: int
    splits: int
    has_masks: bool = False


class PassOutput(NamedTuple):
    """What a static pass computes for its N rows."""

    logits: Tensor  # [N, V]
    greedy_ids: Tensor  # [N, 1] int64


class StaticPass:
    """The input buffers and the attention of passes of one size; fill them before every run.

    ``recorded`` is the captured graph with what it writes, or None; ``logits_bytes`` is the size of
    the logits.
    """

    def __init__(
        self, size: PassSize, kv_pool: KVPool, kernel: AttentionKernel, group: int
    ) -> None:
        device, rows = kv_pool.layout.device, size.rows
        self.size, self._kv_pool, self._kernel = size, kv_pool, kernel
        self._block_rows = rows_per_block(group)
        self.recorded: tuple[torch.cuda.CUDAGraph, PassOutput] | None = None
        self.logits_bytes = 0
        pinned = device.type == "cuda"
        self.buffers: tuple[Tensor, ...] = ()
        """Memory of the kernel that a captured graph writes to."""
        words = -(-min(rows, 256) // 64)
        tables = table_size(rows, size.blocks, words)
        # Parts begin at multiples of 16 bytes: Triton compiles another kernel for other pointers.
        even = rows + rows % 2
        parts = [tables, 2 * even, even, MAX_MOVES, MAX_MOVES, 1]
        self._host = torch.zeros(sum(parts), dtype=torch.int64, pin_memory=pinned)
        self._inputs = torch.zeros_like(self._host, device=device)
        self._copied: Any = cast("Any", torch.cuda).Event() if pinned else None
        block_sizes = (rows, size.blocks, words)
        own, *given = torch.split(self._inputs, parts)
        self._blocks = RowBlocks.over(own, *block_sizes, block_rows=self._block_rows)
        self.token_ids, self.positions = given[0].view(2, even)[:, :rows].chunk(2)
        self._slots, self._sources, self._targets, self._num_moves = given[1][:rows], *given[2:]
        own, *given = torch.split(self._host, parts)
        given[0] = given[0].view(2, even)
        self._host_array, self._arrays = self._host.numpy(), [part.numpy() for part in given]
        self._tables = RowBlocks.over(own, *block_sizes).arrays()

    @property
    def num_bytes(self) -> int:
        """Device memory of the inputs, tables and logits, in bytes."""
        return self._inputs.nbytes + self.logits_bytes

    def keep_buffers(self, output: PassOutput) -> None:
        """Keep the kernel's memory that the pass, which has run, writes to."""
        self.buffers, self.logits_bytes = self._kernel.buffers, output.logits.nbytes

    def fill(self, rows: Rows) -> None:
        """Write a pass into the buffers, once the device has read the previous pass from them.

        All inputs are written to one host buffer, and moved to the device by one copy.
        """
        if self._copied is not None:
            self._copied.synchronize()  # a prefill pass ends without a synchronization
        self._host_array.fill(0)  # token 0 at position 0 in the null slot; no blocks and no moves
        inputs, slots, sources, targets, num_moves = self._arrays
        inputs[:, : rows.num_rows] = rows.inputs.numpy()
        moved, segments = 0, []
        for span in rows.spans:
            cache = cast("PooledKVCache", span.cache)
            own, first = span.rows, cache.base + span.start
            slots[own] = np.arange(first, first + span.num_rows)
            if cache.num_moves:
                own_sources, own_targets = cache.moves()
                stop = moved + len(own_sources)
                sources[moved:stop], targets[moved:stop] = own_sources, own_targets
                moved = stop
            where = (span.first, span.num_rows, cache.base, span.start)
            segments.append(BlockSegment(*where, span.paths, inputs[1, own]))
        num_moves[0] = moved
        fill_tables(self._tables, segments, self._block_rows)
        self._inputs.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._inputs.device))

    def move(self) -> None:
        """Move rows of earlier passes to their final slots."""
        self._kernel.move(self._kv_pool.states, self._sources, self._targets, self._num_moves)

    def attend(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the rows' keys and values; return the attention output. [1, N, H, D].

        ``states`` are queries [1, H, N, D], keys and values [1, K, N, D].
        """
        queries, keys, values = states
        all_keys, all_values = self._states_of(layer)
        all_keys.index_copy_(1, self._slots, keys[0])
        all_values.index_copy_(1, self._slots, values[0])
        return self._attend(layer, queries[0].transpose(0, 1), scaling, window, softcap)[None]

    def attend_rotated(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        kernels: LayerKernels,
        *,
        norms: tuple[LayerNorm, LayerNorm] | None,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, and attend. [N, H * D].

        ``states`` are queries [N, H * D], keys and values [N, K * D], as the layer's products give
        them; the other arguments are those of ``LayerKernels.rotate_and_store`` and ``attend``.
        """
        pool = self._states_of(layer)
        queries = kernels.rotate_and_store(states, angles, pool, self._slots, norms)
        return self._attend(layer, queries, scaling, window, None).flatten(1)

    def _states_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values in the KV pool, [K, S, D]."""
        keys, values = self._kv_pool.states[2 * layer : 2 * layer + 2].unbind(0)
        return keys, values

    def _attend(
        self,
        layer: int,
        queries: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend with queries [N, H, D] over the stored states; return [N, H, D]."""
        return self._kernel(
            queries,
            *self._states_of(layer),
            self._blocks,
            scaling=scaling,
            num_splits=self.size.splits,
            window=window,
            softcap=softcap,
        )


_SEQUENCE_BUCKETS = (1, 16, 32)
_MIN_TOKENS, _TOKEN_STEP = 1024, 4  # the first bucket of attended tokens, and the ratio of others
_KEPT_SHARE = 0.05  # of the device's memory

logger = logging.getLogger("ragaccel")


class StepGraphs:
    """Passes over static buffers, captured as CUDA graphs if the device supports them.

    The least recently used sizes are dropped when a limit is exceeded.

    Args:
        compute: runs the model over a static pass, with the pass's ``attend`` in every layer;
            returns logits [N, V].
        kv_pool: the KV pool with the caches of all passes.
        make_kernel: makes the attention kernel.
        group: query heads that share a KV head.
        capture: capture and replay graphs; else call ``compute`` for every pass.
        max_rows: most rows of a pass.
        max_passes: most sizes kept. The driver's memory for a graph is not part of ``max_bytes``.
        max_bytes: most bytes of buffers and logits kept; ``None`` means 5 % of the device's memory.
            The last pass is always kept.
    """

    def __init__(
        self,
        compute: Callable[[StaticPass], Tensor],
        kv_pool: KVPool,
        make_kernel: Callable[[], AttentionKernel],
        *,
        group: int,
        capture: bool,
        max_rows: int = ROW_BUCKETS[-1],
        max_passes: int = 128,
        max_bytes: int | None = None,
    ) -> None:
        self._compute, self._kv_pool, self._group = compute, kv_pool, group
        self._make_kernel, self._capture = make_kernel, capture
        self._kernel = make_kernel()
        self._max_rows = min(max_rows, ROW_BUCKETS[-1])
        self._version = kv_pool.version
        if max_bytes is None:
            max_bytes = memory_share(kv_pool.layout.device, _KEPT_SHARE)
        self._max_passes, self._max_bytes = max_passes, max_bytes
        self._passes: dict[PassSize, StaticPass] = {}  # in order of last use
        self._last: PassOutput | None = None  # of the last pass, without padding
        self._recorder = GraphRecorder(kv_pool.layout.device)
        self.num_captures = 0
        """How many sizes of pass were captured or run for the first time."""
        self.running: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes a context that surrounds the device's work of every pass, for measurements."""

    @property
    def num_bytes(self) -> int:
        """Device memory kept for later passes, in bytes."""
        passes = self._passes.values()
        shared = {id(one): one.nbytes for static in passes for one in static.buffers}
        return sum(static.num_bytes for static in passes) + sum(shared.values())

    def supports(self, rows: Rows) -> bool:
        """Return whether a pass has few enough rows and sequences, all of them in the KV pool.

        Deterministic passes are not supported: their number of splits depends on the attended
        tokens.
        """
        return (
            not rows.deterministic
            and rows.num_rows <= self._max_rows
            and len(rows.spans) <= _SEQUENCE_BUCKETS[-1]
            and all(isinstance(span.cache, PooledKVCache) for span in rows.spans)
        )

    def clear(self) -> None:
        """Free all captured passes and their scratch; later passes are captured again."""
        self._passes.clear()
        self._last = None
        self._kernel = self._make_kernel()

    def greedy_ids(self, logits: Tensor) -> Tensor | None:
        """Return the greedy tokens [n, 1] of the logits that the last pass returned, else None.

        The tensor must be the very one, and its numbers those that were computed.
        """
        return self._last.greedy_ids if self._last and self._last.logits is logits else None

    def expect_compiled_passes(self) -> None:
        """Capture passes from now on that torch compiles, which cannot be watched as others are."""
        self._recorder.guards_warm_up = False

    def run(self, rows: Rows) -> Tensor:
        """Run a pass; return its logits, [n, V], valid until the next pass of this size.

        If an error is raised, the recorded moves of KV slots are kept.

        Raises:
            CaptureError: the pass cannot be captured; nothing was computed.
        """
        if not self._capture:
            return self._run(rows)
        with torch.cuda.device(self._kv_pool.layout.device):  # streams belong to a device
            return self._run(rows)

    def _run(self, rows: Rows) -> Tensor:
        if self._version != self._kv_pool.version:  # the graphs read the old addresses
            self.clear()
            self._version = self._kv_pool.version
        _flush_excess_moves(rows)
        size = self._size(rows)
        static = self._passes.pop(size, None)
        is_new = static is None
        if static is None:
            static = self._new_pass(size)
        output = self._launch(static, rows)
        self._passes[size] = static
        if is_new:
            static.keep_buffers(output)
            self._drop_oldest()
        n = rows.num_rows
        self._last = PassOutput(output.logits[:n], output.greedy_ids[:n])
        return self._last.logits

    def capture_all(
        self, attended: int, *, num_rows: int, num_sequences: int, has_masks: bool = False
    ) -> None:
        """Capture every size of pass up to these numbers, as far as the limits allow.

        Args:
            attended: most cached tokens and rows of a sequence.
            num_rows: most rows of a sequence.
            num_sequences: most sequences of a pass.
            has_masks: capture passes with mask tokens, too.

        Raises:
            CaptureError: a pass cannot be captured.
        """
        if self._version != self._kv_pool.version:
            self.clear()
            self._version = self._kv_pool.version
        sizes = self.sizes(attended, num_rows, num_sequences, has_masks=has_masks)
        # Largest first: the memory of smaller ones is found free in the graphs' pool.
        for size in sorted(sizes, key=lambda one: (-one.rows, -one.splits, -one.blocks)):
            if size not in self._passes and len(self._passes) < self._max_passes:
                self._capture_unused(size)
                if self.num_bytes > self._max_bytes:
                    return

    def sizes(
        self, attended: int, num_rows: int, num_sequences: int, *, has_masks: bool = False
    ) -> set[PassSize]:
        """Return all sizes of pass up to these numbers."""
        tokens = [_MIN_TOKENS]
        while tokens[-1] < attended:
            tokens.append(tokens[-1] * _TOKEN_STEP)
        most = _bucket(num_sequences, _SEQUENCE_BUCKETS)
        widest = {
            number: _bucket(min(num_rows * min(number, num_sequences), self._max_rows), ROW_BUCKETS)
            for number in _SEQUENCE_BUCKETS
            if number <= most
        }
        return {
            self._size_of(rows, number, length, has_masks=masks)
            for number, limit in widest.items()
            for rows in ROW_BUCKETS
            for length in tokens
            for masks in (False, True)[: 1 + has_masks]
            if rows <= limit
        }

    def _capture_unused(self, size: PassSize) -> None:
        """Capture a pass in which all rows are padding."""
        with torch.cuda.device(self._kv_pool.layout.device) if self._capture else nullcontext():
            static = self._new_pass(size)
            if static.recorded is None:
                output = self._move_and_compute(static)
            else:
                _, output = static.recorded
        static.keep_buffers(output)
        self._passes[size] = static

    def _new_pass(self, size: PassSize) -> StaticPass:
        """Make a pass of a size, and capture it. All of its rows are padding until it is filled."""
        self.num_captures += 1
        static = StaticPass(size, self._kv_pool, self._kernel, self._group)
        if self._capture:
            static.recorded = self._capture_or_raise(static)
        return static

    def _launch(self, static: StaticPass, rows: Rows) -> PassOutput:
        """Fill a pass's buffers and run it; forget the recorded moves once they are done."""
        static.fill(rows)
        with self.running():
            if static.recorded is not None:
                graph, output = static.recorded
                graph.replay()
                _clear_moves(rows)
                return output
            static.move()
            _clear_moves(rows)
            return self._with_greedy_ids(static)

    def _drop_oldest(self) -> None:
        """Drop the least recently used passes beyond the limits; the device has finished them."""
        while len(self._passes) > 1 and (
            len(self._passes) > self._max_passes or self.num_bytes > self._max_bytes
        ):
            del self._passes[next(iter(self._passes))]

    def _capture_or_raise(self, static: StaticPass) -> tuple[torch.cuda.CUDAGraph, PassOutput]:
        try:
            return self._capture_graph(static)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if self._kv_pool.layout.device.type == "cuda":
                # Raises what no later pass would survive, such as an illegal access.
                torch.cuda.synchronize(self._kv_pool.layout.device)
            raise CaptureError(str(error)) from error

    def _capture_graph(self, static: StaticPass) -> tuple[torch.cuda.CUDAGraph, PassOutput]:
        """Capture a pass over its static buffers, after warm-up runs."""
        if not self._passes:
            self._recorder.forget_pool()
        return self._recorder.record(partial(self._move_and_compute, static))

    def _move_and_compute(self, static: StaticPass) -> PassOutput:
        static.move()
        return self._with_greedy_ids(static)

    def _with_greedy_ids(self, static: StaticPass) -> PassOutput:
        logits = self._compute(static)
        return PassOutput(logits, greedy_ids(logits))

    def _size(self, rows: Rows) -> PassSize:
        has_masks = rows.is_mask is not None
        return self._size_of(rows.num_rows, len(rows.spans), rows.attended, has_masks=has_masks)

    def _size_of(
        self, num_rows: int, num_sequences: int, attended: int, *, has_masks: bool
    ) -> PassSize:
        bucket = token_bucket(attended)
        return _pass_size(num_rows, num_sequences, bucket, has_masks, self._group)


@lru_cache(maxsize=4096)
def _pass_size(
    num_rows: int, num_sequences: int, attended: int, has_masks: bool, group: int
) -> PassSize:
    """Return the size of a pass; few sizes serve all passes, so that each is captured soon.

    Programs of unused blocks and splits end at once.
    """
    count = _bucket(num_rows, ROW_BUCKETS)
    sequences = min(count, _bucket(num_sequences, _SEQUENCE_BUCKETS))
    # Every sequence may have a partly empty last block.
    blocks = -(-count // rows_per_block(group)) + sequences - 1
    return PassSize(count, blocks, num_splits(attended), has_masks)


def token_bucket(attended: int) -> int:
    """Return the attended tokens that a static pass is made for, at least ``attended``."""
    bucket = _MIN_TOKENS
    while bucket < attended:
        bucket *= _TOKEN_STEP
    return bucket


def _flush_excess_moves(rows: Rows) -> None:
    """Do the moves that exceed the limit of a pass, from the caches with the most moves on."""
    caches = [cast("PooledKVCache", span.cache) for span in rows.spans]
    if len(caches) == 1 and caches[0].num_moves <= MAX_MOVES:
        return
    caches.sort(key=lambda one: one.num_moves)
    while sum(cache.num_moves for cache in caches) > MAX_MOVES:
        caches.pop().flush_moves()


def _clear_moves(rows: Rows) -> None:
    for span in rows.spans:
        cast("PooledKVCache", span.cache).clear_moves()


def _bucket(number: int, buckets: tuple[int, ...]) -> int:
    return next(bucket for bucket in buckets if bucket >= number)
