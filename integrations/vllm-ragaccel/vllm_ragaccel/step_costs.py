"""How long a step of the engine takes, by running requests and draft tokens, as measured."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

PLAIN_SECONDS = 0.02
"""Assumed time of a step before one was measured; only its relation to others matters."""
TOKEN_SHARE = 0.03
"""Assumed extra time per token of a step, in steps of no token, before one was measured."""
MIN_TOKEN_SHARE = 0.002
"""Extra time per draft token, in steps without any, that no measurement falls below: else noise
could make unlikely tokens look free."""
MAX_SAMPLES = 31
"""Latest steps of a size that count; their median is not moved by single slow steps."""

Table = NDArray[np.floating[Any]]


class StepCosts:
    """The measured time of steps, in powers of two of running requests and of draft tokens.

    Between measured sizes the relation to the assumed time is interpolated.
    """

    def __init__(self) -> None:
        self._samples: dict[int, dict[int, deque[tuple[int, float]]]] = {}
        self._points: dict[int, tuple[list[float], list[float]]] = {}

    def record(self, rows: int, drafts: int, seconds: float) -> None:
        """Record the time of a step over ``rows`` requests with ``drafts`` draft tokens in all."""
        sizes = self._samples.setdefault(rows.bit_length(), {})
        samples = sizes.setdefault(drafts.bit_length(), deque(maxlen=MAX_SAMPLES))
        samples.append((drafts, seconds / _assumed_seconds(rows, drafts)))
        measured = [sizes[size] for size in sorted(sizes)]
        self._points[rows.bit_length()] = (
            [median(drafts for drafts, _ in samples) for samples in measured],
            [median(ratio for _, ratio in samples) for samples in measured],
        )

    def table(self, rows: int, max_drafts: int, *, measured: bool = True) -> Table:
        """Return [max_drafts + 1] the seconds of a step with 0, 1, 2 … draft tokens.

        More draft tokens never cost less. Pass ``measured=False`` for the assumed times.
        """
        drafts = np.arange(max_drafts + 1)
        seconds: Table = _assumed_seconds(rows, 1) + (drafts - 1) * PLAIN_SECONDS * TOKEN_SHARE
        if measured and rows.bit_length() in self._points:
            seconds = seconds * np.interp(drafts, *self._points[rows.bit_length()])
        return np.maximum.accumulate(
            np.maximum(seconds, seconds[0] * (1.0 + MIN_TOKEN_SHARE * drafts))
        )


def _assumed_seconds(rows: int, drafts: int) -> float:
    return PLAIN_SECONDS * (1.0 + TOKEN_SHARE * (rows + drafts))
