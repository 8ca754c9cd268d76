"""Calibration: how far guesses are to be believed, learned from what became of earlier ones."""

from __future__ import annotations

from threading import RLock

import numpy as np

from ragaccel.draft.corpus import Ids
from ragaccel.draft.evidence import SOURCES, Table
from ragaccel.draft.growth import ODDS_DEPTHS, ODDS_LENGTHS, Pool
from ragaccel.draft.jit import compiled
from ragaccel.draft.restoring import State, checked

RATE = 0.02
"""How much one outcome moves a correction; constant, so that old outcomes fade."""
_LARGEST = 3.0  # a factor of twenty in the odds


class Calibration:
    """Corrections to the odds of a guess, by its source, the length of its match and its depth.

    The logarithm of a correction is the sum of three: of the source, of the source and length, of
    the source and depth. They follow the outcomes by stochastic gradient descent on the log-loss,
    so what is seen of one length tells something of the others. Shared by threads.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # an answer that is dropped may be remembered anywhere, here too
        self.clear()

    def clear(self) -> None:
        """Forget everything: all corrections are 1."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        sources = len(SOURCES)
        self._by_source = np.zeros(sources)
        self._by_length = np.zeros((sources, ODDS_LENGTHS + 1))
        self._by_depth = np.zeros((sources, ODDS_DEPTHS + 1))
        self.odds: Table = np.ones((sources, ODDS_LENGTHS + 1, ODDS_DEPTHS + 1))

    def learn(self, pool: Pool, nodes: Ids, emitted: Ids) -> None:
        """Learn from a grown tree and the tokens that came after its root.

        Every guess under a node that came true has an outcome, whether it was verified or not.
        """
        with self._lock:
            follow(
                pool, nodes, emitted, RATE, self._by_source, self._by_length, self._by_depth,
                self.odds,
            )  # fmt: skip

    def state(self) -> State:
        """What it learned, as arrays that do not change later; ``restore`` takes them in again."""
        with self._lock:
            return {
                "by_source": self._by_source.copy(),
                "by_length": self._by_length.copy(),
                "by_depth": self._by_depth.copy(),
            }

    def restore(self, state: State) -> None:
        """Know what a state knows, and nothing else.

        Raises:
            ValueError: arrays of another kind, or corrections beyond the bound.
        """
        sources, most = len(SOURCES), _LARGEST
        by_source = checked(state, "by_source", np.float64, (sources,), low=-most, high=most)
        shape = (sources, ODDS_LENGTHS + 1)
        by_length = checked(state, "by_length", np.float64, shape, low=-most, high=most)
        shape = (sources, ODDS_DEPTHS + 1)
        by_depth = checked(state, "by_depth", np.float64, shape, low=-most, high=most)
        with self._lock:
            self._reset()
            self._by_source, self._by_length, self._by_depth = by_source, by_length, by_depth
            write_odds(by_source, by_length, by_depth, self.odds)


@compiled
def bounded(logarithm: float) -> float:
    """A correction's logarithm, no larger than may be: what winds up takes long to come back."""
    return min(max(logarithm, -_LARGEST), _LARGEST)


@compiled
def follow(
    pool: Pool, nodes: Ids, emitted: Ids, rate: float,
    by_source: Table, by_length: Table, by_depth: Table, odds: Table,
) -> None:  # fmt: skip
    """Move the corrections a step towards the outcomes, and write their product to ``odds``."""
    node = 0
    for step in range(len(emitted)):
        if node < 0:
            break
        depth = min(step, ODDS_DEPTHS)
        true_child = -1
        before = pool.path_probs[nodes[node]]
        for child in range(node + 1, len(nodes)):
            guess = nodes[child]
            if pool.parents[guess] != node:
                continue
            came_true = pool.token_ids[guess] == emitted[step]
            if came_true:
                true_child = child
            kind, length = pool.kinds[guess], min(pool.lengths[guess], ODDS_LENGTHS)
            error = rate * ((1.0 if came_true else 0.0) - pool.path_probs[guess] / before)
            by_source[kind] = bounded(by_source[kind] + error)
            by_length[kind, length] = bounded(by_length[kind, length] + error)
            by_depth[kind, depth] = bounded(by_depth[kind, depth] + error)
        node = true_child
    write_odds(by_source, by_length, by_depth, odds)


@compiled
def write_odds(by_source: Table, by_length: Table, by_depth: Table, odds: Table) -> None:
    """Write the product of the corrections to ``odds``."""
    for kind in range(odds.shape[0]):
        for length in range(odds.shape[1]):
            for depth in range(odds.shape[2]):
                logarithm = by_source[kind] + by_length[kind, length] + by_depth[kind, depth]
                odds[kind, length, depth] = np.exp(bounded(logarithm))
