"""Ratios: paired comparisons with confidence intervals."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median ratio with its 95 % interval over so many examples, and the least of them."""

    value: float
    low: float
    high: float
    worst: float
    examples: int


def paired_ratio(
    ours: Mapping[tuple[str, int], float], theirs: Mapping[tuple[str, int], float]
) -> Ratio:
    """Compare two speeds, keyed by example and round: the median over examples of ours / theirs.

    Speeds are divided within a round, where they were measured one after the other; the rounds of
    an example are reduced to their median. The interval is a percentile bootstrap over examples: it
    tells how far another draw of examples could move the median, and nothing of another machine.

    Raises:
        ValueError: no example was measured on both sides.
    """
    rounds: defaultdict[str, list[float]] = defaultdict(list)
    for key in ours.keys() & theirs.keys():
        rounds[key[0]].append(ours[key] / theirs[key])
    if not rounds:
        raise ValueError("no example was measured on both sides")
    ratios = sorted(median(values) for values in rounds.values())
    low, high = bootstrap_interval(ratios)
    return Ratio(median(ratios), low, high, ratios[0], len(ratios))


def bootstrap_interval(values: Sequence[float], resamples: int = _RESAMPLES) -> tuple[float, float]:
    """Return the 95 % percentile-bootstrap interval of the median; the same every time."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]
