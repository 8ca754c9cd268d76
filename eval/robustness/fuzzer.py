"""Run a fuzzer: read its options, keep its result, and exit with 1 if a promise broke."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.runner import in_folder, measured, new_parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence


_SHOWN = 5
_HELP = {
    "batch": "how many a process tries",
    "count": "how many, at most",
    "first": "the number of the first one",
    "only": "those whose names hold this text",
    "patience": "seconds that one may take",
    "seed": "of the random numbers",
}


def run_fuzzer(
    name: str,
    doc: str | None,
    fuzz: Callable[[argparse.Namespace], dict[str, Any]],
    arguments: Sequence[str] | None,
    **defaults: int | str,
) -> None:
    """Parse options, run ``eval fuzz_NAME``, print its figures and exit.

    ``defaults`` are the options with their default values, ``doc`` describes the run.
    """
    parser = new_parser(f"fuzz_{name}", doc or "")
    for option, default in defaults.items():
        text = f"{_HELP[option]} [{default}]"
        parser.add_argument(f"--{option}", type=type(default), default=default, help=text)
    parser.add_argument("--out", type=Path, help="folder or file of the result")
    parsed = parser.parse_args(arguments)
    parsed.out = in_folder(parsed.out, f"fuzz-{name.replace('_', '-')}.json")
    document = measured(f"fuzz_{name}", fuzz, parsed)
    figures = {key: it for key, it in document.items() if isinstance(it, int | float)}
    print(json.dumps({"counts": document["counts"], **figures}, indent=1))
    for item in list(document["broken"])[:_SHOWN]:
        print(json.dumps(item), file=sys.stderr)
    sys.exit(bool(document["broken"]))


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
