"""Broken documents: whether each is read and cut, or refused by an error of ours, in little time.

    python -m eval.fuzz.documents --out eval/results

A small document of every format that the package reads is changed at random, byte by byte or inside
the files of its archive, sometimes given another format's name, and then read as a folder's files
are: text in this process, all else in the one beside it. Three things are promised: no error but
ours and no crash of a library, nothing over 10 seconds, nothing over a gigabyte of memory; and
passages are what stands in the text. It exits with 1 if one is broken; ``--first N --count 1``
tries one document again.

What a document takes is the most that either process held while it was read, less what it held
before: Linux keeps such a peak, and begins it anew when asked. Elsewhere memory is not measured.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.fuzz.runner import Hang, describe, run_fuzzer, time_limit
from eval.fuzz.seeds import endings, has_seed, members_of, seed_documents, zipped
from eval.script import note, result
from ragaccel.errors import RagaccelError
from ragaccel.retrieval.chunking import split_document
from ragaccel.retrieval.loaders import BinaryFileError, DocumentReader

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

LIMIT_SECONDS = 10.0
LIMIT_MEGABYTES = 1000
_EACH = 1000
_OVER = {"takes more than": "over", "crashes on it": "raw", "does not start": "raw"}
_BYTES = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n" * 5, b"\x1b", b"\x0c"),
    *(b"<" * 9, b"[" * 300, b'{"a":' * 300, b"{" * 300, b"```", b"~~~", b"<!--", b"-->", b"#" * 9),
    *(
        b"|" * 40,
        b"---\n",
        b'"',
        b"'",
        b",",
        b"\\ud800",
        b"\\'zz",
        b"\\bin999999999 ",
        b"\\u-99999?",
    ),
    *(b"1e999", b"NaN", b"-0", b"9" * 400, b"&#x110000;", b"&#0;", b"&a;", b"<pre>", b"<title>"),
    *(b"<tr><td>", b'w:val="99999999"', b'"1048576"', b"\xf0\x9f\x92\xa9", b"\xe3\x80\x82"),
    *(
        b"\xe2\x80\xa8",
        b"\xc2\x85",
        b"\xe2\x80\xae",
        b"../",
        b"0 0 R",
        b"stream\n",
        b"<</Kids[2 0 R]>>",
    ),
)
_NUMBERS = (b"0", b"-1", b"1", b"7", b"65536", b"99999999", b"1e9", b"x", b"", b"continue", b"nan")
_WHOLE = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"9999")


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, insert, delete, repeat or cut off some bytes."""
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        size = len(data)
        at = rng.randrange(size) if size else 0
        kind = rng.random()
        if kind < 0.25:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind < 0.45:
            data = data[:at] + rng.choice(_BYTES) + data[at:]
        elif kind < 0.58:
            data = data[:at] + data[at + rng.choice((1, 2, 8, 64, 512)) :]
        elif kind < 0.72:
            other = rng.randrange(size) if size else 0
            data = data[:at] + data[other : other + rng.choice((1, 8, 64, 512))] + data[at:]
        elif kind < 0.76:
            data = _other_number(data, at, rng)
        elif kind < 0.82 and size:
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind < 0.9:
            data = data[:at] + rng.choice(_WHOLE) + data[at + 4 :]
        elif kind < 0.95:
            data = data[:at] + data[at : at + 64] * rng.choice((10, 100)) + data[at:]
        else:
            data = data[:at]
    return data


def _other_number(data: bytes, start: int, rng: random.Random) -> bytes:
    """Say another number, or name, where the first one after a place stands: XML stays XML."""
    found = re.compile(rb'(?<=")[\w.-]+(?=")|\d+').search(data, start)
    if not found:
        return data
    return data[: found.start()] + rng.choice(_NUMBERS) + data[found.end() :]


def changed_members(data: bytes, rng: random.Random) -> bytes:
    """Change what is inside an archive, so that the archive itself stays whole."""
    members = members_of(data)
    texts = [name for name in members if name.endswith((".xml", ".rels", ".opf", ".xhtml"))]
    chosen = rng.choice(texts or list(members))
    changed = {}
    for name, content in members.items():
        if rng.random() < 0.01:
            continue
        told = f"../../{name}" if rng.random() < 0.01 else name
        changed[told] = changed_bytes(content, rng) if name == chosen else content
    return zipped(changed)


def broken_document(number: int, seed: int, seeds: dict[str, bytes]) -> tuple[str, bytes]:
    """The name and the bytes of one broken document, the same every time."""
    rng = random.Random(f"{seed}/{number}")
    ending = rng.choice(list(seeds))
    data = seeds[ending]
    if data.startswith(b"PK") and rng.random() < 0.8:
        data = changed_members(data, rng)
    else:
        data = changed_bytes(data, rng)
    if rng.random() < 0.05:
        ending = rng.choice(list(seeds))
    return f"a{ending}", data


def outcome(reader: DocumentReader, name: str, data: bytes) -> str:
    """What becomes of a document: ok, binary, refused, or which promise it breaks and how."""
    try:
        with time_limit(LIMIT_SECONDS):
            document = reader.read(data, name)
            for passage in split_document(document, _count):
                if document.text[passage.start : passage.end] != passage.text:
                    return "raw: a passage is not what stands in the text"
                (passage.title + passage.text).encode()
    except BinaryFileError:
        return "binary"
    except RagaccelError as error:
        kind = next((kind for text, kind in _OVER.items() if text in str(error)), "refused")
        return kind if kind == "refused" else f"{kind}: {error}"
    except Hang:
        return "hang"
    except Exception as error:
        return f"raw: {describe(error)}"
    return "ok"


def _count(texts: list[str]) -> list[int]:
    return [text.count(" ") + 1 + len(text) // 20 for text in texts]


class Peak:
    """The most memory that this process and the one beside it took above what they held before."""

    def __init__(self, reader: DocumentReader) -> None:
        self._reader = reader
        self._held: dict[int, int] = {}
        self.is_measured = forget_peak(os.getpid())

    def begin(self) -> None:
        """Measure from here."""
        self._held = {
            pid: _kilobytes(pid, "VmRSS") for pid in self._processes() if forget_peak(pid)
        }

    def megabytes(self) -> int:
        """What was taken since; of a process that began since, all that it took."""
        if not self.is_measured:
            return 0
        taken = [_kilobytes(pid, "VmHWM") - self._held.get(pid, 0) for pid in self._processes()]
        return max(0, *taken) // 1024

    def _processes(self) -> list[int]:
        beside = self._reader._process._process
        return [os.getpid(), *([beside.pid] if beside is not None else [])]


def forget_peak(pid: int) -> bool:
    """Let the peak of a process's memory begin anew; return whether the system could."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kilobytes(pid: int, name: str) -> int:
    """One figure of the memory of a process; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    _, _, after = status.partition(f"{name}:")
    return int(after.split(None, 1)[0]) if after else 0


class Found:
    """What became of documents: how many of each outcome, the broken promises, the most taken."""

    def __init__(self, formats: Iterable[str]) -> None:
        self.counts: dict[str, Counter[str]] = {ending: Counter() for ending in formats}
        self.broken: list[dict[str, Any]] = []
        self.slowest = 0.0
        self.largest: dict[str, Any] = {"megabytes": 0}

    def add(self, number: int, name: str, outcome: str, seconds: float, megabytes: int) -> None:
        """Add one document."""
        if megabytes > LIMIT_MEGABYTES:
            outcome = f"over: it takes {megabytes} MB ({outcome})"
        kind, _, _ = outcome.partition(":")
        self.counts[name[1:]][kind] += 1
        if kind in ("raw", "hang", "over"):
            self.broken.append({"number": number, "name": name, "outcome": outcome[:300]})
        self.slowest = max(self.slowest, seconds)
        if megabytes > self.largest["megabytes"]:
            self.largest = {"megabytes": megabytes, "number": number, "name": name}

    def count(self, kind: str) -> int:
        """How many documents broke a promise in one way."""
        return sum(item["outcome"].startswith(kind) for item in self.broken)


def read_all(options: argparse.Namespace, seeds: dict[str, bytes], found: Found) -> bool:
    """Read so many broken documents; return whether their memory was measured."""
    with DocumentReader() as reader:
        reader._process.read(
            seeds[".csv"], "a.csv"
        )  # the process beside this one is there from now on
        peak = Peak(reader)
        for number in range(options.first, options.first + options.count):
            name, data = broken_document(number, options.seed, seeds)
            peak.begin()
            began = time.perf_counter()
            told = outcome(reader, name, data)
            seconds = time.perf_counter() - began
            found.add(number, name, told, seconds, peak.megabytes())
            if (number + 1) % _EACH == 0:
                note(f"{number + 1} documents, {len(found.broken)} promises broken")
        return peak.is_measured


def fuzz(options: argparse.Namespace) -> dict[str, Any]:
    """Read so many broken documents; lay out what became of each, and what the largest took."""
    seeds = seed_documents()
    found = Found(seeds)
    started = time.perf_counter()
    is_measured = read_all(options, seeds, found)
    return result(
        "fuzz.documents",
        {"count": options.count, "seed": options.seed, "first": options.first},
        formats=endings(),
        without_seed=[ending for ending in endings() if not has_seed(ending)],
        counts={ending: dict(sorted(counts.items())) for ending, counts in found.counts.items()},
        raw_errors=found.count("raw"),
        hangs=found.count("hang"),
        over_limits=found.count("over"),
        peak_mb=found.largest["megabytes"] if is_measured else None,
        largest=found.largest if is_measured else None,
        slowest_seconds=round(found.slowest, 2),
        broken=found.broken,
        seconds=round(time.perf_counter() - started, 1),
    )


def main(arguments: list[str] | None = None) -> None:
    run_fuzzer("documents", __doc__, fuzz, arguments, count=30_000, first=0, seed=1)


if __name__ == "__main__":
    main()
