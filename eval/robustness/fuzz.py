"""The fuzzer: broken cases of one kind, each used in a process with limits on time and memory."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import select
import signal
import tempfile
import time
import traceback
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from eval import cli
from eval.measure import forget_peak, process_bytes
from eval.runner import note, result
from ragaccel.errors import RagaccelError

Row = dict[str, Any]
Counts = dict[str, Counter[str]]
Tell = Callable[[Any], object]
Case = tuple[str, str, Callable[[], object]]
"""A case: the group in which it is counted, what it is, and a function that uses it.

The function may return figures to keep. Its outcome is *ok*; *refused* after one of ragaccel's
errors; what an :class:`OutcomeError` says; and *raw* after any other error.
"""
Make = Callable[[int, random.Random], Case]
KINDS = ("documents", "encodings", "indexes", "model_folders", "patterns", "settings")
OPENING_SECONDS = 300.0
MAX_BYTES = 12 << 30  # of a process's address space


class OutcomeError(Exception):
    """An outcome that no other error shows: a word, and after a colon what happened."""


@dataclass(frozen=True)
class Kind:
    """A kind of cases.

    ``open`` prepares a folder and returns the function that makes case number N from random
    numbers. A process uses ``batch`` cases; each may take ``seconds`` and ``megabytes``. Outcomes
    other than the ``allowed`` ones break a promise; ``judge`` returns the promises about all cases
    together that the counts break.
    """

    open: Callable[[Path], Make]
    count: int
    seconds: float
    megabytes: int = 1000
    batch: int = 50
    allowed: tuple[str, ...] = ("ok", "refused")
    judge: Callable[[Counts], list[str]] = lambda _counts: []


def kind_of(name: str) -> Kind:
    """Import the module of a kind and return what it defines."""
    kind: Kind = import_module(f"eval.robustness.{name}").KIND
    return kind


@cli.experiment(
    cli.option("kind", choices=KINDS),
    cli.option("--count", type=int, help="how many (default: the kind's own number)"),
    cli.integer("--first", 0, "number of the first"),
    cli.SEED,
    shown=("counts", "broken"),
    broken=lambda document: bool(document["broken"]),
    file="fuzz-{kind}.json",
)
def run_fuzz(options: Namespace) -> dict[str, Any]:
    """Fuzz: is each broken thing used or refused with one of our errors, in little time and memory?

        python -m eval fuzz documents --out eval/results

    - ``documents``: of every format, changed byte by byte or inside their archives. Each is read
      and cut as for an index, or refused, in 10 seconds and a gigabyte; passages equal the text at
      their positions.
    - ``patterns``: text that makes parsers slow, in 10,000, 100,000 and 1,000,000 characters. CPU
      time grows at most with the power 1.3 of the size; times below 5 ms count as equal.
    - ``encodings``: texts in encodings from before Unicode. At least 98 % of those in the eight
      common ones are read without an error in any character, and Unicode and Western text always.
    - ``indexes``: bytes, logs, contents and schemas of indexes, damaged. Each is searched, listed,
      updated and checked, or refused; a rebuild makes it equal to a new one.
    - ``model_folders``: one file of a tiny model damaged or deleted. It loads and answers, or is
      refused.
    - ``settings``: wild settings, prompts, references and callbacks. Each call answers or is
      refused, and a fixed question is answered as before.

    Any other error, a process that dies and a case over its limits break the promise too, and the
    run exits with 1. Case N of a seed is always the same: ``--first N --count 1`` tries it again.
    On systems other than Linux memory is not measured.
    """
    kind = kind_of(options.kind)
    count = options.count or kind.count
    counts: Counts = {}
    broken: list[Row] = []
    figures: Row = {}
    slowest, largest = {"seconds": 0.0}, {"megabytes": 0}
    started = time.perf_counter()
    for done, row in enumerate(used(kind, range(options.first, options.first + count), options), 1):
        outcome, place = row["outcome"], {"number": row["number"], "case": row["case"]}
        counts.setdefault(row["group"], Counter())[outcome.partition(":")[0]] += 1
        if outcome not in kind.allowed:
            broken.append({**place, "group": row["group"], "outcome": outcome})
        if row["figures"] is not None:
            figures[row["case"]] = row["figures"]
        slowest = max(slowest, {"seconds": row["seconds"], **place}, key=lambda r: r["seconds"])
        largest = max(largest, {"megabytes": row["mb"], **place}, key=lambda r: r["megabytes"])
        if done % kind.batch == 0 or done == count:
            note(f"{done} of {count} {options.kind}, {len(broken)} promises broken")
    broken += [{"outcome": told} for told in kind.judge(counts)]
    return result(
        "fuzz",
        {"kind": options.kind, "count": count, "seed": options.seed, "first": options.first},
        counts={group: dict(sorted(own.items())) for group, own in sorted(counts.items())},
        broken=broken,
        slowest=slowest,
        largest=largest,
        **({"figures": figures} if figures else {}),
        seconds=round(time.perf_counter() - started, 1),
    )


def used(kind: Kind, numbers: Sequence[int], options: Namespace) -> Iterator[Row]:
    """Yield the outcome of each case; go on in a new process where one hangs or dies."""
    while numbers:
        with tempfile.TemporaryDirectory(prefix="ragaccel-fuzz-") as folder:
            batch = numbers[: kind.batch]
            use_all = partial(_use_all, kind, Path(folder), batch, options.seed)
            told, ended = in_child(use_all, kind.seconds)
        rows = [case | end for case, end in zip(told[1::2], told[2::2], strict=False)]
        if ended and told and not len(told) % 2:  # it ended in the middle of a case
            lost = {"outcome": ended, "seconds": kind.seconds, "mb": 0, "figures": None}
            rows.append(told[-1] | lost)
        elif ended:
            raise RuntimeError(
                f"the fuzzer itself failed before case {numbers[len(rows)]}: {ended} (see stderr)"
            )
        yield from rows
        numbers = numbers[len(rows) :]


def _use_all(kind: Kind, folder: Path, numbers: Sequence[int], seed: int, tell: Tell) -> None:
    """Tell that all is prepared, then each case and its outcome."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    make = kind.open(folder)
    tell("ready")
    for number in numbers:
        group, label, use = make(number, random.Random(f"{seed}/{number}"))
        tell({"number": number, "group": group, "case": label[:200]})
        tell(_outcome(use, kind.megabytes))


def _outcome(use: Callable[[], object], most: int) -> Row:
    peak, figures, outcome = Peak(), None, "ok"
    started = time.perf_counter()
    try:
        figures = use()
    except RagaccelError:
        outcome = "refused"
    except OutcomeError as error:
        outcome = str(error)
    except BaseException as error:
        outcome = f"raw: {describe(error)}"
    seconds, megabytes = time.perf_counter() - started, peak.megabytes()
    if megabytes > most:
        outcome = f"over: {megabytes} MB ({outcome})"
    return {
        "outcome": outcome[:300],
        "seconds": round(seconds, 3),
        "mb": megabytes,
        "figures": figures,
    }


def describe(error: BaseException) -> str:
    """Return an error's type, message and the place where it was raised, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    try:
        said = " ".join(str(error)[:200].split())
    except Exception:
        said = "without a message"
    return f"{type(error).__name__}: {said} ({place})"


def in_child(
    work: Callable[[Tell], object], patience: float | None = None
) -> tuple[list[Any], str]:
    """Do ``work`` in a forked process; return what it told, and how the process ended.

    The work is given a function that tells a value to this process, as JSON. The process ended
    with "" if by itself; with "hang" if after its first word it told nothing for ``patience``
    seconds, if given; else with "died" and the signal or exit code.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            work(lambda told: os.write(writing, (json.dumps(told) + "\n").encode()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    said, hangs = b"", False
    while not hangs:
        limit = patience if said or patience is None else OPENING_SECONDS
        if not select.select([reading], [], [], limit)[0]:
            hangs = True
            os.kill(child, signal.SIGKILL)
        elif part := os.read(reading, 1 << 16):
            said += part
        else:
            break
    os.close(reading)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = [json.loads(line) for line in said.split(b"\n")[:-1]]
    name = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
    return told, "hang" if hangs else f"died: {name}" if ended else ""


class Peak:
    """The most memory that this process, or one that it started, takes from now on."""

    def __init__(self) -> None:
        self._held = {pid: process_bytes("VmRSS", pid) for pid in _processes() if forget_peak(pid)}

    def megabytes(self) -> int:
        """Return the peak in megabytes above the memory at the start, or 0 if not measurable.

        All memory of a process started since then counts.
        """
        if not self._held:
            return 0
        taken = [process_bytes("VmHWM", pid) - self._held.get(pid, 0) for pid in _processes()]
        return max(0, *taken) >> 20


def _processes() -> list[int]:
    own = os.getpid()
    try:
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    except OSError:
        children = []
    return [own, *map(int, children)]


_NUMBERS = (b"0", b"-1", b"1", b"7", b"65536", b"99999999", b"1e9", b"1e999", b"x", b"", b"nan")
_WORDS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"9999")
_SPANS = (1, 2, 8, 64, 512)


def changed_bytes(data: bytes, rng: random.Random, pieces: Sequence[bytes] = _NUMBERS) -> bytes:
    """Return a copy with bytes changed, inserted, deleted, repeated or cut off, a few times.

    ``pieces`` are inserted: what a parser of such files trips over.
    """
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if data:
            data = _changed_once(data, rng, pieces)
    return data


def _changed_once(data: bytes, rng: random.Random, pieces: Sequence[bytes]) -> bytes:
    at, other = rng.randrange(len(data)), rng.randrange(len(data))
    end = at + rng.choice(_SPANS)
    head, span, tail = data[:at], data[at:end], data[end:]
    changes: list[tuple[int, Callable[[], bytes]]] = [
        (20, lambda: head + rng.randbytes(1) + data[at + 1 :]),
        (6, lambda: head + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]),
        (20, lambda: head + rng.choice(pieces) + data[at:]),
        (13, lambda: head + tail),
        (13, lambda: head + data[other : other + len(span)] + data[at:]),
        (5, lambda: head + rng.randbytes(len(span)) + tail),
        (8, lambda: head + rng.choice(_WORDS) + data[at + 4 :]),
        (5, lambda: head + span * rng.choice((10, 100)) + tail),
        (5, lambda: head),
        (5, lambda: _other_number(data, at, rng)),
    ]
    ((_, change),) = rng.choices(changes, [weight for weight, _ in changes])
    return change()


def _other_number(data: bytes, start: int, rng: random.Random) -> bytes:
    """Replace the first number or quoted name after an offset, so that XML and JSON stay whole."""
    found = re.compile(rb'(?<=")[\w.-]+(?=")|\d+').search(data, start)
    if not found:
        return data
    return data[: found.start()] + rng.choice(_NUMBERS) + data[found.end() :]
