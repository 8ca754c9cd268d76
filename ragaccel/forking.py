"""Forks: what a forked process must not use, and what it makes for itself."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Generic, TypeVar

from ragaccel.errors import ForkError

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")

_torch_owner: list[int] = []  # the process that first used torch, also in those forked from it


def claim_torch() -> None:
    """Claim torch for this process: called before torch computes and before any lock is taken.

    A forked process has none of its parent's threads: it would wait for ever for those of torch's
    pool, and for locks that others held at the fork.

    Raises:
        ForkError: A process that this one was forked from has claimed it.
    """
    if not _torch_owner:
        _torch_owner.append(os.getpid())
    if not owns_torch():
        raise ForkError(
            "this process was forked from one that had already used a model, and cannot use any: "
            "load models after the fork, in each process, or start processes by spawn"
        )


def owns_torch() -> bool:
    """Return whether this process may use torch: no process that it was forked from has."""
    return _torch_owner in ([], [os.getpid()])


def keep_forever(inherited: object) -> None:
    """Keep what a parent process owns from being closed here: not even the end of Python does."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


class PerProcess(Generic[Made]):
    """What each process makes for itself when it first asks, such as a lock.

    A lock that another thread holds at a fork is never released in the forked process.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: dict[int, Made] = {}

    def get(self) -> Made:
        """Return this process's own; the same for all of its threads."""
        process = os.getpid()
        if process not in self._made:
            self._made.setdefault(process, self._make())
        return self._made[process]

    def __reduce__(self) -> str:
        """Refuse to be pickled, used or not, as locks do.

        Raises:
            TypeError: Always.
        """
        raise TypeError("what each process makes for itself cannot be pickled")
