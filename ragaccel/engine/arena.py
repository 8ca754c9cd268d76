"""The arena: all sequences' keys and values in one tensor of a device, each in slots of its own.

A CUDA graph reads and writes fixed addresses, so caches that come and go cannot have buffers of
their own: each has a run of slots of the arena, and a pass is told where they begin. The rows a
pass leaves in the wrong place are moved for all layers at once.

Shapes: L layers, K KV heads, S slots, D head size.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING

import torch

from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.memory_limits import memory_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from torch import Tensor

    Relief: TypeAlias = "Callable[[Arena, int], None]"

FIRST_SLOTS = 16_384  # less where that is more than this share of the device's memory
_FIRST_SHARE = 0.1
_FEWEST_SLOTS = 1024
TRASH = 0
"""A slot of no sequence: where rows that only fill up a pass are written."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What one token's states look like in every layer of a model."""

    num_layers: int
    num_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, cache: KVCache) -> StateLayout | None:
        """Read it off a cache that was written; None where layers differ."""
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
        """Memory that one token's states take, in bytes."""
        return 2 * self.num_layers * self.num_heads * self.head_size * self.dtype.itemsize


class Arena:
    """States of all sequences, [2L, K, S, D]: keys and values of the layers in turn.

    ``num_slots`` is how many tokens it holds at first. Grows by doubling; ``version`` changes when
    the states have moved.
    """

    def __init__(self, layout: StateLayout, num_slots: int | None = None) -> None:
        if num_slots is None:
            room = memory_share(layout.device, _FIRST_SHARE) // layout.slot_bytes
            num_slots = max(_FEWEST_SLOTS, min(FIRST_SLOTS, room))
        self.layout, self.version = layout, 0
        self.states = self._new(num_slots)
        self._free = [(1, num_slots)]  # runs of slots, by their first, up to and without their end
        self._caches: weakref.WeakSet[ArenaCache] = weakref.WeakSet()
        self._returned: deque[tuple[int, int]] = deque()  # runs that are to join the free ones
        self._lock = RLock()

    @property
    def num_slots(self) -> int:
        """How many tokens it holds, the trash included."""
        return self.states.shape[2]

    @property
    def num_free(self) -> int:
        """Slots that no sequence has."""
        return sum(end - first for first, end in self._all_free())

    def new_cache(self, capacity: int | None = None, limit: int | None = None) -> ArenaCache:
        """Make an empty cache in this arena."""
        cache = ArenaCache(self, capacity, limit)
        self._caches.add(cache)
        return cache

    def allocate(self, num_slots: int) -> int:
        """Reserve a run of slots; return the first.

        Raises:
            torch.OutOfMemoryError: the arena would have to grow, and the device is full.
        """
        with self._lock:
            while (base := self._fit(num_slots)) is None:
                self._grow(num_slots)
            return base

    def free(self, first: int, end: int) -> None:
        """Give a run of slots back. A cache may be collected anywhere, so no lock is taken."""
        self._returned.append((first, end))

    def fits(self, num_slots: int, without: Sequence[ArenaCache] = ()) -> bool:
        """Whether so many slots lie free in a row, or would do so without some caches."""
        with self._lock:
            free = _merged([*self._all_free(), *(run for cache in without for run in cache.runs)])
        return any(end - first >= num_slots for first, end in free)

    def may_grow(self, num_slots: int, idle: Sequence[ArenaCache], kept_bytes: int) -> bool:
        """Whether, grown for so many slots, it is no larger than what is used and may be kept."""
        held = sum(end - first for cache in idle for first, end in cache.runs)
        used = self.num_slots - self.num_free - held + num_slots
        return (self._grown(num_slots) - used) * self.layout.slot_bytes <= kept_bytes

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states of some slots to others, in all layers."""
        index = torch.tensor([sources, targets]).to(self.layout.device, non_blocking=True)
        with self._lock:  # a closed request's rows may be moved while another's cache grows
            self.states.index_copy_(2, index[1], self.states.index_select(2, index[0]))

    def _fit(self, num_slots: int) -> int | None:
        free = self._all_free()
        for i, (first, end) in enumerate(free):
            if end - first >= num_slots:
                free[i : i + 1] = [(first + num_slots, end)] * (end - first > num_slots)
                return first
        return None

    def _all_free(self) -> list[tuple[int, int]]:
        """The free runs, those that were given back among them."""
        with self._lock:
            while self._returned:
                self._free = _merged([*self._free, self._returned.popleft()])
            return self._free

    def _grown(self, num_slots: int) -> int:
        """How many slots it has once it has grown."""
        return max(2 * self.num_slots, self.num_slots + num_slots)

    def _grow(self, num_slots: int) -> None:
        old, count = self.states, self._grown(num_slots)
        self.states = self._new(count)
        self.states[:, :, : old.shape[2]] = old
        self.version += 1
        for cache in list(self._caches):
            cache.bind()
        self.free(old.shape[2], count)

    def _new(self, num_slots: int) -> Tensor:
        layout = self.layout
        shape = (2 * layout.num_layers, layout.num_heads, num_slots, layout.head_size)
        states = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        states[:, :, TRASH] = 0.0
        return states


def _merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join runs of slots that touch, in order."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(runs):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return merged


class ArenaCache(KVCache):
    """A sequence's run of slots in an arena. What is to be moved waits for ``settle``."""

    __slots__ = ("_finalizer", "arena", "base", "relief")

    def __init__(self, arena: Arena, capacity: int | None, limit: int | None) -> None:
        super().__init__(capacity, limit)
        self.arena = arena
        self.relief: weakref.WeakMethod[Relief] | None = None
        """Is told of slots that are about to be allocated, and may free others before."""
        self.base = TRASH  # slot of the first token, once there is one
        self._finalizer: weakref.finalize[..., ArenaCache] | None = None

    def begin(self, num_rows: int) -> int:
        """Make room for a pass; recorded moves are done by the pass itself, or by ``settle``."""
        self.reserve(0)
        return self._make_room(num_rows)

    @torch.inference_mode()
    def reserve(self, num_slots: int) -> None:
        """Have room for so many tokens without growing later, and some slots at all."""
        if self._finalizer is None or num_slots > self.capacity:
            wanted = max(num_slots, self.capacity)
            self._resize(wanted if self.limit is None else min(wanted, self.limit))

    def settle(self) -> None:
        """Do the recorded moves now, before a pass that does not."""
        self._apply_moves()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The slots it has, by their first, up to and without their end: none or one run."""
        return () if self._finalizer is None else ((self.base, self.base + self.capacity),)

    @property
    def num_moves(self) -> int:
        """How many rows are to be moved."""
        return sum(len(slots) for _, slots in self._moves)

    @property
    def moves(self) -> Sequence[tuple[int, tuple[int, ...]]]:
        """What is to be moved, for ``put_back``."""
        with self._lock:
            return tuple(self._moves)

    def put_back(self, moves: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Have moves to do yet that were taken for a pass which did not begin."""
        with self._lock:
            self._moves[:] = moves

    def take_moves(self) -> tuple[list[int], list[int]]:
        """Hand out the recorded moves, as sources and targets among the arena's slots."""
        with self._lock:
            moves = self._listed()
            self._moves.clear()
        return moves

    def _listed(self) -> tuple[list[int], list[int]]:
        sources = [self.base + slot for _, slots in self._moves for slot in slots]
        targets = [self.base + first + i for first, slots in self._moves for i in range(len(slots))]
        return sources, targets

    def bind(self) -> None:
        """Look at the arena's states where they are now."""
        if self._finalizer is None:
            return
        own = self.arena.states[:, :, self.base : self.base + self.capacity]
        self._keys = [states[None] for states in own[0::2]]
        self._values = [states[None] for states in own[1::2]]

    @torch.inference_mode()
    def _apply_moves(self) -> None:
        with self._lock:
            sources, targets = self._listed()
            if sources:
                self.arena.move(sources, targets)
            self._moves.clear()  # not before they are done: memory may run out on the way

    @torch.inference_mode()
    def _resize(self, capacity: int) -> None:
        # Rows that are yet to be moved stand behind what is committed.
        used = max((slot + 1 for _, slots in self._moves for slot in slots), default=0)
        used = max(used, self.length)
        if used == 0:
            self._release()
        relieve = None if self.relief is None else self.relief()
        if relieve is not None:
            relieve(self.arena, capacity)
        base = self.arena.allocate(capacity)
        states, old = self.arena.states, self._finalizer
        if old is not None:
            states[:, :, base : base + used] = states[:, :, self.base : self.base + used]
        self.base, self.capacity = base, capacity
        self._finalizer = weakref.finalize(self, self.arena.free, base, base + capacity)
        self._finalizer.atexit = False
        self.bind()
        if old is not None:
            old()

    def _release(self) -> None:
        """Give its slots back; it gets others when they are wanted."""
        finalizer, self._finalizer, self.base = self._finalizer, None, TRASH
        self._keys, self._values = [], []
        if finalizer is not None:
            finalizer()
