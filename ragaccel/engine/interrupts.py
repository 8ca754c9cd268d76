"""Interrupts: tell a signal's error from a callback's, and leave nothing half-done after a signal.

A context manager written in Python can be interrupted in its ``__enter__`` or ``__exit__``, one
written in C cannot: so these functions, like the scheduler, wait with locks and queues written in
C, not with the conditions and events of ``threading``.
"""

from __future__ import annotations

import dis
import signal
from _thread import start_new_thread
from functools import partial, wraps
from threading import Lock, get_ident, main_thread
from traceback import walk_tb
from types import CodeType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch._C import _InferenceMode

if TYPE_CHECKING:
    from collections.abc import Callable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_RAISE = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}


def inference_mode() -> Any:
    """Return ``torch.inference_mode()`` as a context manager that is written in C.

    At its end all of torch's modes of differentiation are as before, whatever an interrupt left.
    """
    return _InferenceMode(True)


def in_inference_mode(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function to run in ``inference_mode``."""

    @wraps(function)
    def run(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        with inference_mode():
            return function(*args, **named)

    return run


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised this error, rather than the interrupted code.

    Python runs signal handlers in the main thread, between any two instructions. A handler written
    in Python appears in the traceback. Python's own handler for Ctrl-C does not, but unlike a
    callback it never raises from a ``raise`` statement.
    """
    if get_ident() != main_thread().ident:
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
    """Run ``work`` completely, even if signals arrive during the call.

    It runs in a separate thread, where Python does not handle signals. A signal's error is raised
    here after the work.

    Raises:
        RuntimeError: no thread can be started; the work did not run.
        BaseException: what the work raised, if no signal came.
    """
    claim, running = Lock(), Lock()
    running.acquire()
    failure: BaseException | None = None

    def run() -> None:
        nonlocal failure
        if claim.acquire(blocking=False):
            try:
                work()
            except BaseException as error:
                failure = error
            finally:
                running.release()

    interrupt: BaseException | None = None
    is_started = is_done = False
    while not is_started:
        try:
            start_new_thread(run, ())  # again after an interrupt: one of the threads has the claim
            is_started = True
        except BaseException as error:  # noqa: PERF203
            if is_interrupt(error):
                interrupt = error
            elif claim.acquire(blocking=False):
                raise
            else:  # an interrupted attempt did start a thread, and that one has the claim
                is_started = True
    while not is_done:
        try:
            with running:
                is_done = True
        except BaseException as error:  # noqa: PERF203 - keep waiting
            interrupt = error
    if interrupt is not None:
        raise interrupt from failure
    if failure is not None:
        raise failure


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
