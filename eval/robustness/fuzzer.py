"""What fuzzers share: how they become runs, a time limit, and damaged bytes."""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval import cli


def fuzzer(count: int, *options: cli.Option, seed: int = 1) -> Callable[[Any], Any]:
    """Make a function the run of its name; the run fails if the result has ``broken`` promises."""
    return cli.experiment(
        cli.integer("--count", count, "how many, at most"),
        cli.integer("--seed", seed, "of the random numbers"),
        *options,
        shown=("counts", "broken"),
        broken=lambda document: bool(document["broken"]),
    )


def patience(seconds: int) -> cli.Option:
    return cli.integer("--patience", seconds, "seconds that one may take")


def in_child(
    work: Callable[[Callable[[Any], object]], object], patience: float | None = None
) -> tuple[list[Any], str]:
    """Do ``work`` in a forked process; return what it told, and how the process ended.

    The work is given a function that tells a value to this process, as JSON. The process ended
    with "" if by itself; with "hang" if it told nothing for ``patience`` seconds and was killed;
    else with the name of the signal that killed it, or its exit code.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            work(lambda told: os.write(writing, (json.dumps(told) + "\n").encode()))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    said, hangs = b"", False
    while not hangs:
        if patience is not None and not select.select([reading], [], [], patience)[0]:
            hangs = True
            os.kill(child, signal.SIGKILL)
        elif part := os.read(reading, 1 << 16):
            said += part
        else:
            break
    os.close(reading)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = [json.loads(line) for line in said.split(b"\n")[:-1]]
    if hangs:
        return told, "hang"
    return told, signal.Signals(-ended).name if ended < 0 else str(ended or "")


class Hang(BaseException):
    """A case exceeded its time limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``Hang`` if the code inside the context takes longer than ``seconds``."""
    before = signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _give_up(*_: object) -> None:
    raise Hang


def describe(error: BaseException) -> str:
    """Return an error's type, message and the place where it was raised, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__}: {str(error)[:200]} ({place})"
