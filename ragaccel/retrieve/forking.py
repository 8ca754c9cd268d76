"""Forking: what is told that its process is forked, so that the child can go on with it."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.told: WeakSet[AcrossForks] = WeakSet()
        self.in_turn: tuple[AcrossForks, ...] = ()
        self.is_child = False


_state = _State()


class AcrossForks:
    """An object that is told before its process is forked, and afterwards in both.

    A child has none of the other threads: a lock that one of them held stays locked for ever, and
    what it was changing stays half changed.
    """

    def __init__(self) -> None:
        with _state.lock:
            _state.told.add(self)

    def before_fork(self) -> None:
        """Come to a state that can be copied."""

    def after_fork(self, *, in_child: bool) -> None:
        """Go on, in the process that forked or in the child."""


def is_forked() -> bool:
    """Whether this process was forked off, so that thread pools of libraries are dead in it."""
    return _state.is_child


def _before() -> None:
    _state.lock.acquire()
    _state.in_turn = tuple(_state.told)
    for told in _state.in_turn:
        told.before_fork()


def _after(*, in_child: bool) -> None:
    _state.is_child |= in_child
    for told in _state.in_turn:
        told.after_fork(in_child=in_child)
    _state.in_turn = ()
    _state.lock.release()  # a plain lock, which the thread that goes on may release in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=lambda: _after(in_child=False),
        after_in_child=lambda: _after(in_child=True),
    )
