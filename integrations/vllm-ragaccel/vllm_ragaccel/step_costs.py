"""How long a step of the engine takes, by running requests and draft tokens, as measured."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

PLAIN_SECONDS = 0.02
"""Assumed time of a step before one was measured; only its relation to others matters."""
TOKEN_SHARE = 0.03
"""Assumed extra time per token of a step, in steps of no token, before one was measured."""
MIN_TOKEN_SHARE = 0.002
"""Extra time per draft token, in steps without any, that no measurement falls below: else noise
could make unlikely tokens look free."""
MAX_SAMPLES = 31
"""Latest steps of a size that count; their median is not moved by single slow steps."""
TABLE_STEPS = 8
"""Steps of known sizes after which the table is made anew."""

Samples = dict[int, deque[tuple[int, float]]]
"""Draft tokens of steps, and their time in the assumed one's, by powers of two of the tokens."""


class StepCosts:
    """The measured time of steps, in powers of two of running requests and of draft tokens.

    Between measured sizes the relation to the assumed time is interpolated.
    """

    def __init__(self) -> None:
        self._samples: dict[int, Samples] = {}
        self._num_new: dict[int, int] = {}  # samples since the last table, by requests
        self._tables: dict[int, tuple[tuple[int, int], list[float]]] = {}  # with their sizes

    def record(self, rows: int, drafts: int, seconds: float) -> None:
        """Record the time of a step over ``rows`` requests with ``drafts`` draft tokens in all."""
        size = rows.bit_length()
        sizes = self._samples.setdefault(size, {})
        samples = sizes.setdefault(drafts.bit_length(), deque(maxlen=MAX_SAMPLES))
        samples.append((drafts, seconds / _assumed_seconds(rows, drafts)))
        self._num_new[size] = self._num_new.get(size, 0) + 1
        # A median of many samples hardly moves, and a table takes longer than the rest of a draft.
        if len(samples) < TABLE_STEPS or self._num_new[size] >= TABLE_STEPS:
            self._num_new[size] = 0
            self._tables.pop(size, None)

    def table(self, rows: int, max_drafts: int, *, measured: bool = True) -> list[float]:
        """Return the seconds of a step with 0, 1, 2 … ``max_drafts`` draft tokens.

        More draft tokens never cost less. Pass ``measured=False`` for the assumed times.
        """
        if not measured:
            return self._table_of(rows, max_drafts, {})
        size = rows.bit_length()
        sizes, table = self._tables.get(size, (None, []))
        if sizes != (rows, max_drafts):
            table = self._table_of(rows, max_drafts, self._samples.get(size, {}))
            self._tables[size] = (rows, max_drafts), table
        return table

    @staticmethod
    def _table_of(rows: int, max_drafts: int, sizes: Samples) -> list[float]:
        drafts = np.arange(max_drafts + 1)
        seconds = _assumed_seconds(rows, 1) + (drafts - 1) * PLAIN_SECONDS * TOKEN_SHARE
        if sizes:
            measured = [sizes[size] for size in sorted(sizes)]
            known = [median(count for count, _ in samples) for samples in measured]
            ratios = [median(ratio for _, ratio in samples) for samples in measured]
            seconds = seconds * np.interp(drafts, known, ratios)
        least = seconds[0] * (1.0 + MIN_TOKEN_SHARE * drafts)
        table: list[float] = np.maximum.accumulate(np.maximum(seconds, least)).tolist()
        return table


def _assumed_seconds(rows: int, drafts: int) -> float:
    return PLAIN_SECONDS * (1.0 + TOKEN_SHARE * (rows + drafts))
