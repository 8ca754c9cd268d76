"""The registry measured: what it takes to register texts, and to find those of a prompt again.

    python -m eval.registry --out eval/results/registry.json

Texts of 1,000 characters are made of words drawn with the frequencies of a language and registered
one by one; every tenth has a footer that all of those share. Real ones, full of licences, headers
and near copies, are cut from the files of the packages that are installed here, those of a
licence, a README or metadata first, each text beginning 800 characters after the one before; or
from the files of ``--data``. Prompts number some of them, whole or cut to 400 characters, before
text that is not registered. Times are of the processor: they leave out what else ran meanwhile.
The last line of the output is one JSON document.

A text counts as found if one is that holds all that is shown of it. Looked for is what is long
enough to be told by, 96 characters, and what no more than four registered texts hold a half of.
Anything else found is counted that is neither wholly there nor holds what is shown of one.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import statistics
from importlib.metadata import distributions
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any

from eval.script import measured, new_parser, note, result
from ragaccel.frameworks.registry import ReferenceRegistry
from ragaccel.frameworks.text_matching import MIN_COMMON, remove_whitespace
from ragaccel.passage import Passage

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ragaccel.frameworks.registry import Match

TEXT_SIZE = 1_000
CUT = slice(300, 700)
PROMPT_SIZES = (3_000, 13_000, 80_000)
MOST_SHARING = 4  # texts: what more of them hold tells nothing about any
_TEMPLATES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "README", "METADATA")
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class Writer:
    """Texts of made-up words, some of them much more frequent than others."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random.choices
        lengths = [self.random.randint(2, 9) for _ in range(20_000)]
        weights = range(len(_LETTERS), 0, -1)
        self.words = ["".join(draw(_LETTERS, weights, k=size)) for size in lengths]
        self.frequencies = [1 / (rank + 3) for rank in range(len(self.words))]

    def text(self, size: int) -> str:
        """Write so many characters."""
        words = self.random.choices(self.words, self.frequencies, k=size // 3)
        return " ".join(words)[:size]


def texts(writer: Writer, count: int) -> list[Passage]:
    """Make passages with different texts, ten of a document."""
    footer = writer.text(200)
    made = []
    for number in range(count):
        own = writer.text(TEXT_SIZE if number % 10 else TEXT_SIZE - len(footer))
        text = own if number % 10 else own + footer
        place = {"path": f"{number // 10}.md", "start": number % 10 * TEXT_SIZE}
        made.append(Passage(str(number), text, **place))
    return made


def real_texts(count: int, folder: Path | None) -> list[Passage]:
    """Cut so many passages, or as many as there are, from installed packages or a folder."""
    made: list[Passage] = []
    for path in _files(folder):
        text = path.read_text(encoding="utf-8", errors="replace")
        for start in range(0, len(text), 800):
            piece = text[start : start + TEXT_SIZE]
            if len(piece) > TEXT_SIZE // 3:
                made.append(Passage(str(len(made)), piece, path=str(path), start=start))
        if len(made) >= count:
            break
    if len(made) < count:
        note(f"only {len(made):,} real texts are here: give a larger folder as --data")
    return made[:count]


def _files(folder: Path | None) -> list[Path]:
    if folder is not None:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    files = {Path(str(file.locate())) for one in distributions() for file in one.files or ()}
    paths = sorted(path for path in files if path.is_file())
    templates = [path for path in paths if path.name.upper().startswith(_TEMPLATES)]
    return templates + [path for path in paths if path.suffix == ".py"]


class Pauses:
    """What the garbage collection took, while it is looked at."""

    def __init__(self) -> None:
        self.seconds, self._started = 0.0, 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        """Note when a collection starts, and how long it was when it stops."""
        if phase == "start":
            self._started = thread_time()
        else:
            self.seconds += thread_time() - self._started


def prompt_of(texts: Sequence[str], writer: Writer) -> str:
    """Write texts as a chain does, numbered, with as much that was never registered."""
    parts = [f"[{n}] {text}" for n, text in enumerate(texts, start=1)]
    return "\n\n".join(["Answer from these.", *parts, writer.text(300), "Question?"])


def tells(piece: str, known: Sequence[str]) -> bool:
    """Whether few registered texts hold one half of a piece or the other."""
    halves = piece[: len(piece) // 2], piece[len(piece) // 2 :]
    return any(sum(half in text for text in known) <= MOST_SHARING for half in halves)


def found_again(
    matches: Sequence[Match], shown: Sequence[str], known: Sequence[str]
) -> tuple[int, int, int]:
    """Count which pieces were found, which could be, and what else was."""
    texts = [remove_whitespace(match.passage.text) for match in matches]
    pieces = {
        remove_whitespace(piece) for piece in shown if len(" ".join(piece.split())) >= MIN_COMMON
    }
    missed = [piece for piece in pieces if not any(piece in text for text in texts)]
    wanted = sum(tells(piece, known) for piece in missed)
    found = len(pieces) - len(missed)
    extra = sum(
        not match.whole and not any(piece in text for piece in pieces)
        for match, text in zip(matches, texts, strict=True)
    )
    return found, found + wanted, extra


def measure_prompts(
    registry: ReferenceRegistry, passages: Sequence[Passage], size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Look for passages in prompts of a size, whole and cut: the time, what is missed and extra."""
    writer = Writer(size)
    known = list({remove_whitespace(passage.text): None for passage in passages})
    figures: dict[str, Any] = {"characters": size}
    for name, part in {"whole": slice(None), "cut": CUT}.items():
        count = max(1, (size - 300) // (len(("x" * TEXT_SIZE)[part]) + 6))
        seconds, pauses, counts = [], [], []
        for _ in range(options.prompts):
            chosen = writer.random.sample(passages, count)
            prompt = prompt_of([one.text[part] for one in chosen], writer)
            gc.callbacks.append(pause := Pauses())
            started = thread_time()
            found = registry.match(prompt)
            seconds.append(thread_time() - started)
            gc.callbacks.remove(pause)
            pauses.append(pause.seconds)
            counts.append(found_again(found, [one.text[part] for one in chosen], known))
        hits, wanted, extra = (sum(column) for column in zip(*counts, strict=True))
        figures[name] = {
            "passages": count,
            "match_ms_median": 1000 * statistics.median(seconds),
            "match_ms_p99": 1000 * sorted(seconds)[int(0.99 * (len(seconds) - 1))],
            "match_ms_worst": 1000 * max(seconds),
            "collected_ms_worst": 1000 * max(pauses),
            "wanted": wanted,
            "recall": hits / wanted,
            "extra": extra,
        }
    return figures


def measure_registry(passages: Sequence[Passage], options: argparse.Namespace) -> dict[str, Any]:
    """Register texts and look for them in prompts of every size."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    registry = ReferenceRegistry()
    seconds = []
    for passage in passages:
        started = thread_time()
        registry.register(passage)
        seconds.append(thread_time() - started)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    kept = len(registry)
    text_bytes = sum(len(passage.text) for passage in passages)  # they were there before
    return {
        "texts": len(passages),
        "kept": kept,
        "register_us_median": 1e6 * statistics.median(seconds),
        "register_us_mean": 1e6 * statistics.mean(seconds),
        "mb": (registry.num_bytes - text_bytes) / 1e6,
        "grown_mb": grown * 1024 / 1e6,
        "prompts": [measure_prompts(registry, passages, size, options) for size in PROMPT_SIZES],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure registries of every number of texts."""
    figures = []
    for count in options.texts:
        note(f"{count:,} texts")
        made = {"made": texts(Writer(0), count), "real": real_texts(count, options.data)}
        figures += [
            {"kind": kind, **measure_registry(passages, options)}
            for kind, passages in made.items()
            if passages
        ]
    settings = {"texts": options.texts, "prompts": options.prompts}
    return result("registry", settings, figures=figures)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the result as the last line."""
    print(json.dumps(measured("registry", measure, parse(arguments))))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("registry", __doc__)
    parser.add_argument("--texts", type=int, nargs="+", default=[1_000, 20_000])
    parser.add_argument("--prompts", type=int, default=50, help="of each kind and size")
    parser.add_argument("--data", type=Path, help="a folder of documents to cut real texts from")
    parser.add_argument("--out", type=Path, help="write the result there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
