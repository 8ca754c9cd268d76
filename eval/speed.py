"""Speed: is it faster? Contenders interleaved on the same prompts, prefill and decoding apart.

    python -m eval.speed --model reader --task demo
    python -m eval.speed --model random:llama-135m --task llma --data DATA --limit 20

A real model gives its own answers; a random one follows recorded ones (``eval/forced.py``).
Progress goes to stderr; the last line of stdout is one JSON document, by contender.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eval.contenders import DEFAULT, PLAIN, WARM, Ours, make_contender
from eval.examples import load_task, telling_none_of
from eval.forced import Forcing
from eval.jobs import as_recorded, jobs_for
from eval.ledger import Ledger, kept_beside
from eval.machine import current_commit
from eval.passes import allocated_bytes, peak_bytes
from eval.rows_cost import cost_row, measure_rows, median_costs
from eval.script import measured, new_parser, note, result
from eval.summary import summarize
from eval.tables import speed_table
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from eval.warm import capture_passes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eval.contenders import Contender
    from eval.examples import Example
    from eval.jobs import Job
    from eval.runs import Run
    from eval.targets import Target

WARM_UP_TOKENS = 48
WARMING = 200  # rows that a warm memory has seen at most


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("speed", measure, parse(arguments))
    print(speed_table(document))
    print(json.dumps(document["contenders"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("speed", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", default="demo", help="a file of eval/tasks, or a .jsonl file of your own")
    forced = parser.add_mutually_exclusive_group()
    forced.add_argument("--forced", action="store_true", default=None, help="follow the recording")
    forced.add_argument(
        "--real", dest="forced", action="store_false", help="the model's own answer"
    )
    add("--contenders", default=",".join(DEFAULT), help="comma-separated (default: %(default)s)")
    add("--limit", type=int, help="examples to take (default: all)")
    add("--repeats", type=int, default=1, help="rounds over all examples")
    add("--max-new-tokens", type=int, default=256)
    add("--cost-repeats", type=int, default=3, help="passes of each size before each example")
    add("--compile", action="store_true", help="have torch compile what is replayed, on a GPU")
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure whatever the ledger lacks and summarize."""
    examples = load_task(options.task, options.limit, options.data)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    forced = target.is_random if options.forced is None else options.forced
    jobs = jobs_for(target, examples, options.max_new_tokens)
    jobs = [as_recorded(job) for job in jobs if job.answer_ids] if forced else jobs
    if not jobs:
        raise ValueError(f"task {options.task} has no recorded answers to follow: take --real")
    settings = describe_settings(options, forced, len(jobs))
    ledger = kept_beside(options.out, settings)
    names = options.contenders.split(",")
    warming = warming_jobs(options, target, examples) if WARM in names else []
    contenders = [make_contender(name, target, warming) for name in names]
    capture_passes(target.ours, jobs, compile=options.compile)
    costs = costs_if_asked(target, jobs, contenders, options.cost_repeats)
    run_rounds(
        target, jobs, contenders, ledger, repeats=options.repeats, forced=forced, costs=costs
    )
    resumed = [row["resumed"] for row in ledger.rows if "resumed" in row]
    return result(
        "speed",
        settings,
        device=options.device,
        milliseconds={str(rows): 1e3 * value for rows, value in median_costs(ledger).items()},
        **({"resumed": resumed} if resumed else {}),
        **({"warmed_by": len(warming)} if warming else {}),
        contenders=summarize(ledger.measurements, median_costs(ledger)),
    )


def warming_jobs(
    options: argparse.Namespace, target: Target, measured: Sequence[Example]
) -> list[Job]:
    """Lay out rows of the task behind those that are measured, at most ``WARMING`` of them.

    Those without an answer are left out, and those that tell a measured one's.
    """
    if options.limit is None:
        return []
    rows = load_task(options.task, options.limit + WARMING, options.data)[options.limit :]
    jobs = jobs_for(target, telling_none_of(rows, measured), options.max_new_tokens)
    return [job for job in jobs if job.answer_ids]


def costs_if_asked(
    target: Target, jobs: Sequence[Job], contenders: Sequence[Contender], repeats: int
) -> Callable[[], dict[int, float]] | None:
    """What measures seconds of a pass by its rows, where drafts are compared with plain decoding.

    A machine is faster at one moment than at the next, so it is called before every example.
    """
    ours = {contender.name for contender in contenders if isinstance(contender, Ours)}
    if PLAIN not in ours or ours == {PLAIN}:
        return None
    context = int(median(len(job.prompt_ids) for job in jobs))
    return partial(measure_rows, target, context, repeats)


def describe_settings(options: argparse.Namespace, forced: bool, num_jobs: int) -> dict[str, Any]:
    """All that must agree for rows to be comparable."""
    return {
        **describe_target(options),
        "task": Path(options.task).name,
        "forced": forced,
        "examples": num_jobs,
        "repeats": options.repeats,
        "max_new_tokens": options.max_new_tokens,
        "cost_repeats": options.cost_repeats,
        "contenders": options.contenders,
        **({"compile": True} if options.compile else {}),
        "commit": current_commit(),
    }


def run_rounds(
    target: Target,
    jobs: Sequence[Job],
    contenders: Sequence[Contender],
    ledger: Ledger,
    *,
    repeats: int,
    forced: bool,
    keep_answers: bool = False,
    costs: Callable[[], dict[int, float]] | None = None,
) -> None:
    """Run every contender on every job, the order rotated from job to job and round to round.

    Groups of one job and round that the ledger holds are skipped; one that was cut short is dropped
    and measured anew.
    What drafters learn is forgotten before every round: they would know its answers. A run that
    goes on within one notes the place in the ledger: what the former had taught them is lost.
    ``keep_answers`` puts the token ids into the rows, too; what ``costs`` returns stands with each
    group.
    """
    groups = [(turn, at, job) for turn in range(repeats) for at, job in enumerate(jobs)]
    drop_cut_short(ledger, contenders, jobs)
    done = {(row["round"], row["example"]) for row in ledger.measurements}
    left = [(turn, at, job) for turn, at, job in groups if (turn, job.job_id) not in done]
    if left and left[0][1] > 0:
        turn, _, job = left[0]
        ledger.add({"resumed": {"round": turn, "example": job.job_id}})
    if left:
        note("warming up")
        short = replace(jobs[-1], max_new_tokens=min(WARM_UP_TOKENS, jobs[-1].max_new_tokens))
        for contender in contenders:
            contender.prepare(jobs)
            run_once(contender, short, forced=forced)
    last_turn = None
    for number, (turn, at, job) in enumerate(left, start=1):
        if turn != last_turn:  # the warm-up and each round end with an example that comes again
            for contender in contenders:
                contender.forget()
        last_turn = turn
        noted = [cost_row(costs())] if costs else []
        rows = {
            contender.name: measured_row(
                target, contender, job, turn, forced=forced, keep_answers=keep_answers
            )
            for contender in in_turn(contenders, at + turn)
        }
        ledger.add(*noted, *(rows[contender.name] for contender in contenders))
        rates = ", ".join(
            f"{name} {row['tokens'] / row['decode_seconds']:.1f}" for name, row in rows.items()
        )
        note(f"{number}/{len(left)} round {turn + 1} example {job.job_id}: tokens/s {rates}")


def drop_cut_short(ledger: Ledger, contenders: Sequence[Contender], jobs: Sequence[Job]) -> None:
    """Drop what the ledger holds of a job and round where not all contenders have a row."""
    names, ids = {contender.name for contender in contenders}, {job.job_id for job in jobs}
    ran: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
    for row in ledger.measurements:
        if row["example"] in ids:
            ran[row["round"], row["example"]].add(row["contender"])
    cut = {group for group, had in ran.items() if not had >= names}
    ledger.keep(lambda row: "contender" not in row or (row["round"], row["example"]) not in cut)


def measured_row(
    target: Target, contender: Contender, job: Job, turn: int, *, forced: bool, keep_answers: bool
) -> dict[str, Any]:
    """Run one contender on one job: the row of it, on a GPU with its peak of memory."""
    before = allocated_bytes(target.ours.device)
    run, forcing = run_once(contender, job, forced=forced)
    row = as_row(contender, job, turn, run, forcing)
    if before is not None:
        own = peak_bytes(target.ours.device) - before
        row["peak_bytes"] = own + contender.held_bytes(before)
    return row | ({"token_ids": run.token_ids} if keep_answers else {})


def in_turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of one group: rotated, and the other way round after each whole rotation."""
    rotations, shift = divmod(number, len(contenders))
    order = [*contenders[shift:], *contenders[:shift]]
    return order[::-1] if rotations % 2 else order


def run_once(contender: Contender, job: Job, *, forced: bool) -> tuple[Run, Forcing]:
    """Run one contender on one job; a forced run must give the recording, token for token.

    Raises:
        RuntimeError: it gave something else: the harness or the decoder is wrong.
    """
    recorded = job.answer_ids[: job.max_new_tokens]
    force: AbstractContextManager[Forcing] = nullcontext(Forcing())
    with contender.following(job) if forced else force as forcing:
        run = contender.run(job)
    if forced and run.token_ids != recorded:
        raise RuntimeError(
            f"{contender.name} left the recording of example {job.job_id}: "
            f"{len(run.token_ids)} tokens instead of {len(recorded)}"
        )
    return run, forcing


def as_row(contender: Contender, job: Job, turn: int, run: Run, forcing: Forcing) -> dict[str, Any]:
    """Put one measurement into a row of the ledger."""
    digest = hashlib.sha256(repr(tuple(run.token_ids)).encode()).hexdigest()[:12]
    return {
        "example": job.job_id,
        "round": turn,
        "contender": contender.name,
        "prompt_tokens": len(job.prompt_ids),
        "tokens": len(run.token_ids),
        "answer_hash": digest,
        "prefill_seconds": run.prefill_seconds,
        "first_token_seconds": run.first_token_seconds,
        "decode_seconds": run.decode_seconds,
        "passes": run.passes,
        "rows": run.rows,
        "draft_tokens": run.draft_tokens,
        "accepted_tokens": run.accepted_tokens,
        "rows_of_each": run.rows_of_each,
        "tokens_of_each": run.tokens_of_each,
        "stages": run.stages,
        "forcing_seconds": forcing.seconds,
    }


if __name__ == "__main__":
    main()
