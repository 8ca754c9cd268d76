"""What fuzzers share: how they become runs, a time limit, and damaged bytes."""

from __future__ import annotations

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
