"""Measure a model's own answers: their speed, and whether they equal ``generate``'s."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from eval import cli
from eval.data import DATA_VARIABLE, Example, Job, fitting_jobs, jobs_for, under_task
from eval.decoders import BASELINE, PLAIN, SPACE, Decoder, capture_passes, make_decoder
from eval.experiments.speed import run_rounds, summarize
from eval.measure import paired_ratio
from eval.models import (
    DTYPE_NAMES,
    Target,
    adapter_beside,
    chosen_target,
    describe_target,
)
from eval.report.tables import show
from eval.runner import (
    ResultsLog,
    note,
    open_results_log,
    result,
    settings_of,
)
from eval.tasks import load_task

Row = dict[str, Any]
Rows = dict[tuple[str, int], Row]


@cli.experiment(
    *cli.TARGET,
    cli.option("--tasks", "--task", default="demo", help="comma-separated"),
    cli.option("--decoders", "--decoder", default="ours", help=f"held against {BASELINE}"),
    cli.option("--dtypes", default="float32,bfloat16", help=f"of {', '.join(DTYPE_NAMES)}"),
    cli.LIMIT, cli.integer("--max-new-tokens", 128),
    table=show, shown=("comparisons",),
)  # fmt: skip
def run_lossless(options: Namespace) -> dict[str, Any]:
    """Lossless: are our answers those of ``model.generate``, and how do they differ?

        python -m eval lossless --model reader --tasks demo,handbook,code --dtypes float32,bfloat16

    Any of our decoders (``--decoders``) can be compared on any tasks in several dtypes. Passes over
    different numbers of rows round differently, so the choice between two nearly tied tokens can
    differ. For each first difference the gap between the two tokens' logits is measured, in one
    pass over the common text in the same precision, with the gap between the model's two likeliest
    tokens. A difference that is not a near tie is an error.
    """
    dtypes = options.dtypes.split(",")
    for dtype in dtypes:
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"no dtype {dtype!r}: take some of {', '.join(DTYPE_NAMES)}")
    sets = {
        Path(task).name: load_task(task, options.limit, options.data)
        for task in options.tasks.split(",")
    }
    found = {dtype: _compared_or_told(options, dtype, sets) for dtype in dtypes}
    lacking = {dtype: told for dtype, told in found.items() if isinstance(told, str)}
    return result(
        "lossless",
        _lossless_settings(options, sets, options.dtypes),
        device=options.device,
        **({"lacking": lacking} if lacking else {}),
        comparisons=[row for rows in found.values() if not isinstance(rows, str) for row in rows],
    )


def _compared_or_told(
    options: Namespace, dtype: str, sets: Mapping[str, Sequence[Example]]
) -> list[Row] | str:
    """Compare all tasks in one dtype; return torch's error if it has no such operation."""
    try:
        return compare_tasks(options, dtype, sets)
    except RuntimeError as error:
        if "not implemented for '" not in str(error):  # torch's message
            raise
        told = str(error).partition("\n")[0]
        note(f"{dtype}: {told}")
        return told


def compare_tasks(
    options: Namespace, dtype: str, sets: Mapping[str, Sequence[Example]]
) -> list[Row]:
    """Answer every example in one dtype; return a comparison for each task and decoder."""
    note(f"loading {options.model} in {dtype}")
    target = chosen_target(options, dtype)
    jobs = {
        task: under_task(task, fitting_jobs(target, examples, options.max_new_tokens))
        for task, examples in sets.items()
    }
    beside = options.out and options.out.with_stem(f"{options.out.stem}-{dtype}")
    results_log = open_results_log(beside, _lossless_settings(options, sets, dtype))
    names = [name for name in options.decoders.split(",") if name != BASELINE]
    decoders = [make_decoder(name, target) for name in (*names, BASELINE)]
    everything = [job for own in jobs.values() for job in own]
    rows = answers_of(target, everything, decoders, results_log)
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


def _lossless_settings(
    options: Namespace, sets: Mapping[str, Sequence[Example]], dtype: str
) -> dict[str, Any]:
    options = Namespace(**{**vars(options), "dtype": dtype})
    return describe_target(options) | settings_of(
        options, "decoders", "max_new_tokens", tasks=[*sets], examples=sum(map(len, sets.values()))
    )


def _acceptance_length(jobs: Sequence[Job], rows: Rows) -> float:
    own = [rows[job.job_id, 0] for job in jobs]
    return float(sum(row["tokens"] for row in own) / max(1, sum(row["passes"] for row in own)))


def answers_of(
    target: Target,
    jobs: Sequence[Job],
    decoders: Sequence[Decoder],
    results_log: ResultsLog,
    repeats: int = 1,
) -> dict[str, Rows]:
    """Have every decoder give the model's own answers; return all logged rows by decoder."""
    run_rounds(
        target, jobs, decoders, results_log, repeats=repeats, forced=False, keep_answers=True
    )
    return {one.name: rows_of(one.name, results_log.measurements) for one in decoders}


def rows_of(name: str, rows: Iterable[Row]) -> Rows:
    """Return the rows of a decoder by (example, round)."""
    return {(row["example"], row["round"]): row for row in rows if row["decoder"] == name}


def compare(
    target: Target, jobs: Sequence[Job], rows: Mapping[str, Rows], found: str, wanted: str
) -> dict[str, Any]:
    """Count the answers of decoder ``found`` that equal those of ``wanted``; list differences."""
    answers = [
        (job, *(rows[name][job.job_id, 0]["token_ids"] for name in (found, wanted))) for job in jobs
    ]
    return {"found": found, "wanted": wanted, **identical(target, answers)}


def identical(
    target: Target, answers: Sequence[tuple[Job, Sequence[int], Sequence[int]]]
) -> dict[str, Any]:
    """Count the pairs of equal answers; list the first difference of every other pair."""
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
    """Return where two answers first differ, and the gap of the two logits there.

    ``gap`` is between the logits of the two chosen tokens, ``top_2_gap`` between the two largest
    logits. ``spread`` is the standard deviation of all logits, as a scale for both.
    """
    place = next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
        min(len(found), len(wanted)),
    )
    result: dict[str, Any] = {"example": job.job_id, "place": place}
    if place >= min(len(found), len(wanted)):
        # One answer ended before the other: an error of ours, not a near tie.
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


KINDS = ("RAG", "summary", "multi-turn", "code", "chat", "other")
RAG, SUMMARY, LATER, CODE, CHAT, OTHER = KINDS
KIND_OF = {
    **dict.fromkeys(("demo", "handbook", "llma", "clapnq", "mtrag", "pubmedqa", "xquad"), RAG),
    **dict.fromkeys(("summaries", "qmsum", "scitldr"), SUMMARY),
    **dict.fromkeys(("code", "humaneval", "humaneval_x"), CODE),
    **dict.fromkeys(("chat", "mt_bench"), CHAT),
}
SHIPPED_TASKS = ("handbook", "summaries", "code", "chat")
DATA_TASKS = ("llma", "mtrag", "qmsum", "humaneval_x", "mt_bench")
OF_EACH_IN_DATA = 8  # examples of each task without --limit
GENERATION_DECODERS = ("ours_full", PLAIN, BASELINE, "generate_lookup")
CODE_REQUEST = "Complete this Python code. Write only what follows it.\n\n```python\n{code}\n```"


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """An answered prompt with its task and its kind, such as ``code``."""

    task: str
    kind: str
    job: Job


@dataclass(frozen=True, slots=True)
class DecoderPanel:
    """The decoders that answer one model's prompts, and the log of their answers."""

    target: Target
    decoders: Sequence[Decoder]
    results_log: ResultsLog
    max_new_tokens: int
    repeats: int
    compiled: bool

    def ask(self, task: str, examples: Sequence[Example]) -> Iterator[AnsweredPrompt]:
        """Answer all examples of a task, turn by turn, and yield the answered prompts."""
        left, turn = list(examples), 1
        while left:
            name = task if turn == 1 else f"{task}, turn {turn}"
            fitting = fitting_jobs(self.target, left, self.max_new_tokens)
            named = zip(fitting, under_task(name, fitting), strict=True)
            job_of = {job.job_id: one for job, one in named}
            answers: Rows = {}
            if job_of:
                jobs = list(job_of.values())
                capture_passes(self.target.ours, jobs, compile=self.compiled)
                answers = answers_of(
                    self.target, jobs, self.decoders, self.results_log, self.repeats
                )[BASELINE]
            left = [example for example in left if example.example_id in job_of]
            for example in left:
                kind = LATER if example.history else KIND_OF.get(task, OTHER)
                yield AnsweredPrompt(task, kind, job_of[example.example_id])
            left = [
                self._continued(example, answers[job_of[example.example_id].job_id, 0]["token_ids"])
                for example in left
                if len(example.turns) > 1
            ]
            turn += 1

    def _continued(self, example: Example, answer_ids: Sequence[int]) -> Example:
        """Return the example of a chat's second turn, with the first answer in its history."""
        said, *then = example.turns
        turns = (
            {"role": "user", "content": said},
            {"role": "assistant", "content": self.target.tokenizer.decode(answer_ids).strip()},
        )
        return replace(example, turns=tuple(then), history=(*example.history, *turns))


@cli.experiment(
    *cli.TARGET, cli.DTYPE,
    cli.option("--tasks", help="comma-separated (default: those that ship, and those of the data)"),
    cli.option("--decoders", help=f"default: {','.join(GENERATION_DECODERS)}, and {SPACE}"),
    cli.option("--limit", type=int, help=f"of each task (default: all, {OF_EACH_IN_DATA} of DATA)"),
    cli.integer("--repeats", 1, "rounds over all examples of a task"),
    cli.integer("--max-new-tokens", 128), cli.COMPILE,
    table=show, shown=("groups",),
)  # fmt: skip
def run_generation(options: Namespace) -> dict[str, Any]:
    """Generation: are a model's own answers faster, by kind of prompt, and are they the same?

        python -m eval generation --model reader
        python -m eval generation --model HUB-NAME --data DATA --limit 10

    The model gives its own answers. RAG prompts, summaries, conversations, code and chats are
    answered greedily by our loop as ``LLM`` runs it, by our loop without draft tokens, by
    ``model.generate`` and by its prompt lookup, in turn as in ``eval speed``. The tasks are those
    that ship and, with a data folder, those in it. Prompts use the model's chat template if it has
    one. The second turn of a chat follows ``generate``'s answer for all decoders, so that they read
    the same prompt. Our decoder forgets what it learned before every task and every turn. Each
    first difference from ``generate`` is described as in ``eval lossless``.
    """
    if options.model.startswith("random:"):
        raise ValueError(
            "a random model's own answers mean nothing: take a trained one, or let it follow "
            "recorded answers (eval speed)"
        )
    sets = load_sets(options)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    wanted = options.decoders.split(",") if options.decoders else default_decoders(target)
    names = [name for name in wanted if name != BASELINE]
    settings = describe_target(options) | settings_of(
        options, "repeats", "max_new_tokens", chat_template=target.tokenizer.has_chat_template,
        tasks=[*sets], examples=sum(map(len, sets.values())), decoders=[*names, BASELINE],
    )  # fmt: skip
    panel = DecoderPanel(
        target,
        [make_decoder(name, target) for name in settings["decoders"]],
        open_results_log(options.out, settings),
        options.max_new_tokens,
        options.repeats,
        options.compile,
    )
    asked: list[AnsweredPrompt] = []
    left_out = {}
    for task, examples in sets.items():
        note(f"task {task}")
        own = list(panel.ask(task, [_in_chat(target, example) for example in examples]))
        fitting = sum(one.job.job_id.startswith(f"{task}/") for one in own)
        if fitting < len(examples):
            left_out[task] = len(examples) - fitting
        asked += own
    return result(
        "generation",
        settings,
        device=options.device,
        log=panel.results_log,
        **({"left_out": left_out} if left_out else {}),
        groups=list(_groups(panel, asked, names)),
    )


def default_decoders(target: Target) -> list[str]:
    """Return the names of the decoders; SPACE's is among them if the target has an adapter."""
    return [*GENERATION_DECODERS, *[SPACE] * (adapter_beside(target) is not None)]


def load_sets(options: Namespace) -> dict[str, list[Example]]:
    """Load the named tasks, or those that ship and, with a data folder, those in it."""
    if options.tasks:
        names: Sequence[str] = options.tasks.split(",")
    elif options.data is not None or DATA_VARIABLE in os.environ:
        names = (*SHIPPED_TASKS, *DATA_TASKS)
    else:
        names = SHIPPED_TASKS
        note(f"no data folder, so what ships is asked: {', '.join(names)} (--data asks more)")
    return {
        Path(name).name: load_task(name, options.limit or _few(name), options.data)
        for name in names
    }


def _few(task: str) -> int | None:
    return OF_EACH_IN_DATA if task in DATA_TASKS else None


def _in_chat(target: Target, example: Example) -> Example:
    """Return a prompt as a request to continue it, if the model has a chat template."""
    if not example.prompt or not target.tokenizer.has_chat_template:
        return example
    return replace(example, prompt="", turns=(CODE_REQUEST.format(code=example.prompt),))


def _groups(
    panel: DecoderPanel, asked: Sequence[AnsweredPrompt], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of every kind and task: speeds, and answers compared to ``generate``'s."""
    measurements = panel.results_log.measurements
    rows = {name: rows_of(name, measurements) for name in (*names, BASELINE)}
    for kind, task in sorted({(one.kind, one.task) for one in asked}, key=_in_order):
        jobs = [one.job for one in asked if (one.kind, one.task) == (kind, task)]
        ids = {job.job_id for job in jobs}
        answers = [(job, rows[BASELINE][job.job_id, 0]["token_ids"]) for job in jobs]
        yield {
            "kind": kind,
            "task": task,
            "prompts": len(jobs),
            "answer_tokens": fmean(len(answer) for _, answer in answers),
            "ended": fmean(answer[-1] in job.eos_ids for job, answer in answers),
            "first_answer": panel.target.tokenizer.decode(answers[0][1]).strip(),
            "decoders": summarize([row for row in measurements if row["example"] in ids]),
            "same": [compare(panel.target, jobs, rows, name, BASELINE) for name in names],
        }


def _in_order(group: tuple[str, str]) -> tuple[int, str]:
    kind, task = group
    return KINDS.index(kind), task


EXACTNESS_DECODERS = (
    "generate",
    "ours_tree",
    "ours_plain",
    "ours_exact_plain",
    "ours_exact",
)
MUST = ("ours_exact", "ours_exact_plain")
"""The two decoders that must give identical answers."""
EXACTNESS_PAIRS = (
    ("ours_tree", "generate"),
    ("ours_plain", "generate"),
    ("ours_exact", "generate"),
    ("ours_tree", "ours_plain"),
    MUST,
)
EXACTNESS_COSTS = (
    ("ours_exact", "ours_tree"),
    ("ours_exact_plain", "ours_plain"),
    MUST,
)


@cli.experiment(
    *cli.TARGET, cli.DTYPE, cli.TASK, cli.LIMIT, cli.integer("--max-new-tokens", 128),
    table=show, shown=("pairs", "costs"),
    broken=lambda document: wrongly_exact(document),
)  # fmt: skip
def run_exactness(options: Namespace) -> dict[str, Any]:
    """Exactness: which modes give the same answers as which decoder, and what each mode costs.

        python -m eval exactness --model reader --task xquad --data DATA --limit 200

    The model gives its own answers, by transformers' ``generate`` and by our loop with draft trees
    and without drafts, in default and in exact mode. Exact mode must give the same tokens with
    drafts as without. Other differences must be near ties: each first difference is reported with
    its position and the gap of the logits there in transformers' own pass, as in ``eval lossless``.
    Decoders run one after the other on each example, in rotated order, so that the cost of a mode
    is a ratio within an example.
    """
    examples = load_task(options.task, options.limit, options.data)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    jobs = jobs_for(target, examples, options.max_new_tokens)
    settings = describe_target(options) | settings_of(
        options, "task", "max_new_tokens", examples=len(jobs)
    )
    results_log = open_results_log(options.out, settings)
    decoders = [make_decoder(name, target) for name in EXACTNESS_DECODERS]
    rows = answers_of(target, jobs, decoders, results_log)
    return result(
        "exactness",
        settings,
        device=options.device,
        pairs=[compare(target, jobs, rows, *pair) for pair in EXACTNESS_PAIRS],
        costs=[cost(rows, *pair) for pair in EXACTNESS_COSTS],
        decoders=summarize(results_log.measurements),
    )


def wrongly_exact(document: dict[str, Any]) -> str:
    """Return a message if exact answers differ when they are drafted."""
    exact = next(one for one in document["pairs"] if (one["found"], one["wanted"]) == MUST)
    differing = len(exact["differences"])
    return f"{differing} exact answers differ when drafted" if differing else ""


def cost(rows: dict[str, Rows], decoder: str, against: str) -> dict[str, Any]:
    """Return the cost of a decoder as a multiple of another's.

    ``decode_seconds`` are per token and ``prefill_seconds`` per prompt, both medians over examples;
    ``passes`` compares all passes divided by all tokens.
    """
    ones, others = rows[decoder], rows[against]
    result: dict[str, Any] = {"decoder": decoder, "against": against}
    for label in ("decode_seconds", "prefill_seconds"):
        ratio = paired_ratio(_seconds(ones, label), _seconds(others, label))
        result[label], result[f"{label}_interval"] = ratio.value, [ratio.low, ratio.high]
    return {**result, "passes": _passes_a_token(ones) / _passes_a_token(others)}


def _seconds(rows: Rows, label: str) -> dict[tuple[str, int], float]:
    by_token = label == "decode_seconds"
    return {key: row[label] / (row["tokens"] if by_token else 1) for key, row in rows.items()}


def _passes_a_token(rows: Rows) -> float:
    return float(
        sum(row["passes"] for row in rows.values()) / sum(row["tokens"] for row in rows.values())
    )
