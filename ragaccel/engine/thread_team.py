"""How many threads of torch's pool work together while other programs take processor time.

Threads that wait for one another are as slow as the one whose core another program has. Beside one
busy program, a step of a model of 135 million parameters took 27 ms with the two threads of two
cores and 8 with one; alone, 7 and 8. So threads are left out for as long as they lose time.
"""

from __future__ import annotations

from time import perf_counter

import torch

_WINDOW = 0.02  # seconds of passes that are judged together: some turns of the system's scheduler
_MAX_LOST = 0.3  # share of the threads' time, in two windows, the first of which counts half
_RETRY_WINDOWS = 50  # for which a thread is left out: what trying it costs is a few percent
_TRIED_WINDOWS = 3  # before one more is tried


class ThreadTeam:
    """Chooses the number of threads by the processor time that those of recent passes got.

    It needs a pass's results not to depend on their number. Calls of several threads may make it
    choose badly for a moment, nothing else.
    """

    def __init__(self) -> None:
        self._num_left_out = 0
        self._retry_at = self._last_window = 0.0
        self._last_lost = 0.0
        self._begin_window(0)

    def size(self) -> int:
        """Return the number of threads for the next pass: those that torch uses, or fewer."""
        if self._num_left_out and perf_counter() >= self._retry_at:
            self._num_left_out -= 1
            self._retry_at = perf_counter() + _TRIED_WINDOWS * self._last_window
        return max(1, torch.get_num_threads() - self._num_left_out)

    def note(self, size: int, seconds: float, cpu_seconds: float) -> None:
        """Take in how long a pass took, and the processor time that all its threads got."""
        if size != self._window_size:
            self._begin_window(size)
        self._seconds += seconds
        self._cpu_seconds += cpu_seconds
        if size == 1 or self._seconds < _WINDOW:
            return
        lost = 1.0 - self._cpu_seconds / (self._seconds * size)
        self._last_lost = (self._last_lost + lost) / 2
        if self._last_lost > _MAX_LOST:
            self._num_left_out = torch.get_num_threads() - size + 1
            self._last_window = self._seconds
            self._retry_at = perf_counter() + _RETRY_WINDOWS * self._seconds
            self._last_lost = 0.0
        self._begin_window(size)

    def _begin_window(self, size: int) -> None:
        self._window_size, self._seconds, self._cpu_seconds = size, 0.0, 0.0


TEAM = ThreadTeam()
"""The team of this process."""
