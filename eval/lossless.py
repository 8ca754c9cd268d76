"""Lossless: is it the same? Our answers against ``model.generate``, and how they differ.

    python -m eval.lossless --model reader --tasks demo,handbook,code,chat --dtypes float32,bfloat16

Any of our decoders (``--contenders``) on any tasks, in every type of numbers that is named. Two
passes over different numbers of rows round differently, so a choice between two tokens that
are nearly tied can fall either way. For each first difference the gap between the two tokens'
logits is measured, in one pass over the common text in the same precision, next to the gap between
the model's two likeliest tokens; what is no near tie is an error. Progress goes to stderr; the last
line of stdout is one JSON document, a comparison for each task, type and decoder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eval.answer_tables import lossless_table
from eval.contenders import BASELINE, make_contender
from eval.examples import load_task
from eval.jobs import fitting_jobs, under_task
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.script import measured, new_parser, note, result
from eval.speed import run_rounds
from eval.targets import DTYPES, add_target_options, chosen_target, describe_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from eval.examples import Example
    from eval.jobs import Job
    from eval.targets import Target

Row = dict[str, Any]
Rows = dict[tuple[str, int], Row]


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("lossless", measure, parse(arguments))
    print(lossless_table(document))
    print(json.dumps(document["comparisons"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("lossless", __doc__)
    add_target_options(parser)
    add = parser.add_argument
    tasks = "comma-separated files of eval/tasks, or .jsonl files of your own"
    add("--tasks", "--task", default="demo", help=tasks)
    contenders = f"comma-separated: what is held against {BASELINE}"
    add("--contenders", "--contender", default="ours", help=contenders)
    add("--dtypes", default="float32,bfloat16", help=f"comma-separated, of {', '.join(DTYPES)}")
    add("--limit", type=int, help="examples to take of each task (default: all)")
    add("--max-new-tokens", type=int, default=128)
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare all answers in every type of numbers; tell of those that the processor lacks."""
    dtypes = options.dtypes.split(",")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"no dtype {dtype!r}: take some of {', '.join(DTYPES)}")
    sets = {
        Path(task).name: load_task(task, options.limit, options.data)
        for task in options.tasks.split(",")
    }
    found = {dtype: _compared_or_told(options, dtype, sets) for dtype in dtypes}
    lacking = {dtype: told for dtype, told in found.items() if isinstance(told, str)}
    return result(
        "lossless",
        _settings(options, sets, options.dtypes),
        device=options.device,
        **({"lacking": lacking} if lacking else {}),
        comparisons=[row for rows in found.values() if not isinstance(rows, str) for row in rows],
    )


def _compared_or_told(
    options: argparse.Namespace, dtype: str, sets: Mapping[str, Sequence[Example]]
) -> list[Row] | str:
    """Compare in one type of numbers, or tell what the processor cannot compute in it."""
    try:
        return compare_tasks(options, dtype, sets)
    except RuntimeError as error:
        if "not implemented for '" not in str(error):  # as torch says it
            raise
        told = str(error).partition("\n")[0]
        note(f"{dtype}: {told}")
        return told


def compare_tasks(
    options: argparse.Namespace, dtype: str, sets: Mapping[str, Sequence[Example]]
) -> list[Row]:
    """Have every example answered in one type of numbers; compare by task and decoder."""
    note(f"loading {options.model} in {dtype}")
    target = chosen_target(options, dtype)
    jobs = {
        task: under_task(task, fitting_jobs(target, examples, options.max_new_tokens))
        for task, examples in sets.items()
    }
    beside = options.out and options.out.with_stem(f"{options.out.stem}-{dtype}")
    ledger = kept_beside(beside, _settings(options, sets, dtype))
    names = [name for name in options.contenders.split(",") if name != BASELINE]
    decoders = [make_contender(name, target) for name in (*names, BASELINE)]
    everything = [job for own in jobs.values() for job in own]
    run_rounds(target, everything, decoders, ledger, repeats=1, forced=False, keep_answers=True)
    rows = {name: rows_of(name, ledger.measurements) for name in (*names, BASELINE)}
    return [
        {
            "task": task,
            "dtype": dtype,
            **compare(target, own, rows, name, BASELINE),
            "left_out": len(sets[task]) - len(own),
            "acceptance_length": _acceptance_length(own, rows[name]),
        }
        for task, own in jobs.items()
        for name in names
    ]


def _settings(
    options: argparse.Namespace, sets: Mapping[str, Sequence[Example]], dtype: str
) -> dict[str, Any]:
    return {
        **describe_target(argparse.Namespace(**vars(options), dtype=dtype)),
        "tasks": list(sets),
        "contenders": options.contenders,
        "examples": sum(map(len, sets.values())),
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }


def _acceptance_length(jobs: Sequence[Job], rows: Rows) -> float:
    own = [rows[job.job_id, 0] for job in jobs]
    return float(sum(row["tokens"] for row in own) / max(1, sum(row["passes"] for row in own)))


def rows_of(name: str, rows: Iterable[Row]) -> Rows:
    """The rows of a contender, by example and round."""
    return {(row["example"], row["round"]): row for row in rows if row["contender"] == name}


def compare(
    target: Target, jobs: Sequence[Job], rows: Mapping[str, Rows], found: str, wanted: str
) -> dict[str, Any]:
    """Count the answers of one decoder that are those of another; list first differences."""
    answers = [
        (job, *(rows[name][job.job_id, 0]["token_ids"] for name in (found, wanted))) for job in jobs
    ]
    return {"found": found, "wanted": wanted, **identical(target, answers)}


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
