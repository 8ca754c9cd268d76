"""Following: the vectors of a store held for searching, as the store has them now."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from ragaccel.retrieve.index import VectorIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragaccel.retrieve.store import Store


class FollowedVectors:
    """The vector index of a store; loaded when first asked for, then changed by what changed.

    Safe to ask from several threads, and while another process writes to the store.

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
        self._lock = threading.Lock()

    def current(self) -> VectorIndex:
        """The vectors as the store has them now."""
        with self._lock:
            state = self._store.state()
            if self._index is None or state[0] != self._state[0]:
                index = VectorIndex(self._dimension())
                index.build(self._store.vectors())
                self._index = index
            elif state != self._state:
                self._follow(self._index)
            self._state = state
            return self._index

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
