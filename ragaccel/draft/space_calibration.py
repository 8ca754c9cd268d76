"""SPACE's calibration: how far chances at mask tokens are to be believed, and what they add."""

from __future__ import annotations

from enum import IntEnum
from math import exp
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from ragaccel.draft.restoring import State, checked

if TYPE_CHECKING:
    from collections.abc import Sequence

DEPTHS, RANKS = 8, 4  # beyond, all count as the last
RATE = 0.05
"""How much one outcome moves a correction; constant, so that old outcomes fade."""
VALUE = 0.8
"""Tokens that mask tokens are expected to add, until it is known."""
VALUE_RATE = 0.05
RETURN_RATE = 0.01
"""How much a value that is not tried comes back to what was expected at first, each pass."""
_LARGEST = 4.0  # a factor of fifty in the odds
_MOST_VALUE = 64.0
_CLEAR = 1e-4  # chances nearer to 0 or 1 count as this


Ranked = list[list[tuple[int, float]]]
"""For each place ahead the likeliest tokens and their chances, the likeliest first."""


class Ending(IntEnum):
    """Where a verify pass ended: which leaf of its tree was accepted."""

    ROOT = 0
    """No guess was right, or there was none."""
    WITHIN = 1
    """The model went another way than the guesses below."""
    END = 2
    """All of a branch was right: what was copied may go on."""

    @classmethod
    def of(cls, node: int, *, has_children: bool) -> Ending:
        """Tell it of a node."""
        if node == 0:
            return cls.ROOT
        return cls.WITHIN if has_children else cls.END


class SpaceCalibration:
    """Learns while decoding; shared by threads, one for each namespace.

    The logarithm of a guess's odds is the model's own, corrected by a sum of two: of how far ahead
    it is, and of its rank. Both follow the outcomes by stochastic gradient descent on the log-loss.
    ``values`` are the tokens that mask tokens added to the pass after one that ended so.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # an answer that is dropped may be remembered anywhere, here too
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._by_depth, self._by_rank = [0.0] * DEPTHS, [0.0] * RANKS
            self.values: list[float] = [VALUE] * len(Ending)

    def chance(self, depth: int, rank: int, own: float) -> float:
        """Correct the chance the model gave a token so far ahead, if all before it are right."""
        own = min(max(own, _CLEAR), 1.0 - _CLEAR)
        correction = self._by_depth[min(depth, DEPTHS - 1)] + self._by_rank[min(rank, RANKS - 1)]
        return 1.0 / (1.0 + (1.0 - own) / own * exp(-correction))

    def corrected(self, ranked: Ranked) -> Ranked:
        """Correct the chances of all that was guessed."""
        return [
            [(token, self.chance(depth, rank, own)) for rank, (token, own) in enumerate(row)]
            for depth, row in enumerate(ranked)
        ]

    def learn(self, ranked: Ranked, came: Sequence[int]) -> None:
        """Learn from what was guessed for each place and the tokens that came.

        A place tells something only if the tokens before it were among the guesses.
        """
        with self._lock:
            for depth, (row, token) in enumerate(zip(ranked, came, strict=False)):
                for rank, (guess, own) in enumerate(row):
                    error = RATE * (float(guess == token) - self.chance(depth, rank, own))
                    _move(self._by_depth, min(depth, DEPTHS - 1), error)
                    _move(self._by_rank, min(rank, RANKS - 1), error)
                if all(guess != token for guess, _ in row):
                    break

    def count(self, ending: Ending, added: int) -> None:
        """Note how many tokens mask tokens added after a pass that ended so."""
        with self._lock:
            values = self.values
            for other in Ending:
                rate = VALUE_RATE if other == ending else RETURN_RATE
                values[other] += rate * ((added if other == ending else VALUE) - values[other])

    def rest(self) -> None:
        """Note a pass without mask tokens: what they would have added is less sure."""
        with self._lock:
            self.values = [value + RETURN_RATE * (VALUE - value) for value in self.values]

    def state(self) -> State:
        """What it learned, as arrays; ``restore`` takes them in again."""
        with self._lock:
            return {
                "by_depth": np.array(self._by_depth),
                "by_rank": np.array(self._by_rank),
                "values": np.array(self.values),
            }

    def restore(self, state: State) -> None:
        """Know what a state knows, and nothing else; an empty one is of a time before SPACE.

        Raises:
            ValueError: arrays of another kind, or numbers beyond their bounds.
        """
        if not state:
            self.clear()
            return
        most = _LARGEST
        by_depth = checked(state, "by_depth", np.float64, (DEPTHS,), low=-most, high=most)
        by_rank = checked(state, "by_rank", np.float64, (RANKS,), low=-most, high=most)
        values = checked(state, "values", np.float64, (len(Ending),), low=0.0, high=_MOST_VALUE)
        with self._lock:
            self._by_depth, self._by_rank = by_depth.tolist(), by_rank.tolist()
            self.values = values.tolist()


def _move(corrections: list[float], place: int, step: float) -> None:
    corrections[place] = min(max(corrections[place] + step, -_LARGEST), _LARGEST)
