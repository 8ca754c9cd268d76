"""Batch: how much sooner are many answers there when they share passes?

    python -m eval.batch --model random:llama-135m --task llma --data DATA --sizes 2,4,8,16

Groups of recorded answers are decoded one by one, together by our scheduler with and without
guesses, and by ``model.generate`` on a padded batch; all follow the recordings, so that all write
the same tokens. Interleaved group by group; prompts are read before the clock starts. ``generate``
gets each first token with its prompt, and is charged for the others alone. Each measurement is kept
as it is made. Progress goes to stderr; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eval.examples import load_task
from eval.groups import CONTENDERS, GENERATE, PLAIN, TOGETHER, Group, run
from eval.jobs import as_recorded, jobs_for, shortened
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.ratios import paired_ratio
from eval.script import measured, new_parser, note, result
from eval.tables import batch_table
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from eval.warm import capture_passes
from ragaccel.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.jobs import Job
    from eval.ledger import Ledger
    from eval.targets import Target

WARM_UP_TOKENS = 48


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("batch", measure, parse(arguments))
    print(batch_table(document))
    print(json.dumps(document["sizes"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("batch", __doc__)
    add_target_options(parser, "random:llama-135m")
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", default="llma", help="a file of eval/tasks, or a .jsonl file of your own")
    add("--sizes", default="2,4,8,16", help="sequences of a group (default: %(default)s)")
    add("--groups", type=int, default=2, help="groups of each size (default: %(default)s)")
    add("--max-new-tokens", type=int, default=128)
    add("--compile", action="store_true", help="have torch compile what is replayed, on a GPU")
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure whatever the ledger lacks and compare."""
    sizes = [int(size) for size in options.sizes.split(",")]
    target = chosen_target(options, options.dtype)
    examples = load_task(options.task, options.groups * max(sizes), options.data)
    jobs = jobs_for(target, examples, options.max_new_tokens)
    # A single token comes with the prompt: there is no decoding to time.
    jobs = [as_recorded(job) for job in jobs if len(job.answer_ids) > 1]
    if len(jobs) < max(sizes):
        raise ValueError(f"task {options.task} has {len(jobs)} recorded answers: take less")
    settings = describe_settings(options, len(jobs))
    ledger = kept_beside(options.out, settings)
    capture_passes(target.ours, jobs, compile=options.compile)
    for size in sizes:
        measure_size(target, jobs, size, options.groups, ledger)
    found = {
        str(size): compare([row for row in ledger.rows if row["size"] == size]) for size in sizes
    }
    return result("batch", settings, device=options.device, sizes=found)


def describe_settings(options: argparse.Namespace, num_jobs: int) -> dict[str, Any]:
    """All that must agree for rows to be comparable."""
    return {
        **describe_target(options),
        "task": Path(options.task).name,
        "forced": True,
        "answers": num_jobs,  # groups are made of them
        "max_new_tokens": options.max_new_tokens,
        "sizes": options.sizes,
        "groups": options.groups,
        **({"compile": True} if options.compile else {}),
        "commit": current_commit(),
    }


def measure_size(
    target: Target, jobs: Sequence[Job], size: int, groups: int, ledger: Ledger
) -> None:
    """Decode some groups of one size by every contender, as far as the ledger lacks it."""
    grouped = [
        [jobs[(number * size + i) % len(jobs)] for i in range(size)] for number in range(groups)
    ]
    done = {(row["group"], row["contender"]) for row in ledger.rows if row["size"] == size}
    turns = [(number, name) for number in range(groups) for name in order_of(number)]
    left = [turn for turn in turns if turn not in done]
    if not left:
        return
    engine = Engine(target.ours, kept_prefixes=0)  # no prompt is known from the contender before
    warm_up(target, engine, grouped)
    for at, (number, name) in enumerate(left, start=1):
        found = run(name, target, engine, grouped[number])
        example = grouped[number][0].job_id
        ledger.add(
            {"size": size, "group": number, "example": example, "contender": name, **asdict(found)}
        )
        where = f"{size} sequences: {at}/{len(left)}, group {number + 1}"
        note(f"{where}, {name}: {found.speed:.1f} tokens/s")


def order_of(number: int) -> tuple[str, ...]:
    """The contenders forwards and backwards by turns."""
    return CONTENDERS if number % 2 else tuple(reversed(CONTENDERS))


def warm_up(target: Target, engine: Engine, grouped: Sequence[Sequence[Job]]) -> None:
    """Run what is not timed: some tokens of a group, or whole groups where passes are captured.

    Passes of several sequences are captured where they are first met, so every group is met.
    """
    if target.ours.graphs is None:
        grouped = [[shortened(job, WARM_UP_TOKENS) for job in grouped[0]]]
    for group in grouped:
        for name in CONTENDERS:
            note(f"{len(group)} sequences: warming up {name}")
            run(name, target, engine, group)


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the contenders' speeds on the groups of one size, in pairs."""
    found: dict[str, dict[tuple[str, int], Group]] = {name: {} for name in CONTENDERS}
    for row in rows:
        group = Group(row["tokens"], row["seconds"], row["passes"])
        found[row["contender"]][row["example"], row["group"]] = group
    speeds = {name: {key: one.speed for key, one in each.items()} for name, each in found.items()}
    return {
        "contenders": {
            name: {
                "tokens_per_second": median(each.values()),
                "tokens_per_pass": sum(one.tokens for one in found[name].values())
                / sum(one.passes for one in found[name].values()),
                "tokens": sum(one.tokens for one in found[name].values()),
            }
            for name, each in speeds.items()
        },
        "together_over": {
            name: asdict(paired_ratio(speeds[TOGETHER], speeds[name]))
            for name in CONTENDERS
            if name != TOGETHER
        },
        "plain_over_generate": asdict(paired_ratio(speeds[PLAIN], speeds[GENERATE])),
    }


if __name__ == "__main__":
    main()
