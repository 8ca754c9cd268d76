"""Pass cost: what a verify pass of so many rows takes here, learned from the passes themselves."""

from __future__ import annotations

from bisect import bisect_left
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WINDOW = 15
# A bucket measured only so often is doubted once it has not been used for some passes: had its
# passes been slow by chance, it would never be chosen, and never measured, again.
_FEW, _SOON, _LATE = 3, 64, 2048


class PassCost:
    """A running table of seconds per row bucket.

    Each bucket keeps the median of its last passes, so that one slow pass (the first of its
    shape, a busy machine) does not count. Buckets never seen borrow the nearest that was, scaled
    by a prior slope; the table never falls with more rows.

    Args:
        row_share: prior cost of one more row, as a share of a one-row pass.
    """

    def __init__(self, row_share: float) -> None:
        self._row_share = row_share
        self._recent: dict[int, list[float]] = {}
        self._last_used: dict[int, int] = {}
        self._num_passes = 0
        self._table: list[float] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Add one pass; the bucket is the nearest one."""
        bucket = _nearest(rows)
        self._num_passes += 1
        self._last_used[bucket] = self._num_passes
        recent = self._recent.setdefault(bucket, [])
        # Scaled to its bucket by the prior, so that 9 and 14 rows do not blur one another.
        recent.append(seconds * self._prior(bucket) / self._prior(rows))
        del recent[:-_WINDOW]
        self._table = None

    def seconds(self, rows: int) -> float:
        """Estimate a pass of so many rows; relative to a one-row pass before any was seen."""
        if self._table is None:
            self._table = self._make_table()
        table = self._table
        place = bisect_left(ROW_BUCKETS, rows)
        if place == 0:
            return table[0]
        if place == len(ROW_BUCKETS):
            return table[-1] * self._prior(rows) / self._prior(ROW_BUCKETS[-1])
        low, high = ROW_BUCKETS[place - 1], ROW_BUCKETS[place]
        share = (rows - low) / (high - low)
        return table[place - 1] + share * (table[place] - table[place - 1])

    def _make_table(self) -> list[float]:
        known = {
            bucket: median_low(recent)
            for bucket, recent in self._recent.items()
            if self._is_trusted(bucket, len(recent))
        }
        if not known:
            return [self._prior(bucket) for bucket in ROW_BUCKETS]
        values = []
        for bucket in ROW_BUCKETS:
            source = min(known, key=lambda seen: abs(seen - bucket))
            values.append(known[source] * self._prior(bucket) / self._prior(source))
        return _never_falling(values)

    def _is_trusted(self, bucket: int, num_seen: int) -> bool:
        age = self._num_passes - self._last_used[bucket]
        return age <= (_SOON if num_seen < _FEW else _LATE)

    def _prior(self, rows: int) -> float:
        return 1.0 + self._row_share * (rows - 1)


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
