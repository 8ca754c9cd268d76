"""Namespaces: what was learned from each tenant's requests, kept apart and bounded together."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, ClassVar

from ragaccel.draft.calibration import Calibration
from ragaccel.draft.space_calibration import SpaceCalibration
from ragaccel.errors import ConfigurationError
from ragaccel.memory.figures import Figures, MemoryFigures
from ragaccel.memory.files import Changes, Filed, named
from ragaccel.memory.history import History

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ragaccel.draft.restoring import State
    from ragaccel.memory.archive import Header

DEFAULT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Recollection:
    """What is remembered of one namespace; each drafter has a calibration of its own.

    ``changes`` are those of the memory it belongs to.
    """

    history: History
    calibration: Calibration = field(default_factory=Calibration)
    space_calibration: SpaceCalibration = field(default_factory=SpaceCalibration)
    changes: Changes = field(default_factory=Changes, repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        """How large it is, the few hundred numbers of its calibrations aside."""
        return self.history.num_bytes

    @property
    def is_empty(self) -> bool:
        """Whether no request is remembered."""
        return not self.history.num_requests

    def remember(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Remember a request that has ended, and that there is something to save.

        To be called when the drafters have learned from it: what they learn alone is saved with
        the next change.
        """
        self.history.add(prompt_ids, answer_ids)
        self.changes.mark()

    def clear(self) -> None:
        """Forget everything."""
        self.history.clear()
        self.calibration.clear()
        self.space_calibration.clear()
        self.changes.mark()

    def figures(self) -> Figures:
        """Count what is remembered and was let go; waits for no request that is being added."""
        return self.history.figures()

    def state(self) -> State:
        """All that is kept of it in a file; ``restore`` takes it in again."""
        learners = {name: getattr(self, name) for name in _LEARNERS}
        return {
            f"{name}/{key}": array
            for name, learner in learners.items()
            for key, array in learner.state().items()
        }

    def restore(self, state: State) -> None:
        """Remember what a state holds, as far as there is room for it.

        Raises:
            ValueError: arrays that cannot be what was remembered.
        """
        self.history.restore(part(state, "history/"))
        self.calibration.restore(part(state, "calibration/"))
        self.space_calibration.restore(part(state, "space_calibration/"))


_LEARNERS = ("history", "calibration", "space_calibration")


def part(state: State, prefix: str) -> State:
    """Return the arrays of a state whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)
    }


class Memory(Filed):
    """Recollections by namespace: nothing learned in one is ever drafted in another.

    Of more than ``max_namespaces`` the one asked for longest ago is forgotten; each may hold at
    most an equal share of ``max_bytes``. Shared by threads. With a path it outlives the process:
    see :class:`ragaccel.memory.files.Filed`. A file of a larger memory is taken in as far as there
    is room: the namespaces asked for last, of each the newest requests.

    Args:
        max_bytes: of all namespaces together.
        max_namespaces: how many are remembered.
        path: the file it is kept in; without one it is in memory only.
        fingerprint: of the model whose token ids these are; a file of another one is refused.
        vocab_size: of that model; see :class:`History`.

    Raises:
        ConfigurationError: bounds that leave a namespace no room. A file never raises anything
            here: see ``refused``.
    """

    file_format: ClassVar[str] = "ragaccel memory"

    def __init__(
        self,
        max_bytes: int = DEFAULT_BYTES,
        max_namespaces: int = 4,
        path: str | Path | None = None,
        fingerprint: str = "",
        *,
        vocab_size: int | None = None,
    ) -> None:
        if max_namespaces < 1:
            raise ConfigurationError(f"max_namespaces must be 1 or more, not {max_namespaces}")
        super().__init__(path, fingerprint, max_bytes)
        self.max_bytes, self.max_namespaces = max_bytes, max_namespaces
        self.vocab_size = vocab_size
        self._lock = RLock()
        self._kept: OrderedDict[str, Recollection] = OrderedDict()
        self._share = max_bytes // max_namespaces
        self._hits = self._misses = self._evicted = 0
        self._evicted_requests = 0  # of namespaces that are gone
        self._made()  # so that bounds which cannot work are refused now
        self._load()

    def of(self, namespace: str) -> Recollection:
        """Return what is remembered of a namespace, empty when it is new.

        Raises:
            ConfigurationError: its name is no string.
        """
        if not isinstance(namespace, str):
            raise ConfigurationError(f"a namespace's name is a string, not {namespace!r}")
        with self._lock:
            found = self._kept.get(namespace)
            if found is None:
                found = self._kept[namespace] = self._made()
            if found.is_empty:
                self._misses += 1
            else:
                self._hits += 1
            self._kept.move_to_end(namespace)
            while len(self._kept) > self.max_namespaces:
                self._drop(next(iter(self._kept)))
                self._evicted += 1
                self.changes.mark()
            return found

    def forget(self, namespace: str) -> None:
        """Forget a namespace."""
        with self._lock:
            kept = self._drop(namespace)
        if kept is not None:
            kept.clear()
        self.changes.mark()  # the file may know it still

    def clear(self) -> None:
        """Forget all namespaces."""
        for namespace in self.namespaces:
            self.forget(namespace)
        self.changes.mark()

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

    def figures(self) -> MemoryFigures:
        """Count what is remembered, was let go and was of use, since this memory was made."""
        with self._lock:
            each = [kept.figures() for kept in self._kept.values()]
            return MemoryFigures(
                requests=sum(one.requests for one in each),
                tokens=sum(one.tokens for one in each),
                num_bytes=sum(one.num_bytes for one in each),
                evicted_requests=self._evicted_requests + sum(o.evicted_requests for o in each),
                namespaces=len(each),
                evicted_namespaces=self._evicted,
                hits=self._hits,
                misses=self._misses,
            )

    def _drop(self, namespace: str) -> Recollection | None:
        """Take a namespace out, the lock being held; what it had let go still counts."""
        kept = self._kept.pop(namespace, None)
        if kept is not None:
            self._evicted_requests += kept.figures().evicted_requests
        return kept

    def _made(self) -> Recollection:
        return Recollection(History(self._share, self.vocab_size), changes=self.changes)

    def _state(self) -> tuple[Header, State]:
        with self._lock:
            kept = dict(self._kept)
        arrays = {
            f"{number}/{name}": array
            for number, recollection in enumerate(kept.values())
            for name, array in recollection.state().items()
        }
        return {"namespaces": list(kept)}, arrays

    def _restore(self, header: Header, arrays: State) -> None:
        names = named(header, "namespaces")
        left_out = max(0, len(names) - self.max_namespaces)
        kept = OrderedDict((name, self._made()) for name in names[left_out:])
        for number, recollection in enumerate(kept.values(), start=left_out):
            recollection.restore(part(arrays, f"{number}/"))
        self._kept, self._evicted = kept, left_out
        if left_out:
            self.changes.mark()
