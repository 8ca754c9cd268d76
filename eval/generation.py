"""Generation: how much faster are a model's own answers, by kind of prompt, and are they the same?

    python -m eval.generation --model reader
    python -m eval.generation --model HUB-NAME --data DATA --limit 10

Nothing is forced: RAG prompts, summaries, conversations, code and chats are answered greedily by
our loop as ``LLM`` runs it, by our loop without guesses, by ``model.generate`` and by its prompt
lookup, interleaved as in ``eval.speed``. What ships is asked; with a data folder also what lies
there. Prompts are laid out by the model's chat template where it has one. A chat goes on from what
``generate`` answered, for all decoders alike, so that they read the same prompt. What our decoder
learns is forgotten before every task and every turn. Each first difference from ``generate`` is
told as in ``eval.lossless``. Progress goes to stderr; the last line of stdout is one JSON document:
the figures of every kind of prompt and task.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from eval.adapters import adapter_beside
from eval.answer_tables import generation_table
from eval.contenders import BASELINE, PLAIN, SPACE, make_contender
from eval.examples import DATA_VARIABLE, Example, load_task
from eval.jobs import fitting_jobs, under_task
from eval.ledger import Ledger, kept_beside
from eval.lossless import compare, rows_of
from eval.machine import current_commit
from eval.script import measured, new_parser, note, result
from eval.speed import run_rounds
from eval.summary import summarize
from eval.targets import (
    Target,
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from eval.warm import capture_passes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eval.contenders import Contender
    from eval.jobs import Job

KINDS = ("RAG", "summary", "multi-turn", "code", "chat", "other")
RAG, SUMMARY, LATER, CODE, CHAT, OTHER = KINDS
KIND_OF = {
    **dict.fromkeys(("demo", "handbook", "llma", "clapnq", "mtrag", "pubmedqa", "xquad"), RAG),
    **dict.fromkeys(("summaries", "qmsum", "scitldr"), SUMMARY),
    **dict.fromkeys(("code", "humaneval", "humaneval_x"), CODE),
    **dict.fromkeys(("chat", "mt_bench", "spec_bench"), CHAT),
}
SHIPPED = ("handbook", "summaries", "code", "chat")
IN_DATA = ("llma", "mtrag", "qmsum", "humaneval_x", "mt_bench")
OF_EACH_IN_DATA = 8  # examples, where no limit is given
DECODERS = ("ours_full", PLAIN, BASELINE, "generate_lookup")
CODE_REQUEST = "Complete this Python code. Write only what follows it.\n\n```python\n{code}\n```"


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as it was answered, the task it is of, and its kind."""

    task: str
    kind: str
    job: Job


@dataclass(frozen=True, slots=True)
class Panel:
    """The decoders that answer one model's prompts, and where their answers are kept."""

    target: Target
    decoders: Sequence[Contender]
    ledger: Ledger
    max_new_tokens: int
    repeats: int
    compiled: bool

    def ask(self, task: str, examples: Sequence[Example]) -> Iterator[Asked]:
        """Have all examples of a task answered: the first turn of each, then all second ones."""
        left, turn = list(examples), 1
        while left:
            name = task if turn == 1 else f"{task}, turn {turn}"
            fitting = fitting_jobs(self.target, left, self.max_new_tokens)
            named = zip(fitting, under_task(name, fitting), strict=True)
            job_of = {job.job_id: one for job, one in named}
            self._answer(list(job_of.values()))
            left = [example for example in left if example.example_id in job_of]
            for example in left:
                kind = LATER if example.history else KIND_OF.get(task, OTHER)
                yield Asked(task, kind, job_of[example.example_id])
            answers = rows_of(BASELINE, self.ledger.measurements)
            left = [
                self._continued(example, answers[job_of[example.example_id].job_id, 0]["token_ids"])
                for example in left
                if len(example.turns) > 1
            ]
            turn += 1

    def _answer(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        capture_passes(self.target.ours, jobs, compile=self.compiled)
        run_rounds(
            self.target,
            jobs,
            self.decoders,
            self.ledger,
            repeats=self.repeats,
            forced=False,
            keep_answers=True,
        )

    def _continued(self, example: Example, answer_ids: Sequence[int]) -> Example:
        """A chat after its first turn was answered."""
        said, *then = example.turns
        turns = (
            {"role": "user", "content": said},
            {"role": "assistant", "content": self.target.tokenizer.decode(answer_ids).strip()},
        )
        return replace(example, turns=tuple(then), history=(*example.history, *turns))


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("generation", measure, parse(arguments))
    print(generation_table(document))
    print(json.dumps(document["groups"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("generation", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    default = f"{', '.join(SHIPPED)}; with a data folder also {', '.join(IN_DATA)}"
    add("--tasks", help=f"comma-separated files of eval/tasks or .jsonl files (default: {default})")
    told = f"{','.join(DECODERS)}, and {SPACE} where the model's folder has an adapter"
    add("--contenders", help=f"comma-separated (default: {told})")
    add(
        "--limit",
        type=int,
        help=f"examples of each task (default: all, {OF_EACH_IN_DATA} of DATA's)",
    )
    add("--repeats", type=int, default=1, help="rounds over all examples of a task")
    add("--max-new-tokens", type=int, default=128)
    add("--compile", action="store_true", help="have torch compile what is replayed, on a GPU")
    add("--tiny-check", action="store_true", help="let a random model babble, to try this out")
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Have every prompt that the ledger lacks answered; tell of each kind and task."""
    if options.model.startswith("random:") and not options.tiny_check:
        raise ValueError(
            "a random model's own answers mean nothing: take a trained one, let it follow recorded "
            "answers (eval.speed), or try this out with --tiny-check"
        )
    sets = load_sets(options)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    wanted = options.contenders.split(",") if options.contenders else default_decoders(target)
    names = [name for name in wanted if name != BASELINE]
    settings = _settings(options, target, sets) | {"contenders": [*names, BASELINE]}
    panel = Panel(
        target,
        [make_contender(name, target) for name in settings["contenders"]],
        kept_beside(options.out, settings),
        options.max_new_tokens,
        options.repeats,
        options.compile,
    )
    asked: list[Asked] = []
    left_out = {}
    for task, examples in sets.items():
        note(f"task {task}")
        own = list(panel.ask(task, [_in_chat(target, example) for example in examples]))
        fitting = sum(one.job.job_id.startswith(f"{task}/") for one in own)
        if fitting < len(examples):
            left_out[task] = len(examples) - fitting
        asked += own
    resumed = [row["resumed"] for row in panel.ledger.rows if "resumed" in row]
    return result(
        "generation",
        settings,
        device=options.device,
        **({"resumed": resumed} if resumed else {}),
        **({"left_out": left_out} if left_out else {}),
        groups=list(_groups(panel, asked, names)),
    )


def default_decoders(target: Target) -> list[str]:
    """Name the decoders, SPACE's where there is an adapter for it."""
    return [*DECODERS, *[SPACE] * (adapter_beside(target) is not None)]


def _settings(
    options: argparse.Namespace, target: Target, sets: Mapping[str, Sequence[Example]]
) -> dict[str, Any]:
    return {
        **describe_target(options),
        "chat_template": target.tokenizer.has_chat_template,
        "tasks": list(sets),
        "examples": sum(map(len, sets.values())),
        "repeats": options.repeats,
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }


def load_sets(options: argparse.Namespace) -> dict[str, list[Example]]:
    """Load the tasks that are named, or those that are at hand."""
    if options.tasks:
        names: Sequence[str] = options.tasks.split(",")
    elif options.data is not None or DATA_VARIABLE in os.environ:
        names = (*SHIPPED, *IN_DATA)
    else:
        names = SHIPPED
        note(f"no data folder, so what ships is asked: {', '.join(names)} (--data asks more)")
    return {
        Path(name).name: load_task(name, options.limit or _few(name), options.data)
        for name in names
    }


def _few(task: str) -> int | None:
    return OF_EACH_IN_DATA if task in IN_DATA else None


def _in_chat(target: Target, example: Example) -> Example:
    """A prompt to be continued as a request, where the model was trained on requests."""
    if not example.prompt or not target.tokenizer.has_chat_template:
        return example
    return replace(example, prompt="", turns=(CODE_REQUEST.format(code=example.prompt),))


def _groups(panel: Panel, asked: Sequence[Asked], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The figures of every kind and task: speeds, and answers held against ``generate``'s."""
    measurements = panel.ledger.measurements
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
            "contenders": summarize([row for row in measurements if row["example"] in ids]),
            "same": [compare(panel.target, jobs, rows, name, BASELINE) for name in names],
        }


def _in_order(group: tuple[str, str]) -> tuple[int, str]:
    kind, task = group
    return KINDS.index(kind), task


if __name__ == "__main__":
    main()
