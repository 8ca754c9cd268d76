"""Lossless: is it the same? Our answers against ``model.generate``, and how they differ.

    python -m eval.lossless --model reader --task demo --dtypes float32,bfloat16

Two passes over different numbers of rows round differently, so a choice between two tokens that
are nearly tied can fall either way. For each first difference the gap between the two tokens'
logits is measured, in one pass over the common text in the same precision, next to the gap between
the model's two likeliest tokens; what is no near tie is an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eval.contenders import make_contender
from eval.examples import load_task
from eval.jobs import jobs_for
from eval.machine import current_commit
from eval.script import measured, new_parser, note, result
from eval.tables import lossless_table
from eval.targets import DTYPES, add_target_options, chosen_target, shown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.jobs import Job
    from eval.targets import Target


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("lossless", measure, parse(arguments))
    print(lossless_table(document))
    print(json.dumps(document["dtypes"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("lossless", __doc__)
    add_target_options(parser)
    add = parser.add_argument
    add("--task", default="demo", help="a file of eval/tasks, or a .jsonl file of your own")
    add("--contender", default="ours", help="what is held against generate")
    add("--dtypes", default="float32,bfloat16", help=f"comma-separated, of {', '.join(DTYPES)}")
    add("--limit", type=int, help="examples to take (default: all)")
    add("--max-new-tokens", type=int, default=128)
    add("--out", type=Path, help="result file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare all answers in every dtype."""
    examples = load_task(options.task, options.limit, options.data)
    results = {}
    for dtype in options.dtypes.split(","):
        if dtype not in DTYPES:
            raise ValueError(f"no dtype {dtype!r}: take some of {', '.join(DTYPES)}")
        target = chosen_target(options, dtype)
        jobs = jobs_for(target, examples, options.max_new_tokens)
        results[dtype] = compare(target, jobs, options.contender, dtype)
    settings = {
        "model": shown_name(options.model),
        "task": Path(options.task).name,
        "contender": options.contender,
        "examples": len(examples),
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }
    return result("lossless", settings, device=options.device, dtypes=results)


def compare(target: Target, jobs: Sequence[Job], name: str, label: str = "") -> dict[str, Any]:
    """Count the answers of a contender that are those of ``generate``; list first differences."""
    ours, theirs = make_contender(name, target), make_contender("generate", target)
    answers = []
    same = tokens = passes = 0
    for at, job in enumerate(jobs, start=1):
        found, wanted = ours.run(job), theirs.run(job)
        tokens, passes = tokens + len(found.token_ids), passes + found.passes
        answers.append((job, found.token_ids, wanted.token_ids))
        same += found.token_ids == wanted.token_ids
        note(f"{label} {at}/{len(jobs)}: {same} identical")
    length = tokens / max(1, passes)
    return {**identical(target, answers), "acceptance_length": length}


def identical(
    target: Target, answers: Sequence[tuple[Job, Sequence[int], Sequence[int]]]
) -> dict[str, Any]:
    """Count the pairs of answers that are the same; list the first differences of the others."""
    differences = [
        first_difference(target, job, found, wanted)
        for job, found, wanted in answers
        if list(found) != list(wanted)
    ]
    same = len(answers) - len(differences)
    return {
        "answers": len(answers),
        "identical": same,
        "share": same / max(1, len(answers)),
        "differences": differences,
    }


def first_difference(
    target: Target, job: Job, found: Sequence[int], wanted: Sequence[int]
) -> dict[str, Any]:
    """Tell where two answers part, and how near the two choices were to each other there.

    ``gap`` is between the logits of the two tokens chosen, ``top_2_gap`` between the two greatest;
    ``spread`` is the standard deviation of the logits, to judge them by.
    """
    place = next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
        min(len(found), len(wanted)),
    )
    result: dict[str, Any] = {"example": job.job_id, "place": place}
    if place >= min(len(found), len(wanted)):
        # One went on where the other ended: never a near tie but an error of ours.
        return {**result, "found": None, "wanted": None, "gap": None}
    ids = torch.tensor([[*job.prompt_ids, *found[:place]]], device=target.model.device)
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -1].double()
    top = logits.topk(2).values
    return {
        **result,
        "found": found[place],
        "wanted": wanted[place],
        "gap": abs(float(logits[found[place]] - logits[wanted[place]])),
        "top_2_gap": float(top[0] - top[1]),
        "spread": float(logits.std()),
    }


if __name__ == "__main__":
    main()
