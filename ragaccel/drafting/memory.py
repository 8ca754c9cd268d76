"""Memory: what earlier requests taught, by namespace, and the file that keeps it.

The header is JSON in the file's metadata, beside a checksum of it and of the arrays.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import stat
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from safetensors.numpy import load, save

from ragaccel.drafting.calibration import Calibration, SpaceCalibration
from ragaccel.drafting.history import History, HistoryStats, MemoryStats
from ragaccel.errors import ConfigurationError, StorageError
from ragaccel.paths import PerProcess, atomic_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.drafting.arrays import State


Header = dict[str, Any]
"""What JSON can say of an archive."""
_KEY = "ragaccel"  # the one key of the metadata: safetensors keeps several in no order


class UnusableFileError(ValueError):
    """A file that is not taken in; the message says why and stands after its path."""


def write_archive(path: Path, header: Header, arrays: State) -> None:
    """Write an archive in the place of what stands at ``path``, which stays whole if this fails.

    Its folder is made where it is missing. Only its owner may read the file: it holds what was
    asked and answered.

    Raises:
        OSError: no permission, a full disk, a folder at ``path``.
        Exception: whatever safetensors raises for arrays that it cannot hold.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {"crc32": _checksum(header, arrays), "header": header}
    contents = save(arrays, {_KEY: json.dumps(metadata)})
    with atomic_write(path, private=True) as file:
        file.write(contents)


def read_archive(path: Path, max_bytes: int) -> tuple[Header, State] | None:
    """Read an archive of at most so many bytes; None where there is no file.

    Raises:
        UnusableFileError: no archive, or too large a one.
        OSError: no permission.
        Exception: whatever a damaged file makes safetensors or numpy raise.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise UnusableFileError("it is no file" + " but a folder" * stat.S_ISDIR(found.st_mode))
    if found.st_size > max_bytes:
        raise UnusableFileError(f"it is larger than the {max_bytes} bytes that may be taken in")
    with open(path, "rb") as file:  # not mapped: another process may cut the file off
        contents = file.read(found.st_size)
    arrays: State = load(contents)
    metadata = _read_metadata(contents)
    header = metadata.get("header")
    if not isinstance(header, dict):
        raise UnusableFileError("its header is not an object")
    if metadata.get("crc32") != _checksum(header, arrays):
        raise UnusableFileError("it is damaged: its checksum is that of other contents")
    return header, arrays


def _read_metadata(contents: bytes) -> dict[str, Any]:
    """Read the JSON in the metadata of a safetensors file that has been loaded before."""
    size = int.from_bytes(contents[:8], "little")
    metadata = json.loads(contents[8 : 8 + size]).get("__metadata__", {})
    if _KEY not in metadata:
        raise UnusableFileError("it has no header")
    contained = json.loads(metadata[_KEY])
    return contained if isinstance(contained, dict) else {}


def _checksum(header: Header, arrays: State) -> int:
    checksum = zlib.crc32(json.dumps(header).encode("ascii"))
    for name in sorted(arrays):
        checksum = zlib.crc32(arrays[name].data, checksum)
    return checksum


SAVE_INTERVAL = 64
"""Changes after which a memory with a path is saved, whatever becomes of the process."""
VERSION = 1
"""Of the format; a file of a higher one is refused."""
FILE_SIZE_FACTOR = 4
"""A file may hold so many times the bytes of the memory that takes it in, and a mebibyte more."""

_logger = logging.getLogger("ragaccel")


class Changes:
    """A count of changes of one memory, shared by threads."""

    def __init__(self, owner: PersistentMemory | None = None) -> None:
        self._lock = RLock()  # an answer that is dropped may be remembered anywhere, here too
        self._owner = owner
        self.count = 0

    def mark(self) -> None:
        """Count one more; a memory with changes to save lives until they are saved."""
        with self._lock:
            self.count += 1
        if self._owner is not None and self._owner.path is not None and not self._owner.load_error:
            _unsaved.get().add(self._owner)
            if self.count % SAVE_INTERVAL == 0:
                _save_quietly(self._owner)


class PersistentMemory(ABC):
    """What is kept in a file: read when made, written by ``save``, now and then, and at exit.

    A missing file is a new one. A file that is damaged, foreign, of a newer version or of another
    fingerprint is refused: ``refused`` says why, the log of "ragaccel" is warned, and the file is
    never written to. Two processes may share a file; the one that saves last is believed.

    Args:
        path: the file; ``~`` is the home folder. Without one nothing is kept.
        fingerprint: tells what the contents are good for; a file must have the same.
        max_bytes: what the memory may hold.
    """

    file_format: ClassVar[str]
    """The format's name, in every file."""

    def __init__(self, path: str | Path | None, fingerprint: str, max_bytes: int) -> None:
        # a link is followed: what it points to is replaced, not the link itself
        real = None if path is None else Path(os.path.realpath(os.path.expanduser(path)))
        self.path = real
        self.fingerprint = fingerprint
        self.load_error = ""
        self.changes = Changes(self)
        self._max_file_bytes = FILE_SIZE_FACTOR * max_bytes + (1 << 20)
        self._writing = RLock()
        self._saved = 0  # the count of changes then

    @abstractmethod
    def _state(self) -> tuple[Header, State]:
        """All that is to be kept; it does not change later."""

    @abstractmethod
    def _restore(self, header: Header, arrays: State) -> None:
        """Take in what was kept, whole or not at all; may raise whatever tells that it is wrong."""

    def save(self) -> None:
        """Write all that is known to the file, in one step: a reader finds the old or the new.

        Raises:
            ConfigurationError: there is no path, or the file there was refused.
            StorageError: it cannot be written; what was saved before is whole.
        """
        if self.path is None:
            raise ConfigurationError("there is no file to save to: make the memory with path=…")
        if self.load_error:
            raise ConfigurationError(self.load_error)
        with self._writing:
            count = self.changes.count
            header, arrays = self._state()
            own = {"format": self.file_format, "version": VERSION, "fingerprint": self.fingerprint}
            try:
                write_archive(self.path, {**own, **header}, arrays)
            except OSError as error:
                raise StorageError(
                    f"{self.path} cannot be written ({error.strerror or error}): free some space, "
                    f"allow writing there, or choose another path"
                ) from error
            self._saved = count
            if not self.has_unsaved_changes:
                _unsaved.get().discard(self)

    @property
    def has_unsaved_changes(self) -> bool:
        """Whether anything has changed since the last save."""
        return self.changes.count != self._saved

    def _load(self) -> None:
        """Take in what the file holds, or refuse it; to be called when all else is ready."""
        if self.path is None:
            return
        for other in list(_unsaved.get()):  # of this process: what it learned is in the file then
            if other.path == self.path and type(other) is type(self):
                _save_quietly(other)
        try:
            found = read_archive(self.path, self._max_file_bytes)
            if found is not None:
                self._check_header(found[0])
                self._restore(*found)
        except Exception as error:  # a damaged file raises nearly anything; answers must still come
            self._refuse(_describe_error(error))

    def _check_header(self, header: Header) -> None:
        """Raise UnusableFileError for a header of another format, version or fingerprint."""
        if header.get("format") != self.file_format:
            raise UnusableFileError(f"it holds something other than {self.file_format}")
        version = header.get("version")
        if type(version) is not int or version < 1:
            raise UnusableFileError("it has no version")
        if version > VERSION:
            raise UnusableFileError(
                f"a newer ragaccel wrote it, in version {version}; this one reads up to {VERSION}"
            )
        if header.get("fingerprint") != self.fingerprint:
            raise UnusableFileError(
                f"it was made with another model, {header.get('fingerprint')!r}, "
                f"not with {self.fingerprint!r}"
            )

    def _refuse(self, reason: str) -> None:
        """Leave the file alone from now on, and say why."""
        self.load_error = (
            f"{self.path} is not used: {reason}. Delete it or choose another path; "
            f"until then nothing is saved."
        )
        _unsaved.get().discard(self)
        _logger.warning("%s", self.load_error)


def name_list(header: Header, name: str) -> list[str]:
    """Return a list of different strings from a header.

    Raises:
        UnusableFileError: it is something else.
    """
    found = header.get(name)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise UnusableFileError(f"its header has no list of {name}")
    if len(set(found)) < len(found):
        raise UnusableFileError(f"its header names one of the {name} twice")
    return found


def _describe_error(error: Exception) -> str:
    if isinstance(error, UnusableFileError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read ({error.strerror or error})"
    return f"it is damaged, or no such file at all ({error or type(error).__name__})"


# Held, so that what a function's local LLM learned is saved; by the process in which it did.
_unsaved: PerProcess[set[PersistentMemory]] = PerProcess(set)


@atexit.register
def _save_all_at_exit() -> None:
    for memory in list(_unsaved.get()):
        _save_quietly(memory)


def _save_quietly(memory: PersistentMemory) -> None:
    """Save; an error is only logged: nobody asked for it now."""
    try:
        memory.save()
    except Exception as error:
        _logger.warning("%s", error)


DEFAULT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class NamespaceMemory:
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

    def stats(self) -> HistoryStats:
        """Count what is remembered and was let go; waits for no request that is being added."""
        return self.history.stats()

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
        self.history.restore(with_prefix(state, "history/"))
        self.calibration.restore(with_prefix(state, "calibration/"))
        self.space_calibration.restore(with_prefix(state, "space_calibration/"))


_LEARNERS = ("history", "calibration", "space_calibration")


def with_prefix(state: State, prefix: str) -> State:
    """Return the arrays of a state whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)
    }


class Memory(PersistentMemory):
    """Recollections by namespace: nothing learned in one is ever drafted in another.

    Of more than ``max_namespaces`` the one asked for longest ago is forgotten; each may hold at
    most an equal share of ``max_bytes``. Shared by threads. With a path it outlives the process:
    see :class:`PersistentMemory`. A file of a larger memory is taken in as far as there
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
        self._namespaces: OrderedDict[str, NamespaceMemory] = OrderedDict()
        self._namespace_bytes = max_bytes // max_namespaces
        self._hits = self._misses = self._evicted = 0
        self._evicted_requests = 0  # of namespaces that are gone
        self._new_namespace_memory()  # so that bounds which cannot work are refused now
        self._load()

    def of(self, namespace: str) -> NamespaceMemory:
        """Return what is remembered of a namespace, empty when it is new.

        Raises:
            ConfigurationError: its name is no string.
        """
        if not isinstance(namespace, str):
            raise ConfigurationError(f"a namespace's name is a string, not {namespace!r}")
        with self._lock:
            found = self._namespaces.get(namespace)
            if found is None:
                found = self._namespaces[namespace] = self._new_namespace_memory()
            if found.is_empty:
                self._misses += 1
            else:
                self._hits += 1
            self._namespaces.move_to_end(namespace)
            while len(self._namespaces) > self.max_namespaces:
                self._drop(next(iter(self._namespaces)))
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
            return list(self._namespaces)

    @property
    def num_bytes(self) -> int:
        """How large all of them are."""
        with self._lock:
            return sum(kept.num_bytes for kept in self._namespaces.values())

    def stats(self) -> MemoryStats:
        """Count what is remembered, was let go and was of use, since this memory was made."""
        with self._lock:
            each = [kept.stats() for kept in self._namespaces.values()]
            return MemoryStats(
                requests=sum(one.requests for one in each),
                tokens=sum(one.tokens for one in each),
                num_bytes=sum(one.num_bytes for one in each),
                evicted_requests=self._evicted_requests + sum(o.evicted_requests for o in each),
                namespaces=len(each),
                evicted_namespaces=self._evicted,
                hits=self._hits,
                misses=self._misses,
            )

    def _drop(self, namespace: str) -> NamespaceMemory | None:
        """Take a namespace out, the lock being held; what it had let go still counts."""
        kept = self._namespaces.pop(namespace, None)
        if kept is not None:
            self._evicted_requests += kept.stats().evicted_requests
        return kept

    def _new_namespace_memory(self) -> NamespaceMemory:
        return NamespaceMemory(
            History(self._namespace_bytes, self.vocab_size), changes=self.changes
        )

    def _state(self) -> tuple[Header, State]:
        with self._lock:
            kept = dict(self._namespaces)
        arrays = {
            f"{number}/{name}": array
            for number, namespace_memory in enumerate(kept.values())
            for name, array in namespace_memory.state().items()
        }
        return {"namespaces": list(kept)}, arrays

    def _restore(self, header: Header, arrays: State) -> None:
        names = name_list(header, "namespaces")
        num_dropped = max(0, len(names) - self.max_namespaces)
        kept = OrderedDict((name, self._new_namespace_memory()) for name in names[num_dropped:])
        for number, namespace_memory in enumerate(kept.values(), start=num_dropped):
            namespace_memory.restore(with_prefix(arrays, f"{number}/"))
        self._namespaces, self._evicted = kept, num_dropped
        if num_dropped:
            self.changes.mark()
