"""Patterns that make a parser read the same text repeatedly, timed at three sizes."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eval.robustness.documents import count_words, members_of, pdf, seed_documents, zipped
from eval.robustness.fuzz import Case, Kind, Make, OutcomeError
from ragaccel.errors import RagaccelError
from ragaccel.passage import is_heading, sentence_spans, split_sentences
from ragaccel.retrieval import IgnoreRules, split_document
from ragaccel.retrieval.loaders import document_from_bytes
from ragaccel.retrieval.loaders.pdf import join_lines

Work = Callable[[int], object]

SIZES = (10_000, 100_000, 1_000_000)
LARGEST_POWER = 1.3
_FLOOR_SECONDS = 0.005
_TRIES = 3  # runs of each size, of which the fastest counts

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
    return split_document(document_from_bytes(data, f"a{ending}"), count_words)


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


def seconds_of(work: Work, size: int) -> float:
    """Return the CPU seconds of the fastest of some runs; one that is refused counts as well."""
    taken = []
    for _ in range(_TRIES):
        began = time.process_time()
        with suppress(RagaccelError):
            work(size)
        taken.append(time.process_time() - began)
    return min(taken)


def power(times: list[float]) -> float:
    """Return the largest exponent with which time grew from one size to the next."""
    steps = zip(times, times[1:], SIZES, SIZES[1:], strict=False)
    return max(
        math.log(max(after, _FLOOR_SECONDS) / max(before, _FLOOR_SECONDS)) / math.log(large / small)
        for before, after, small, large in steps
    )


def measure(work: Work) -> dict[str, Any]:
    """Time a pattern at every size; its time must grow with a small power of the size."""
    times = [seconds_of(work, size) for size in SIZES]
    figures = {"seconds": [round(one, 4) for one in times], "power": round(power(times), 2)}
    if figures["power"] > LARGEST_POWER:
        raise OutcomeError(f"not linear: {figures}")
    return figures


def open_patterns(_folder: Path) -> Make:
    """Return the function that takes the patterns in their order."""
    made = list(patterns().items())

    def make(number: int, _rng: random.Random) -> Case:
        name, work = made[number % len(made)]
        return name.split()[0], name, lambda: measure(work)

    return make


KIND = Kind(open_patterns, count=len(patterns()), seconds=120, batch=1)
