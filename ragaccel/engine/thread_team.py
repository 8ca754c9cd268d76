"""How many threads compute a pass on a CPU while other programs want its cores.

Threads that wait for one another after each operation are as slow as one whose core another program
has for a turn of the system's scheduler, some milliseconds, and a pass has hundreds of operations.
Beside one busy program, on two cores, a step of a 135M model took 1,160 ms in float32 with two
threads and 22 with one (16 to 20 with two and none beside). So threads are left out for as long as
they wait for cores. Linux tells how long that is; elsewhere all threads compute.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_WINDOW = 0.05  # seconds that are judged together: some turns of the scheduler
_MAX_WAITING = 0.3  # threads that wait for a core, on average; one busy program makes it a half
_RETRY_WINDOWS, _MAX_RETRY = 30, 20.0  # after so many, or seconds: it may cost a few percent
_TRIED_WINDOWS = 2  # before the next is tried
_TASKS = "/proc/self/task"
_TORCH = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")


@cache
def openmp() -> Any:
    """Return the library of torch's OpenMP pool; None without one."""
    for name in (None, _TORCH):  # first a library that was preloaded in place of torch's own
        try:
            found = ctypes.CDLL(name)
            start: Any = found.GOMP_parallel
        except (OSError, AttributeError, TypeError):
            continue
        start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        start.restype = None
        return found
    return None


class ThreadTeam:
    """Chooses the number of threads of passes by how long the threads of the process wait.

    Several threads may run passes at once; they may then choose badly for a moment, nothing else.
    """

    def __init__(self) -> None:
        self._num_left_out = self._num_judged = 0
        self._retry_at = self._last_window = 0.0
        self._begun = self._ended = self._waited = 0.0

    def run(self, compute: Callable[[], Result]) -> Result:
        """Call a function with as many of torch's threads as gain by it, and return its result."""
        usual, started = torch.get_num_threads(), perf_counter()
        if started - self._ended > _MAX_RETRY:  # others may have ended long ago
            self._num_left_out = 0
        size = self._choose(usual, started)
        if self._num_left_out != self._num_judged or started - self._ended > _WINDOW:
            self._begin_window(started)
        result = compute() if size == usual else _with_threads(size, usual, compute)
        self._ended = perf_counter()
        if size > 1 and self._ended - self._begun >= _WINDOW:
            self._judge()
        return result

    def _choose(self, usual: int, now: float) -> int:
        if self._num_left_out and now >= self._retry_at:
            self._num_left_out -= 1
            self._retry_at = now + min(_TRIED_WINDOWS * self._last_window, _MAX_RETRY)
        return max(1, usual - self._num_left_out)

    def _judge(self) -> None:
        """Leave one thread more out if threads waited, and begin the next window."""
        seconds, waited = self._ended - self._begun, self._waited
        self._begin_window(self._ended)
        if self._waited - waited > _MAX_WAITING * seconds:
            self._num_left_out += 1
            self._last_window = seconds
            self._retry_at = self._ended + min(_RETRY_WINDOWS * seconds, _MAX_RETRY)

    def _begin_window(self, now: float) -> None:
        self._num_judged, self._begun = self._num_left_out, now
        self._waited = seconds_waited()


def seconds_waited() -> float:
    """Return how long threads of this process have waited for a core; 0 if nothing tells it."""
    nanoseconds = 0
    with suppress(OSError):
        for thread in os.listdir(_TASKS):
            # It may have ended meanwhile.
            with suppress(OSError), open(f"{_TASKS}/{thread}/schedstat", "rb") as opened:
                nanoseconds += int(opened.read().split()[1])
    return nanoseconds / 1e9


def _with_threads(size: int, usual: int, compute: Callable[[], Result]) -> Result:
    """Call a function with another number of threads, in this thread only.

    ``torch.set_num_threads`` would set it for threads that begin meanwhile, too.
    """
    pool = openmp()
    if pool is None:
        return compute()
    set_for_mkl = _set_for_mkl()
    before = set_for_mkl(size)
    try:
        pool.omp_set_num_threads(size)
        return compute()
    finally:
        pool.omp_set_num_threads(usual)
        set_for_mkl(before)


@cache
def _set_for_mkl() -> Callable[[int], int]:
    """Return what sets MKL's number in a thread, once torch's was set apart from OpenMP's.

    It returns the number before; 0 is none.
    """
    try:
        found: Callable[[int], int] = ctypes.CDLL(_TORCH).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):  # torch without MKL
        return lambda _size: 0
    return found


TEAM = ThreadTeam()
"""That of this process."""
