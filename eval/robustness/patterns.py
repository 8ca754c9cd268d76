"""An experiment on hostile patterns in documents, timed at three sizes."""

from __future__ import annotations

import json
import logging
import math
import resource
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval import cli
from eval.robustness.documents import endings, members_of, pdf, seed_documents, zipped
from eval.robustness.fuzzer import fuzzer, in_child
from eval.runner import note, result
from ragaccel.errors import RagaccelError
from ragaccel.passage import is_heading, sentence_spans, split_sentences
from ragaccel.retrieval import IgnoreRules, split_document
from ragaccel.retrieval.loaders import document_from_bytes
from ragaccel.retrieval.loaders.pdf import join_lines

Work = Callable[[int], object]

SIZES = (10_000, 100_000, 1_000_000)
LARGEST_POWER = 1.3
LIMIT_MEGABYTES = 1000
_FLOOR_SECONDS = 0.005
_TRIES = 3  # runs of each smaller size, of which the fastest counts
_LIMIT_SECONDS = 30

PATTERNS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""``repeated``, by ending: (beginning, repeated text, end). ``members``, of archives: the file in
the archive, the text after which it is written, and what is."""


def filled(pieces: Sequence[str], size: int) -> bytes:
    """Return the text of (beginning, repeated, end), repeated to about ``size`` characters."""
    first, repeated, last = pieces
    return (first + repeated * (size // len(repeated)) + last).encode()


def patterns() -> dict[str, Work]:
    """Return the patterns by name; each is a function that reads the pattern at a size."""
    seeds = seed_documents()
    work: dict[str, Work] = {}
    for ending, all_pieces in PATTERNS["repeated"].items():
        if ending not in seeds:
            continue
        for pieces in all_pieces:
            shown = " ".join(_shown(piece) for piece in pieces if piece)
            work[f"{ending} {shown}"] = lambda n, e=ending, p=pieces: _read(e, filled(p, n))
    for ending, places in PATTERNS["members"].items():
        if ending not in seeds:
            continue
        members = members_of(seeds[ending])
        for name, after, pieces in places:
            shown = " ".join(_shown(piece) for piece in pieces if piece)
            work[f"{ending} {name} {shown}"] = (
                lambda n, m=members, e=ending, a=(name, after, pieces): _read(
                    e, zipped(_with_member(m, *a, n))
                )
            )
    return work | _other_patterns()


def _other_patterns() -> dict[str, Work]:
    """Return the patterns of PDF files and of functions that take only a part of a file."""
    text = b"BT /F1 12 Tf 72 720 Td %s ET"
    line = b"(1 Abc def) Tj 0 -14 Td "
    return {
        ".pdf one word": lambda n: _read(".pdf", pdf(text % (b"(" + b"a" * n + b") Tj"))),
        ".pdf lines": lambda n: _read(".pdf", pdf(text % (line * (n // len(line))))),
        ".pdf open": lambda n: _read(".pdf", pdf(text % (b"(" * n))),
        ".pdf operators": lambda n: _read(".pdf", pdf(text % (b"q " * (n // 2)))),
        ".pdf pages": lambda n: _read(
            ".pdf", pdf(text % b"(a) Tj", kids=b"3 0 R " * (n // 1000), count=n // 1000)
        ),
        "lines of a page": lambda n: join_lines("ab-\n" * (n // 4)),
        "headings of a page": lambda n: join_lines("x\n" + "1 Abcdef\n" * (n // 9)),
        "numbers of a heading": lambda n: join_lines("1.1." * (n // 4) + " A"),
        "a word of a page": lambda n: join_lines("a" * n),
        "is_heading of sentences": lambda n: _headings("Ab c. " * (n // 6)),
        "is_heading of lines": lambda n: _headings("ab\n\n" * (n // 4)),
        "sentences of marks": lambda n: split_sentences("*_`\"')" * (n // 6)),
        "ignore *a*a*b": lambda n: _ignored("*a" * (n // 2) + "b", "a" * 250),
        "ignore **/": lambda n: _ignored("**/" * (n // 3) + "b", "a/" * 500 + "c"),
        "ignore **/a/": lambda n: IgnoreRules(["**/a/" * min(n // 5, 800) + "b"]).verdict(
            "a/" * 2000 + "c", False
        ),
        "ignore [": lambda n: _ignored("[" * n, "a"),
        "ignore [a]": lambda n: _ignored("[a]" * (n // 3), "a" * 250),
        "ignore many": lambda n: [
            IgnoreRules([f"*{i}*a*" for i in range(n // 100)]).verdict("a" * 99, False)
        ],
    }


def _read(ending: str, data: bytes) -> object:
    return split_document(document_from_bytes(data, f"a{ending}"), _count)


def _count(texts: list[str]) -> list[int]:
    return [text.count(" ") + 1 + len(text) // 20 for text in texts]


def _headings(text: str) -> list[bool]:
    return [is_heading(text, *span) for span in sentence_spans(text)]


def _ignored(pattern: str, path: str) -> bool:
    return IgnoreRules([pattern]).ignores(path, False)


def _with_member(
    members: dict[str, bytes], name: str, after: str, pieces: Sequence[str], size: int
) -> dict[str, bytes]:
    place = after.encode()
    return {**members, name: members[name].replace(place, place + filled(pieces, size), 1)}


def _shown(piece: str) -> str:
    said = json.dumps(piece, ensure_ascii=False)
    return said if len(said) <= 24 else f"{said[:20]}…{said[-3:]}"


# Measuring in child processes


def take(work: Work, size: int) -> dict[str, Any]:
    """Do a piece of work in a child process; return its CPU seconds, megabytes and outcome."""
    told, ended = in_child(partial(_work, work, size))
    return told[0] if told else {"seconds": _LIMIT_SECONDS, "mb": 0, "outcome": f"killed: {ended}"}


def _work(work: Work, size: int, tell: Callable[[Any], object]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT_SECONDS, _LIMIT_SECONDS + 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    try:
        work(size)
        said = "ok"
    except RagaccelError as error:
        said = f"refused: {error}"[:100]
    except BaseException as error:
        said = f"raw: {type(error).__name__}: {error}"[:200]
    seconds = time.process_time() - began
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    tell({"seconds": seconds, "mb": megabytes, "outcome": said})


def power(times: list[float]) -> float:
    """Return the largest exponent with which time grew from one size to the next."""
    steps = zip(times, times[1:], SIZES, SIZES[1:], strict=False)
    return max(
        math.log(max(after, _FLOOR_SECONDS) / max(before, _FLOOR_SECONDS)) / math.log(large / small)
        for before, after, small, large in steps
    )


def measure(work: Work) -> dict[str, Any]:
    """Time a pattern at every size; return the figures and whether a promise is broken."""
    taken = []
    for size in SIZES:
        tries = _TRIES if size < SIZES[-1] else 1
        taken.append(min((take(work, size) for _ in range(tries)), key=lambda one: one["seconds"]))
        if taken[-1]["outcome"].startswith(("killed", "raw")):
            break
    times = [one["seconds"] for one in taken]
    outcome = str(taken[-1]["outcome"])
    grown = power(times) if len(times) > 1 else 0.0
    if grown > LARGEST_POWER and len(times) == len(SIZES):  # another process may have slowed it
        times[-1] = min(times[-1], take(work, SIZES[-1])["seconds"])
        grown = power(times)
    kind = outcome.partition(":")[0]
    if kind in ("ok", "refused") and grown > LARGEST_POWER:
        kind = "not linear"
    megabytes = max(one["mb"] for one in taken)
    if kind in ("ok", "refused") and megabytes > LIMIT_MEGABYTES:
        kind = "too large"
    return {
        "kind": kind,
        "seconds": [round(one, 4) for one in times],
        "power": round(grown, 2),
        "mb": megabytes,
        "outcome": outcome,
    }


@fuzzer(1000, cli.option("--only", default="", help="those whose names hold this text"))
def run_fuzz_patterns(options: Namespace) -> dict[str, Any]:
    """Hostile patterns: whether time grows with the size of a file, or with a power of it.

        python -m eval fuzz_patterns --out eval/results

    Patterns that make a parser read the same text repeatedly are written with 10,000, 100,000 and
    1,000,000 characters, for every format that the package reads and for the rules of
    ``.gitignore``. Each is read and cut in a process of its own, with a time limit. Three things
    are promised: no errors except ragaccel's own, at most a gigabyte of memory, and CPU time that
    grows less than twentyfold when the size grows tenfold (a power of 1.3; times below a few
    milliseconds count as equal). The run exits with 1 if a promise is broken.
    """
    chosen = {name: work for name, work in patterns().items() if options.only in name}
    chosen = dict(list(chosen.items())[: options.count])
    started = time.perf_counter()
    found = {}
    for number, (name, work) in enumerate(chosen.items(), 1):
        found[name] = measure(work)
        note(f"{number} of {len(chosen)}: {name}: {found[name]['kind']} {found[name]['seconds']}")
    kinds = [one["kind"] for one in found.values()]
    return result(
        "fuzz_patterns",
        {"sizes": SIZES, "only": options.only, "count": len(chosen)},
        formats=[ending for ending in endings() if any(name.startswith(ending) for name in found)],
        counts={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        largest_power=max((one["power"] for one in found.values()), default=0.0),
        patterns=found,
        broken={name: one for name, one in found.items() if one["kind"] not in ("ok", "refused")},
        seconds=round(time.perf_counter() - started, 1),
    )
