"""Interrupts: tell a signal's error from a callback's, and run work that no signal interrupts."""

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
    """Return whether a signal handler raised this error, rather than the interrupted code.

    Python runs signal handlers in the main thread, between any two instructions. A handler written
    in Python appears in the traceback. Python's own handler for Ctrl-C does not, but unlike a
    callback it never raises from a ``raise`` statement.
    """
    if current_thread() is not main_thread():
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if _handler_codes() & {frame.f_code for frame in frames}:
        return True
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or trace.tb_frame.f_code.co_code[trace.tb_lasti] not in _RAISE


def run_uninterrupted(work: Callable[[], None]) -> None:
    """Run ``work`` completely or not at all, even if a signal arrives during the call.

    It runs in a separate thread, where Python does not handle signals. A signal's error is raised
    here after the work; if the signal arrives before the work begins, the work does not run.
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
        except BaseException as error:  # noqa: PERF203 - keep waiting
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _handler_codes() -> set[CodeType]:
    """Return the code objects of all signal handlers written in Python."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return {code for handler in handlers if (code := _code_of(handler)) is not None}


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None)
    if code is None:  # an object with a __call__ method
        code = getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None
