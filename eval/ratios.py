"""Ratios and differences: paired comparisons with confidence intervals."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

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


def resampled_means(
    values: Sequence[float], groups: Sequence[Hashable], *, seed: int = 0
) -> NDArray[np.float64]:
    """Return the means of other draws of a set's groups, with replacement; the same every time.

    What belongs together (questions on one article) is drawn together: drawn one by one, values
    that resemble each other would make an interval too narrow.

    Args:
        values: One of every question: a figure, or the difference of two (which pairs them).
        groups: What each belongs to.
        seed: Of the draws; another one for means that are averaged with these.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("there is nothing to average")
    numbers: dict[Hashable, int] = {}
    group_of = [numbers.setdefault(group, len(numbers)) for group in groups]
    sums = np.bincount(group_of, weights=np.asarray(values, dtype=np.float64))
    sizes = np.bincount(group_of)
    count = len(numbers)
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    means: NDArray[np.float64] = (draws @ sums) / (draws @ sizes)
    return means


def middle_95(means: NDArray[np.float64]) -> tuple[float, float]:
    """Return the bounds between which 95 % of resampled means lie."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def spread(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Return a mean and the bounds of its 95 % interval, as results hold them."""
    low, high = middle_95(resampled_means(values, groups))
    return [round(number, 4) for number in (sum(values) / len(values), low, high)]
