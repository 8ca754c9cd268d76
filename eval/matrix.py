"""Matrix: real data sets against transformers' decoders and ours, one file a shape and set.

    python -m eval.matrix --data DATA --out eval/results && python -m eval.report
    python -m eval.matrix --data DATA --out eval/results --models random:llama-3.1-8b --device cuda

Every cell of a row is decoded in turn with the others of its row (``eval/speed.py``), following the
recorded answers. Each file is made in a process of its own and keeps its measurements as they are
made: a run that was stopped goes on. Afterwards ``python -m eval.report`` writes the table.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eval.contenders import STATIC
from eval.examples import has_data
from eval.script import new_parser
from eval.steps import HOURS, Step, add_places, note, run_all
from eval.stock import compiling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODELS = "random:llama-135m,random:qwen2.5-0.5b"
TASKS = "llma,clapnq,mtrag,pubmedqa,scitldr,gsm8k,humaneval"
SHIPPED = "handbook"
CONTENDERS = (
    *("generate", "generate_static", "generate_lookup"),
    *("ours_plain", "ours_paper", "ours_tree", "ours_full", "ours_warm"),
)
ROWS = {"random:qwen2.5-0.5b": 8}  # of the others 20
NO_WARMTH = ("demo",)  # no rows are left to be warm with


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    run_all(steps(options), "eval.matrix")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("matrix", __doc__)
    add_places(parser)
    add = parser.add_argument
    add("--models", default=MODELS, help="comma-separated (default: %(default)s)")
    add("--tasks", help=f"comma-separated (default: {TASKS}; without data {SHIPPED})")
    add("--limit", type=int, help="examples of a set (default: 20, of the 0.5B shape 8)")
    add("--tokenizer", help="in place of the one a shape names")
    add("--dtype", default="bfloat16")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--threads", type=int, help="processor threads (default: torch's)")
    add("--max-new-tokens", type=int, default=256)
    return parser.parse_args(arguments)


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """One speed run for each model and set.

    Raises:
        SystemExit: two of them would be the same file.
    """
    names = [name for name in CONTENDERS if name != STATIC or _compiles(options.device)]
    models, tasks = options.models.split(","), _tasks(options)
    made = [_step(model, task, names, options) for model in models for task in tasks]
    ((out, times),) = Counter(step.out for step in made).most_common(1)
    if times > 1:
        sys.exit(f"eval.matrix: {times} results would be {out.name}: give each its own --out")
    yield from made


def _tasks(options: argparse.Namespace) -> list[str]:
    if options.tasks:
        return list(options.tasks.split(","))
    if has_data(options.data):
        return TASKS.split(",")
    note(f"no data folder (--data): only {SHIPPED} is run, in the reader's tokens")
    options.tokenizer = options.tokenizer or "reader"
    return [SHIPPED]


def _compiles(device: str) -> bool:
    """Whether there is what it takes to compile transformers' passes; says so if not."""
    try:
        compiling(torch.device(device))
    except ValueError as error:
        note(str(error))
        return False
    return True


def _step(
    model: str, task: str, names: Sequence[str], options: argparse.Namespace, *, marked: str = ""
) -> Step:
    shape, place = (
        Path(model.rpartition(":")[2]).name.removesuffix(".json"),
        "gpu-" * (options.device != "cpu"),
    )
    out = options.out / f"matrix-{place}{shape}-{Path(task).stem}{marked}.json"
    shown = [name for name in names if name != "ours_warm" or task not in NO_WARMTH]
    arguments = [
        *(f"--model={model}", f"--task={task}", f"--dtype={options.dtype}"),
        *(f"--device={options.device}", f"--max-new-tokens={options.max_new_tokens}"),
        *(f"--limit={options.limit or ROWS.get(model, 20)}", "--forced", f"--out={out}"),
        *[f"--data={options.data}"] * (options.data is not None),
        *[f"--tokenizer={options.tokenizer}"] * (options.tokenizer is not None),
        *[f"--threads={options.threads}"] * (options.threads is not None),
        f"--contenders={','.join(shown)}",
    ]
    fallback = None
    if STATIC in names:  # what compiles may still fail: headers of Python are not looked for
        others = [name for name in names if name != STATIC]
        fallback = _step(model, task, others, options, marked="-not-static")
    return Step("eval.speed", tuple(arguments), out, seconds=6 * HOURS, fallback=fallback)


if __name__ == "__main__":
    main()
