"""Broken documents of every supported format, and the valid ones that they are made of."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

from eval.robustness.fuzz import Case, Kind, Make, OutcomeError, changed_bytes
from ragaccel.errors import RagaccelError
from ragaccel.retrieval import split_document
from ragaccel.retrieval.loaders import READERS, DocumentReader
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
_BROKEN = ("takes more than", "crashes on it", "does not start")  # told by the reader's own process


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
        changed[told] = changed_bytes(content, rng, _BYTES) if name == chosen else content
    return zipped(changed)


def broken_document(seeds: dict[str, bytes], rng: random.Random) -> tuple[str, bytes]:
    """Draw the ending and the bytes of a broken document."""
    ending = rng.choice(list(seeds))
    data = seeds[ending]
    if data.startswith(b"PK") and rng.random() < 0.8:
        data = changed_members(data, rng)
    else:
        data = changed_bytes(data, rng, _BYTES)
    if rng.random() < 0.05:
        ending = rng.choice(list(seeds))
    return ending, data


def count_words(texts: list[str]) -> list[int]:
    """Count tokens as a stand-in for an embedder's tokenizer does."""
    return [text.count(" ") + 1 + len(text) // 20 for text in texts]


def open_documents(_folder: Path) -> Make:
    """Start the reader's own process; return the function that makes broken documents."""
    seeds, reader = seed_documents(), DocumentReader()
    ReaderProcess.read(reader, seeds[".csv"], "a.csv")

    def make(_number: int, rng: random.Random) -> Case:
        ending, data = broken_document(seeds, rng)
        return ending, f"a{ending} of {len(data)} bytes", lambda: read(reader, f"a{ending}", data)

    return make


def read(reader: DocumentReader, name: str, data: bytes) -> None:
    """Read and cut a document as indexing does; its passages must equal the text."""
    try:
        document = reader.read(data, name)
        passages = split_document(document, count_words)
    except RagaccelError as error:
        if any(told in str(error) for told in _BROKEN):
            raise OutcomeError(f"raw: {error}") from error
        raise
    for passage in passages:
        if document.text[passage.start : passage.end] != passage.text:
            raise OutcomeError("raw: a passage is not what stands in the text")
        (passage.title + passage.text).encode()


KIND = Kind(open_documents, count=30_000, seconds=10, batch=1000)
