"""Calibration: how likely a drafted token is accepted, learned while decoding."""

from __future__ import annotations

from enum import IntEnum
from math import exp
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from ragaccel.drafting.arrays import Field, State, Table, check_state
from ragaccel.drafting.expansion import ODDS_DEPTHS, ODDS_LENGTHS, SOURCES, Nodes
from ragaccel.drafting.suffix_array import Ids
from ragaccel.jit import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence


RATE = 0.02
"""Step size of one outcome; constant, so that old outcomes fade."""
_MAX_LOG_ODDS = 3.0  # a factor of twenty in the odds
_FIELDS = {
    name: Field(np.float64, (len(SOURCES), *shape), -_MAX_LOG_ODDS, _MAX_LOG_ODDS)
    for name, shape in {
        "by_source": (),
        "by_length": (ODDS_LENGTHS + 1,),
        "by_depth": (ODDS_DEPTHS + 1,),
    }.items()
}


class Calibration:
    """Learned corrections of the odds of draft tokens, by source, match length and depth.

    The logarithm of a correction is the sum of three terms: source, source and length, source and
    depth. They follow the outcomes by stochastic gradient descent on the log-loss, so outcomes of
    one length also inform the others. Shared by threads.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # reentrant: code run by garbage collection may take it
        self.clear()

    def clear(self) -> None:
        """Reset all corrections to 1."""
        sources = len(SOURCES)
        with self._lock:
            self._by_source = np.zeros(sources)
            self._by_length = np.zeros((sources, ODDS_LENGTHS + 1))
            self._by_depth = np.zeros((sources, ODDS_DEPTHS + 1))
            self.odds: Table = np.ones((sources, ODDS_LENGTHS + 1, ODDS_DEPTHS + 1))

    def learn(self, nodes: Nodes, emitted: Ids) -> None:
        """Learn from a drafted tree and the tokens that were emitted after its root.

        Every child of an accepted node has an outcome, whether it was verified or not.
        """
        with self._lock:
            update_corrections(
                nodes, emitted, RATE, self._by_source, self._by_length, self._by_depth, self.odds
            )

    def state(self) -> State:
        """Return copies of the corrections; ``restore`` loads them."""
        with self._lock:
            return {
                "by_source": self._by_source.copy(),
                "by_length": self._by_length.copy(),
                "by_depth": self._by_depth.copy(),
            }

    def restore(self, state: State) -> None:
        """Replace the corrections with those of a state.

        Raises:
            ValueError: an array has another shape or type, or a correction is out of bounds.
        """
        by_source, by_length, by_depth = check_state(state, _FIELDS)
        with self._lock:
            self.clear()
            self._by_source, self._by_length, self._by_depth = by_source, by_length, by_depth
            write_odds(by_source, by_length, by_depth, self.odds)


@compiled
def clip_log_odds(logarithm: float) -> float:
    """Return the logarithm of a correction, clipped so that new outcomes can reverse it soon."""
    return min(max(logarithm, -_MAX_LOG_ODDS), _MAX_LOG_ODDS)


@compiled
def update_corrections(
    nodes: Nodes, emitted: Ids, rate: float,
    by_source: Table, by_length: Table, by_depth: Table, odds: Table,
) -> None:  # fmt: skip
    """Move the corrections one step towards the outcomes, and write their product to ``odds``."""
    node = 0
    for step in range(len(emitted)):
        if node < 0:
            break
        depth = min(step, ODDS_DEPTHS)
        right_child = -1
        before = nodes[node]["path_prob"]
        for child in range(node + 1, len(nodes)):
            draft = nodes[child]
            if draft["parent"] != node:
                continue
            is_right = draft["token_id"] == emitted[step]
            if is_right:
                right_child = child
            kind, length = draft["kind"], min(draft["length"], ODDS_LENGTHS)
            error = rate * ((1.0 if is_right else 0.0) - draft["path_prob"] / before)
            by_source[kind] = clip_log_odds(by_source[kind] + error)
            by_length[kind, length] = clip_log_odds(by_length[kind, length] + error)
            by_depth[kind, depth] = clip_log_odds(by_depth[kind, depth] + error)
        node = right_child
    write_odds(by_source, by_length, by_depth, odds)


@compiled
def write_odds(by_source: Table, by_length: Table, by_depth: Table, odds: Table) -> None:
    """Write the product of the corrections to ``odds`` [source, match length, depth]."""
    for kind in range(odds.shape[0]):
        for length in range(odds.shape[1]):
            for depth in range(odds.shape[2]):
                logarithm = by_source[kind] + by_length[kind, length] + by_depth[kind, depth]
                odds[kind, length, depth] = np.exp(clip_log_odds(logarithm))


DEPTHS, RANKS = 8, 4  # larger values count as the last
SPACE_RATE = 0.05
"""Step size of one outcome; constant, so that old outcomes fade."""
INITIAL_VALUE = 0.8
"""Number of tokens that mask tokens are expected to add before any outcome is known."""
VALUE_RATE = 0.05
DECAY_RATE = 0.01
"""Fraction by which an unused value returns to ``INITIAL_VALUE`` in every pass."""
_MAX_SPACE_LOG_ODDS = 4.0  # a factor of fifty in the odds
_MAX_VALUE = 64.0
_MIN_CHANCE = 1e-4  # probabilities are clipped to this distance from 0 and 1


Predictions = list[list[tuple[int, float]]]
"""For each position ahead, (token, probability) pairs, the likeliest first."""


class Ending(IntEnum):
    """The place in the draft tree at which a verification pass ended: its accepted leaf."""

    ROOT = 0
    """No draft token was right, or there was none."""
    INNER = 1
    """The model left the tree at a node with children."""
    END = 2
    """A whole branch was right, so a copied span may continue."""

    @classmethod
    def of(cls, node: int, *, has_children: bool) -> Ending:
        """Return the ending of a pass whose accepted leaf is this node."""
        if node == 0:
            return cls.ROOT
        return cls.INNER if has_children else cls.END


_SPACE_FIELDS = {
    "by_depth": Field(np.float64, (DEPTHS,), -_MAX_SPACE_LOG_ODDS, _MAX_SPACE_LOG_ODDS),
    "by_rank": Field(np.float64, (RANKS,), -_MAX_SPACE_LOG_ODDS, _MAX_SPACE_LOG_ODDS),
    "values": Field(np.float64, (len(Ending),), 0.0, _MAX_VALUE),
}


class SpaceCalibration:
    """Learned corrections of mask predictions. Each namespace has one, shared by threads.

    The log-odds of a prediction are the model's own plus two terms: one for the distance ahead, one
    for the rank. Both follow the outcomes by stochastic gradient descent on the log-loss.
    ``values`` holds, for each ``Ending`` of a pass, the average number of tokens that mask tokens
    added to the following pass.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # reentrant: code run by garbage collection may take it
        self.clear()

    def clear(self) -> None:
        """Reset all corrections and values."""
        with self._lock:
            self._by_depth, self._by_rank = [0.0] * DEPTHS, [0.0] * RANKS
            self.values: list[float] = [INITIAL_VALUE] * len(Ending)

    def chance(self, depth: int, rank: int, model_prob: float) -> float:
        """Return the corrected probability of a token, given that all tokens before it are right.

        Args:
            depth: the distance ahead, from 0.
            rank: the token's rank among the predictions for its position, from 0.
            model_prob: the model's own probability.
        """
        model_prob = min(max(model_prob, _MIN_CHANCE), 1.0 - _MIN_CHANCE)
        correction = self._by_depth[min(depth, DEPTHS - 1)] + self._by_rank[min(rank, RANKS - 1)]
        return 1.0 / (1.0 + (1.0 - model_prob) / model_prob * exp(-correction))

    def corrected(self, predictions: Predictions) -> Predictions:
        """Return predictions with their probabilities corrected."""
        return [
            [
                (token, self.chance(depth, rank, model_prob))
                for rank, (token, model_prob) in enumerate(row)
            ]
            for depth, row in enumerate(predictions)
        ]

    def learn(self, predictions: Predictions, actual: Sequence[int]) -> None:
        """Learn from the predictions for each position and the tokens that followed.

        A position has an outcome only if every token before it was predicted.
        """
        with self._lock:
            for depth, (row, token) in enumerate(zip(predictions, actual, strict=False)):
                for rank, (draft, model_prob) in enumerate(row):
                    error = SPACE_RATE * (
                        float(draft == token) - self.chance(depth, rank, model_prob)
                    )
                    _move(self._by_depth, min(depth, DEPTHS - 1), error)
                    _move(self._by_rank, min(rank, RANKS - 1), error)
                if all(draft != token for draft, _ in row):
                    break

    def record(self, ending: Ending, added: int) -> None:
        """Record how many tokens the mask tokens added after a pass with this ending."""
        with self._lock:
            values = self.values
            for other in Ending:
                rate = VALUE_RATE if other == ending else DECAY_RATE
                values[other] += rate * (
                    (added if other == ending else INITIAL_VALUE) - values[other]
                )

    def decay(self) -> None:
        """Move all values towards their initial value, after a pass without mask tokens."""
        with self._lock:
            self.values = [value + DECAY_RATE * (INITIAL_VALUE - value) for value in self.values]

    def state(self) -> State:
        """Return copies of corrections and values, in arrays; ``restore`` loads them."""
        with self._lock:
            return {
                "by_depth": np.array(self._by_depth),
                "by_rank": np.array(self._by_rank),
                "values": np.array(self.values),
            }

    def restore(self, state: State) -> None:
        """Replace corrections and values with those of a state.

        An empty state, from a file that was written without SPACE, resets them.

        Raises:
            ValueError: an array has another shape or type, or a number is out of bounds.
        """
        if not state:
            self.clear()
            return
        by_depth, by_rank, values = (found.tolist() for found in check_state(state, _SPACE_FIELDS))
        with self._lock:
            self._by_depth, self._by_rank, self.values = by_depth, by_rank, values


def _move(corrections: list[float], position: int, step: float) -> None:
    corrections[position] = min(
        max(corrections[position] + step, -_MAX_SPACE_LOG_ODDS), _MAX_SPACE_LOG_ODDS
    )
