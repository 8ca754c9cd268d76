"""A fuzzer of the document readers: broken documents of every supported format."""

from __future__ import annotations

import io
import os
import random
import re
import time
import zipfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval import cli
from eval.robustness.fuzzer import Hang, describe, fuzzer, time_limit
from eval.runner import note, result
from ragaccel.errors import RagaccelError
from ragaccel.retrieval import split_document
from ragaccel.retrieval.loaders import READERS, BinaryFileError, DocumentReader
from ragaccel.retrieval.loaders.process import ReaderProcess

TEXT_ENDINGS = (".md", ".rst", ".txt", ".py")
"""Endings of plain-text formats, which have rules of their own but no reader in ``READERS``."""


def endings() -> list[str]:
    """Return the endings of all formats that the package reads."""
    return [*TEXT_ENDINGS, *sorted(READERS)]


SEEDS = Path(__file__).with_name("seeds")
"""A small valid document in each format, named by its ending without the dot."""
_SAME = {".htm": ".html", ".xhtml": ".html", ".ndjson": ".jsonl", ".xlsm": ".xlsx"}


def has_seed(ending: str) -> bool:
    """Return whether ``seed_documents`` has a document in this ending's own format."""
    return _seed_of(ending).exists()


def seed_documents() -> dict[str, bytes]:
    """Return a valid document for every ending; plain text for a format without a seed."""
    return {
        ending: _seed_of(ending if has_seed(ending) else ".txt").read_bytes()
        for ending in endings()
    }


def _seed_of(ending: str) -> Path:
    return SEEDS / _SAME.get(ending, ending)[1:]


def zipped(members: dict[str, bytes]) -> bytes:
    """Return a ZIP archive of the given files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    """Return the files of a ZIP archive by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pdf(content: bytes, *, more: bytes = b"", kids: bytes = b"3 0 R", count: int = 1) -> bytes:
    """Return a PDF of one page.

    Args:
        content: The stream of drawing commands.
        more: Further entries of the stream's dictionary.
        kids: The references in the page tree.
        count: The number of pages that the page tree claims.
    """
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, count),
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(content), more, content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    made, places = b"%PDF-1.4\n", []
    for number, thing in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, thing)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        made
        + b"xref\n0 6\n0000000000 65535 f \n"
        + table
        + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(made)
    )


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
    """Return a copy with some bytes changed, inserted, deleted, repeated or cut off."""
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
    """Replace the first number or quoted name after an offset, so that XML stays XML."""
    found = re.compile(rb'(?<=")[\w.-]+(?=")|\d+').search(data, start)
    if not found:
        return data
    return data[: found.start()] + rng.choice(_NUMBERS) + data[found.end() :]


def changed_members(data: bytes, rng: random.Random) -> bytes:
    """Return an archive with one member changed; the archive itself stays valid."""
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
    """Return the name and the bytes of a broken document, always the same for number and seed."""
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
    """Read a document and return the outcome.

    It is ok, binary or refused, or begins with the broken promise: raw, hang or over.
    """
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
    """A meter of the peak memory that reading takes, in this process or the reader's own."""

    def __init__(self, reader: DocumentReader) -> None:
        self._reader = reader
        self._held: dict[int, int] = {}
        self.is_measured = forget_peak(os.getpid())

    def begin(self) -> None:
        """Start a measurement: reset the peaks and note the memory in use."""
        self._held = {
            pid: _kilobytes(pid, "VmRSS") for pid in self._processes() if forget_peak(pid)
        }

    def megabytes(self) -> int:
        """Return the peak in megabytes above the memory at ``begin``, or 0 if not measurable.

        All memory of a process started since then counts.
        """
        if not self.is_measured:
            return 0
        taken = [_kilobytes(pid, "VmHWM") - self._held.get(pid, 0) for pid in self._processes()]
        return max(0, *taken) // 1024

    def _processes(self) -> list[int]:
        beside = self._reader._process
        return [os.getpid(), *([beside.pid] if beside is not None else [])]


def forget_peak(pid: int) -> bool:
    """Reset the peak memory of a process; return whether the system supports that."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kilobytes(pid: int, name: str) -> int:
    """Return a field of ``/proc/PID/status`` in kilobytes, or 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    _, _, after = status.partition(f"{name}:")
    return int(after.split(None, 1)[0]) if after else 0


class Found:
    """Counts of outcomes, broken promises, and the largest use of memory."""

    def __init__(self, formats: Iterable[str]) -> None:
        self.counts: dict[str, Counter[str]] = {ending: Counter() for ending in formats}
        self.broken: list[dict[str, Any]] = []
        self.slowest = 0.0
        self.largest: dict[str, Any] = {"megabytes": 0}

    def add(self, number: int, name: str, outcome: str, seconds: float, megabytes: int) -> None:
        """Count the outcome of one document, with its time and memory."""
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
        """Return how many documents broke the promise ``kind``: raw, hang or over."""
        return sum(item["outcome"].startswith(kind) for item in self.broken)


def read_all(options: Namespace, seeds: dict[str, bytes], found: Found) -> bool:
    """Read broken documents and count outcomes in ``found``; return whether memory was measured."""
    with DocumentReader() as reader:
        ReaderProcess.read(reader, seeds[".csv"], "a.csv")  # starts the reader's own process
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


@fuzzer(30_000, cli.integer("--first", 0, "the number of the first one"))
def run_fuzz_documents(options: Namespace) -> dict[str, Any]:
    """Broken documents: is each read and cut, or refused with one of our errors, in little time?

        python -m eval fuzz_documents --out eval/results

    A small document of every format that the package reads is changed at random, byte by byte or
    inside the files of its archive, sometimes given another format's name, and then read as
    indexing does: text in this process, all other formats in the reader's own process. Four things
    are promised: no errors except ragaccel's own and no crash of a library; at most 10 seconds; at
    most a gigabyte of memory; and passages equal to the text at their positions. The run exits
    with 1 if a promise is broken; ``--first N --count 1`` tries one document again.

    A document's memory is the peak of either process while it is read, less the memory before.
    Only Linux can reset such a peak; elsewhere memory is not measured.
    """
    seeds = seed_documents()
    found = Found(seeds)
    started = time.perf_counter()
    is_measured = read_all(options, seeds, found)
    return result(
        "fuzz_documents",
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
