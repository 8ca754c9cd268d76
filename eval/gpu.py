"""GPU: everything that is asked of a data-centre GPU, in order, by one command.

    python -m eval.gpu --data DATA --out eval/results
    python -m eval.gpu --device cpu --models random:llama-135m --data DATA --out /tmp/r --quick

Every result is a file and a process of its own: what fails is told at the end and loses no other,
and what is there already is not measured again. Afterwards ``python -m eval.report`` writes the
tables.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from eval import matrix
from eval.examples import DATA_VARIABLE
from eval.script import new_parser
from eval.steps import Step, add_places, note, run_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODELS = "random:llama-2-7b,random:llama-3.1-8b,random:qwen2.5-0.5b"
DECODERS = "ours,ours_tree,ours_plain,generate,generate_lookup"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    run_all(steps(options), "eval.gpu")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("gpu", __doc__)
    add_places(parser)
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:N, or cpu to try it out")
    add("--models", default=MODELS, help="comma-separated (default: %(default)s)")
    add("--task", default="llma", help="whose recorded answers are followed")
    add("--tokenizer", help="in place of the one a shape names")
    add("--quick", action="store_true", help="a few tokens of two examples, to try it out")
    return parser.parse_args(arguments)


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """What is measured, by model: passes, decoding, batches, exactness; matrix; memory; SPACE."""
    for model in options.models.split(","):
        yield from model_steps(model, options)
    yield from matrix.steps(matrix.parse(matrix_arguments(options)))
    asked = ("--requests=4", "--every=2", "--max-new-tokens=4") if options.quick else ()
    last = options.models.split(",")[-1]  # the smallest
    yield step("memory", last, options, (*asked, f"--task={_own_task(options)}"))
    if has_text(options.data):
        yield scratch_step(options)
    else:
        note("no text archives (--data): no model is trained for SPACE")


def has_text(data: Path | None) -> bool:
    """Whether a data folder is named that holds text to train on."""
    named = data or os.environ.get(DATA_VARIABLE)
    return named is not None and (Path(named) / "text").is_dir()


def scratch_step(options: argparse.Namespace) -> Step:
    """Train a model and its SPACE adapter, and have it guess ahead."""
    shape = "tiny" if options.quick else "llama-135m"
    out = options.out / f"space-scratch-{shape}.json"
    data = [f"--data={options.data}"] * (options.data is not None)
    asked = (f"--shape={shape}", f"--device={options.device}", *data, f"--out={out}")
    return Step("eval.papers.space_scratch", asked, out)


def model_steps(model: str, options: argparse.Namespace) -> Iterator[Step]:
    quick, compiled = options.quick, ("--compile",)
    few = ("--max-new-tokens=8",) if quick else ()
    task = (f"--task={options.task}",)
    passes = ("--contexts=64", "--repeats=1", "--steps=16") if quick else ()
    yield step("roofline", model, options, passes)
    limit = ("--limit=2", "--cost-repeats=1") if quick else ("--limit=20",)
    asked = (*task, *limit, *few)
    without = step(
        "speed", model, options, (*asked, f"--contenders={DECODERS}"), name="speed-not-static"
    )
    names = f"--contenders={DECODERS},generate_static"
    yield step("speed", model, options, (*asked, *compiled, names), fallback=without)
    sizes = ("--sizes=2", "--groups=1") if quick else ("--sizes=2,4,8,16",)
    yield step("batch", model, options, (*task, *sizes, *few, *compiled))
    yield step("exactness", model, options, (*task, *limit[:1], *few))


def matrix_arguments(options: argparse.Namespace) -> list[str]:
    """The same models over all sets; to try it out, over the one that is named."""
    few = (f"--tasks={options.task}", "--limit=2", "--max-new-tokens=8")
    return [
        *(f"--models={options.models}", f"--device={options.device}", f"--out={options.out}"),
        *[f"--data={options.data}"] * (options.data is not None),
        *[f"--tokenizer={options.tokenizer}"] * (options.tokenizer is not None),
        *(few if options.quick else ()),
    ]


def step(
    kind: str,
    model: str,
    options: argparse.Namespace,
    arguments: tuple[str, ...],
    *,
    name: str = "",
    fallback: Step | None = None,
) -> Step:
    """Make a step, whose file is named after device, model and kind."""
    shape = Path(model.rpartition(":")[2]).stem if model.endswith(".json") else model.split(":")[-1]
    place = "cpu" if options.device == "cpu" else "gpu"
    out = options.out / f"{place}-{Path(shape).name}-{name or kind}.json"
    common = [f"--model={model}", f"--device={options.device}", f"--out={out}"]
    common += [f"--data={options.data}"] * (options.data is not None)
    common += [f"--tokenizer={options.tokenizer}"] * (options.tokenizer is not None)
    common += ["--dtype=bfloat16"] * (options.device != "cpu")
    return Step(f"eval.{kind}", (*common, *arguments), out, fallback=fallback)


def _own_task(options: argparse.Namespace) -> str:
    """The memory's questions ship, unless the caller brings a file of questions."""
    return options.task if options.task.endswith(".jsonl") else "demo"


if __name__ == "__main__":
    main()
