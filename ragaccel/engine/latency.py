"""Latency: seconds of a pass by rows, length and sampling mode, measured and stored."""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import log
from operator import itemgetter
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ragaccel.paths import atomic_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ragaccel.decoding.request import Request


ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WINDOW = 64  # passes of any width, after which a measurement is dropped
_TRUSTED_PASSES = 3  # passes of a bucket that weigh as much as its neighbours
_NEIGHBOUR_WEIGHT = 0.5  # weight of the next bucket's passes, per bucket of distance
_TABLE_LIFETIME = 16  # passes before the table is built again, as building it takes time
_HALF_LIFE = 128  # passes of other widths after which a bucket's passes weigh half
_MASK_SMOOTHING = 0.25  # weight of the latest pass with mask tokens in the time that they add
_MASK_DECAY = 0.99  # of that time with every pass without them, so that they are tried again
_RATIO = itemgetter(1)
_ALL_ROWS = np.arange(ROW_BUCKETS[-1] + 1)
_NEAREST = [min(ROW_BUCKETS, key=lambda bucket: abs(bucket - rows)) for rows in _ALL_ROWS.tolist()]
_INDEX = {bucket: index for index, bucket in enumerate(ROW_BUCKETS)}
_ORDER = np.arange(len(ROW_BUCKETS))
_WEIGHTS = _NEIGHBOUR_WEIGHT ** np.abs(_ORDER[:, None] - _ORDER) - np.eye(len(ROW_BUCKETS))
"""Weight of each bucket's passes for the estimate of another bucket."""


class PassCost:
    """An estimate of a pass's seconds by its rows, robust against other load on the machine.

    Noise only makes a pass slower, so the fastest of a bucket's recent passes counts. The ratio of
    its time to a prior is averaged with the ratios of neighbouring buckets, unless the bucket has
    enough recent passes. Thus one slow pass does not rule a width out, and a width that is no
    longer used is tried again later. Estimates never decrease with more rows. Thread-safe.

    Args:
        row_share: assumed cost of one more row, as a share of a one-row pass.
        known: seconds by rows, from an earlier run or a measurement, as the prior.
    """

    def __init__(self, row_share: float, known: Mapping[int, float] | None = None) -> None:
        self._row_share = row_share
        self._known = sorted((known or {}).items())
        self._priors = [self._prior(bucket) for bucket in ROW_BUCKETS]
        self._lock = RLock()
        self._recent: dict[int, deque[tuple[int, float]]] = {}
        self._fastest: dict[int, float] = {}  # ratio of each bucket's recent passes
        self._num_passes = 0
        self._mask_seconds: float | None = None
        self._table: list[float] | None = None
        self._due = 0  # number of passes at which the table is built again

    def observe(self, rows: int, seconds: float, *, has_masks: bool = False) -> None:
        """Add the measured seconds of one pass to the nearest bucket.

        Of a pass with mask tokens, learn what they add to the estimate, once there is one.
        """
        with self._lock:
            if has_masks and (self._fastest or self._known):
                added = max(0.0, seconds - self.seconds(rows))
                last = added if self._mask_seconds is None else self._mask_seconds
                self._mask_seconds = last + _MASK_SMOOTHING * (added - last)
                return
            self._observe(_NEAREST[min(rows, ROW_BUCKETS[-1])], rows, seconds)
            if self._mask_seconds is not None:
                self._mask_seconds *= _MASK_DECAY

    @property
    def mask_seconds(self) -> float:
        """How much longer a pass takes if any of its rows is a mask token."""
        return self._mask_seconds or 0.0

    def _observe(self, bucket: int, rows: int, seconds: float) -> None:
        self._num_passes += 1
        # In units of the prior, so that 9 and 14 rows are comparable in one bucket.
        ratio = max(seconds, 1e-9) / self._prior(rows)
        recent = self._recent.setdefault(bucket, deque())
        recent.append((self._num_passes, ratio))
        before = self._fastest.get(bucket, math.inf)
        fastest = min(before, ratio)
        while recent[0][0] <= self._num_passes - _WINDOW:
            if recent.popleft()[1] <= fastest:
                fastest = min(map(_RATIO, recent))
        self._fastest[bucket] = fastest
        if len(recent) <= _TRUSTED_PASSES or fastest != before:
            self._table = None

    @property
    def num_passes(self) -> int:
        """How many passes were observed."""
        return self._num_passes

    def by_rows(self) -> dict[int, float]:
        """Return the estimated seconds by rows, for the widths observed or known."""
        with self._lock:
            seen = {*self._recent, *(rows for rows, _ in self._known)}
            return {rows: self.seconds(rows) for rows in sorted(seen)}

    def seconds(self, rows: int) -> float:
        """Estimate the seconds of a pass; in units of a one-row pass if nothing was measured."""
        table = self.by_num_rows()
        if rows < len(table):
            return table[rows]
        return table[-1] * self._prior(rows) / self._priors[-1]

    def step_costs(self, max_rows: int) -> Callable[[int], float]:
        """Return ``seconds`` for up to ``max_rows`` rows, with the estimates of this moment."""
        table = self.by_num_rows()
        return table.__getitem__ if max_rows < len(table) else self.seconds

    def by_num_rows(self) -> Sequence[float]:
        """Return the estimated seconds of passes of 0, 1, 2, … rows, up to the largest bucket."""
        table = self._table
        if table is None or self._num_passes >= self._due:
            with self._lock:
                table = self._table = self._make_table()
                self._due = self._num_passes + _TABLE_LIFETIME
        return table

    def _make_table(self) -> list[float]:
        """Interpolate the buckets linearly for every number of rows; 0 rows cost as 1 does."""
        dense: list[float] = np.interp(_ALL_ROWS, ROW_BUCKETS, self._bucket_seconds()).tolist()
        return dense

    def _bucket_seconds(self) -> list[float]:
        """Estimate the seconds of each bucket: a mean of its own log ratio and its neighbours'."""
        if not self._fastest:
            return self._priors
        log_ratios, counts = np.zeros((2, len(ROW_BUCKETS)))
        for bucket, ratio in self._fastest.items():
            log_ratios[_INDEX[bucket]], counts[_INDEX[bucket]] = log(ratio), self._count(bucket)
        total = _WEIGHTS @ counts  # of a bucket's neighbours
        is_alone = total == 0.0  # the only bucket seen
        smoothed = _WEIGHTS @ (counts * log_ratios) / (total + is_alone)
        squares = counts * counts
        trust = np.where(is_alone, 1.0, squares / (squares + _TRUSTED_PASSES**2))
        smoothed += trust * (log_ratios - smoothed)
        return _non_decreasing((self._priors * np.exp(smoothed)).tolist())

    def _count(self, bucket: int) -> float:
        """Return the weight of a bucket's estimate, in passes, reduced with age."""
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


def _non_decreasing(values: Sequence[float]) -> list[float]:
    """Fit the nearest non-decreasing sequence (pool adjacent violators)."""
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
_MIN_ATTENDED = 1024  # tokens; below, reading the weights dominates the time of a pass
_MAX_ROWS = 4096

logger = logging.getLogger("ragaccel")


def sampling_mode(request: Request) -> str:
    """Return a name for the sampling settings of a request that change the time of a row."""
    sampling = request.sampling
    mode = _GREEDY if sampling.is_greedy else "sampled"
    if mode != _GREEDY and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        mode = "filtered"
    if request.repetition_penalty != 1.0 or request.no_repeat_ngram_size:
        mode += ", penalized"
    if request.processors:
        mode += ", processed"
    return mode


@dataclass(frozen=True, slots=True)
class PassProfile:
    """The properties of a pass, besides its rows, that its time depends on.

    ``mode`` is the sampling mode, ``attended`` the tokens of the longest sequence, ``sequences``
    their number. Numbers are rounded up to powers of two, and ``attended`` to 1,024 at least.
    """

    mode: str = _GREEDY
    attended: int = _MIN_ATTENDED
    sequences: int = 1

    @classmethod
    def of(cls, mode: str, attended: int, sequences: int = 1) -> PassProfile:
        """Return the profile of a pass, with its numbers rounded up."""
        return cls(mode, max(_MIN_ATTENDED, _power(attended)), _power(sequences))

    @property
    def name(self) -> str:
        """The profile's key in the latency file."""
        length = f", {self.attended} tokens" if self.attended > _MIN_ATTENDED else ""
        return f"{self.mode}{length}" + (f", x{self.sequences}" if self.sequences > 1 else "")

    def nearest(self) -> Iterator[str]:
        """Yield the names of the most similar profiles, this one first."""
        for mode in dict.fromkeys((self.mode, _GREEDY)):
            for sequences in dict.fromkeys((self.sequences, 1)):
                attended = self.attended
                while attended >= _MIN_ATTENDED:
                    yield PassProfile(mode, attended, sequences).name
                    attended //= 2


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class LatencyProfile:
    """A ``PassCost`` for each ``PassProfile``, stored in a file as the prior of the next run.

    The file is written atomically after every few hundred passes. A damaged file is ignored, and a
    failed write does no harm: latencies are measured again. Thread-safe.

    ``threads`` is the number of CPU threads that was measured to be fastest, None if not measured.

    Args:
        row_share: assumed cost of one more row, as a share of a one-row pass.
        path: the file for this model on this device; ``None`` stores nothing.
    """

    def __init__(self, row_share: float, path: Path | None = None) -> None:
        self.path = path
        self._row_share = row_share
        self.threads, self._known = _read(path) if path is not None else (None, {})
        self._costs: dict[str, PassCost] = {}
        self._lock = RLock()  # re-entrant: garbage collection may close a request anywhere
        self._num_saved = 0

    def of(self, mode: str, attended: int = 0, sequences: int = 1) -> PassCost:
        """Return the latencies of a profile; a new profile starts from the nearest known one."""
        profile = PassProfile.of(mode, attended, sequences)
        with self._lock:
            found = self._costs.get(profile.name)
            if found is None:
                known = next(filter(None, map(self._seconds, profile.nearest())), None)
                found = self._costs[profile.name] = PassCost(self._row_share, known)
            return found

    def replace(self, mode: str, seconds: dict[int, float], attended: int = 0) -> None:
        """Replace the latencies of one profile by measured seconds by rows."""
        name = PassProfile.of(mode, attended).name
        with self._lock:
            self._known[name] = dict(seconds)
            self._costs[name] = PassCost(self._row_share, seconds)

    def _seconds(self, name: str) -> Mapping[int, float] | None:
        seen = self._costs.get(name)
        return seen.by_rows() if seen is not None and seen.num_passes else self._known.get(name)

    def by_profile(self) -> dict[str, dict[int, float]]:
        """Return the seconds by rows of each profile observed or known."""
        with self._lock:
            seen = {mode: cost.by_rows() for mode, cost in self._costs.items() if cost.num_passes}
        return {**self._known, **seen}

    def save_if_due(self) -> None:
        """Write the file if enough passes were observed since the last write."""
        with self._lock:
            passes = sum(cost.num_passes for cost in self._costs.values())
            due = self.path is not None and passes >= self._num_saved + _SAVE_AFTER
            if due:
                self._num_saved = passes
        if due:
            self.save()

    def save(self) -> bool:
        """Write the file; return whether that succeeded."""
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
            logger.debug("the latency file cannot be written: %s", error)
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
    except Exception:  # a damaged file is ignored: its contents are measured again
        return None, {}


def _checked(rows: Any) -> dict[int, float]:
    seconds = {int(number): float(value) for number, value in rows.items()}
    if not all(
        0 < number <= _MAX_ROWS and math.isfinite(value) and value > 0
        for number, value in seconds.items()
    ):
        raise ValueError("the file does not hold positive, finite seconds by rows")
    return seconds


_BYTES = 1 << 28
_REPEATS = 7
_QUEUED_SUMS = 32


def read_bandwidth(device: torch.device) -> float:
    """Measure a device's memory bandwidth, in bytes per second: the best of seven sums.

    The array of 256 MiB is larger than any cache. A GPU reads it in a twentieth of a millisecond,
    no more than it takes to start a sum and to wait for it: there many sums are measured at once.
    """
    numbers = torch.ones(_BYTES // 4, dtype=torch.float32, device=device)
    best, num_sums = float("inf"), 1 if device.type == "cpu" else _QUEUED_SUMS
    for _ in range(_REPEATS):
        _synchronize(device)
        started = perf_counter()
        for _ in range(num_sums):
            numbers.sum()
        _synchronize(device)
        best = min(best, perf_counter() - started)
    return num_sums * _BYTES / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
