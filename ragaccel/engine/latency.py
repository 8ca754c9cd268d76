"""Latency: what passes cost by rows, length and sampling mode, measured and kept."""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.decoding.request import NO_RULES
from ragaccel.paths import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ragaccel.decoding.request import Request


ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WINDOW = 64  # passes, of whatever width, after which a bucket's next one replaces its old ones
_TRUSTED_PASSES = 3  # so many passes of a bucket are believed as much as its neighbours
_NEIGHBOUR_WEIGHT = 0.5  # how much a bucket's passes say about the next bucket
_TABLE_LIFETIME = 4  # passes a table may serve if none was a surprise: making one takes a while
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
        if len(recent) <= _TRUSTED_PASSES or min(known for _, known in recent) != fastest:
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
                table = self._table = self._interpolated(self._make_table())
                self._due = self._num_passes + _TABLE_LIFETIME
        if rows < len(table):
            return table[rows]
        return table[-1] * self._prior(rows) / self._prior(len(table) - 1)

    def _interpolated(self, values: Sequence[float]) -> list[float]:
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
        for index, bucket in enumerate(ROW_BUCKETS):
            own = [(departure, count) for other, departure, count in seen if other == index]
            others = [
                (departure, count * _NEIGHBOUR_WEIGHT ** abs(index - other))
                for other, departure, count in seen
                if other != index
            ]
            values.append(self._prior(bucket) * exp(_smoothed(own, others)))
        return _non_decreasing(values)

    def _count(self, bucket: int) -> float:
        """How many passes a bucket's estimate is worth, old ones being worth less."""
        recent = self._recent[bucket]
        age = self._num_passes - recent[-1][0]
        return float(len(recent) * max(0.5 ** (age / _HALF_LIFE), 1e-9))

    def _prior(self, rows: int) -> float:
        if not self._known:
            return self._slope(rows)
        index = bisect_left(self._known, (rows, 0.0))
        if index == 0:
            at, seconds = self._known[0]
        elif index == len(self._known):
            at, seconds = self._known[-1]
        else:
            (low, before), (high, after) = self._known[index - 1 : index + 1]
            return before + (rows - low) / (high - low) * (after - before)
        return seconds * self._slope(rows) / self._slope(at)

    def _slope(self, rows: int) -> float:
        return 1.0 + self._row_share * (rows - 1)


def _smoothed(own: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Average a bucket's departure with its neighbours', the less the more passes it rests on."""
    if not others:
        return own[0][0]
    total = sum(weight for _, weight in others)
    borrowed = sum(departure * weight for departure, weight in others) / total
    if not own:
        return borrowed
    departure, count = own[0]
    trust = count**2 / (count**2 + _TRUSTED_PASSES**2)
    return trust * departure + (1 - trust) * borrowed


def _nearest(rows: int) -> int:
    return min(ROW_BUCKETS, key=lambda bucket: abs(bucket - rows))


def _non_decreasing(values: Sequence[float]) -> list[float]:
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


_FORMAT = "ragaccel pass costs 1"
_SAVE_AFTER = 256  # passes
_GREEDY = "greedy"
_MIN_ATTENDED = 1024  # tokens; below, the weights make out what a pass costs
_MAX_ROWS = 4096

logger = logging.getLogger("ragaccel")


def sampling_mode(request: Request) -> str:
    """How the tokens of a request are chosen, as far as its settings make a row dearer."""
    sampling = request.sampling
    mode = _GREEDY if sampling.is_greedy else "sampled"
    if mode != _GREEDY and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        mode = "filtered"
    is_ruled = request.score_rules != NO_RULES
    if request.repetition_penalty != 1.0 or request.no_repeat_ngram_size or is_ruled:
        mode += ", penalized"
    if request.processors:
        mode += ", processed"
    return mode


@dataclass(frozen=True, slots=True)
class PassProfile:
    """What makes passes of as many rows cost differently, rounded up to powers of two.

    ``attended`` counts the tokens of the longest sequence, 1,024 and less being one profile.
    """

    mode: str = _GREEDY
    attended: int = _MIN_ATTENDED
    sequences: int = 1

    @classmethod
    def of(cls, mode: str, attended: int, sequences: int = 1) -> PassProfile:
        """Round up."""
        return cls(mode, max(_MIN_ATTENDED, _power(attended)), _power(sequences))

    @property
    def name(self) -> str:
        """What it is called in a file."""
        length = f", {self.attended} tokens" if self.attended > _MIN_ATTENDED else ""
        return f"{self.mode}{length}" + (f", x{self.sequences}" if self.sequences > 1 else "")

    def nearest(self) -> Iterator[str]:
        """Name the kinds whose costs tell most about it, the most telling first."""
        for mode in dict.fromkeys((self.mode, _GREEDY)):
            for sequences in dict.fromkeys((self.sequences, 1)):
                attended = self.attended
                while attended >= _MIN_ATTENDED:
                    yield PassProfile(mode, attended, sequences).name
                    attended //= 2


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class LatencyProfile:
    """A ``PassCost`` for each profile of pass; a file of them is a prior for the next run.

    A file that is no such file, or cannot be written, does no harm: costs are learned anew. It is
    written after every few hundred passes, atomically. Shared by threads.

    Args:
        row_share: prior cost of one more row, as a share of a one-row pass.
        path: the file, of one model on one device; without it nothing is kept.

    ``threads`` is how many of a processor's threads were measured to be fastest, None if that
    was not measured.
    """

    def __init__(self, row_share: float, path: Path | None = None) -> None:
        self.path = path
        self._row_share = row_share
        self.threads, self._known = _read(path) if path is not None else (None, {})
        self._costs: dict[str, PassCost] = {}
        self._lock = RLock()  # a request that is dropped may be closed anywhere, here too
        self._num_saved = 0

    def of(self, mode: str, attended: int = 0, sequences: int = 1) -> PassCost:
        """Return the costs of one profile of pass; the nearest known are a new one's prior."""
        profile = PassProfile.of(mode, attended, sequences)
        with self._lock:
            found = self._costs.get(profile.name)
            if found is None:
                known = next(filter(None, map(self._seconds, profile.nearest())), None)
                found = self._costs[profile.name] = PassCost(self._row_share, known)
            return found

    def replace(self, mode: str, seconds: dict[int, float], attended: int = 0) -> None:
        """Take measured seconds by rows in place of what was known of one profile of pass."""
        name = PassProfile.of(mode, attended).name
        with self._lock:
            self._known[name] = dict(seconds)
            self._costs[name] = PassCost(self._row_share, seconds)

    def _seconds(self, name: str) -> Mapping[int, float] | None:
        seen = self._costs.get(name)
        return seen.by_rows() if seen is not None and seen.num_passes else self._known.get(name)

    def by_profile(self) -> dict[str, dict[int, float]]:
        """Seconds by rows of each profile of pass that was seen or known."""
        with self._lock:
            seen = {mode: cost.by_rows() for mode, cost in self._costs.items() if cost.num_passes}
        return {**self._known, **seen}

    def save_if_due(self) -> None:
        """Save, if there was much to learn since the last time."""
        with self._lock:
            passes = sum(cost.num_passes for cost in self._costs.values())
            due = self.path is not None and passes >= self._num_saved + _SAVE_AFTER
            if due:
                self._num_saved = passes
        if due:
            self.save()

    def save(self) -> bool:
        """Write the file; say whether it could be written."""
        if self.path is None:
            return False
        kept = {mode: rows for mode, rows in self.by_profile().items() if "processed" not in mode}
        document: dict[str, Any] = {"format": _FORMAT, "seconds": kept}
        if self.threads is not None:
            document["threads"] = self.threads
        try:
            with atomic_write(self.path) as file:
                file.write(json.dumps(document, indent=1).encode())
        except OSError as error:
            logger.debug("pass costs are not kept: %s", error)
            return False
        return True


def _read(path: Path) -> tuple[int | None, dict[str, dict[int, float]]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            return None, {}
        threads = document.get("threads")
        if threads is not None and not (isinstance(threads, int) and 0 < threads <= _MAX_ROWS):
            return None, {}
        return threads, {mode: _checked(rows) for mode, rows in document["seconds"].items()}
    except Exception:  # learned anew: what it holds is no one's work
        return None, {}


def _checked(rows: Any) -> dict[int, float]:
    seconds = {int(number): float(value) for number, value in rows.items()}
    if not all(
        0 < number <= _MAX_ROWS and math.isfinite(value) and value > 0
        for number, value in seconds.items()
    ):
        raise ValueError("not a table of seconds by rows")
    return seconds


_BYTES = 1 << 28
_REPEATS = 7


def read_bandwidth(device: torch.device) -> float:
    """Measure how fast a device sums a quarter of a gigabyte, in bytes a second; the best of some.

    Far more than any cache holds, so that it is memory that is read.
    """
    numbers = torch.ones(_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(_REPEATS):
        _synchronize(device)
        started = perf_counter()
        numbers.sum()
        _synchronize(device)
        best = min(best, perf_counter() - started)
    return _BYTES / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
