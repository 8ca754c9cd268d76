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

from ragaccel.engine.cuda_graphs import ArenaCache
from ragaccel.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragaccel.engine.cuda_graphs import Arena


logger = logging.getLogger("ragaccel")

_SHORTEST = 8  # tokens below which copying states is more trouble than computing them
_ticks = count()


@dataclass(slots=True, eq=False)
class Holding:
    """A cache, the tokens it holds, and for whom.

    ``num_settled`` of them were computed in whole prefill chunks from the first token on: the
    same ones, to the last bit, in whatever prompt they stand first.
    """

    cache: KVCache
    namespace: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_settled: int = 0
    used: int = 0


class PrefixPool:
    """The caches of one engine: those of open requests, and idle ones that are kept.

    An arena grows for idle caches as far as what may be kept fits beside the open requests; beyond
    that idle caches make room, those that were not used for longest first: growing copies all
    states, captures all passes anew and is never undone.

    Args:
        new_cache: makes an empty cache.
        max_kept: most idle caches.
        max_bytes: most bytes of states in idle caches.
    """

    def __init__(self, new_cache: Callable[[], KVCache], *, max_kept: int, max_bytes: int) -> None:
        self._new_cache, self.max_kept, self.max_bytes = new_cache, max_kept, max_bytes
        self._idle: list[Holding] = []
        self._open: list[Holding] = []
        self._version = 0  # of the weights
        self._source: Holding | None = None  # what is copied from at the moment
        self.bytes_per_token = 0
        """Bytes of states that a token takes; 0 until a cache was given back, kept or not."""
        self._lock = RLock()
        self._amid = 0  # changes of the thread that holds the lock
        self._returned: deque[Holding] = deque()

    @property
    def num_idle(self) -> int:
        """How many caches are kept for later prompts."""
        return len(self._idle)

    @property
    def num_bytes(self) -> int:
        """Bytes of states in idle caches."""
        return sum(holding.cache.used_bytes for holding in tuple(self._idle))

    def take(
        self, prompt: Sequence[int], namespace: str, *, room: int = 0, chunk: int | None = None
    ) -> Holding:
        """Hand out a cache that holds as much of the beginning of a prompt as is known.

        It belongs to the caller until ``give_back``. Nothing may compute meanwhile: states are
        copied from caches of open requests as well.

        Args:
            prompt: the tokens that are to be cached.
            namespace: whose states may serve.
            room: tokens that it is to hold without growing later.
            chunk: take only whole prefill chunks, of so many tokens, that prefill computed.
        """
        with self._change():
            shared, best = self._longest(prompt, namespace, chunk)
            if best is None or shared < _SHORTEST:
                shared, best = 0, None  # else its slots could not be freed for the new one
                holding = Holding(self._spare(), namespace)
            elif best in self._idle and 2 * shared >= len(best.token_ids):
                self._idle.remove(best)
                holding = best
                holding.cache.truncate(shared)
            else:
                holding = Holding(self._spare(keeping=best), namespace)
                self._copy(best, shared, holding.cache, room)
            holding.token_ids = list(prompt[:shared]) if holding.cache.length else []
            holding.num_settled = min(shared, best.num_settled) if best is not None else 0
            holding.num_settled = min(holding.num_settled, len(holding.token_ids))
            holding.cache.reserve(room)
            self._open.append(holding)
            return holding

    def give_back(self, holding: Holding) -> None:
        """Keep a closed request's states for later prompts, within bounds.

        Waits for nobody: a request that is dropped may be closed anywhere, amid a change here too.
        It is then done when that has ended.
        """
        self._returned.append(holding)
        self._take_in()

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            self._amid += 1
            try:
                yield
            finally:
                self._amid -= 1
        self._take_in()

    def _take_in(self) -> None:
        """Keep what was given back, unless somebody is amid a change: he will do it."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                if self._amid:
                    return
                self._amid += 1
                try:
                    self._keep(self._returned.popleft())
                finally:
                    self._amid -= 1
            finally:
                self._lock.release()

    def _keep(self, holding: Holding) -> None:
        if holding not in self._open:
            return
        self._open.remove(holding)
        self.bytes_per_token = max(self.bytes_per_token, holding.cache.slot_bytes)
        try:
            holding.cache.truncate(len(holding.token_ids))
        except RuntimeError as error:  # no memory to move rows; the answer is there
            logger.debug("states are not kept: %s", error)
            return
        holding.used = next(_ticks)
        self._idle = [kept for kept in self._idle if not _extends(holding, kept)]
        longer = next((kept for kept in self._idle if _extends(kept, holding)), None)
        if longer is not None:
            longer.used = holding.used
        else:
            self._idle.append(holding)
        self._idle.sort(key=lambda kept: kept.used)
        while self._idle and self._is_too_much():
            self._idle.pop(0)

    def drop(self, holding: Holding) -> None:
        """Keep nothing of an open request's states, and copy them no more."""
        with self._change():
            if holding in self._open:
                self._open.remove(holding)

    def _is_too_much(self) -> bool:
        return len(self._idle) > self.max_kept or self.num_bytes > self.max_bytes

    def clear(self) -> None:
        """Free all idle caches."""
        with self._change():
            self._idle.clear()

    def follow(self, version: int) -> None:
        """Forget what weights of another version computed; engines over one model ask alike."""
        with self._change():
            if version != self._version:
                self._version = version
                self.forget()

    def forget(self) -> None:
        """Share nothing of what was computed until now, nor what open requests go on from."""
        with self._change():
            self._idle.clear()
            self._open.clear()

    def _longest(
        self, prompt: Sequence[int], namespace: str, chunk: int | None
    ) -> tuple[int, Holding | None]:
        best: tuple[int, Holding | None] = (0, None)
        for holding in (*self._open, *self._idle):
            if holding.namespace != namespace:
                continue
            limit = holding.num_settled if chunk else len(holding.token_ids)
            limit = min(limit, holding.cache.num_in_place)
            length = _common_prefix(prompt, holding.token_ids, limit)
            length -= length % chunk if chunk else 0
            if length > best[0] or (length == best[0] and best[1] in self._open):
                best = (length, holding)
        return best

    def _copy(self, source: Holding, length: int, cache: KVCache, room: int) -> None:
        """Copy the beginning of what is held to a cache that has room for more at once."""
        source.used = next(_ticks)
        self._source = source
        try:
            cache.reserve(max(room, length))
            cache.copy_from(source.cache, length)
        finally:
            self._source = None

    def relieve(self, arena: Arena, num_slots: int) -> None:
        """Drop as few idle caches as make room in an arena that would else grow too far.

        Nothing is dropped in vain: where all of them would not do, the arena grows.
        """
        with self._change():
            idle = [
                (kept, kept.cache)
                for kept in sorted(self._idle, key=lambda kept: kept.used)
                if isinstance(kept.cache, ArenaCache)
                and kept.cache.arena is arena
                and kept is not self._source
            ]
            caches = [cache for _, cache in idle]
            if arena.fits(num_slots) or arena.may_grow(num_slots, caches, self.max_bytes):
                return
            for count in range(1, len(idle) + 1):
                if arena.fits(num_slots, caches[:count]):
                    dropped = [kept for kept, _ in idle[:count]]
                    self._idle = [kept for kept in self._idle if kept not in dropped]
                    return

    def _spare(self, keeping: Holding | None = None) -> KVCache:
        """An empty cache: the least recently used idle one's, when as many are kept as may be."""
        candidates = [holding for holding in self._idle if holding is not keeping]
        if candidates and len(self._idle) >= self.max_kept:
            oldest = min(candidates, key=lambda holding: holding.used)
            self._idle.remove(oldest)
            oldest.cache.truncate(0)
            return oldest.cache
        cache = self._new_cache()
        if isinstance(cache, ArenaCache):
            cache.relief = WeakMethod(self.relieve)
        return cache


def _extends(longer: Holding, shorter: Holding) -> bool:
    """Whether all that one cache holds begins what another holds."""
    length = len(shorter.token_ids)
    return (
        longer.namespace == shorter.namespace
        and longer.num_settled >= shorter.num_settled
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
