"""The registry measured: what it takes to register texts, and to find those of a prompt again.

    python -m eval.registry --out eval/results/registry.json

Texts of 1,000 characters are made of words drawn with the frequencies of a language and registered
one by one; every tenth has a footer that all of those share. Prompts number some of them, whole or
cut to 400 characters, before text that is not registered. Times are of the processor: they leave
out what else ran meanwhile. The last line of the output is one JSON document.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any

from eval.script import measured, new_parser, note, result
from ragaccel.memory.registry import ReferenceRegistry
from ragaccel.passage import Passage

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

TEXT_SIZE = 1_000
CUT = slice(300, 700)
PROMPT_SIZES = (3_000, 13_000, 80_000)
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


def prompt_of(passages: Sequence[Passage], shown: Callable[[str], str], writer: Writer) -> str:
    """Write passages as a chain does, numbered, with as much that was never registered."""
    parts = [f"[{n}] {shown(passage.text)}" for n, passage in enumerate(passages, start=1)]
    return "\n\n".join(["Answer from these.", *parts, writer.text(300), "Question?"])


def measure_prompts(
    registry: ReferenceRegistry, passages: Sequence[Passage], size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Look for passages in prompts of a size, whole and cut: the time, what is missed and extra."""
    writer = Writer(size)
    figures: dict[str, Any] = {"characters": size}
    for name, shown in {"whole": str, "cut": lambda text: text[CUT]}.items():
        count = max(1, (size - 300) // (len(shown("x" * TEXT_SIZE)) + 6))
        seconds, hits, extra = [], 0, 0
        for _ in range(options.prompts):
            chosen = writer.random.sample(passages, count)
            prompt = prompt_of(chosen, shown, writer)
            started = thread_time()
            found = registry.match(prompt)
            seconds.append(thread_time() - started)
            wanted = {passage.passage_id for passage in chosen}
            names = {match.passage.passage_id for match in found}
            hits += len(wanted & names)
            extra += len(names - wanted)
        figures[name] = {
            "passages": count,
            "match_ms_median": 1000 * statistics.median(seconds),
            "match_ms_worst": 1000 * max(seconds),
            "recall": hits / (count * options.prompts),
            "extra": extra,
        }
    return figures


def measure_registry(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Register so many texts and look for them in prompts of every size."""
    note(f"{count:,} texts")
    passages = texts(Writer(0), count)
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
        "texts": count,
        "kept": kept,
        "register_us_median": 1e6 * statistics.median(seconds),
        "register_us_mean": 1e6 * statistics.mean(seconds),
        "mb": (registry.num_bytes - text_bytes) / 1e6,
        "grown_mb": grown * 1024 / 1e6,
        "prompts": [measure_prompts(registry, passages, size, options) for size in PROMPT_SIZES],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure registries of every number of texts."""
    figures = [measure_registry(count, options) for count in options.texts]
    settings = {"texts": options.texts, "prompts": options.prompts}
    return result("registry", settings, figures=figures)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the result as the last line."""
    parser = new_parser("registry", __doc__)
    parser.add_argument("--texts", type=int, nargs="+", default=[1_000, 20_000])
    parser.add_argument("--prompts", type=int, default=50, help="of each kind and size")
    parser.add_argument("--out", type=Path, help="write the result there too")
    print(json.dumps(measured("registry", measure, parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
