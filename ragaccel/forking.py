"""Forking: what is told that its process is forked, so that the child can go on with it."""

from __future__ import annotations

import os
import sys
import threading
from weakref import WeakSet


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.told: WeakSet[AcrossForks] = WeakSet()
        self.in_turn: tuple[AcrossForks, ...] = ()
        self.is_child = self.is_alone = False


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


class UsesTorch(AcrossForks):
    """What computes with torch, by one thread in a child.

    The threads of torch's pool are not copied, and a child that shared its work out among them
    would wait for ever.
    """

    def after_fork(self, *, in_child: bool) -> None:
        """Have torch share nothing out in a child."""
        torch = sys.modules.get("torch")
        if in_child and torch is not None and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
            _state.is_alone = True


def is_alone() -> bool:
    """Whether torch computes with one thread because this process was forked."""
    return _state.is_alone


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
