"""Compare the speed of decoders on the same prompts, on one set or on a matrix of sets."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from eval.data import as_recorded, has_data, jobs_for, without_answers_of
from eval.decoders import (
    BASELINE,
    COPYING,
    DEFAULT,
    LOOKUP,
    PLAIN,
    STATIC,
    WARM,
    Ours,
    capture_passes,
    compiling,
    make_decoder,
)
from eval.experiments.cost import cost_row, known_costs, measure_rows, median_costs, seconds_of
from eval.measure import ForcingCost, allocated_bytes, paired_ratio, peak_bytes
from eval.models import add_dtype_option, add_target_options, chosen_target, describe_target
from eval.report.tables import never_slower_table, speed_table
from eval.runner import (
    HOURS,
    ResultsLog,
    Step,
    add_places,
    current_commit,
    measured,
    new_parser,
    note,
    note_step,
    open_results_log,
    result,
    run_all,
)
from eval.tasks import load_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from eval.data import Example, Job
    from eval.decoders import Decoder, Run
    from eval.models import Target


Row = dict[str, Any]
Speeds = dict[tuple[str, int], float]


def summarize(
    rows: Sequence[Row], costs: Mapping[int, float] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Summarize each decoder, in order of first appearance.

    ``tokens_per_second`` is all tokens over all decoding seconds, without prefill. ``ratio``,
    ``ratio_generate``, ``ratio_copying``, ``ratio_static`` and ``ratio_lookup`` are median paired
    speed-ups of decoding over our plain decoding, ``model.generate``, one copied span, ``generate``
    with a static cache, and its prompt lookup. ``end_to_end`` has the same figures with prefill.
    ``acceptance_length`` is all tokens over all passes; ``acceptance_histogram`` has the number of
    passes by their number of tokens. Seconds are sums over all rows. With ``costs``, the seconds of
    a pass by its rows, ``efficiency`` is the median share of the ``promised_ratio`` that our
    drafting decoders reached. On a GPU ``peak_bytes`` is the peak of allocated memory in any run,
    without the memory of other decoders.
    """
    by_name: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_name[row["decoder"]].append(row)
    decoding = {name: _speeds(own, "decode_seconds") for name, own in by_name.items()}
    whole = {
        name: _speeds(own, "prefill_seconds", "decode_seconds") for name, own in by_name.items()
    }
    answers = {_row_key(row): row["answer_hash"] for row in by_name.get(BASELINE, ())}
    return {
        name: {
            **_speed(own, decoding, name, "decode_seconds"),
            "end_to_end": _speed(own, whole, name, "prefill_seconds", "decode_seconds"),
            **_counts(own),
            **_efficiency(own, decoding, name, costs),
            "identical_to_generate": _identical(own, answers),
        }
        for name, own in by_name.items()
    }


def _speed(own: list[Row], speeds: Mapping[str, Speeds], name: str, *parts: str) -> dict[str, Any]:
    seconds = sum(row[part] for row in own for part in parts)
    result: dict[str, Any] = {"tokens_per_second": sum(row["tokens"] for row in own) / seconds}
    for label, other in (
        ("ratio", PLAIN),
        ("ratio_generate", BASELINE),
        ("ratio_copying", COPYING),
        ("ratio_static", STATIC),
        ("ratio_lookup", LOOKUP),
    ):
        if other in speeds:
            ratio = asdict(paired_ratio(speeds[name], speeds[other]))
            result[label] = ratio["value"]
            result[f"{label}_interval"] = [ratio["low"], ratio["high"]]
            result[f"{label}_worst"] = ratio["worst"]
    return result


def _efficiency(
    own: list[Row], speeds: Mapping[str, Speeds], name: str, costs: Mapping[int, float]
) -> dict[str, Any]:
    if not costs or name == PLAIN or PLAIN not in speeds or "draft" not in own[0]["stages"]:
        return {}
    plain = speeds[PLAIN]
    reached = {key: speed / plain[key] for key, speed in speeds[name].items() if key in plain}
    result: dict[str, Any] = {}
    for label, mean in (("efficiency", fmean), ("efficiency_harmonic", harmonic_mean)):
        ratio = paired_ratio(
            reached, {_row_key(row): promised_ratio(row, costs, mean) for row in own}
        )
        result[label], result[f"{label}_worst"] = ratio.value, ratio.worst
        result[f"{label}_interval"] = [ratio.low, ratio.high]
    return result


def promised_ratio(
    row: Row, costs: Mapping[int, float], mean: Callable[[Sequence[float]], float]
) -> float:
    """Return the speed-up that a run's passes allow: acceptance length times mean of t(1) / t(n).

    With the harmonic mean this is exact for the time of the passes alone; the arithmetic mean is
    never smaller, and a little too large if passes differ in their number of rows n.
    """
    shares = [costs[1] / seconds for seconds in seconds_of(row["rows_of_each"], costs)]
    return float(row["tokens"] / row["passes"] * mean(shares))


def _counts(own: list[Row]) -> dict[str, Any]:
    tokens, passes = sum(row["tokens"] for row in own), sum(row["passes"] for row in own)
    decode = sum(row["decode_seconds"] for row in own)
    stages: defaultdict[str, float] = defaultdict(float)
    for row in own:
        for stage, seconds in row["stages"].items():
            stages[stage] += seconds
    known = stages.get("remember", 0.0) + (
        stages["draft"] + stages["verify"] if "verify" in stages else stages.get("model", decode)
    )
    return {
        "examples": len({row["example"] for row in own}),
        "runs": len(own),
        "tokens": tokens,
        "passes": passes,
        "acceptance_length": tokens / passes,
        "rows_per_pass": sum(row["rows"] for row in own) / passes,
        "draft_tokens": sum(row["draft_tokens"] for row in own),
        "accepted_tokens": sum(row["accepted_tokens"] for row in own),
        **_peak(own),
        "prefill_seconds_median": median(row["prefill_seconds"] for row in own),
        **_first_token(own),
        **_histogram(own),
        "seconds": {
            "prefill": sum(row["prefill_seconds"] for row in own),
            **stages,
            "other": max(0.0, decode - known),
            "forcing": sum(row["forcing_seconds"] for row in own),
        },
    }


def _first_token(own: list[Row]) -> dict[str, float]:
    seconds = [row["first_token_seconds"] for row in own if "first_token_seconds" in row]
    return {"first_token_seconds_median": median(seconds)} if seconds else {}


def _histogram(own: list[Row]) -> dict[str, dict[str, int]]:
    """Count the passes by their number of emitted tokens."""
    passes = Counter(number for row in own for number in row.get("tokens_of_each", ()))
    return {"acceptance_histogram": {str(n): passes[n] for n in sorted(passes)}} if passes else {}


def _peak(own: list[Row]) -> dict[str, int]:
    peaks = [row["peak_bytes"] for row in own if "peak_bytes" in row]
    return {"peak_bytes": max(peaks)} if peaks else {}


def _identical(own: list[Row], answers: Mapping[tuple[str, int], str]) -> float | None:
    """Return the share of runs with the tokens of ``generate`` in the same round, or None."""
    shared = [
        row["answer_hash"] == answers[_row_key(row)] for row in own if _row_key(row) in answers
    ]
    return sum(shared) / len(shared) if shared else None


def _speeds(own: list[Row], *parts: str) -> Speeds:
    return {_row_key(row): row["tokens"] / sum(row[part] for part in parts) for row in own}


def _row_key(row: Row) -> tuple[str, int]:
    return row["example"], row["round"]


WARM_UP_TOKENS = 48
WARMING = 200  # maximum number of rows in a warm memory


def run_speed(arguments: Sequence[str] | None = None) -> None:
    """Speed: how fast is each decoder on the same prompts, in prefill and in decoding?

        python -m eval speed --model reader --task demo
        python -m eval speed --model random:llama-135m --task llma --data DATA --limit 20

    The decoders take turns on each prompt. A real model gives its own answers; a random one follows
    recorded ones (``eval/measure.py``). Progress goes to stderr; the last line of stdout is one
    JSON document, by decoder.
    """
    document = measured("speed", measure_speed, parse_speed(arguments))
    print(speed_table(document))
    print(json.dumps(document["decoders"]))


def parse_speed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("speed", run_speed.__doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", default="demo", help="a file of eval/tasks, or a .jsonl file of your own")
    forced = parser.add_mutually_exclusive_group()
    forced.add_argument("--forced", action="store_true", default=None, help="follow the recording")
    forced.add_argument(
        "--real", dest="forced", action="store_false", help="the model's own answer"
    )
    add("--decoders", default=",".join(DEFAULT), help="comma-separated (default: %(default)s)")
    add("--limit", type=int, help="examples to take (default: all)")
    add("--repeats", type=int, default=1, help="rounds over all examples")
    add("--max-new-tokens", type=int, default=256)
    add("--cost-repeats", type=int, default=3, help="passes of each size before each example")
    add("--compile", action="store_true", help="have torch compile what is replayed, on a GPU")
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the results log lacks and return the result document."""
    examples = load_task(options.task, options.limit, options.data)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    forced = target.is_random if options.forced is None else options.forced
    jobs = jobs_for(target, examples, options.max_new_tokens)
    jobs = [as_recorded(job) for job in jobs if job.answer_ids] if forced else jobs
    if not jobs:
        raise ValueError(f"task {options.task} has no recorded answers to follow: take --real")
    settings = describe_settings(options, forced, len(jobs))
    results_log = open_results_log(options.out, settings)
    names = options.decoders.split(",")
    warming = warming_jobs(options, target, examples) if WARM in names else []
    decoders = [make_decoder(name, target, warming) for name in names]
    capture_passes(target.ours, jobs, compile=options.compile)
    costs = costs_if_asked(target, jobs, decoders, options.cost_repeats)
    run_rounds(
        target, jobs, decoders, results_log, repeats=options.repeats, forced=forced, costs=costs
    )
    resumed = [row["resumed"] for row in results_log.rows if "resumed" in row]
    return result(
        "speed",
        settings,
        device=options.device,
        milliseconds={str(rows): 1e3 * value for rows, value in median_costs(results_log).items()},
        **({"resumed": resumed} if resumed else {}),
        **({"warmed_by": len(warming)} if warming else {}),
        decoders=summarize(results_log.measurements, median_costs(results_log)),
    )


def warming_jobs(
    options: argparse.Namespace, target: Target, measured: Sequence[Example]
) -> list[Job]:
    """Return jobs to warm a memory: up to ``WARMING`` rows of the task after the measured ones.

    Rows without an answer are left out, and rows that contain the answer of a measured example.
    """
    if options.limit is None:
        return []
    rows = load_task(options.task, options.limit + WARMING, options.data)[options.limit :]
    jobs = jobs_for(target, without_answers_of(rows, measured), options.max_new_tokens)
    return [job for job in jobs if job.answer_ids]


def costs_if_asked(
    target: Target, jobs: Sequence[Job], decoders: Sequence[Decoder], repeats: int
) -> Callable[[], dict[int, float]] | None:
    """Return a function that measures the seconds of a pass by its rows, or None without drafts.

    It is called before every example, since a machine's speed varies over time.
    """
    ours = {decoder.name for decoder in decoders if isinstance(decoder, Ours)}
    if PLAIN not in ours or ours == {PLAIN}:
        return None
    context = int(median(len(job.prompt_ids) for job in jobs))
    return partial(measure_rows, target, context, repeats)


def describe_settings(options: argparse.Namespace, forced: bool, num_jobs: int) -> dict[str, Any]:
    """Return the settings that must agree for rows to be comparable."""
    return {
        **describe_target(options),
        "task": Path(options.task).name,
        "forced": forced,
        "examples": num_jobs,
        "repeats": options.repeats,
        "max_new_tokens": options.max_new_tokens,
        "cost_repeats": options.cost_repeats,
        "decoders": options.decoders,
        **({"compile": True} if options.compile else {}),
        "commit": current_commit(),
    }


def run_rounds(
    target: Target,
    jobs: Sequence[Job],
    decoders: Sequence[Decoder],
    results_log: ResultsLog,
    *,
    repeats: int,
    forced: bool,
    keep_answers: bool = False,
    costs: Callable[[], dict[int, float]] | None = None,
) -> None:
    """Run every decoder on every job; the order rotates from job to job and round to round.

    Groups of one job and round that are in the results log are skipped; an incomplete group is
    dropped and measured again. Drafters forget everything before every round, since they would know
    the answers. A run that resumes within a round records the place in the log, since the drafters
    have lost the round's earlier jobs. ``keep_answers`` adds token ids to the rows; the result of
    ``costs`` is logged with each group.
    """
    groups = [(turn, at, job) for turn in range(repeats) for at, job in enumerate(jobs)]
    drop_cut_short(results_log, decoders, jobs)
    done = {(row["round"], row["example"]) for row in results_log.measurements}
    left = [(turn, at, job) for turn, at, job in groups if (turn, job.job_id) not in done]
    if left and left[0][1] > 0:
        turn, _, job = left[0]
        results_log.add({"resumed": {"round": turn, "example": job.job_id}})
    if left:
        note("warming up")
        short = replace(jobs[-1], max_new_tokens=min(WARM_UP_TOKENS, jobs[-1].max_new_tokens))
        for decoder in decoders:
            decoder.prepare(jobs)
            run_once(decoder, short, forced=forced)
    last_turn = None
    for number, (turn, at, job) in enumerate(left, start=1):
        if turn != last_turn:  # a new round repeats examples, as the warm-up did
            for decoder in decoders:
                decoder.forget()
        last_turn = turn
        noted = [cost_row(costs())] if costs else []
        rows = {
            decoder.name: measured_row(
                target, decoder, job, turn, forced=forced, keep_answers=keep_answers
            )
            for decoder in in_turn(decoders, at + turn)
        }
        results_log.add(*noted, *(rows[decoder.name] for decoder in decoders))
        rates = ", ".join(
            f"{name} {row['tokens'] / row['decode_seconds']:.1f}" for name, row in rows.items()
        )
        note(f"{number}/{len(left)} round {turn + 1} example {job.job_id}: tokens/s {rates}")


def drop_cut_short(
    results_log: ResultsLog, decoders: Sequence[Decoder], jobs: Sequence[Job]
) -> None:
    """Drop the logged rows of each job and round in which a decoder has no row."""
    names, ids = {decoder.name for decoder in decoders}, {job.job_id for job in jobs}
    ran: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
    for row in results_log.measurements:
        if row["example"] in ids:
            ran[row["round"], row["example"]].add(row["decoder"])
    cut = {group for group, had in ran.items() if not had >= names}
    results_log.keep(lambda row: "decoder" not in row or (row["round"], row["example"]) not in cut)


def measured_row(
    target: Target, decoder: Decoder, job: Job, turn: int, *, forced: bool, keep_answers: bool
) -> dict[str, Any]:
    """Run one decoder on one job; return the row, on a GPU with the peak of memory."""
    before = allocated_bytes(target.ours.device)
    run, forcing = run_once(decoder, job, forced=forced)
    row = as_row(decoder, job, turn, run, forcing)
    if before is not None:
        own = peak_bytes(target.ours.device) - before
        row["peak_bytes"] = own + decoder.held_bytes(before)
    return row | ({"token_ids": run.token_ids} if keep_answers else {})


def in_turn(decoders: Sequence[Decoder], number: int) -> list[Decoder]:
    """Return the decoders' order for a group: rotated, and reversed after each full rotation."""
    rotations, shift = divmod(number, len(decoders))
    order = [*decoders[shift:], *decoders[:shift]]
    return order[::-1] if rotations % 2 else order


def run_once(decoder: Decoder, job: Job, *, forced: bool) -> tuple[Run, ForcingCost]:
    """Run one decoder on one job; a forced run must give the recording, token for token.

    Raises:
        RuntimeError: The forced answer differs: this module or the decoder is wrong.
    """
    recorded = job.answer_ids[: job.max_new_tokens]
    force: AbstractContextManager[ForcingCost] = nullcontext(ForcingCost())
    with decoder.teacher_forced(job) if forced else force as forcing:
        run = decoder.run(job)
    if forced and run.token_ids != recorded:
        raise RuntimeError(
            f"{decoder.name} left the recording of example {job.job_id}: "
            f"{len(run.token_ids)} tokens instead of {len(recorded)}"
        )
    return run, forcing


def as_row(decoder: Decoder, job: Job, turn: int, run: Run, forcing: ForcingCost) -> dict[str, Any]:
    """Return the row of one run for the results log."""
    digest = hashlib.sha256(repr(tuple(run.token_ids)).encode()).hexdigest()[:12]
    return {
        "example": job.job_id,
        "round": turn,
        "decoder": decoder.name,
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


MATRIX_MODELS = "random:llama-135m,random:qwen2.5-0.5b"
MATRIX_TASKS = "llma,clapnq,mtrag,pubmedqa,scitldr,gsm8k,humaneval"
MATRIX_SHIPPED = "handbook"
MATRIX_DECODERS = (
    *("generate", "generate_static", "generate_lookup"),
    *("ours_plain", "ours_paper", "ours_tree", "ours_full", "ours_warm"),
)
MATRIX_ROWS = {"random:qwen2.5-0.5b": 8}  # examples; other models have 20
MATRIX_NOT_WARM = ("demo",)  # tasks with too few rows to warm a memory


def run_matrix(arguments: Sequence[str] | None = None) -> None:
    """Matrix: transformers' decoders and ours on real data sets, one file for each shape and set.

        python -m eval matrix --data DATA --out eval/results && python -m eval report
        python -m eval matrix --data DATA --out eval/results --models random:llama-3.1-8b

    All decoders of a set take turns as in ``eval speed``, following the recorded answers. Each file
    is made in a process of its own, and measurements are kept at once: an interrupted run
    continues. Afterwards ``python -m eval report`` writes the table.
    """
    options = parse_matrix(arguments)
    run_all(matrix_steps(options), "eval matrix")


def parse_matrix(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("matrix", run_matrix.__doc__)
    add_places(parser)
    add = parser.add_argument
    add("--models", default=MATRIX_MODELS, help="comma-separated (default: %(default)s)")
    add("--tasks", help=f"comma-separated (default: {MATRIX_TASKS}; without data {MATRIX_SHIPPED})")
    add("--limit", type=int, help="examples of a set (default: 20, of the 0.5B shape 8)")
    add("--tokenizer", help="in place of the one a shape names")
    add("--dtype", default="bfloat16")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--threads", type=int, help="processor threads (default: torch's)")
    add("--max-new-tokens", type=int, default=256)
    return parser.parse_args(arguments)


def matrix_steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield the step of a speed run for each model and set.

    Raises:
        SystemExit: Two steps would write the same file.
    """
    names = [name for name in MATRIX_DECODERS if name != STATIC or _compiles(options.device)]
    models, tasks = options.models.split(","), _matrix_tasks(options)
    made = [_matrix_step(model, task, names, options) for model in models for task in tasks]
    ((out, times),) = Counter(step.out for step in made).most_common(1)
    if times > 1:
        sys.exit(f"eval matrix: {times} results would be {out.name}: give each its own --out")
    yield from made


def _matrix_tasks(options: argparse.Namespace) -> list[str]:
    if options.tasks:
        return list(options.tasks.split(","))
    if has_data(options.data):
        return MATRIX_TASKS.split(",")
    note_step(f"no data folder (--data): only {MATRIX_SHIPPED} is run, in the reader's tokens")
    options.tokenizer = options.tokenizer or "reader"
    return [MATRIX_SHIPPED]


def _compiles(device: str) -> bool:
    """Return whether transformers' passes can be compiled here; print a note if not."""
    try:
        compiling(torch.device(device))
    except ValueError as error:
        note_step(str(error))
        return False
    return True


def _matrix_step(
    model: str, task: str, names: Sequence[str], options: argparse.Namespace, *, marked: str = ""
) -> Step:
    shape, place = (
        Path(model.rpartition(":")[2]).name.removesuffix(".json"),
        "gpu-" * (options.device != "cpu"),
    )
    out = options.out / f"matrix-{place}{shape}-{Path(task).stem}{marked}.json"
    shown = [name for name in names if name != "ours_warm" or task not in MATRIX_NOT_WARM]
    arguments = [
        *(f"--model={model}", f"--task={task}", f"--dtype={options.dtype}"),
        *(f"--device={options.device}", f"--max-new-tokens={options.max_new_tokens}"),
        *(f"--limit={options.limit or MATRIX_ROWS.get(model, 20)}", "--forced", f"--out={out}"),
        *[f"--data={options.data}"] * (options.data is not None),
        *[f"--tokenizer={options.tokenizer}"] * (options.tokenizer is not None),
        *[f"--threads={options.threads}"] * (options.threads is not None),
        f"--decoders={','.join(shown)}",
    ]
    fallback = None
    if STATIC in names:  # compiling may still fail, for example without Python's headers
        others = [name for name in names if name != STATIC]
        fallback = _matrix_step(model, task, others, options, marked="-not-static")
    return Step("speed", tuple(arguments), out, seconds=6 * HOURS, fallback=fallback)


NEVER_SLOWER_TASKS = ("humaneval", "gsm8k", "random_tokens")
NEVER_SLOWER_DECODER = "ours_tree"
MIN_ANSWER = 100  # tokens; a shorter answer ends before anything is learned
NEVER_SLOWER_ASKED = {"ratio": 0.98, "ratio_low": 0.95, "modelled": 1.02}
_SUMMED = ("tokens", "passes", "rows")


def run_never_slower(arguments: Sequence[str] | None = None) -> None:
    r"""Never slower: what does drafting cost if nothing can be copied?

        python -m eval never_slower --model random:llama-135m --data DATA --limit 40 --threads 2 \
            --out eval/results/never-slower.json

    Each request is decoded by a drafter without past requests or calibration, and by plain
    decoding. Both are new for the request and follow its recorded answer; the first one alternates.
    The latency profile is known, as from a machine's second run on (with ``--cold-costs`` it is
    not). Three things are required of every set: a median speed of at least 0.98 of plain
    decoding's, a lower bound of its 95 % interval of at least 0.95, and a modelled time of at most
    1.02 of plain decoding's.

    The modelled time has no noise between two runs: every pass counts as long as its number of rows
    takes in a table measured before, interpolated linearly, plus the measured seconds of drafting.
    Progress goes to stderr; the last line of stdout is one JSON document, by set.
    """
    document = measured("never_slower", measure_never_slower, parse_never_slower(arguments))
    print(never_slower_table(document))
    print(json.dumps(document["sets"]))


def parse_never_slower(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("never_slower", run_never_slower.__doc__)
    add_target_options(parser, "random:llama-135m")
    add_dtype_option(parser)
    add = parser.add_argument
    add(
        "--tasks",
        default=",".join(NEVER_SLOWER_TASKS),
        help="files of eval/tasks (default: %(default)s)",
    )
    add("--decoder", default=NEVER_SLOWER_DECODER, help="what is compared with plain decoding")
    add("--limit", type=int, default=40, help="requests of each set (default: %(default)s)")
    add("--min-answer", type=int, default=MIN_ANSWER, help="tokens; shorter ones are left out")
    add("--max-new-tokens", type=int, default=256)
    add("--cold-costs", action="store_true", help="as on the first run on a machine")
    add("--cost-repeats", type=int, default=15, help="passes of each size for the cost table")
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure_never_slower(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the results log lacks and return the result document."""
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    sets = {task: load_jobs(task, target, options) for task in options.tasks.split(",")}
    settings = describe_never_slower(options, {task: len(jobs) for task, jobs in sets.items()})
    results_log = open_results_log(options.out, settings)
    context = int(median(len(job.prompt_ids) for jobs in sets.values() for job in jobs))
    costs = known_costs(target, results_log, context, options.cost_repeats)
    for task, jobs in sets.items():
        known = {} if options.cold_costs else costs
        run_set(target, task, jobs, results_log, decoder=options.decoder, costs=known)
    rows = [row for row in results_log.rows if "task" in row]
    return result(
        "never_slower",
        settings,
        device=options.device,
        asked=NEVER_SLOWER_ASKED,
        milliseconds={str(size): 1e3 * seconds for size, seconds in costs.items()},
        sets={
            task: summarize_set(
                [row for row in rows if row["task"] == task], options.decoder, costs
            )
            for task in sets
        },
    )


def load_jobs(task: str, target: Target, options: argparse.Namespace) -> list[Job]:
    """Return the first requests of a set whose recorded answers are long enough.

    Raises:
        ValueError: There are none.
    """
    jobs = jobs_for(target, load_task(task, None, options.data), options.max_new_tokens)
    long = [as_recorded(job) for job in jobs if len(job.answer_ids) >= options.min_answer]
    note(f"{task}: {len(long)} of {len(jobs)} answers of {options.min_answer} tokens or more")
    if not long:
        raise ValueError(f"task {task} has no answers of {options.min_answer} tokens")
    return long[: options.limit]


def describe_never_slower(options: argparse.Namespace, requests: dict[str, int]) -> dict[str, Any]:
    """Return the settings that must agree for rows to be comparable."""
    return {
        **describe_target(options),
        "requests": requests,
        "decoder": options.decoder,
        "min_answer": options.min_answer,
        "max_new_tokens": options.max_new_tokens,
        "cost_repeats": options.cost_repeats,
        "cold_costs": options.cold_costs,
        "commit": current_commit(),
    }


def run_set(
    target: Target,
    task: str,
    jobs: Sequence[Job],
    results_log: ResultsLog,
    *,
    decoder: str,
    costs: dict[int, float],
) -> None:
    """Run each job that the results log lacks with both decoders, in alternating order."""
    done = [(row["task"], row["example"]) for row in results_log.rows if "task" in row]
    left = [(at, job) for at, job in enumerate(jobs) if done.count((task, job.job_id)) < 2]
    if left:
        short = replace(jobs[-1], max_new_tokens=min(WARM_UP_TOKENS, jobs[-1].max_new_tokens))
        for warm in (decoder, PLAIN):
            run_once(make_decoder(warm, target), short, forced=True)
    for at, job in left:
        order = ((decoder, PLAIN), (PLAIN, decoder))[at % 2]
        rows = [_cold_row(target, task, job, which, costs) for which in order]
        results_log.add(*rows)
        rates = ", ".join(
            f"{row['decoder']} {row['tokens'] / row['decode_seconds']:.1f}" for row in rows
        )
        note(f"{task} {at + 1}/{len(jobs)} {job.job_id}: tokens/s {rates}")


def _cold_row(target: Target, task: str, job: Job, name: str, costs: dict[int, float]) -> Row:
    """Measure a new decoder on one job; it knows no earlier jobs. Return the row."""
    decoder = make_decoder(name, target)
    if isinstance(decoder, Ours):
        decoder.know_costs(costs)
    run, forcing = run_once(decoder, job, forced=True)
    row = as_row(decoder, job, 0, run, forcing)
    return {"task": task, **row}


def summarize_set(rows: Sequence[Row], name: str, costs: dict[int, float]) -> dict[str, Any]:
    """Return the figures of one set: paired speeds, and the time modelled by the cost table."""
    ours = {row["example"]: row for row in rows if row["decoder"] == name}
    plain = {row["example"]: row for row in rows if row["decoder"] == PLAIN}
    both = sorted(ours.keys() & plain.keys())
    ratio = asdict(paired_ratio(_set_speeds(ours), _set_speeds(plain)))
    modelled = [modelled_seconds(ours[example], costs) for example in both]
    base = [plain[example]["passes"] * costs[1] for example in both]
    sums = {part: sum(ours[example][part] for example in both) for part in _SUMMED}
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


def _set_speeds(rows: dict[str, Row]) -> dict[tuple[str, int], float]:
    return {(name, 0): row["tokens"] / row["decode_seconds"] for name, row in rows.items()}


def modelled_seconds(row: Row, costs: dict[int, float]) -> float:
    """Return a run's seconds: passes by the cost table, and drafting as measured."""
    return sum(seconds_of(row["rows_of_each"], costs)) + float(row["stages"]["draft"])
