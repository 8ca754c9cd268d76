"""The KV cache: one pair of buffers per layer, with scratch slots for the rows being verified.

Shapes: H KV heads, C slots (the capacity, in tokens), D head size, n rows.
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

import torch

from ragaccel.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FIRST_CAPACITY = 512


class KVCache:
    """Keys and values of one sequence, [1, H, C, D] per layer.

    Slots 0..length hold committed tokens; the slots after them are scratch for the rows of the
    running pass. Buffers are made from the first states a layer writes, so that device, dtype
    and number of heads are right however the model is spread or quantized. A pass reads views
    cut to the attended length: its cost follows the length and never the capacity.

    Args:
        capacity: slots to hold; ``None`` starts small and doubles as needed.
        limit: the most slots it may grow to; ``None`` for no limit.
    """

    __slots__ = (
        "__weakref__",
        "_keys",
        "_lock",
        "_moves",
        "_peak",
        "_stop",
        "_values",
        "capacity",
        "length",
        "limit",
        "model_cache",
    )

    def __init__(self, capacity: int | None = None, limit: int | None = None) -> None:
        if capacity is None:
            self.capacity = FIRST_CAPACITY if limit is None else min(FIRST_CAPACITY, limit)
            self.limit = limit
        else:
            self.capacity = self.limit = capacity
        self.length = 0
        self.model_cache: object | None = None  # what the model layer hangs here, built once
        self._stop = 0
        self._peak = 0  # slots ever written
        self._lock = RLock()  # tokens may be kept while another request copies states from here
        self._moves: list[tuple[int, tuple[int, ...]]] = []
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []

    @property
    def stop(self) -> int:
        """End of the running pass: committed slots plus its rows."""
        return self._stop

    def begin(self, num_rows: int) -> int:
        """Make room for a pass of ``num_rows`` and do the moves recorded by ``keep``.

        Returns:
            The slot of the first row.

        Raises:
            CapacityError: if the rows do not fit and the cache may not grow further.
        """
        self._apply_moves()
        return self._make_room(num_rows)

    def flush_moves(self) -> None:
        """Do the recorded moves now; here ``begin`` has done them."""

    def _make_room(self, num_rows: int) -> int:
        self._stop = self.length + num_rows
        if self._stop > self.capacity:
            self._grow(self._stop)
        self._peak = max(self._peak, self._stop)
        return self.length

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' states [1, H, n, D]; return all attended ones, [1, H, length + n, D]."""
        while layer >= len(self._keys):
            self._keys.append(None)
            self._values.append(None)
        stored_keys, stored_values = self._keys[layer], self._values[layer]
        if stored_keys is None or stored_values is None:
            stored_keys = self._keys[layer] = _buffer(keys, self.capacity)
            stored_values = self._values[layer] = _buffer(values, self.capacity)
        start, stop = self.length, self._stop
        stored_keys[:, :, start:stop] = keys
        stored_values[:, :, start:stop] = values
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass, in this order; the others are forgotten.

        A row that lies where it belongs (a chain, or the head of a branch) costs nothing; the
        rest move at the start of the next pass.
        """
        if any(not 0 <= row < self._stop - self.length for row in rows):
            raise ValueError(f"rows {tuple(rows)} are not rows of the last pass")
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place:
            in_place += 1
        with self._lock:
            if in_place < len(rows):
                sources = tuple(self.length + row for row in rows[in_place:])
                self._moves.append((self.length + in_place, sources))
            self.length += len(rows)
            self._stop = self.length

    def truncate(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        if length == 0:
            self._moves.clear()
        self._apply_moves()
        self.length = self._stop = min(self.length, length)

    @property
    def buffers(self) -> list[Tensor | None]:
        """Keys and values of the layers in turn, [1, H, C, D] each, None before the first write."""
        return [buffer for pair in zip(self._keys, self._values, strict=True) for buffer in pair]

    @property
    def num_bytes(self) -> int:
        """Memory the buffers take, in bytes."""
        return sum(
            buffer.numel() * buffer.element_size()
            for buffer in (*self._keys, *self._values)
            if buffer is not None
        )

    @property
    def slot_bytes(self) -> int:
        """Memory that one token's states take, in bytes; 0 before the first write."""
        return sum(
            buffer.numel() // buffer.shape[2] * buffer.element_size()
            for buffer in (*self._keys, *self._values)
            if buffer is not None
        )

    @property
    def used_bytes(self) -> int:
        """Memory it takes, in bytes: on a CPU, that of the slots that were ever written."""
        return sum(
            buffer[:, :, : self._peak if buffer.device.type == "cpu" else None].numel()
            * buffer.element_size()
            for buffer in (*self._keys, *self._values)
            if buffer is not None
        )

    @property
    def num_in_place(self) -> int:
        """Tokens from the first on of which none is yet to be moved."""
        with self._lock:
            return self._moves[0][0] if self._moves else self.length

    @torch.inference_mode()
    def copy_from(self, other: KVCache, length: int) -> None:
        """Hold the first ``length`` tokens of another cache, in place there, and nothing else.

        The other is only read: its owner, not the caller, would notice an interrupted move.
        """
        if other._moves and length > other.num_in_place:
            raise ValueError(f"of {length} tokens only {other.num_in_place} are in place")
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
        self.length = self._stop = length

    @torch.inference_mode()
    def reserve(self, num_slots: int) -> None:
        """Have room for so many tokens without growing later; less where the limit is lower."""
        if num_slots > self.capacity:
            # In even steps: buffers of few sizes are used again, of many they leave memory in bits.
            num_slots = -(-num_slots // FIRST_CAPACITY) * FIRST_CAPACITY
            self._resize(num_slots if self.limit is None else min(num_slots, self.limit))

    @torch.inference_mode()
    def move(self, target: int, sources: Sequence[int]) -> None:
        """Move the states of some slots to those from ``target`` on."""
        index = torch.tensor(sources)
        moved = []  # all of them before any is written: memory may run out on the way
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                index = index.to(buffer.device)
                moved.append((buffer, buffer.index_select(2, index)))
        for buffer, states in moved:
            buffer[:, :, target : target + len(sources)] = states

    def _apply_moves(self) -> None:
        with self._lock:
            while self._moves:
                target, sources = self._moves[0]
                self.move(target, sources)
                del self._moves[0]

    def _grow(self, needed: int) -> None:
        if self.limit is not None and needed > self.limit:
            raise CapacityError(
                f"{needed:,} tokens do not fit the capacity of {self.limit:,}: "
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
        self.capacity = capacity  # not before all have it: memory may run out on the way


def _buffer(like: Tensor, capacity: int) -> Tensor:
    _, heads, _, size = like.shape
    # Slots are read only once they are written: on a CPU those never used take no memory.
    return torch.empty(1, heads, capacity, size, dtype=like.dtype, device=like.device)
