"""The prefix cache: keys and values of earlier prompts, kept by namespace and reused.

The common prefix of a new prompt and an earlier one (the same instructions, passages or earlier
messages) is not computed again. Namespaces never share states: response times would reveal what
others have asked.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from weakref import WeakMethod, WeakSet

from ragaccel.engine.cuda_graphs import PooledKVCache
from ragaccel.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.engine.cuda_graphs import KVPool


logger = logging.getLogger("ragaccel")

_MIN_SHARED_TOKENS = 8  # below, computing the states is cheaper than copying them
_ticks = count()

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(eq=False)
class PrefixEntry:
    """A KV cache, the tokens it holds, and the namespace they belong to.

    The first ``num_block_aligned`` tokens were computed in whole prefill chunks, counted from the
    first token: their states are the same, to the last bit, in every prompt that begins with them.
    """

    cache: KVCache
    namespace: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_block_aligned: int = 0
    used: int = 0


def _change(
    method: Callable[Concatenate[PrefixCache, Parameters], Result],
) -> Callable[Concatenate[PrefixCache, Parameters], Result]:
    """Let a method change the cache alone, and then keep the entries released meanwhile.

    A context manager would stay entered if a signal interrupted its ``__enter__``.
    """

    @wraps(method)
    def change(cache: PrefixCache, /, *args: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            with cache._lock:
                cache._change_depth += 1
                try:
                    return method(cache, *args, **named)
                finally:
                    cache._change_depth -= 1
        finally:
            cache._process_returned()

    return change


class PrefixCache:
    """The caches of one engine: those of open requests, and idle ones kept for later prompts.

    A full KV pool grows only if the larger pool leaves at most ``max_bytes`` for idle caches.
    Otherwise idle caches are evicted, the least recently used first: growing copies all states,
    captures all CUDA graphs again and is never undone.

    Args:
        new_cache: makes an empty cache.
        max_kept: most idle caches.
        max_bytes: most bytes of states in idle caches.
    """

    def __init__(self, new_cache: Callable[[], KVCache], *, max_kept: int, max_bytes: int) -> None:
        self._new_cache, self.max_kept, self.max_bytes = new_cache, max_kept, max_bytes
        self._idle: list[PrefixEntry] = []
        self._open = WeakSet[PrefixEntry]()  # an interruption can keep a request from its release
        self._version = 0  # version of the model's weights
        self._source: PrefixEntry | None = None  # the entry being copied from
        self.bytes_per_token = 0
        """Bytes of one token's states; 0 until the first cache is released."""
        self._lock = RLock()
        self._change_depth = 0  # number of nested changes in the thread with the lock
        self._returned: deque[PrefixEntry] = deque()

    @property
    def num_idle(self) -> int:
        """How many idle caches are kept for later prompts."""
        return len(self._idle)

    @property
    def num_bytes(self) -> int:
        """Bytes of states in idle caches."""
        return sum(entry.cache.used_bytes for entry in tuple(self._idle))

    @_change
    def acquire(
        self, prompt: Sequence[int], namespace: str, *, room: int = 0, chunk: int | None = None
    ) -> PrefixEntry:
        """Return an entry that holds the longest known prefix of a prompt.

        The caller owns the entry until ``release``. The caller must hold the pass lock during this
        call, because states are also copied from caches of open requests.

        Args:
            prompt: the tokens that will be cached.
            namespace: reuse states of this namespace only.
            room: slots to reserve, so that the cache need not grow.
            chunk: reuse only whole prefill chunks of this many tokens.
        """
        shared, best = self._longest_match(prompt, namespace, chunk)
        if best is None or shared < _MIN_SHARED_TOKENS:
            shared, best = 0, None  # forget the match, so that its slots can be freed
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
        self._open.add(entry)
        return entry

    def release(self, entry: PrefixEntry) -> None:
        """Keep a closed request's states for later prompts, within the limits.

        Never blocks: a garbage-collected request may be closed anywhere, even during a change of
        this cache. Then the entry is processed after that change.
        """
        self._returned.append(entry)
        self._process_returned()

    def _process_returned(self) -> None:
        """Keep the released entries; during a change, leave that to the end of the change."""
        while self._returned and not self._change_depth:
            try:
                if not self._lock.acquire(blocking=False):
                    return
                self._change_depth += 1
                try:
                    if self._returned:
                        self._retain(self._returned.popleft())
                finally:
                    self._change_depth -= 1
            finally:
                try:  # noqa: SIM105 - a signal may interrupt the call of suppress
                    self._lock.release()
                except RuntimeError:  # it was not acquired
                    pass

    def _retain(self, entry: PrefixEntry) -> None:
        if entry not in self._open:
            return
        self._open.remove(entry)
        self.bytes_per_token = max(self.bytes_per_token, entry.cache.slot_bytes)
        try:
            entry.cache.truncate(len(entry.token_ids))
        except RuntimeError as error:  # memory ran out while moving rows, after the answer
            logger.debug("the states of a prompt are not kept: %s", error)
            return
        entry.used = next(_ticks)
        self._idle = [kept for kept in self._idle if not _extends(entry, kept)]
        longer = next((kept for kept in self._idle if _extends(kept, entry)), None)
        if longer is not None:
            longer.used = entry.used
        else:
            self._idle.append(entry)
        self._idle.sort(key=lambda kept: kept.used)
        while self._idle and (len(self._idle) > self.max_kept or self.num_bytes > self.max_bytes):
            self._idle.pop(0)

    @_change
    def drop(self, entry: PrefixEntry) -> None:
        """Stop sharing an open request's states, and do not keep them when it ends."""
        if entry in self._open:
            self._open.remove(entry)

    @_change
    def hold(self, work: Callable[[], Result]) -> Result:
        """Run a pass: entries that are released meanwhile, even its own, stay whole to its end."""
        return work()

    @_change
    def clear(self) -> None:
        """Free all idle caches, those that were released during a running pass as well."""
        self._idle.clear()
        self._returned.clear()

    @_change
    def set_weights_version(self, version: int) -> None:
        """If the model's weights have another version than before, share no state any more."""
        if version != self._version:
            self._version = version
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
        """Copy an entry's first tokens to a cache with ``room`` reserved slots."""
        source.used = next(_ticks)
        self._source = source
        try:
            cache.reserve(max(room, length))
            cache.copy_from(source.cache, length)
        finally:
            self._source = None

    @_change
    def make_room(self, kv_pool: KVPool, num_slots: int) -> None:
        """Evict as few idle caches as possible to free ``num_slots`` slots of a KV pool.

        Evict nothing if the slots are free, if the pool may grow (``KVPool.can_grow``), or if all
        idle caches together would not suffice: then the pool grows.
        """
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
        for number in range(1, len(idle) + 1):
            if kv_pool.fits(num_slots, caches[:number]):
                dropped = [kept for kept, _ in idle[:number]]
                self._idle = [kept for kept in self._idle if kept not in dropped]
                return

    def _new_or_reused(self, keeping: PrefixEntry | None = None) -> KVCache:
        """Return an empty cache: a new one, or the oldest idle one if ``max_kept`` are idle.

        The cache of ``keeping`` is not reused.
        """
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
    """Return whether one entry holds a shorter one's tokens and is block-aligned as far."""
    length = len(shorter.token_ids)
    return (
        longer.namespace == shorter.namespace
        and longer.num_block_aligned >= shorter.num_block_aligned
        and longer.token_ids[:length] == shorter.token_ids
    )


def _common_prefix(prompt: Sequence[int], held: Sequence[int], limit: int) -> int:
    """Count the tokens of the common prefix, at most ``limit``, by bisection."""
    low, high = 0, min(len(prompt), len(held), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(prompt[low:middle]) == tuple(held[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
