"""An experiment on hostile patterns in documents, timed at three sizes."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import time
import warnings
from typing import TYPE_CHECKING, Any

from eval.robustness.documents import endings, members_of, pdf, seed_documents, zipped
from eval.robustness.fuzzer import run_fuzzer
from eval.runner import note, result
from ragaccel.errors import RagaccelError
from ragaccel.passage import is_heading, sentence_spans, split_sentences
from ragaccel.retrieval import IgnoreRules, split_document
from ragaccel.retrieval.loaders import document_from_bytes
from ragaccel.retrieval.loaders.pdf import join_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    Work = Callable[[int], object]


SIZES = (10_000, 100_000, 1_000_000)
LARGEST_POWER = 1.3
LIMIT_MEGABYTES = 1000
_FLOOR_SECONDS = 0.005
_TRIES = 3  # runs of each smaller size, of which the fastest counts
_LIMIT_SECONDS = 30

# (beginning of the file, repeated text, end of the file), by ending
_REPEATED: dict[str, tuple[tuple[str, str, str], ...]] = {
    ".md": (
        ("", "a", ""),
        ("x", " ", "y"),
        ("# ", " ", "x"),
        ("# a", "\t", "#b"),
        ("# x", " #", "y"),
        ("# ", "[", ""),
        ("# ", "![](", ""),
        ("# ", "[a](", ""),
        ("# ", "[a]", "(b)"),
        ("# ", "{#", ""),
        ("# ", "<a ", ""),
        ("# ", "[[", "]"),
        ("# ", "[[]", ""),
        ("# a", " ", "{#"),
        ("# ", "* ", ""),
        ("# ", "_", ""),
        ("", "# a\n", ""),
        ("", "# a\n\nx\n\n", ""),
        ("", "abc\n===\n\n", ""),
        ("", "abc\n---\n", ""),
        ("", "-", "x"),
        ("", "- ", "x"),
        ("", "|-", "x"),
        ("---", " ", "x"),
        ("a\n", "=", "x"),
        ("", "```\n", ""),
        ("", "```\nx\n```\n", ""),
        ("", "~~~~\n```\n", ""),
        ("", "```" * 30 + "\n", ""),
        ("", "<!--\n", ""),
        ("", "<!-- -->\n", ""),
        ("", "```\n<!--\n```\n", ""),
        ("a", "\n", "b"),
        ("a", "\n \t", "b"),
        ("a\n", " ", "x"),
        ("", "\n" + " " * 99, "x"),
        ("", "> ", "x"),
        ("---\n", "title: x\n", ""),
        ("---\ntitle: ", "x ", "\n---\n"),
        ('---\ntitle: "', '" ', "\n---\n"),
        ("---\ntitle: a", "\t", "b\n---\n"),
        ("---\n", "---  x\n", ""),
        ("---\n---", "\n ", "x"),
    ),
    ".txt": (
        ("", ".", ""),
        (".", ")", "x"),
        ("", "." + " " * 200 + "a", ""),
        ("x.", " ", "a"),
        ("", ".'", ""),
        ("", "!)", ""),
        ("x. ", "(", "a"),
        ("", "x. (", ""),
        ("", "A. ", ""),
        ("", "Mr. Smith ", ""),
        ("", "1.\n", ""),
        ("", "a. ", ""),
        ("", "。", ""),
        ("", "日本語の文。", ""),
        ("", "日本語", ""),
        ("", "ab\n", ""),
        ("", "ab,\n", ""),
        ("", "x ", ""),
        ("", "w" * 5000 + " ", ""),
        ("", "\x1b[0m", ""),
        ("", "a\u2028", ""),
        ("", "e\u0301", ""),
        ("", "\u200b\n\n", ""),
        ("a\r", "\r", "b"),
        ("", "The lamp burns. It shines on ", ""),
        ("", ":a", ":"),
    ),
    ".rst": (
        ("", "a\n===\n", ""),
        ("", "=", "x"),
        ("===", " ", "x"),
        ("", "===\n", ""),
        ("", "===\na\n===\n", ""),
        ("", "~~~\n===\n", ""),
    ),
    ".py": (("x=", "1+", ""), ("", "x = 1\n", ""), ("", "\n\n", "")),
    ".html": (
        ("", "<div>", ""),
        ("", "<b>", "x"),
        ("", "<div></b>", ""),
        ("", "<b a=1><p>x", ""),
        ("", "<script>", ""),
        ("<script>", "</scrip", ""),
        ("", "<svg>", "</svg>"),
        ("<pre>", "\n", ""),
        ("<pre>", "a<i>", ""),
        ("", "<pre>", ""),
        ("", "<", ""),
        ("", "<!", ""),
        ("", "<!--", ""),
        ("", "<!-->", ""),
        ("<!--", "--", "x"),
        ("", "<![CDATA[", ">"),
        ("", "<?", ""),
        ("", "</", ">"),
        ("", "</b", ">"),
        ("<a", " a", ">"),
        ("<a ", '="', ">"),
        ("", "<a x='", ">"),
        ("", '<a x="">">"', ""),
        ("<a x=", " ", "'>"),
        ("", "<a =", ">"),
        ("", "&", ""),
        ("", "&amp", ""),
        ("&#", "9", ";"),
        ("", "&#x10ffff", ""),
        ("<table>", "<tr><td>x", ""),
        ("<table><tr>", "<td>x", ""),
        ("<meta", " ", "charset"),
        ("", "<meta ", ""),
        ("", "<title>", ""),
        ("<title>", "a ", ""),
        ("<textarea>", "</", ""),
        ("", "<li>", "x"),
        ("", "<h1>x", ""),
    ),
    ".csv": (
        ("", "c,", "\n1,2"),
        ("c" * 999 + ",b\n", "1,2\n", ""),
        ("a,b\n", "1,2\n", ""),
        ('a,b\n"', "x,\n", ""),
        ("", "'a',\"b\";", ""),
        ("", '"', ""),
        ("", ",'a", ""),
        ("a,b\n1,", " ", "x"),
        ("", "1", "x,b\n1,2"),
        ("", "\n", "a"),
    ),
    ".json": (
        ("", "[", ""),
        ("[", "1,", "1]"),
        ("[", "[],", "1]"),
        ("[", '{"a":{"b":1}},', "1]"),
        ("[", '{"a":1,"a":2},', "1]"),
        ('{"a":' * 100 + "[", "1,", "1]" + "}" * 100),
        ("[" * 99, "1,", "1" + "]" * 99),
        ("[", "9", "]"),
        ("[0.", "9", "]"),
        ('["', "\\\\", '"]'),
        ('["', '\\"', ""),
        ('["', "\\n", '"]'),
        ('["', " ", 'x"]'),
        ('{"a"', "\n", ":1}"),
        ("[1", "\n", "]"),
        ("{", '"a":[{"x":1}],', '"b":1}'),
        ("[", "\n1,", "1]"),
    ),
    ".jsonl": (("", "[" * 500 + "\n", ""), ("", '{"a":1}\n', ""), ("", "\n", "")),
    ".ipynb": (
        ('{"cells":[', '{"cell_type":"markdown","source":"x"},', '{"source":[]}]}'),
        ('{"cells":', "[", ""),
        ('{"cells":[{"source":[', '"x",', '""]}]}'),
    ),
    ".rtf": (
        (r"{\rtf1 ", "{", "}"),
        (r"{\rtf1 ", r"\b", " x}"),
        (r"{\rtf1 ", r"\'e9", "}"),
        (r"{\rtf1 ", r"\u233?", "}"),
        (r"{\rtf1 ", r"\par ", "}"),
        (r"{\rtf1 ", r"{\*\x ", "}"),
        (r"{\rtf1 ", " ", "x}"),
        (r"{\rtf1 ", "\\", "}"),
    ),
}
_RUN = "<w:p><w:r><w:t>y</w:t></w:r></w:p>"
_CELL = "<w:tc><w:p><w:r><w:t>z</w:t></w:r></w:p></w:tc>"
_MERGED = f"<w:tr>{_CELL.replace('<w:tc>', '<w:tc><w:tcPr><w:vMerge/></w:tcPr>')}</w:tr>"
_ODS_ROW = (
    "<table:table-row><table:table-cell><text:p>a</text:p></table:table-cell></table:table-row>"
)
# the same inside an archive: the file in it, the text after which it is written, and what is
_MEMBERS: dict[str, tuple[tuple[str, str, tuple[str, str, str]], ...]] = {
    ".docx": (
        ("word/document.xml", "<w:body>", ("", _RUN, "")),
        ("word/document.xml", "<w:body>", ("<w:p><w:r>", "<w:tab/>", "</w:r></w:p>")),
        ("word/document.xml", "<w:body>", ("<w:p><w:r><w:t>", " ", "x</w:t></w:r></w:p>")),
        ("word/document.xml", "<w:body>", ("<w:tbl><w:tr>", _CELL, "</w:tr></w:tbl>")),
        ("word/document.xml", "<w:body>", ("<w:tbl>", f"<w:tr>{_CELL}</w:tr>", "</w:tbl>")),
        ("word/document.xml", "<w:body>", ("<w:tbl>", _MERGED, "</w:tbl>")),
        ("word/document.xml", "<w:body>", ("", "<w:p>", "")),
    ),
    ".pptx": (
        ("ppt/slides/slide1.xml", "<a:t>T", ("", "x ", "")),
        ("ppt/slides/slide1.xml", "<a:t>T", ("", "</a:t></a:r><a:r><a:t>x", "")),
        ("ppt/slides/slide1.xml", "<a:t>T", ("", "</a:t></a:r></a:p><a:p><a:r><a:t>x", "")),
    ),
    ".xlsx": (
        ("xl/worksheets/sheet1.xml", "<sheetData>", ("", "<row><c><v>1</v></c></row>", "")),
        ("xl/worksheets/sheet1.xml", "<sheetData>", ("<row>", "<c><v>1</v></c>", "</row>")),
    ),
    ".odt": (
        ("content.xml", "<office:text>", ("", "<text:p>a</text:p>", "")),
        ("content.xml", "<office:text>", ("<text:p>", "<text:s/>", "</text:p>")),
        (
            "content.xml",
            "<office:text>",
            (
                "<table:table><table:table-row><table:table-cell>",
                "<text:p>a</text:p>",
                "</table:table-cell></table:table-row></table:table>",
            ),
        ),
        ("content.xml", "<office:text>", ("", "<text:list><text:list-item>", "")),
        ("content.xml", "<office:text>", ("", "<text:p>", "")),
        ("meta.xml", "<dc:title>", ("", "a<x/>", "")),
        ("content.xml", "<office:text>", ("<text:p>", "<text:span>a</text:span>", "</text:p>")),
    ),
    ".ods": (
        ("content.xml", "<office:spreadsheet>", ("<table:table>", _ODS_ROW, "</table:table>")),
        (
            "content.xml",
            "<office:spreadsheet>",
            (
                "<table:table><table:table-row><table:table-cell>",
                "<text:p>a</text:p>",
                "</table:table-cell></table:table-row></table:table>",
            ),
        ),
        (
            "content.xml",
            "<office:spreadsheet>",
            (
                "<table:table><table:table-row>",
                '<table:table-cell table:number-columns-repeated="9"/>',
                "</table:table-row></table:table>",
            ),
        ),
    ),
    ".odp": (
        (
            "content.xml",
            "<office:presentation>",
            ("", "<draw:page><text:p>a</text:p></draw:page>", ""),
        ),
        ("content.xml", "<office:presentation>", ("", "<draw:page>", "")),
    ),
    ".epub": (
        ("a.xhtml", "<body>", ("", "<p>a</p>", "")),
        ("a.xhtml", "<body>", ("", "<p>", "")),
        ("book.opf", "<spine>", ("", '<itemref idref="b"/>', "")),
    ),
}


def filled(pieces: tuple[str, str, str], size: int) -> bytes:
    """Return the text of (beginning, repeated, end), repeated to about ``size`` characters."""
    first, repeated, last = pieces
    return (first + repeated * (size // len(repeated)) + last).encode()


def patterns() -> dict[str, Work]:
    """Return the patterns by name; each is a function that reads the pattern at a size."""
    seeds = seed_documents()
    work: dict[str, Work] = {}
    for ending, all_pieces in _REPEATED.items():
        if ending not in seeds:
            continue
        for pieces in all_pieces:
            shown = " ".join(_shown(piece) for piece in pieces if piece)
            work[f"{ending} {shown}"] = lambda n, e=ending, p=pieces: _read(e, filled(p, n))
    for ending, places in _MEMBERS.items():
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
    members: dict[str, bytes], name: str, after: str, pieces: tuple[str, str, str], size: int
) -> dict[str, bytes]:
    place = after.encode()
    return {**members, name: members[name].replace(place, place + filled(pieces, size), 1)}


def _shown(piece: str) -> str:
    said = json.dumps(piece, ensure_ascii=False)
    return said if len(said) <= 24 else f"{said[:20]}…{said[-3:]}"


# Measuring in child processes


def take(work: Work, size: int) -> dict[str, Any]:
    """Do a piece of work in a child process; return its CPU seconds, megabytes and outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(work, size, writing)
    os.close(writing)
    said = b""
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    _, status, used = os.wait4(child, 0)
    if said:
        return dict(json.loads(said))
    cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else str(status)
    return {"seconds": used.ru_utime + used.ru_stime, "mb": 0, "outcome": f"killed: {cause}"}


def _child(work: Work, size: int, writing: int) -> None:
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
    os.write(writing, json.dumps({"seconds": seconds, "mb": megabytes, "outcome": said}).encode())
    os._exit(0)


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


def fuzz(options: argparse.Namespace) -> dict[str, Any]:
    """Time all patterns, or those with ``options.only`` in their names; return the result."""
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


def run_fuzz_patterns(arguments: list[str] | None = None) -> None:
    """Hostile patterns: whether time grows with the size of a file, or with a power of it.

        python -m eval fuzz_patterns --out eval/results

    Patterns that make a parser read the same text repeatedly are written with 10,000, 100,000 and
    1,000,000 characters, for every format that the package reads and for the rules of
    ``.gitignore``. Each is read and cut in a process of its own, with a time limit. Three things
    are promised: no errors except ragaccel's own, at most a gigabyte of memory, and CPU time that
    grows less than twentyfold when the size grows tenfold (a power of 1.3; times below a few
    milliseconds count as equal). The run exits with 1 if a promise is broken.
    """
    run_fuzzer("patterns", run_fuzz_patterns.__doc__, fuzz, arguments, only="", count=1000)
