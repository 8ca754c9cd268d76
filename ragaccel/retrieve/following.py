"""Following: the vectors of a store held for searching, as the store has them now."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ragaccel.forking import PerProcess
from ragaccel.retrieve.index import VectorIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ragaccel.retrieve.store import Store


class FollowedVectors:
    """The vector index of a store; loaded when first asked for, then changed by what changed.

    Safe to ask from several threads, and while another process writes to the store. A forked
    process goes on with the vectors that were loaded, in memory that the two share.

    Args:
        store: What to follow.
        dimension: Asked before vectors are loaded; may refuse the store, which can have been made
            anew since.
    """

    def __init__(self, store: Store, dimension: Callable[[], int]) -> None:
        self._store = store
        self._dimension = dimension
        self._index: VectorIndex | None = None
        self._state = ("", "")
        self._lock = PerProcess(threading.Lock)

    @contextmanager
    def current(self) -> Iterator[VectorIndex]:
        """The vectors as the store has them now, or as its open transaction sees them.

        They stay so to the end, so that every passage found is there to be read.
        """
        with self._lock.get():
            yield self._followed()

    def _followed(self) -> VectorIndex:
        state = self._store.state()
        index, self._index = self._index, None  # a change that does not end leaves nothing behind
        if index is None or state[0] != self._state[0]:
            index = VectorIndex(self._dimension())
            index.build(self._store.vectors())
        elif state != self._state:
            self._follow(index)
        self._index, self._state = index, state
        return index

    def _follow(self, index: VectorIndex) -> None:
        """Bring in what was changed; a row's vector never changes."""
        held, wanted = index.keys(), self._store.keys()
        gone = np.setdiff1d(held, wanted, assume_unique=True)
        new = np.setdiff1d(wanted, held, assume_unique=True)
        if gone.size:
            index.remove(gone)
        if new.size:
            for keys, vectors in self._store.vectors(new.tolist()):
                index.add(keys, vectors)
