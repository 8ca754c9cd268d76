"""Pass cost: what a verify pass of so many rows takes here, learned from the passes themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import pairwise
from math import exp, log
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WINDOW = 64  # passes, of whatever width, after which a bucket's next one replaces its old ones
_FEW = 3  # so many passes of a bucket are believed as much as its neighbours
_NEIGHBOUR = 0.5  # how much a bucket's passes say about the next bucket
_SETTLED = 4  # passes a table may serve if none was a surprise: making one takes a while
_HALF_LIFE = 128  # passes of other widths after which those of one count for half as many


class PassCost:
    """A running table of seconds per row bucket, made for a machine that others use as well.

    Noise only ever makes a pass slower, so a bucket counts as the fastest of its last passes. How
    far that departs from a prior slope is averaged with how far its neighbours do, unless it rests
    on enough recent passes. Thus a width seen once, in a bad moment, is not ruled out by it, and
    one that is no longer used is tried again in time. The table never falls with more rows. Shared
    by threads.

    Args:
        row_share: prior cost of one more row, as a share of a one-row pass.
        known: seconds by rows, from an earlier run or a measurement; a better prior.
    """

    def __init__(self, row_share: float, known: Mapping[int, float] | None = None) -> None:
        self._row_share = row_share
        self._known = sorted((known or {}).items())
        self._lock = RLock()
        self._recent: dict[int, deque[tuple[int, float]]] = {}
        self._num_passes = 0
        self._table: list[float] | None = None
        self._due = 0  # passes, at which the table is made anew

    def observe(self, rows: int, seconds: float) -> None:
        """Add one pass; the bucket is the nearest one."""
        with self._lock:
            self._observe(_nearest(rows), rows, seconds)

    def _observe(self, bucket: int, rows: int, seconds: float) -> None:
        self._num_passes += 1
        # In units of the prior, so that 9 and 14 rows do not blur one another.
        ratio = max(seconds, 1e-9) / self._prior(rows)
        recent = self._recent.setdefault(bucket, deque())
        fastest = min((known for _, known in recent), default=0.0)
        recent.append((self._num_passes, ratio))
        while recent[0][0] <= self._num_passes - _WINDOW:
            recent.popleft()
        if len(recent) <= _FEW or min(known for _, known in recent) != fastest:
            self._table = None

    @property
    def num_passes(self) -> int:
        """How many passes it was shown."""
        return self._num_passes

    def by_rows(self) -> dict[int, float]:
        """The estimates for the widths that were seen or known, in seconds."""
        with self._lock:
            seen = {*self._recent, *(rows for rows, _ in self._known)}
            return {rows: self.seconds(rows) for rows in sorted(seen)}

    def seconds(self, rows: int) -> float:
        """Estimate a pass of so many rows; relative to a one-row pass before any was seen."""
        table = self._table
        if table is None or self._num_passes >= self._due:
            with self._lock:
                table = self._table = self._dense(self._make_table())
                self._due = self._num_passes + _SETTLED
        if rows < len(table):
            return table[rows]
        return table[-1] * self._prior(rows) / self._prior(len(table) - 1)

    def _dense(self, values: Sequence[float]) -> list[float]:
        """The table for every number of rows, linear between the buckets; 0 costs as 1 does."""
        dense = [values[0]] * (ROW_BUCKETS[0] + 1)
        for (low, before), (high, after) in pairwise(zip(ROW_BUCKETS, values, strict=True)):
            step = (after - before) / (high - low)
            dense += [before + step * i for i in range(1, high - low + 1)]
        return dense

    def _make_table(self) -> list[float]:
        seen = [
            (ROW_BUCKETS.index(bucket), log(min(ratio for _, ratio in recent)), self._count(bucket))
            for bucket, recent in list(self._recent.items())
        ]
        if not seen:
            return [self._prior(bucket) for bucket in ROW_BUCKETS]
        values = []
        for place, bucket in enumerate(ROW_BUCKETS):
            own = [(departure, count) for other, departure, count in seen if other == place]
            others = [
                (departure, count * _NEIGHBOUR ** abs(place - other))
                for other, departure, count in seen
                if other != place
            ]
            values.append(self._prior(bucket) * exp(_believed(own, others)))
        return _never_falling(values)

    def _count(self, bucket: int) -> float:
        """How many passes a bucket's estimate is worth, old ones being worth less."""
        recent = self._recent[bucket]
        age = self._num_passes - recent[-1][0]
        return float(len(recent) * max(0.5 ** (age / _HALF_LIFE), 1e-9))

    def _prior(self, rows: int) -> float:
        if not self._known:
            return self._slope(rows)
        place = bisect_left(self._known, (rows, 0.0))
        if place == 0:
            at, seconds = self._known[0]
        elif place == len(self._known):
            at, seconds = self._known[-1]
        else:
            (low, before), (high, after) = self._known[place - 1 : place + 1]
            return before + (rows - low) / (high - low) * (after - before)
        return seconds * self._slope(rows) / self._slope(at)

    def _slope(self, rows: int) -> float:
        return 1.0 + self._row_share * (rows - 1)


def _believed(own: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Average a bucket's departure with its neighbours', the less the more passes it rests on."""
    if not others:
        return own[0][0]
    total = sum(weight for _, weight in others)
    borrowed = sum(departure * weight for departure, weight in others) / total
    if not own:
        return borrowed
    departure, count = own[0]
    trust = count**2 / (count**2 + _FEW**2)
    return trust * departure + (1 - trust) * borrowed


def _nearest(rows: int) -> int:
    return min(ROW_BUCKETS, key=lambda bucket: abs(bucket - rows))


def _never_falling(values: Sequence[float]) -> list[float]:
    """Fit the nearest non-decreasing sequence, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean = (before * size + mean * count) / (size + count)
            count += size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
