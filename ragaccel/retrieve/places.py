"""Places: where the file of a collection is, given or temporary, and what that means for copies."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError, NothingIndexedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self


class InPlace:
    """What lives in a file: pickled it is opened again there, copied it is the same.

    Args:
        path: The file; None: one in a temporary folder, which goes with this object.
        name: What the temporary one is called.
    """

    def __init__(self, path: str | Path | None, name: str) -> None:
        self._delete: weakref.finalize[Any, Any] | None = None
        if path is None:
            folder = tempfile.mkdtemp(prefix="ragaccel-")
            self._delete = weakref.finalize(self, _delete, folder, os.getpid())
            path = Path(folder) / name
        self.path = Path(path).absolute()  # a program may change its folder

    @property
    def is_temporary(self) -> bool:
        """Whether its file goes with it."""
        return self._delete is not None

    def _leave(self) -> None:
        """Delete what is temporary."""
        if self._delete is not None:
            self._delete()

    def _require_there(self) -> None:
        """Refuse to go on without a file.

        Raises:
            NothingIndexedError: With the cause.
        """
        if self._delete is not None and not self._delete.alive:
            raise NothingIndexedError("this temporary collection was closed: make a new one")
        if not self.path.exists():
            raise NothingIndexedError(
                f"the collection {self.path} was moved or deleted: open it at its new place, or"
                " make a new one"
            )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.is_temporary:
            raise ConfigurationError(
                "a temporary collection cannot be pickled, for its file goes with it: make it with"
                " a path, or copy_to() a file and open that"
            )
        return {"path": self.path}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _delete(folder: str, process: int) -> None:
    """Delete a temporary folder, but not from a process that was forked off meanwhile."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
