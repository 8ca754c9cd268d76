"""Full: every result of the report anew, one after the other, by one command. Takes hours.

    python -m eval.full --data DATA
    python -m eval.full --data DATA --only matrix,llma        # whose names begin so
    python -m eval.full --data DATA --out eval/results        # those that the project keeps

Each result is a file and a process of its own: a run that was stopped goes on where it was, what
fails is told at the end and loses no other, and what is there already is not made again: delete a
file to have it measured anew. The report is written last. Leave the machine alone meanwhile. On a
GPU the same is done by ``python -m eval.gpu``.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from eval import matrix
from eval.examples import has_data
from eval.script import new_parser
from eval.steps import CACHE, HOURS, Step, add_places, note, run_and_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUT = CACHE / "full"
SMALL = "--model=random:llama-135m"
BFLOAT16 = "--dtype=bfloat16"
ONE_SET = (SMALL, BFLOAT16, "--sets=llma_msmarco_davinci003", "--limit=8")
SOME_POINTS = ("--n=1,2,3,5", "--k=2,5,10,20,30")
# The result's name, its module and what is asked of it.
WITHOUT_DATA = (
    ("reader-demo", "speed", ("--model=reader", "--task=demo")),
    ("reader-generation", "generation", ("--model=reader",)),
    ("reader-lossless", "lossless", ("--dtypes=float64,float32,bfloat16",)),
    ("reader-memory", "memory", ("--model=reader",)),
    ("frameworks-reader", "frameworks", ("--model=reader", "--task=demo")),
    ("rag-speedup-reader", "rag_speedup", ("--model=reader", "--task=handbook")),
    ("quality", "quality", ()),
    ("registry", "registry", ()),
)
WITH_DATA = (
    ("replay", "replay", ()),
    ("ablation", "ablation", ()),
    ("reliability", "reliability", ()),
    ("drafting", "drafting", ("--tree",)),
    ("llma-count", "papers.llma_count", ()),
    ("llma-tables", "papers.llma_tables", ()),
    ("llma-sweep", "papers.llma_sweep", ()),
    ("llma-dialogue", "papers.llma_dialogue", ()),
    ("lookahead-sweep", "papers.lookahead_sweep", ()),
    ("lookahead-branches", "papers.lookahead_branches", ()),
    ("lookahead-memory", "papers.lookahead_memory", ()),
    ("space-reader", "papers.space_reader", ()),
    ("llma-tables-llama-135m", "papers.llma_tables", (SMALL, BFLOAT16, "--limit=8")),
    ("llma-sweep-llama-135m", "papers.llma_sweep", (SMALL, BFLOAT16, "--limit=8", *SOME_POINTS)),
    ("lookahead-sweep-llama-135m", "papers.lookahead_sweep", (*ONE_SET, "--memory=cold")),
    ("quality-sweep", "quality", ("--sweep",)),
    ("rag-speedup-reader-llma", "rag_speedup", ("--model=reader", "--task=llma", "--limit=40")),
    ("rag-speedup-llama-135m", "rag_speedup", (SMALL, BFLOAT16, "--limit=20")),
    ("frameworks-llama-135m", "frameworks", (SMALL, "--task=llma", "--limit=6", "--rounds=2")),
    ("peak-memory-llama-135m", "peak_memory", (SMALL, BFLOAT16, "--task=llma")),
    ("llama-135m-batch", "batch", (SMALL, BFLOAT16, "--task=llma", "--groups=2")),
    ("llama-135m-roofline", "roofline", (SMALL, BFLOAT16)),
    ("never-slower", "never_slower", (SMALL, "--limit=40")),
    ("reader-exactness-float32", "exactness", ("--task=xquad", "--limit=200")),
    ("reader-exactness-bfloat16", "exactness", ("--task=xquad", "--limit=200", BFLOAT16)),
)
OUT_NAMES = {"replay": "--json"}
OWN_TEXTS = ("registry",)  # what it calls data are documents


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    made = (one for one in steps(options) if one.out.stem.startswith(wanted))
    run_and_report(made, "eval.full", options.out)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("full", __doc__)
    add_places(parser, OUT)
    add = parser.add_argument
    add("--only", help="comma-separated beginnings of results' names")
    return parser.parse_args(arguments)


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """The matrix, then all else; without a data folder what can do without."""
    shared = [f"--data={options.data}"] * (options.data is not None)
    yield from matrix.steps(matrix.parse([f"--out={options.out}", *shared]))
    wanted = [*WITHOUT_DATA, *WITH_DATA]
    if not has_data(options.data):
        note("no data folder (--data): what needs it is left out")
        wanted = [*WITHOUT_DATA]
    for name, module, asked in wanted:
        out = options.out / f"{name}.json"
        where = f"{OUT_NAMES.get(module, '--out')}={out}"
        data = () if module in OWN_TEXTS else shared
        yield Step(f"eval.{module}", (*asked, *data, where), out, 6 * HOURS)


if __name__ == "__main__":
    main()
