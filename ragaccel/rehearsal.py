"""The rehearsal: drafting once on a few tokens, so that its functions are compiled when needed."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

_PATIENCE = 300.0  # seconds for another process to compile; it takes about ten
# The paths are this process's own: else what lies in the current folder would be imported first.
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:]; from ragaccel.rehearsal import rehearse; rehearse()"
)

logger = logging.getLogger("ragaccel")


class Rehearsal:
    """Makes the drafting functions ready beside whatever else goes on.

    The first time on a machine they are compiled, about ten seconds, by a process of its own: in a
    thread of this one that would hold up the decoding. Later they are read from where numba keeps
    them, in well under a second.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: Thread | None = None
        self._ready = Event()

    def start(self) -> None:
        """Begin, unless it has begun before; returns at once."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="ragaccel-rehearsal", daemon=True)
                self._thread.start()

    def is_ready(self) -> bool:
        """Whether drafting goes at full speed from now on."""
        return self._ready.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Begin if need be and wait for the end; say whether drafting is ready."""
        self.start()
        if self._thread is not None:
            self._thread.join(seconds)
        return self.is_ready()

    def _run(self) -> None:
        try:
            from ragaccel.drafting.arrays import is_missing, never_compiles
            from ragaccel.drafting.calibration import (
                follow,  # the last one that a rehearsal compiles
            )

            if never_compiles():
                return
            if is_missing(follow) and _can_start_python():
                _rehearse_elsewhere()
            rehearse()
        except Exception as error:  # answers come without, only more slowly
            logger.warning("token trees are not drafted, one copied span is: %s", error)
        else:
            self._ready.set()


def rehearse() -> None:
    """Draft, learn and remember on a few tokens: compiles all that these need."""
    from ragaccel.decoding.session import Context
    from ragaccel.drafting.memory import Memory
    from ragaccel.drafting.trie import TrieDrafter

    kept = Memory().of("")
    kept.history.add([1, 2, 3, 1, 2], [3, 1])
    context = Context([1, 2, 3, 1, 2])
    drafter = TrieDrafter(past=kept.history, calibration=kept.calibration)
    drafter.draft(context, 4)
    context.token_ids.append(3)
    drafter.draft(context, 4)


def _can_start_python() -> bool:
    """Whether ``sys.executable`` is Python, not a program that Python is a part of."""
    return "python" in Path(sys.executable or "").name.lower() and not hasattr(sys, "frozen")


def _rehearse_elsewhere() -> None:
    """Compile in a process that goes on to its end even if this one is interrupted or ends."""
    folder = str(Path(__file__).parents[1])
    with suppress(OSError, subprocess.SubprocessError):  # then it is compiled here
        subprocess.run(
            [sys.executable, "-c", _COMMAND, folder, *filter(None, sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            start_new_session=True,
            check=False,
        )


REHEARSAL = Rehearsal()
"""The one of this process: what is compiled serves all models."""
