"""Messages: what the first of several processes tells the others of its caches and passes.

Each is a run of 64-bit words: ``[kind, words in all, events, the events one after another]``, then,
of a pass, ``[rows, keep, exact, spans, six words a span]``, token ids, positions, and the bits of
who sees whom where rows are no plain runs.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch

from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.layout import Rows, Span

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch import Tensor

    Words: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

END, ALIVE, PASS = range(3)
"""Kinds of messages: nothing will follow; no pass for now; a pass."""

_MOVED, _COPIED, _DROPPED = range(3)
_BITS = 64  # of a word


class Journal:
    """What happened to the caches of this process besides passes, for others that mirror them."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, ...]] = deque()
        self._numbers: WeakKeyDictionary[KVCache, int] = WeakKeyDictionary()
        self._next = count()

    def new_cache(self, capacity: int | None, limit: int | None) -> KVCache:
        """Make an empty cache that is told of from now on."""
        cache = KVCache(capacity, limit, journal=self)
        number = self._numbers[cache] = next(self._next)
        # Without a reference to the cache: whichever thread drops it, only a note is made.
        finalize(cache, self._events.append, (_DROPPED, number)).atexit = False
        return cache

    def number(self, cache: KVCache) -> int:
        """The number under which a cache is told of."""
        return self._numbers[cache]

    def moved(self, cache: KVCache, target: int, sources: Sequence[int]) -> None:
        """Note that states were moved from some slots to those from ``target`` on."""
        self._events.append((_MOVED, self._numbers[cache], target, len(sources), *sources))

    def copied(self, cache: KVCache, source: KVCache, length: int) -> None:
        """Note that a cache now holds the first ``length`` tokens of another."""
        self._events.append((_COPIED, self._numbers[cache], self._numbers[source], length))

    def read(self) -> list[tuple[int, ...]]:
        """Take out what was noted since the last time, in order."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events


def message(kind: int, journal: Journal, rows: Rows | None = None, keep: int = 0) -> Words:
    """Put into words what a journal has noted, and a pass if there is one."""
    events = journal.read()
    words = [kind, 0, len(events), *(word for event in events for word in event)]
    parts: list[Words] = []
    if rows is not None:
        words += [rows.num_rows, keep, int(rows.exact), len(rows.spans)]
        for span in rows.spans:
            cache, branches = span.cache, int(span.sees is not None)
            words += [journal.number(cache), cache.capacity]
            words += [span.start, span.num_rows, span.depth, branches]
        parts = [torch.cat((rows.token_ids[0], rows.positions[0])).cpu().numpy(), _bits(rows)]
    whole = np.concatenate([np.array(words, dtype=np.int64), *parts])
    whole[1] = len(whole)
    return whole


class Mirror:
    """The caches of another process, held alike by doing what its messages say.

    Args:
        device: where passes go in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._caches: dict[int, KVCache] = {}

    def read(self, words: Words) -> tuple[int, Rows | None, int]:
        """Do what happened elsewhere; return the message's kind, and the pass and its ``keep``.

        The pass has been begun on every cache.

        Raises:
            RuntimeError: a cache does not hold what the pass builds on.
        """
        text = _Reader(words)
        kind, _, num_events = text.some(3)
        for _ in range(num_events):
            self._repeat(text)
        if kind != PASS:
            return kind, None, 0
        num_rows, keep, is_exact, num_spans = text.some(4)
        heads = [text.some(6) for _ in range(num_spans)]
        inputs = torch.from_numpy(text.take(2 * num_rows).copy()).view(2, num_rows)
        sees = iter(_sees(text, [n for *_, n, _, branches in heads if branches]))
        spans, first = [], 0
        for number, capacity, start, n, depth, branches in heads:
            cache = self._begun(number, capacity, start, n)
            own = next(sees).to(self._device) if branches else None
            spans.append(Span(cache, first, n, start, depth, own))
            first += n
        inputs = inputs.to(self._device)
        return kind, Rows(inputs[:1], inputs[1:], tuple(spans), exact=bool(is_exact)), keep

    @property
    def num_caches(self) -> int:
        """How many caches are held."""
        return len(self._caches)

    def _repeat(self, text: _Reader) -> None:
        kind, number = text.some(2)
        if kind == _MOVED:
            target, num_sources = text.some(2)
            self._caches[number].move(target, text.some(num_sources))
        elif kind == _COPIED:
            source, length = text.some(2)
            self._cache(number).copy_from(self._caches[source], length)
        else:
            self._caches.pop(number, None)

    def _cache(self, number: int) -> KVCache:
        if number not in self._caches:
            self._caches[number] = KVCache()
        return self._caches[number]

    def _begun(self, number: int, capacity: int, start: int, num_rows: int) -> KVCache:
        cache = self._cache(number)
        cache.keep(range(cache.stop - cache.length))  # which rows were kept shows in ``start``
        cache.truncate(start)
        if cache.length != start:
            raise RuntimeError(f"cache {number} holds {cache.length} tokens here, not {start}")
        cache.reserve(capacity)
        cache.begin(num_rows)
        return cache


class _Reader:
    """Words, read one after another."""

    def __init__(self, words: Words) -> None:
        self._words, self._at = words, 0

    def take(self, count: int) -> Words:
        self._at += count
        return self._words[self._at - count : self._at]

    def some(self, count: int) -> list[int]:
        found: list[int] = self.take(count).tolist()
        return found


def _bits(rows: Rows) -> Words:
    """Pack who sees whom, span after span, where rows are no plain runs."""
    sees = [span.sees.reshape(-1) for span in rows.spans if span.sees is not None]
    if not sees:
        return np.zeros(0, dtype=np.int64)
    packed = np.packbits(torch.cat(sees).cpu().numpy())
    return np.pad(packed, (0, -len(packed) % 8)).view(np.int64)


def _sees(text: _Reader, sizes: Sequence[int]) -> list[Tensor]:
    """Unpack who sees whom: [n, n] bool for each size n."""
    total = sum(n * n for n in sizes)
    packed = text.take(-(-total // _BITS)).copy().view(np.uint8)
    bits = torch.from_numpy(np.unpackbits(packed, count=total).astype(np.bool_))
    sees, at = [], 0
    for n in sizes:
        sees.append(bits[at : at + n * n].view(n, n))
        at += n * n
    return sees
