"""Interrupts: what a signal raises in the main thread, told apart from what callbacks raise."""

from __future__ import annotations

import dis
import signal
from functools import partial
from threading import Event, Lock, Thread, current_thread, main_thread
from traceback import walk_tb
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_RAISE = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal's handler raised this, rather than the code that was running.

    Signals are handled in the main thread, between any two instructions of whatever runs there.
    A handler written in Python shows in the traceback. Python's own for Ctrl-C does not, but it
    never raises from a ``raise`` statement, as callbacks do.
    """
    if current_thread() is not main_thread():
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if _handlers() & {frame.f_code for frame in frames}:
        return True
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or trace.tb_frame.f_code.co_code[trace.tb_lasti] not in _RAISE


def uninterrupted(work: Callable[[], None]) -> None:
    """Do some work as a whole or not at all, whatever signal arrives meanwhile.

    It is done in a thread of its own, where no signal is handled. One that arrives is raised here
    afterwards; if it arrives before the work has begun, nothing is done.
    """
    claim, done = Lock(), Event()

    def run() -> None:
        if claim.acquire(blocking=False):
            try:
                work()
            finally:
                done.set()

    interrupt: BaseException | None = None
    try:
        Thread(target=run, name="ragaccel-uninterrupted", daemon=True).start()
        done.wait()
    except BaseException as error:
        if claim.acquire(blocking=False):
            raise
        interrupt = error
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:  # noqa: PERF203 - it waits on
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _handlers() -> set[CodeType]:
    """The code of all signal handlers that are written in Python."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return {code for handler in handlers if (code := _code_of(handler)) is not None}


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None)
    if code is None:  # an object that is called
        code = getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None
