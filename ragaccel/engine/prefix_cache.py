"""The prefix cache: states of earlier prompts, kept by namespace and handed out again.

A prompt that begins like one computed before (the same instructions, passages or earlier turns) is
not computed again up to where they part. The states of one namespace never serve another: how
quickly an answer comes would tell what others have asked.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakMethod

from ragaccel.engine.cuda_graphs import PooledKVCache
from ragaccel.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragaccel.engine.cuda_graphs import KVPool


logger = logging.getLogger("ragaccel")

_MIN_SHARED_TOKENS = 8  # tokens below which copying states is more trouble than computing them
_ticks = count()


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """A cache, the tokens it holds, and for whom.

    ``num_block_aligned`` of them were computed in whole prefill chunks from the first token on: the
    same ones, to the last bit, in whatever prompt they stand first.
    """

    cache: KVCache
    namespace: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_block_aligned: int = 0
    used: int = 0


class PrefixCache:
    """The caches of one engine: those of open requests, and idle ones that are kept.

    A KV pool grows for idle caches as far as what may be kept fits beside the open requests; beyond
    that idle caches make room, those that were not used for longest first: growing copies all
    states, captures all passes anew and is never undone.

    Args:
        new_cache: makes an empty cache.
        max_kept: most idle caches.
        max_bytes: most bytes of states in idle caches.
    """

    def __init__(self, new_cache: Callable[[], KVCache], *, max_kept: int, max_bytes: int) -> None:
        self._new_cache, self.max_kept, self.max_bytes = new_cache, max_kept, max_bytes
        self._idle: list[PrefixEntry] = []
        self._open: list[PrefixEntry] = []
        self._version = 0  # of the weights
        self._source: PrefixEntry | None = None  # what is copied from at the moment
        self.bytes_per_token = 0
        """Bytes of states that a token takes; 0 until a cache was given back, kept or not."""
        self._lock = RLock()
        self._change_depth = 0  # changes of the thread that holds the lock
        self._returned: deque[PrefixEntry] = deque()

    @property
    def num_idle(self) -> int:
        """How many caches are kept for later prompts."""
        return len(self._idle)

    @property
    def num_bytes(self) -> int:
        """Bytes of states in idle caches."""
        return sum(entry.cache.used_bytes for entry in tuple(self._idle))

    def acquire(
        self, prompt: Sequence[int], namespace: str, *, room: int = 0, chunk: int | None = None
    ) -> PrefixEntry:
        """Hand out a cache that holds as much of the beginning of a prompt as is known.

        It belongs to the caller until ``release``. Nothing may compute meanwhile: states are
        copied from caches of open requests as well.

        Args:
            prompt: the tokens that are to be cached.
            namespace: whose states may serve.
            room: tokens that it is to hold without growing later.
            chunk: take only whole prefill chunks, of so many tokens, that prefill computed.
        """
        with self._change():
            shared, best = self._longest_match(prompt, namespace, chunk)
            if best is None or shared < _MIN_SHARED_TOKENS:
                shared, best = 0, None  # else its slots could not be freed for the new one
                entry = PrefixEntry(self._new_or_reused(), namespace)
            elif best in self._idle and 2 * shared >= len(best.token_ids):
                self._idle.remove(best)
                entry = best
                entry.cache.truncate(shared)
            else:
                entry = PrefixEntry(self._new_or_reused(keeping=best), namespace)
                self._copy(best, shared, entry.cache, room)
            entry.token_ids = list(prompt[:shared]) if entry.cache.length else []
            entry.num_block_aligned = min(shared, best.num_block_aligned) if best is not None else 0
            entry.num_block_aligned = min(entry.num_block_aligned, len(entry.token_ids))
            entry.cache.reserve(room)
            self._open.append(entry)
            return entry

    def release(self, entry: PrefixEntry) -> None:
        """Keep a closed request's states for later prompts, within bounds.

        Waits for nobody: a request that is dropped may be closed anywhere, amid a change here too.
        It is then done when that has ended.
        """
        self._returned.append(entry)
        self._process_returned()

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            self._change_depth += 1
            try:
                yield
            finally:
                self._change_depth -= 1
        self._process_returned()

    def _process_returned(self) -> None:
        """Keep what was given back, unless somebody is amid a change: he will do it."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                if self._change_depth:
                    return
                self._change_depth += 1
                try:
                    self._retain(self._returned.popleft())
                finally:
                    self._change_depth -= 1
            finally:
                self._lock.release()

    def _retain(self, entry: PrefixEntry) -> None:
        if entry not in self._open:
            return
        self._open.remove(entry)
        self.bytes_per_token = max(self.bytes_per_token, entry.cache.slot_bytes)
        try:
            entry.cache.truncate(len(entry.token_ids))
        except RuntimeError as error:  # no memory to move rows; the answer is there
            logger.debug("states are not kept: %s", error)
            return
        entry.used = next(_ticks)
        self._idle = [kept for kept in self._idle if not _extends(entry, kept)]
        longer = next((kept for kept in self._idle if _extends(kept, entry)), None)
        if longer is not None:
            longer.used = entry.used
        else:
            self._idle.append(entry)
        self._idle.sort(key=lambda kept: kept.used)
        while self._idle and self._exceeds_limits():
            self._idle.pop(0)

    def drop(self, entry: PrefixEntry) -> None:
        """Keep nothing of an open request's states, and copy them no more."""
        with self._change():
            if entry in self._open:
                self._open.remove(entry)

    def _exceeds_limits(self) -> bool:
        return len(self._idle) > self.max_kept or self.num_bytes > self.max_bytes

    def clear(self) -> None:
        """Free all idle caches."""
        with self._change():
            self._idle.clear()

    def set_weights_version(self, version: int) -> None:
        """Forget what weights of another version computed; engines over one model ask alike."""
        with self._change():
            if version != self._version:
                self._version = version
                self.invalidate()

    def invalidate(self) -> None:
        """Share nothing of what was computed until now, nor what open requests go on from."""
        with self._change():
            self._idle.clear()
            self._open.clear()

    def _longest_match(
        self, prompt: Sequence[int], namespace: str, chunk: int | None
    ) -> tuple[int, PrefixEntry | None]:
        best: tuple[int, PrefixEntry | None] = (0, None)
        for entry in (*self._open, *self._idle):
            if entry.namespace != namespace:
                continue
            limit = entry.num_block_aligned if chunk else len(entry.token_ids)
            limit = min(limit, entry.cache.num_in_place)
            length = _common_prefix(prompt, entry.token_ids, limit)
            length -= length % chunk if chunk else 0
            if length > best[0] or (length == best[0] and best[1] in self._open):
                best = (length, entry)
        return best

    def _copy(self, source: PrefixEntry, length: int, cache: KVCache, room: int) -> None:
        """Copy the beginning of what is held to a cache that has room for more at once."""
        source.used = next(_ticks)
        self._source = source
        try:
            cache.reserve(max(room, length))
            cache.copy_from(source.cache, length)
        finally:
            self._source = None

    def make_room(self, kv_pool: KVPool, num_slots: int) -> None:
        """Drop as few idle caches as make room in a KV pool that would else grow too far.

        Nothing is dropped in vain: where all of them would not do, the KV pool grows.
        """
        with self._change():
            idle = [
                (kept, kept.cache)
                for kept in sorted(self._idle, key=lambda kept: kept.used)
                if isinstance(kept.cache, PooledKVCache)
                and kept.cache.kv_pool is kv_pool
                and kept is not self._source
            ]
            caches = [cache for _, cache in idle]
            if kv_pool.fits(num_slots) or kv_pool.can_grow(num_slots, caches, self.max_bytes):
                return
            for count in range(1, len(idle) + 1):
                if kv_pool.fits(num_slots, caches[:count]):
                    dropped = [kept for kept, _ in idle[:count]]
                    self._idle = [kept for kept in self._idle if kept not in dropped]
                    return

    def _new_or_reused(self, keeping: PrefixEntry | None = None) -> KVCache:
        """An empty cache: the least recently used idle one's, when as many are kept as may be."""
        candidates = [entry for entry in self._idle if entry is not keeping]
        if candidates and len(self._idle) >= self.max_kept:
            oldest = min(candidates, key=lambda entry: entry.used)
            self._idle.remove(oldest)
            oldest.cache.truncate(0)
            return oldest.cache
        cache = self._new_cache()
        if isinstance(cache, PooledKVCache):
            cache.on_full = WeakMethod(self.make_room)
        return cache


def _extends(longer: PrefixEntry, shorter: PrefixEntry) -> bool:
    """Whether all that one cache holds begins what another holds."""
    length = len(shorter.token_ids)
    return (
        longer.namespace == shorter.namespace
        and longer.num_block_aligned >= shorter.num_block_aligned
        and longer.token_ids[:length] == shorter.token_ids
    )


def _common_prefix(prompt: Sequence[int], held: Sequence[int], limit: int) -> int:
    """Count the tokens with which both begin, ``limit`` at most; by halving, as lists compare."""
    low, high = 0, min(len(prompt), len(held), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(prompt[low:middle]) == tuple(held[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
