"""Memory: earlier requests and learned corrections, by namespace, and the file that stores them.

A file is a safetensors archive. Its metadata holds a JSON header and a checksum of header and
arrays.
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
    from collections.abc import Callable, Sequence

    from ragaccel.drafting.arrays import State


Header = dict[str, Any]
"""The JSON object of an archive."""
_KEY = "ragaccel"  # a single key, because safetensors does not keep the order of several


class UnusableFileError(ValueError):
    """The file of a memory cannot be used. The message gives the reason, without the path."""


def write_archive(path: Path, header: Header, arrays: State) -> None:
    """Replace the file at ``path`` with an archive; the old file stays intact if this fails.

    Create missing folders. Only the owner may read the file, because it holds questions and
    answers.

    Raises:
        OSError: the file cannot be written: no permission, a full disk, or a folder at ``path``.
        Exception: safetensors cannot store the arrays.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {"crc32": _checksum(header, arrays), "header": header}
    contents = save(arrays, {_KEY: json.dumps(metadata)})
    with atomic_write(path, private=True) as file:
        file.write(contents)


def read_archive(path: Path, max_bytes: int) -> tuple[Header, State] | None:
    """Read an archive of at most ``max_bytes``; return None if there is no file.

    Raises:
        UnusableFileError: the file is not an archive, or too large.
        OSError: the file cannot be opened or read.
        Exception: the file is damaged; safetensors and numpy raise many types.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would block
        raise UnusableFileError(
            "it is a folder, not a file"
            if stat.S_ISDIR(found.st_mode)
            else "it is not a regular file"
        )
    if found.st_size > max_bytes:
        raise UnusableFileError(f"it is larger than the limit of {max_bytes} bytes")
    with open(path, "rb") as file:  # not mapped: another process may truncate it
        contents = file.read(found.st_size)
    arrays: State = load(contents)
    metadata = _read_metadata(contents)
    header = metadata.get("header")
    if not isinstance(header, dict):
        raise UnusableFileError("its header is not an object")
    if metadata.get("crc32") != _checksum(header, arrays):
        raise UnusableFileError("it is damaged: its checksum does not match its contents")
    return header, arrays


def _read_metadata(contents: bytes) -> dict[str, Any]:
    """Return the JSON in the metadata of a valid safetensors file."""
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
"""Number of changes after which a memory with a path is saved."""
VERSION = 1
"""Version of the format; files of a higher version are refused."""
FILE_SIZE_FACTOR = 4
"""A file may be this many times the size limit of the memory, plus one mebibyte."""

_logger = logging.getLogger("ragaccel")


class PersistentMemory(ABC):
    """A memory in a file: read on construction, written by ``save``, at intervals and at exit.

    The first save creates a missing file. A file that is damaged or foreign, or has a newer
    version or another fingerprint, is refused: ``load_error`` gives the reason, the logger
    "ragaccel" warns, and the file is never written. If two processes share a file, the last save
    wins.

    Args:
        path: the file; ``~`` is the home folder. If None, nothing is stored.
        fingerprint: identifies the model or embedder; that of the file must be equal.
        max_bytes: size limit of the memory.
    """

    file_format: ClassVar[str]
    """Name of the format, stored in every file."""

    def __init__(self, path: str | Path | None, fingerprint: str, max_bytes: int) -> None:
        # Follow links, so that saving replaces the target, not the link.
        real = None if path is None else Path(os.path.realpath(os.path.expanduser(path)))
        self.path = real
        self.fingerprint = fingerprint
        self.load_error = ""
        self._max_file_bytes = FILE_SIZE_FACTOR * max_bytes + (1 << 20)
        self._write_lock = RLock()
        self._changes_lock = RLock()  # reentrant: code run by garbage collection may take it
        self._num_changes = self._num_saved = 0  # changes so far, and those at the last save

    @abstractmethod
    def _state(self) -> tuple[Header, State]:
        """Return everything to store, as a header and arrays that do not change later."""

    @abstractmethod
    def _restore(self, header: Header, arrays: State) -> None:
        """Load everything that ``_state`` returned, or nothing; may raise any exception."""

    def mark_changed(self) -> None:
        """Count a change, keep this memory alive until it is saved, and save it at intervals."""
        with self._changes_lock:
            self._num_changes += 1
        if self.path is not None and not self.load_error:
            _unsaved.get().add(self)
            if self._num_changes % SAVE_INTERVAL == 0:
                _save_quietly(self)

    def save(self) -> None:
        """Write everything to the file in one step: a reader sees the old or the new contents.

        Raises:
            ConfigurationError: the memory has no path, or its file was refused.
            StorageError: the file cannot be written; its old contents are intact.
        """
        if self.path is None:
            raise ConfigurationError("this memory has no file to save to: create it with path=...")
        if self.load_error:
            raise ConfigurationError(self.load_error)
        with self._write_lock:
            count = self._num_changes
            header, arrays = self._state()
            own = {"format": self.file_format, "version": VERSION, "fingerprint": self.fingerprint}
            try:
                write_archive(self.path, {**own, **header}, arrays)
            except OSError as error:
                raise StorageError(
                    f"{self.path} cannot be written ({error.strerror or error}): free some space, "
                    f"allow writing there, or choose another path"
                ) from error
            self._num_saved = count
            if not self.has_unsaved_changes:
                _unsaved.get().discard(self)

    @property
    def has_unsaved_changes(self) -> bool:
        """Return whether anything has changed since the last save."""
        return self._num_changes != self._num_saved

    def _load(self) -> None:
        """Load or refuse the file. Call it last in the constructor."""
        if self.path is None:
            return
        for other in list(_unsaved.get()):  # same file: save it first, so that it is read here
            if other.path == self.path and type(other) is type(self):
                _save_quietly(other)
        try:
            found = read_archive(self.path, self._max_file_bytes)
            if found is not None:
                self._check_header(found[0])
                self._restore(*found)
        except Exception as error:  # a damaged file may raise anything, and answers must still come
            self._refuse(_describe_error(error))

    def _check_header(self, header: Header) -> None:
        """Raise UnusableFileError if the file has another format, version or fingerprint."""
        if header.get("format") != self.file_format:
            raise UnusableFileError(f"it is not a {self.file_format} file")
        version = header.get("version")
        if type(version) is not int or version < 1:
            raise UnusableFileError("its header has no valid version")
        if version > VERSION:
            raise UnusableFileError(
                f"a newer ragaccel wrote it in version {version}; this one reads up to {VERSION}"
            )
        if header.get("fingerprint") != self.fingerprint:
            raise UnusableFileError(
                f"it was made with another model, {header.get('fingerprint')!r}, "
                f"not with {self.fingerprint!r}"
            )

    def _refuse(self, reason: str) -> None:
        """Warn, set ``load_error`` to the reason, and never write to the file."""
        self.load_error = (
            f"{self.path} is not used: {reason}. Delete it or choose another path; "
            f"until then nothing is saved."
        )
        _unsaved.get().discard(self)
        _logger.warning("%s", self.load_error)


def read_namespaces(header: Header) -> list[str]:
    """Return the names of the namespaces that a header lists.

    Raises:
        UnusableFileError: it does not list distinct strings.
    """
    found = header.get("namespaces")
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise UnusableFileError("its header has no list of namespaces")
    if len(set(found)) < len(found):
        raise UnusableFileError("its header lists a namespace twice")
    return found


def _describe_error(error: Exception) -> str:
    if isinstance(error, UnusableFileError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read ({error.strerror or error})"
    return f"it is damaged or of another kind ({error or type(error).__name__})"


# Strong references, per process, so that a memory that goes out of scope is still saved.
_unsaved: PerProcess[set[PersistentMemory]] = PerProcess(set)


@atexit.register
def _save_all_at_exit() -> None:
    for memory in list(_unsaved.get()):
        _save_quietly(memory)


def _save_quietly(memory: PersistentMemory) -> None:
    """Save a memory, automatically; log an error instead of raising it."""
    try:
        memory.save()
    except Exception as error:
        _logger.warning("%s", error)


DEFAULT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class NamespaceMemory:
    """The memory of one namespace: past requests, and a calibration for each kind of drafter.

    ``mark_changed`` is called after every change.
    """

    history: History
    calibration: Calibration = field(default_factory=Calibration)
    space_calibration: SpaceCalibration = field(default_factory=SpaceCalibration)
    mark_changed: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes, without the few hundred numbers of the calibrations."""
        return self.history.num_bytes

    @property
    def is_empty(self) -> bool:
        """Return whether the namespace holds no request."""
        return not self.history.num_requests

    def remember(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Add a finished request and mark the memory as changed.

        Call it after the drafters have learned from the request: what they learn afterwards is
        saved only with the next change.
        """
        self.history.add(prompt_ids, answer_ids)
        self.mark_changed()

    def clear(self) -> None:
        """Delete all requests and reset the calibrations."""
        self.history.clear()
        self.calibration.clear()
        self.space_calibration.clear()
        self.mark_changed()

    def stats(self) -> HistoryStats:
        """Return the size and evictions of the history, without taking a lock."""
        return self.history.stats()

    def state(self) -> State:
        """Return everything that a file stores of this namespace; ``restore`` loads it."""
        return {
            f"{name}/{key}": array
            for name, learner in self._learners.items()
            for key, array in learner.state().items()
        }

    def restore(self, state: State) -> None:
        """Replace everything with a state; of its requests, keep the newest that fit.

        Raises:
            ValueError: the arrays have another form.
        """
        for name, learner in self._learners.items():
            learner.restore(with_prefix(state, f"{name}/"))

    @property
    def _learners(self) -> dict[str, History | Calibration | SpaceCalibration]:
        return {
            "history": self.history,
            "calibration": self.calibration,
            "space_calibration": self.space_calibration,
        }


def with_prefix(state: State, prefix: str) -> State:
    """Return the arrays whose names begin with ``prefix``, by the rest of their names."""
    return {
        name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)
    }


class Memory(PersistentMemory):
    """Earlier requests and learned corrections, by namespace; namespaces share no drafts.

    If there are more than ``max_namespaces``, the least recently used one is forgotten. Each may
    hold an equal share of ``max_bytes``. Shared by threads. With a path it outlives the process:
    see ``PersistentMemory``. A file of a larger memory is loaded as far as it fits: the
    namespaces used last, and the newest requests of each.

    Args:
        max_bytes: size limit of all namespaces together.
        max_namespaces: the maximum number of namespaces.
        path: the file that stores it; if None, it lives in RAM only.
        fingerprint: identifies the model of the token ids; a file of another model is refused.
        vocab_size: vocabulary size of that model; see ``History``.

    Raises:
        ConfigurationError: the limits leave a namespace no room. A bad file never raises here: see
            ``load_error``.
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
        self._evicted_requests = 0  # in namespaces that were dropped
        self._new_namespace_memory()  # raises now if the limits are too small
        self._load()

    def of(self, namespace: str) -> NamespaceMemory:
        """Return the memory of a namespace, empty if the namespace is new.

        Raises:
            ConfigurationError: the name is not a string.
        """
        if not isinstance(namespace, str):
            raise ConfigurationError(f"a namespace must be a string, not {namespace!r}")
        with self._lock:
            found = self._namespaces.get(namespace)
            if found is None:
                found = self._namespaces[namespace] = self._new_namespace_memory()
            if found.is_empty:
                self._misses += 1
            else:
                self._hits += 1
            self._namespaces.move_to_end(namespace)
            num_evicted = max(0, len(self._namespaces) - self.max_namespaces)
            for _ in range(num_evicted):
                self._drop(next(iter(self._namespaces)))
            self._evicted += num_evicted
        for _ in range(num_evicted):
            self.mark_changed()  # it may save, which takes the lock again after another one
        return found

    def forget(self, namespace: str) -> None:
        """Delete the memory of a namespace, also from the file at the next save."""
        with self._lock:
            kept = self._drop(namespace)
        if kept is not None:
            kept.clear()
        self.mark_changed()  # the file may still hold it

    def clear(self) -> None:
        """Delete the memory of all namespaces, also from the file at the next save."""
        for namespace in self.namespaces:
            self.forget(namespace)
        self.mark_changed()

    @property
    def namespaces(self) -> list[str]:
        """Return the names of the namespaces, the least recently used first."""
        with self._lock:
            return list(self._namespaces)

    @property
    def num_bytes(self) -> int:
        """Return the size of all namespaces, in bytes."""
        with self._lock:
            return sum(kept.num_bytes for kept in self._namespaces.values())

    def stats(self) -> MemoryStats:
        """Return the present size, and the evictions and hits since this memory was created."""
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
        """Remove a namespace and keep count of its evictions. The caller holds the lock."""
        kept = self._namespaces.pop(namespace, None)
        if kept is not None:
            self._evicted_requests += kept.stats().evicted_requests
        return kept

    def _new_namespace_memory(self) -> NamespaceMemory:
        history = History(self._namespace_bytes, self.vocab_size)
        return NamespaceMemory(history, mark_changed=self.mark_changed)

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
        names = read_namespaces(header)
        num_dropped = max(0, len(names) - self.max_namespaces)
        kept = OrderedDict((name, self._new_namespace_memory()) for name in names[num_dropped:])
        for number, namespace_memory in enumerate(kept.values(), start=num_dropped):
            namespace_memory.restore(with_prefix(arrays, f"{number}/"))
        self._namespaces, self._evicted = kept, num_dropped
        if num_dropped:
            self.mark_changed()
