"""The KV cache: one pair of buffers per layer, with scratch slots for the rows being verified.

Shapes: H KV heads, C slots (the capacity, in tokens), D head size, n rows.
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

import torch

from ragaccel.engine.interrupts import in_inference_mode
from ragaccel.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FIRST_CAPACITY = 512


class KVCache:
    """Keys and values of one sequence, [1, H, C, D] per layer.

    Slots 0..length hold committed tokens; the slots after them are scratch for the rows of the
    running pass. Each layer's buffers are created from the first states it writes, so that device,
    dtype and number of heads fit models on several devices and quantized ones. A pass reads views
    cut to the attended length: its cost depends on the length, not on the capacity.

    Args:
        capacity: slots, fixed; ``None`` starts small and doubles as needed.
        limit: the most slots that the cache may grow to; ``None`` for no limit.
    """

    def __init__(self, capacity: int | None = None, limit: int | None = None) -> None:
        if capacity is None:
            self.capacity = FIRST_CAPACITY if limit is None else min(FIRST_CAPACITY, limit)
            self.limit = limit
        else:
            self.capacity = self.limit = capacity
        self.length = 0
        self.model_cache: object | None = None  # wrapper of this cache for the model
        self.stop = 0  # the slot after the last row of the running pass
        self._peak = 0  # number of slots ever written
        self._lock = RLock()  # tokens may be kept while another request copies states from here
        self._moves: list[tuple[int, tuple[int, ...]]] = []
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []

    def begin(self, num_rows: int) -> int:
        """Make room for a pass of ``num_rows`` and do the moves recorded by ``keep``.

        Returns:
            The slot of the first row.

        Raises:
            CapacityError: the rows do not fit and the cache may not grow further.
        """
        self.flush_moves()
        return self._make_room(num_rows)

    def _make_room(self, num_rows: int) -> int:
        self.stop = self.length + num_rows
        if self.stop > self.capacity:
            self._grow(self.stop)
        self._peak = max(self._peak, self.stop)
        return self.length

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' states [1, H, n, D]; return all attended ones, [1, H, length + n, D]."""
        stored_keys, stored_values = self.make_buffers(layer, keys, values)
        start, stop = self.length, self.stop
        stored_keys[:, :, start:stop] = keys
        stored_values[:, :, start:stop] = values
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]

    def make_buffers(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers, [1, H, C, D] each; create them for states like these first."""
        while layer >= len(self._keys):
            self._keys.append(None)
            self._values.append(None)
        stored_keys, stored_values = self._keys[layer], self._values[layer]
        if stored_keys is None or stored_values is None:
            stored_keys = self._keys[layer] = _buffer(keys, self.capacity)
            stored_values = self._values[layer] = _buffer(values, self.capacity)
        return stored_keys, stored_values

    def layer_buffers(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return a layer's keys and values, [1, H, C, D] each; None before its first write.

        The states of the running pass's rows belong in slots ``length`` to ``stop``.
        """
        if layer >= len(self._keys):
            return None
        keys, values = self._keys[layer], self._values[layer]
        return None if keys is None or values is None else (keys, values)

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass, in this order, and drop the others.

        Rows that already lie in their final slots (a chain, or the head of a branch) cost nothing;
        the others are moved at the start of the next pass.

        Raises:
            ValueError: a number is not a row of the last pass.
        """
        if rows and not 0 <= min(rows) <= max(rows) < self.stop - self.length:
            raise ValueError(
                f"rows {tuple(rows)} are not among the {self.stop - self.length} of the last pass"
            )
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place:
            in_place += 1
        with self._lock:
            if in_place < len(rows):
                sources = tuple(self.length + row for row in rows[in_place:])
                self._moves.append((self.length + in_place, sources))
            self.length += len(rows)
            self.stop = self.length

    def truncate(self, length: int) -> None:
        """Drop all tokens after the first ``length``."""
        if length == 0:
            self._moves.clear()
        self.flush_moves()
        self.length = self.stop = min(self.length, length)

    @property
    def buffers(self) -> list[Tensor | None]:
        """Keys and values, alternating by layer, [1, H, C, D] each; None before the first write."""
        return [buffer for pair in zip(self._keys, self._values, strict=True) for buffer in pair]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's states; 0 before the first write."""
        return sum(buffer.nbytes // buffer.shape[2] for buffer in self._allocated())

    @property
    def used_bytes(self) -> int:
        """Memory that the cache uses, in bytes; on a CPU, that of the slots ever written."""
        return sum(
            buffer[:, :, : self._peak].nbytes if buffer.device.type == "cpu" else buffer.nbytes
            for buffer in self._allocated()
        )

    def _allocated(self) -> list[Tensor]:
        return [buffer for buffer in (*self._keys, *self._values) if buffer is not None]

    @property
    def num_in_place(self) -> int:
        """How many of the first tokens are in their final slots."""
        with self._lock:
            return self._moves[0][0] if self._moves else self.length

    @in_inference_mode
    def copy_from(self, other: KVCache, length: int) -> None:
        """Replace the contents with the first ``length`` tokens of another cache.

        The other cache is only read, so its tokens must be in their final slots.

        Raises:
            ValueError: some of these tokens are not in their final slots yet.
        """
        if other._moves and length > other.num_in_place:
            raise ValueError(
                f"only the first {other.num_in_place} of {length} tokens are in their final slots: "
                "the others are still to be moved"
            )
        self.truncate(0)
        self.reserve(length)
        self._peak = max(self._peak, length)
        for own, given in ((self._keys, other._keys), (self._values, other._values)):
            own += [None] * (len(given) - len(own))
            for layer, states in enumerate(given):
                if states is not None:
                    buffer = own[layer]
                    if buffer is None:
                        buffer = own[layer] = _buffer(states, self.capacity)
                    buffer[:, :, :length] = states[:, :, :length]
        self.length = self.stop = length

    @in_inference_mode
    def reserve(self, num_slots: int) -> None:
        """Grow to at least ``num_slots`` slots, or to the limit if that is lower."""
        if num_slots > self.capacity:
            # Round up: the allocator reuses buffers of few sizes; many sizes fragment memory.
            num_slots = -(-num_slots // FIRST_CAPACITY) * FIRST_CAPACITY
            self._resize(num_slots if self.limit is None else min(num_slots, self.limit))

    @in_inference_mode
    def move(self, target: int, sources: Sequence[int]) -> None:
        """Move the states of ``sources`` to the slots from ``target`` on."""
        index = torch.tensor(sources)
        moved = []  # gather all before writing any: memory may run out in between
        for buffer in self._allocated():
            index = index.to(buffer.device)
            moved.append((buffer, buffer.index_select(2, index)))
        for buffer, states in moved:
            buffer[:, :, target : target + len(sources)] = states

    def flush_moves(self) -> None:
        """Do the recorded moves now."""
        with self._lock:
            while self._moves:
                target, sources = self._moves[0]
                self.move(target, sources)
                del self._moves[0]

    def _grow(self, needed: int) -> None:
        if self.limit is not None and needed > self.limit:
            raise CapacityError(
                f"{needed:,} tokens do not fit in the capacity of {self.limit:,}: "
                f"shorten the prompt, or load with capacity={needed:,} or more"
            )
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        self._resize(capacity if self.limit is None else min(capacity, self.limit))

    def _resize(self, capacity: int) -> None:
        for buffers in (self._keys, self._values):
            for i, old in enumerate(buffers):
                if old is not None and old.shape[2] < capacity:
                    new = buffers[i] = _buffer(old, capacity)
                    new[:, :, : self.length] = old[:, :, : self.length]
        self.capacity = capacity  # last: memory may run out while buffers are allocated


def _buffer(like: Tensor, capacity: int) -> Tensor:
    _, heads, _, size = like.shape
    # Slots are written before they are read: on a CPU, unused ones take no physical memory.
    return torch.empty(1, heads, capacity, size, dtype=like.dtype, device=like.device)
