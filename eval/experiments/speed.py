"""Compare the speed of decoders on the same prompts, on one set or on a matrix of sets."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from eval import cli
from eval.data import Example, Job, as_recorded, has_data, jobs_for, under_task, without_answers_of
from eval.decoders import (
    BASELINE,
    COPYING,
    DEFAULT,
    LOOKUP,
    PLAIN,
    STATIC,
    WARM,
    Decoder,
    Ours,
    Run,
    capture_passes,
    compiling,
    make_decoder,
)
from eval.experiments.cost import cost_row, known_costs, measure_rows, median_costs, seconds_of
from eval.measure import ForcingCost, allocated_bytes, paired_ratio, peak_bytes
from eval.models import Target, chosen_target, describe_target
from eval.report.tables import show
from eval.runner import (
    HOURS,
    ResultsLog,
    Step,
    given,
    in_turns,
    note,
    note_step,
    open_results_log,
    result,
    run_all,
    settings_of,
)
from eval.tasks import load_task

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


FORCED = (
    cli.option("--forced", action="store_true", default=None, help="follow the recording"),
    cli.option("--real", dest="forced", action="store_false", help="the model's own answer"),
)
WARM_UP_TOKENS = 48
WARMING = 200  # maximum number of rows in a warm memory


@cli.experiment(
    *cli.TARGET,
    cli.DTYPE,
    cli.TASK,
    *FORCED,
    cli.option("--decoders", default=",".join(DEFAULT), help="comma-separated"),
    cli.LIMIT,
    cli.integer("--repeats", 1, "rounds over all examples"),
    cli.integer("--max-new-tokens", 256),
    cli.integer("--cost-repeats", 3, "passes of each size before each example"),
    cli.COMPILE,
    cli.integer("--busy", 0, "other programs, each of which keeps a core busy meanwhile"),
    table=show,
    shown=("decoders",),
)
def run_speed(options: Namespace) -> dict[str, Any]:
    """Speed: how fast is each decoder on the same prompts, in prefill and in decoding?

        python -m eval speed --model reader --task demo
        python -m eval speed --model random:llama-135m --task llma --data DATA --limit 20

    The decoders take turns on each prompt. A real model gives its own answers; a random one follows
    recorded ones (``eval/measure.py``).
    """
    examples = load_task(options.task, options.limit, options.data)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    forced = target.is_random if options.forced is None else options.forced
    jobs = jobs_for(target, examples, options.max_new_tokens)
    jobs = [as_recorded(job) for job in jobs if job.answer_ids] if forced else jobs
    if not jobs:
        raise ValueError(f"task {options.task} has no recorded answers to follow: take --real")
    settings = describe_target(options) | settings_of(
        options, "task", "repeats", "max_new_tokens", "cost_repeats", "decoders", "compile",
        forced=forced, examples=len(jobs), **({"busy": options.busy} if options.busy else {}),
    )  # fmt: skip
    results_log = open_results_log(options.out, settings)
    names = options.decoders.split(",")
    warming = warming_jobs(options, target, examples) if WARM in names else []
    decoders = [make_decoder(name, target, warming) for name in names]
    capture_passes(target.ours, jobs, compile=options.compile)
    costs = costs_if_asked(target, jobs, decoders, options.cost_repeats)
    with busy_programs(options.busy):
        run_rounds(
            target, jobs, decoders, results_log, repeats=options.repeats, forced=forced, costs=costs
        )
    return result(
        "speed",
        settings,
        device=options.device,
        milliseconds={str(rows): 1e3 * value for rows, value in median_costs(results_log).items()},
        log=results_log,
        **({"warmed_by": len(warming)} if warming else {}),
        decoders=summarize(results_log.measurements, median_costs(results_log)),
    )


@contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """Run so many processes that only compute, in sessions of their own as a user's others are.

    They end with this one.
    """
    busy = "import os; mine = os.getppid()\nwhile os.getppid() == mine: pass"
    program = [sys.executable, "-c", busy]
    with ExitStack() as stack:
        for _ in range(number):
            one = stack.enter_context(subprocess.Popen(program, start_new_session=True))
            stack.callback(one.kill)
        yield


def warming_jobs(options: Namespace, target: Target, measured: Sequence[Example]) -> list[Job]:
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
    """Run every decoder on every job in turns; see :func:`eval.runner.in_turns`.

    ``keep_answers`` adds token ids to the rows; the result of ``costs`` is logged with each group.
    """
    by_name = {decoder.name: decoder for decoder in decoders}
    by_id = {job.job_id: job for job in jobs}

    def warm_up(name: str) -> None:
        by_name[name].prepare(jobs)
        short = replace(jobs[-1], max_new_tokens=min(WARM_UP_TOKENS, jobs[-1].max_new_tokens))
        run_once(by_name[name], short, forced=forced)

    def measure(name: str, job: Job) -> Row:
        row, run = measured_row(target, by_name[name], job, forced=forced)
        return row | ({"token_ids": run.token_ids} if keep_answers else {})

    in_turns(
        results_log,
        list(by_name),
        by_id,
        measure,
        lambda row: f"{row['tokens'] / row['decode_seconds']:.1f} tokens/s",
        repeats=repeats,
        warm_up=warm_up,
        forget=lambda name: by_name[name].forget(),
        notes=lambda: [cost_row(costs())] if costs else [],
    )


def measured_row(target: Target, decoder: Decoder, job: Job, *, forced: bool) -> tuple[Row, Run]:
    """Run one decoder on one job; return the figures, on a GPU with the peak of memory."""
    before = allocated_bytes(target.ours.device)
    run, forcing = run_once(decoder, job, forced=forced)
    digest = hashlib.sha256(repr(tuple(run.token_ids)).encode()).hexdigest()[:12]
    kept = ("rows", "passes", "draft_tokens", "accepted_tokens", "rows_of_each", "tokens_of_each")
    row = {
        "prompt_tokens": len(job.prompt_ids),
        "tokens": len(run.token_ids),
        "answer_hash": digest,
        "prefill_seconds": run.prefill_seconds,
        "first_token_seconds": run.first_token_seconds,
        "decode_seconds": run.decode_seconds,
        **{name: getattr(run, name) for name in kept},
        "stages": run.stages,
        "forcing_seconds": forcing.seconds,
    }
    if before is not None:
        own = peak_bytes(target.ours.device) - before
        row["peak_bytes"] = own + decoder.held_bytes(before)
    return row, run


def run_once(decoder: Decoder, job: Job, *, forced: bool) -> tuple[Run, ForcingCost]:
    """Run one decoder on one job; a forced run must give the recording, token for token."""
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


MATRIX_MODELS = "random:llama-135m,random:qwen2.5-0.5b"
MATRIX_TASKS = "llma,clapnq,mtrag,pubmedqa,scitldr,gsm8k,humaneval"
MATRIX_SHIPPED = "handbook"
MATRIX_DECODERS = (
    *("generate", "generate_static", "generate_lookup"),
    *("ours_plain", "ours_paper", "ours_tree", "ours_full", "ours_warm"),
)
MATRIX_ROWS = {"random:qwen2.5-0.5b": 8}  # examples; other models have 20
MATRIX_NOT_WARM = ("demo",)  # tasks with too few rows to warm a memory


@cli.command(
    *cli.places(),
    cli.option("--models", default=MATRIX_MODELS, help="comma-separated"),
    cli.option("--tasks", help=f"comma-separated (default: {MATRIX_TASKS}, or {MATRIX_SHIPPED})"),
    cli.option("--limit", type=int, help="examples of a set (default: 20, of the 0.5B shape 8)"),
    cli.TOKENIZER,
    cli.option("--dtype", default="bfloat16"),
    cli.DEVICE,
    cli.THREADS,
    cli.integer("--max-new-tokens", 256),
)
def run_matrix(options: Namespace) -> None:
    """Matrix: transformers' decoders and ours on real data sets, one file for each shape and set.

        python -m eval matrix --data DATA --out eval/results && python -m eval report
        python -m eval matrix --data DATA --out eval/results --models random:llama-3.1-8b

    All decoders of a set take turns as in ``eval speed``, following the recorded answers. Each file
    is made in a process of its own, and measurements are kept at once: an interrupted run
    continues. Afterwards ``python -m eval report`` writes the table.
    """
    run_all(matrix_steps(options), "eval matrix")


def matrix_steps(options: Namespace) -> Iterator[Step]:
    """Yield the step of a speed run for each model and set."""
    names = [name for name in MATRIX_DECODERS if name != STATIC or _compiles(options.device)]
    models, tasks = options.models.split(","), _matrix_tasks(options)
    made = [_matrix_step(model, task, names, options) for model in models for task in tasks]
    ((out, times),) = Counter(step.out for step in made).most_common(1)
    if times > 1:
        sys.exit(f"eval matrix: {times} results would be {out.name}: give each its own --out")
    yield from made


def _matrix_tasks(options: Namespace) -> list[str]:
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
    model: str, task: str, names: Sequence[str], options: Namespace, *, marked: str = ""
) -> Step:
    shape = Path(model.rpartition(":")[2]).name.removesuffix(".json")
    place = "gpu-" * (options.device != "cpu")
    out = options.out / f"matrix-{place}{shape}-{Path(task).stem}{marked}.json"
    shown = [name for name in names if name != WARM or task not in MATRIX_NOT_WARM]
    arguments = (
        *(f"--model={model}", f"--task={task}"),
        *given(options, "dtype", "device", "max_new_tokens", "data", "tokenizer", "threads"),
        *(f"--limit={options.limit or MATRIX_ROWS.get(model, 20)}", "--forced", f"--out={out}"),
        f"--decoders={','.join(shown)}",
    )
    fallback = None
    if STATIC in names:  # compiling may still fail, for example without Python's headers
        others = [name for name in names if name != STATIC]
        fallback = _matrix_step(model, task, others, options, marked="-not-static")
    return Step("speed", arguments, out, seconds=6 * HOURS, fallback=fallback)


NEVER_SLOWER_TASKS = ("humaneval", "gsm8k", "random_tokens")
NEVER_SLOWER_DECODER = "ours_tree"
MIN_ANSWER = 100  # tokens; a shorter answer ends before anything is learned
NEVER_SLOWER_ASKED = {"ratio": 0.98, "ratio_low": 0.95, "modelled": 1.02}
_SUMMED = ("tokens", "passes", "rows")


@cli.experiment(
    *cli.TARGET,
    cli.DTYPE,
    cli.option("--tasks", default=",".join(NEVER_SLOWER_TASKS), help="comma-separated"),
    cli.option(
        "--decoder", default=NEVER_SLOWER_DECODER, help="what is compared with plain decoding"
    ),
    cli.integer("--limit", 40, "requests of each set"),
    cli.integer("--min-answer", MIN_ANSWER, "tokens; shorter ones are left out"),
    cli.integer("--max-new-tokens", 256),
    cli.option("--cold-costs", action="store_true", help="as on the first run on a machine"),
    cli.integer("--cost-repeats", 15, "passes of each size for the cost table"),
    table=show,
    shown=("sets",),
    model="random:llama-135m",
)
def run_never_slower(options: Namespace) -> dict[str, Any]:
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
    """
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    sets = {task: load_jobs(task, target, options) for task in options.tasks.split(",")}
    settings = describe_target(options) | settings_of(
        options, "decoder", "min_answer", "max_new_tokens", "cost_repeats", "cold_costs",
        requests={task: len(jobs) for task, jobs in sets.items()},
    )  # fmt: skip
    results_log = open_results_log(options.out, settings)
    context = int(median(len(job.prompt_ids) for jobs in sets.values() for job in jobs))
    costs = known_costs(target, results_log, context, options.cost_repeats)
    known = {} if options.cold_costs else costs
    decoders = [Cold(name, target, known) for name in (options.decoder, PLAIN)]
    jobs = [job for task, own in sets.items() for job in under_task(task, own)]
    run_rounds(target, jobs, decoders, results_log, repeats=1, forced=True)
    return result(
        "never_slower",
        settings,
        device=options.device,
        asked=NEVER_SLOWER_ASKED,
        milliseconds={str(size): 1e3 * seconds for size, seconds in costs.items()},
        sets={
            task: summarize_set(
                [row for row in results_log.measurements if row["example"].startswith(f"{task}/")],
                options.decoder,
                costs,
            )
            for task in sets
        },
    )


def load_jobs(task: str, target: Target, options: Namespace) -> list[Job]:
    """Return the first requests of a set whose recorded answers are long enough."""
    jobs = jobs_for(target, load_task(task, None, options.data), options.max_new_tokens)
    long = [as_recorded(job) for job in jobs if len(job.answer_ids) >= options.min_answer]
    note(f"{task}: {len(long)} of {len(jobs)} answers of {options.min_answer} tokens or more")
    if not long:
        raise ValueError(f"task {task} has no answers of {options.min_answer} tokens")
    return long[: options.limit]


class Cold(Decoder):
    """A decoder that is made anew for each job: it knows no earlier jobs, but costs of passes."""

    def __init__(self, name: str, target: Target, costs: dict[int, float]) -> None:
        self.name, self._target, self._costs = name, target, costs

    @override
    def teacher_forced(self, job: Job) -> AbstractContextManager[ForcingCost]:
        self._own = make_decoder(self.name, self._target)
        if isinstance(self._own, Ours):
            self._own.know_costs(self._costs)
        return self._own.teacher_forced(job)

    @override
    def run(self, job: Job) -> Run:
        return self._own.run(job)


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
