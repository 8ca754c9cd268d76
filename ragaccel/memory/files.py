"""Files: what a memory knows, kept between runs; a file that cannot be trusted is left alone."""

from __future__ import annotations

import atexit
import logging
import os
from abc import ABC, abstractmethod
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, ClassVar

from ragaccel.errors import ConfigurationError, MemoryWriteError
from ragaccel.forking import PerProcess
from ragaccel.memory.archive import Header, UnusableError, read_archive, write_archive

if TYPE_CHECKING:
    from ragaccel.draft.restoring import State

SAVED_EVERY = 64
"""Changes after which a memory with a path is saved, whatever becomes of the process."""
VERSION = 1
"""Of the format; a file of a higher one is refused."""
ROOM = 4
"""A file may hold so many times the bytes of the memory that takes it in, and a mebibyte more."""

_logger = logging.getLogger("ragaccel")


class Changes:
    """A count of changes of one memory, shared by threads."""

    def __init__(self, owner: Filed | None = None) -> None:
        self._lock = RLock()  # an answer that is dropped may be remembered anywhere, here too
        self._owner = owner
        self.count = 0

    def mark(self) -> None:
        """Count one more; a memory with changes to save lives until they are saved."""
        with self._lock:
            self.count += 1
        if self._owner is not None and self._owner.path is not None and not self._owner.refused:
            _unsaved.get().add(self._owner)
            if self.count % SAVED_EVERY == 0:
                _save_quietly(self._owner)


class Filed(ABC):
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
        self.refused = ""
        self.changes = Changes(self)
        self._most_bytes = ROOM * max_bytes + (1 << 20)
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
            MemoryWriteError: it cannot be written; what was saved before is whole.
        """
        if self.path is None:
            raise ConfigurationError("there is no file to save to: make the memory with path=…")
        if self.refused:
            raise ConfigurationError(self.refused)
        with self._writing:
            count = self.changes.count
            header, arrays = self._state()
            own = {"format": self.file_format, "version": VERSION, "fingerprint": self.fingerprint}
            try:
                write_archive(self.path, {**own, **header}, arrays)
            except OSError as error:
                raise MemoryWriteError(
                    f"{self.path} cannot be written ({error.strerror or error}): free some space, "
                    f"allow writing there, or choose another path"
                ) from error
            self._saved = count
            if not self.unsaved:
                _unsaved.get().discard(self)

    @property
    def unsaved(self) -> bool:
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
            found = read_archive(self.path, self._most_bytes)
            if found is not None:
                self._require_own(found[0])
                self._restore(*found)
        except Exception as error:  # a damaged file raises nearly anything; answers must still come
            self._refuse(_reason(error))

    def _require_own(self, header: Header) -> None:
        """Raise UnusableError for a header of another format, version or fingerprint."""
        if header.get("format") != self.file_format:
            raise UnusableError(f"it holds something other than {self.file_format}")
        version = header.get("version")
        if type(version) is not int or version < 1:
            raise UnusableError("it has no version")
        if version > VERSION:
            raise UnusableError(
                f"a newer ragaccel wrote it, in version {version}; this one reads up to {VERSION}"
            )
        if header.get("fingerprint") != self.fingerprint:
            raise UnusableError(
                f"it was made with another model, {header.get('fingerprint')!r}, "
                f"not with {self.fingerprint!r}"
            )

    def _refuse(self, reason: str) -> None:
        """Leave the file alone from now on, and say why."""
        self.refused = (
            f"{self.path} is not used: {reason}. Delete it or choose another path; "
            f"until then nothing is saved."
        )
        _unsaved.get().discard(self)
        _logger.warning("%s", self.refused)


def named(header: Header, name: str) -> list[str]:
    """Return a list of different strings from a header.

    Raises:
        UnusableError: it is something else.
    """
    found = header.get(name)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise UnusableError(f"its header has no list of {name}")
    if len(set(found)) < len(found):
        raise UnusableError(f"its header names one of the {name} twice")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, UnusableError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read ({error.strerror or error})"
    return f"it is damaged, or no such file at all ({error or type(error).__name__})"


# Held, so that what a function's local LLM learned is saved; by the process in which it did.
_unsaved: PerProcess[set[Filed]] = PerProcess(set)


@atexit.register
def _save_all_at_exit() -> None:
    for filed in list(_unsaved.get()):
        _save_quietly(filed)


def _save_quietly(filed: Filed) -> None:
    """Save; an error is only logged: nobody asked for it now."""
    try:
        filed.save()
    except Exception as error:
        _logger.warning("%s", error)
