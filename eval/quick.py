"""Quick: is all of it so? Every table of the papers by replay, a small model timed, and the report.

    python -m eval.quick --data DATA
    python -m eval.quick                      # without data: what ships under eval/tasks

Takes less than ten minutes on two cores. Steps are counted on the first rows of every set; seconds
are those of the 135M shape on three rows. Results go to ``--out`` and are not mixed with those that
the project keeps; what is there already is not made again.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from eval import matrix
from eval.examples import has_data
from eval.script import new_parser
from eval.steps import CACHE, Step, add_places, run_and_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUT = CACHE / "quick"
REPLAYED = {  # rows of each set: as many as the minutes allow
    "llma_count": (),
    "llma_tables": ("--limit=40",),
    "llma_sweep": ("--limit=20",),
    "llma_dialogue": ("--limit=60",),
    "lookahead_sweep": ("--limit=15",),
    "lookahead_branches": ("--limit=15",),
    "lookahead_memory": ("--limit=15",),
}
TIMED = ("--models=random:llama-135m", "--limit=3", "--max-new-tokens=64")
_MINUTES = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    run_and_report(steps(options), "eval.quick", options.out)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("quick", __doc__)
    add_places(parser, OUT)
    add = parser.add_argument
    add("--threads", type=int, help="processor threads (default: torch's)")
    return parser.parse_args(arguments)


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """The papers' experiments, replayed; then one set, timed."""
    data = [f"--data={options.data}"] * (options.data is not None)
    for name, asked in REPLAYED.items():
        out = options.out / f"{name.replace('_', '-')}.json"
        yield Step(f"eval.papers.{name}", (*asked, *data, f"--out={out}"), out, 10 * _MINUTES)
    tasks = ["--tasks=llma"] * has_data(options.data)
    threads = [f"--threads={options.threads}"] * (options.threads is not None)
    asked = (f"--out={options.out}", *data, *TIMED, *tasks, *threads)
    yield from matrix.steps(matrix.parse(asked))


if __name__ == "__main__":
    main()
