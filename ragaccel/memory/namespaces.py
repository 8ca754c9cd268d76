"""Namespaces: what was learned from each tenant's requests, kept apart and bounded together."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock

from ragaccel.draft.calibration import Calibration
from ragaccel.draft.recycling import Adjacency
from ragaccel.errors import ConfigurationError
from ragaccel.memory.history import History

DEFAULT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Recollection:
    """What is remembered of one namespace; each drafter has a calibration of its own."""

    history: History
    adjacency: Adjacency
    calibration: Calibration = field(default_factory=Calibration)
    recycling_calibration: Calibration = field(default_factory=Calibration)

    @property
    def num_bytes(self) -> int:
        """How large it is, the few hundred numbers of its calibrations aside."""
        return self.history.num_bytes + self.adjacency.num_bytes

    def clear(self) -> None:
        """Forget everything."""
        self.history.clear()
        self.adjacency.clear()
        self.calibration.clear()
        self.recycling_calibration.clear()


class Memory:
    """Recollections by namespace: nothing learned in one is ever drafted in another.

    In memory only. Of more than ``max_namespaces`` the one asked for longest ago is forgotten;
    each may hold at most an equal share of ``max_bytes``. Shared by threads.

    Raises:
        ConfigurationError: bounds that leave a namespace no room.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES, max_namespaces: int = 4) -> None:
        if max_namespaces < 1:
            raise ConfigurationError(f"max_namespaces must be 1 or more, not {max_namespaces}")
        self.max_bytes, self.max_namespaces = max_bytes, max_namespaces
        self._lock = Lock()
        self._kept: OrderedDict[str, Recollection] = OrderedDict()
        self._share = max_bytes // max_namespaces
        self._made()  # so that bounds which cannot work are refused now

    def of(self, namespace: str) -> Recollection:
        """Return what is remembered of a namespace, empty when it is new."""
        with self._lock:
            if namespace not in self._kept:
                self._kept[namespace] = self._made()
            self._kept.move_to_end(namespace)
            while len(self._kept) > self.max_namespaces:
                self._kept.popitem(last=False)
            return self._kept[namespace]

    def forget(self, namespace: str) -> None:
        """Forget a namespace."""
        with self._lock:
            kept = self._kept.pop(namespace, None)
        if kept is not None:
            kept.clear()

    def clear(self) -> None:
        """Forget all namespaces."""
        for namespace in self.namespaces:
            self.forget(namespace)

    @property
    def namespaces(self) -> list[str]:
        """Those that are remembered, the one asked for longest ago first."""
        with self._lock:
            return list(self._kept)

    @property
    def num_bytes(self) -> int:
        """How large all of them are."""
        with self._lock:
            return sum(kept.num_bytes for kept in self._kept.values())

    def _made(self) -> Recollection:
        return Recollection(History(3 * self._share // 4), Adjacency(self._share // 4))
