r"""Never slower: does drafting cost anything where nothing can be copied?

    python -m eval.never_slower --model random:llama-135m --data DATA --limit 40 --threads 2 \
        --out eval/results/never-slower.json

Each request is decoded by a drafter that knows nothing yet, its chances uncorrected, and by plain
decoding; both made anew for the request, both following its recorded answer, now one first and now
the other. What passes cost is known, as it is from a machine's second run on (``--cold-costs``: it
is not). Asked of every set are a median speed of 0.98 of plain
decoding's or more, the lower bound of its 95 % interval 0.95 or more, and a modelled time of 1.02
of plain decoding's or less.

The modelled time is free of the noise between two runs: every pass counts as its number of rows
costs in one table measured before, linear between the sizes measured; to which the measured seconds
of drafting are added. Progress goes to stderr; the last line of stdout is one JSON document, by
set.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eval.contenders import PLAIN, Ours, make_contender
from eval.examples import load_task
from eval.jobs import as_recorded, jobs_for
from eval.ledger import Ledger, kept_beside
from eval.machine import current_commit
from eval.ratios import paired_ratio
from eval.rows_cost import known_costs, seconds_of
from eval.script import measured, new_parser, note, result
from eval.speed import WARM_UP_TOKENS, as_row, run_once
from eval.tables import never_slower_table
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.jobs import Job
    from eval.targets import Target

TASKS = ("humaneval", "gsm8k", "random_tokens")
CONTENDER = "ours_tree"
LEAST_ANSWER = 100  # tokens; a shorter answer ends before anything is learned
ASKED = {"ratio": 0.98, "ratio_low": 0.95, "modelled": 1.02}
SUMMED = ("tokens", "passes", "rows")
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("never_slower", measure, parse(arguments))
    print(never_slower_table(document))
    print(json.dumps(document["sets"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("never_slower", __doc__)
    add_target_options(parser, "random:llama-135m")
    add_dtype_option(parser)
    add = parser.add_argument
    add("--tasks", default=",".join(TASKS), help="files of eval/tasks (default: %(default)s)")
    add("--contender", default=CONTENDER, help="what is compared with plain decoding")
    add("--limit", type=int, default=40, help="requests of each set (default: %(default)s)")
    add("--least-answer", type=int, default=LEAST_ANSWER, help="tokens; shorter ones are left out")
    add("--max-new-tokens", type=int, default=256)
    add("--cold-costs", action="store_true", help="as on the first run on a machine")
    add("--cost-repeats", type=int, default=15, help="passes of each size for the cost table")
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure whatever the ledger lacks and summarize."""
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    sets = {task: load_jobs(task, target, options) for task in options.tasks.split(",")}
    settings = describe_settings(options, {task: len(jobs) for task, jobs in sets.items()})
    ledger = kept_beside(options.out, settings)
    context = int(median(len(job.prompt_ids) for jobs in sets.values() for job in jobs))
    costs = known_costs(target, ledger, context, options.cost_repeats)
    for task, jobs in sets.items():
        known = {} if options.cold_costs else costs
        run_set(target, task, jobs, ledger, contender=options.contender, costs=known)
    rows = [row for row in ledger.rows if "task" in row]
    return result(
        "never_slower",
        settings,
        device=options.device,
        asked=ASKED,
        milliseconds={str(size): 1e3 * seconds for size, seconds in costs.items()},
        sets={
            task: summarize([row for row in rows if row["task"] == task], options.contender, costs)
            for task in sets
        },
    )


def load_jobs(task: str, target: Target, options: argparse.Namespace) -> list[Job]:
    """The first requests of a set whose recorded answers are long enough.

    Raises:
        ValueError: there are none.
    """
    jobs = jobs_for(target, load_task(task, None, options.data), options.max_new_tokens)
    long = [as_recorded(job) for job in jobs if len(job.answer_ids) >= options.least_answer]
    note(f"{task}: {len(long)} of {len(jobs)} answers of {options.least_answer} tokens or more")
    if not long:
        raise ValueError(f"task {task} has no answers of {options.least_answer} tokens")
    return long[: options.limit]


def describe_settings(options: argparse.Namespace, requests: dict[str, int]) -> dict[str, Any]:
    """All that must agree for rows to be comparable."""
    return {
        **describe_target(options),
        "requests": requests,
        "contender": options.contender,
        "least_answer": options.least_answer,
        "max_new_tokens": options.max_new_tokens,
        "cost_repeats": options.cost_repeats,
        "cold_costs": options.cold_costs,
        "commit": current_commit(),
    }


def run_set(
    target: Target,
    task: str,
    jobs: Sequence[Job],
    ledger: Ledger,
    *,
    contender: str,
    costs: dict[int, float],
) -> None:
    """Run each job that the ledger lacks with both decoders, the order changing with the job."""
    done = [(row["task"], row["example"]) for row in ledger.rows if "task" in row]
    left = [(at, job) for at, job in enumerate(jobs) if done.count((task, job.job_id)) < 2]
    if left:
        short = replace(jobs[-1], max_new_tokens=min(WARM_UP_TOKENS, jobs[-1].max_new_tokens))
        for warm in (contender, PLAIN):
            run_once(make_contender(warm, target), short, forced=True)
    for at, job in left:
        order = ((contender, PLAIN), (PLAIN, contender))[at % 2]
        rows = [_row(target, task, job, which, costs) for which in order]
        ledger.add(*rows)
        rates = ", ".join(
            f"{row['contender']} {row['tokens'] / row['decode_seconds']:.1f}" for row in rows
        )
        note(f"{task} {at + 1}/{len(jobs)} {job.job_id}: tokens/s {rates}")


def _row(target: Target, task: str, job: Job, name: str, costs: dict[int, float]) -> Row:
    """Measure a decoder that is made for this job alone: it knows of no job before."""
    contender = make_contender(name, target)
    if isinstance(contender, Ours):
        contender.know_costs(costs)
    run, forcing = run_once(contender, job, forced=True)
    row = as_row(contender, job, 0, run, forcing)
    return {"task": task, **row}


def summarize(rows: Sequence[Row], name: str, costs: dict[int, float]) -> dict[str, Any]:
    """Sum up one set: paired speeds, and what the passes would take by the table of costs."""
    ours = {row["example"]: row for row in rows if row["contender"] == name}
    plain = {row["example"]: row for row in rows if row["contender"] == PLAIN}
    both = sorted(ours.keys() & plain.keys())
    ratio = asdict(paired_ratio(_speeds(ours), _speeds(plain)))
    modelled = [modelled_seconds(ours[example], costs) for example in both]
    base = [plain[example]["passes"] * costs[1] for example in both]
    sums = {part: sum(ours[example][part] for example in both) for part in SUMMED}
    drafting = sum(ours[example]["stages"]["draft"] for example in both)
    return {
        "requests": len(both),
        "ratio": ratio["value"],
        "ratio_interval": [ratio["low"], ratio["high"]],
        "ratio_worst": ratio["worst"],
        "acceptance_length": sums["tokens"] / sums["passes"],
        "rows_per_pass": sums["rows"] / sums["passes"],
        "draft_us_per_pass": 1e6 * drafting / sums["passes"],
        "modelled": sum(modelled) / sum(base),
        "modelled_worst": max(one / other for one, other in zip(modelled, base, strict=True)),
    }


def _speeds(rows: dict[str, Row]) -> dict[tuple[str, int], float]:
    return {(name, 0): row["tokens"] / row["decode_seconds"] for name, row in rows.items()}


def modelled_seconds(row: Row, costs: dict[int, float]) -> float:
    """What a run takes if each pass takes what its number of rows costs, drafting as measured."""
    return sum(seconds_of(row["rows_of_each"], costs)) + float(row["stages"]["draft"])


if __name__ == "__main__":
    main()
