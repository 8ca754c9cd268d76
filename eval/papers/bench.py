"""Recorded sets for the papers' experiments, and the decoders to replay and time on them."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from eval import cli
from eval.data import DATA_VARIABLE, Job, Recorded, in_data, lay_out, read_rows
from eval.decoders import PLAIN, Ours, capture_passes
from eval.experiments.replay import ReplayedDrafter, replay_set
from eval.experiments.speed import run_rounds, summarize
from eval.models import (
    Target,
    chosen_target,
    describe_target,
    load_tokenizer,
)
from eval.runner import ResultsLog, current_commit, note, open_results_log
from eval.tasks import FOLDER
from ragaccel.decoding import Drafter, NoDrafter
from ragaccel.drafting import CopyDrafter, TrieDrafter

Point = dict[str, Any]
Row = dict[str, Any]

TREE_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PaperDecoder:
    """A drafter with its maximum number of draft tokens.

    ``budget`` is the token budget of a replay, and of a timed run unless ``chooses`` is True; then
    the measured cost of passes decides how many draft tokens are verified. ``apart`` gives the
    drafter references that were tokenized alone.
    """

    name: str
    make: Callable[[], Drafter]
    budget: int
    apart: bool = False
    chooses: bool = False

    def replayed(self) -> ReplayedDrafter:
        """Return a new drafter for a replay."""
        return ReplayedDrafter(self.make, self.budget, apart=self.apart)

    def timed(self, target: Target) -> Ours:
        """Return a new decoder over a model."""
        if self.chooses:
            return Ours(self.name, target, self.make, apart=self.apart)
        wider = {"max_rows": 1 + self.budget} if self.budget >= TREE_DRAFT_TOKENS else {}
        return Ours(
            self.name, target, self.make, token_budget=self.budget, apart=self.apart, **wider
        )


def llma_decoder(n: int = 1, k: int = 20, name: str = "llma") -> PaperDecoder:
    """Return LLMA's decoder as published; k - 1 of the k tokens of a pass are draft tokens."""
    return PaperDecoder(name, partial(CopyDrafter.paper, n, k), k - 1, apart=True)


NO_DRAFTS = PaperDecoder(PLAIN, NoDrafter, 0)
TREES = PaperDecoder("ours_trie", TrieDrafter, TREE_DRAFT_TOKENS, chooses=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """A runner of sets: replays each decoder, and times it if there is a model."""

    target: Target | None
    results_log: ResultsLog
    repeats: int = 1

    def points(
        self, name: str, recordings: Sequence[Recorded], decoders: Sequence[PaperDecoder]
    ) -> list[Point]:
        """Run all decoders on a set; return one point for each, in their order."""
        counts = {one.name: replay_set(recordings, one.replayed()) for one in decoders}
        shown = "  ".join(f"{one} {c['tokens_per_pass']:.3f}" for one, c in counts.items())
        note(f"{name}, {len(recordings)} answers, tokens a pass: {shown}")
        times = self.times(name, recordings, decoders)
        return [{"decoder": one, **counts[one], **times.get(one, {})} for one in counts]

    def times(
        self, name: str, recordings: Sequence[Recorded], decoders: Sequence[PaperDecoder]
    ) -> dict[str, Point]:
        """Time the decoders in turn on the recorded answers; return a point for each by name.

        Answers longer than the model's limit are left out with a note. Return an empty dict without
        a model.
        """
        if self.target is None:
            return {}
        most = max(decoder.budget for decoder in decoders)
        fitting = [one for one in recordings if self._fits(one, most)]
        if len(fitting) < len(recordings):
            note(f"{name}: {len(recordings) - len(fitting)} are longer than the model reads")
        jobs = [_job(f"{name}/{number}", one) for number, one in enumerate(fitting)]
        if not jobs:
            return {}
        timed = [decoder.timed(self.target) for decoder in decoders]
        capture_passes(self.target.ours, jobs, compile=False)
        run_rounds(self.target, jobs, timed, self.results_log, repeats=self.repeats, forced=True)
        ids = {job.job_id for job in jobs}
        rows = [row for row in self.results_log.measurements if row["example"] in ids]
        return {label: _timed(figures) for label, figures in summarize(rows).items()}

    def _fits(self, recorded: Recorded, draft_tokens: int) -> bool:
        limit = self.target and self.target.ours.max_positions
        size = (
            len(recorded.prompt_ids)
            + len(recorded.answer_ids)
            + max(draft_tokens, TREE_DRAFT_TOKENS)
        )
        return limit is None or size <= limit


def open_bench(options: Namespace, target: Target | None, settings: dict[str, Any]) -> Bench:
    """Return the bench of a run; times are logged beside ``--out``, so that a run can resume."""
    results_log = (
        ResultsLog(None, settings) if target is None else open_results_log(options.out, settings)
    )
    return Bench(target, results_log, options.repeats)


def _job(job_id: str, recorded: Recorded) -> Job:
    return Job(
        job_id=job_id,
        prompt_ids=recorded.prompt_ids,
        references=recorded.references,
        apart=recorded.apart,
        answer_ids=recorded.answer_ids,
        max_new_tokens=len(recorded.answer_ids),
        eos_ids=frozenset(recorded.answer_ids[-1:]),
    )


def _timed(figures: dict[str, Any]) -> Point:
    """Return one decoder's times, and its passes for comparison with the replay."""
    return {
        "tokens_per_second": figures["tokens_per_second"],
        "ratio": figures["ratio"],
        "ratio_interval": figures["ratio_interval"],
        "seconds": sum(figures["seconds"][stage] for stage in ("draft", "verify", "other")),
        "timed_answers": figures["examples"],
        "timed_passes": figures["passes"],
        "timed_tokens_per_pass": round(figures["acceptance_length"], 4),
    }


ORIGINAL, UNIFIED = "llma_rag_original", "llma_msmarco_davinci003"
SHIPPED, SHIPPED_ANSWERS = "handbook", "handbook_answers"
"""The sets under ``eval/tasks``: one answer to each task, and three answers to some."""


def paper_options(sets: Sequence[str], limit: int | None = None) -> tuple[cli.Option, ...]:
    """Return the options of an experiment by replay that also times a model if one is named."""
    return (
        *cli.TARGET, cli.DTYPE,
        cli.option("--sets", default=",".join(sets), help="files of rag/ in the data folder"),
        cli.option("--limit", type=int, default=limit, help="rows of each file"),
        cli.integer("--repeats", 1, "rounds over all rows, where a model is timed"),
    )  # fmt: skip


REPLAYED = {"model": None}
"""Defaults of a run that replays unless a model is named."""


def has_data(options: Namespace) -> bool:
    """Return whether a data folder is given; without one the shipped sets are replayed."""
    return options.data is not None or DATA_VARIABLE in os.environ


def set_paths(options: Namespace, names: str, shipped: str = SHIPPED) -> dict[str, Path]:
    """Return the files of comma-separated sets of ``rag/``, or the ``shipped`` set without data."""
    if has_data(options):
        return {n: in_data(f"rag/{n}.jsonl", options.data) for n in names.split(",")}
    where = f"eval/tasks/{shipped}.jsonl"
    note(f"no data folder (--data, {DATA_VARIABLE}): {where}, which ships, in place of {names}")
    return {shipped: FOLDER / f"{shipped}.jsonl"}


def answered_rows(path: Path, limit: int | None) -> list[Row]:
    """Return the first ``limit`` rows of a file that have an answer."""
    rows = (row for row in read_rows(path) if "result" in row or row.get("answer", "").strip())
    return list(islice(rows, limit))


def laid_out(rows: Sequence[Row], tokenizer: Any) -> list[Recorded]:
    """Convert rows to requests in token ids, without rows whose prompts are too long."""
    return [one for row in rows if (one := lay_out(row, tokenizer)) is not None]


def chosen_models(options: Namespace) -> tuple[Target | None, Any]:
    """Return the model of ``--model``, or None without one, and the tokenizer of the answers."""
    if options.model:
        note(f"loading {options.model}")
        target = chosen_target(options, options.dtype)
        return target, target.tokenizer.tokenizer
    name = options.tokenizer or ("llama2" if has_data(options) else "reader")
    return None, load_tokenizer(name, options.data).tokenizer


def describe_paper_run(options: Namespace) -> dict[str, Any]:
    """Return the settings that must agree for two runs to be comparable."""
    words = options.tokenizer or ("llama2" if has_data(options) else "reader")
    model = describe_target(options) | {"repeats": options.repeats} if options.model else {}
    return {
        "sets": options.sets if has_data(options) else "what ships",
        "limit": options.limit,
        "timed": model.get("model", "decoding steps, replayed"),
        **(model or {"tokenizer": words}),
        "commit": current_commit(),
    }
