"""One runner for the papers' experiments: drafters replayed, and timed on a model."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from eval import cli
from eval.data import DATA_VARIABLE, Job, Recorded, has_data, in_data, lay_out, read_rows
from eval.decoders import PLAIN, Ours, capture_passes
from eval.experiments.replay import ReplayedDrafter, Tally
from eval.experiments.speed import run_rounds, summarize
from eval.models import Target, chosen_target, describe_target, load_tokenizer
from eval.runner import ResultsLog, current_commit, note, open_results_log, result
from eval.tasks import FOLDER
from ragaccel.decoding import Drafter, NoDrafter
from ragaccel.drafting import CopyDrafter, History, PastTexts, TrieDrafter

Entry = dict[str, Any]
Row = dict[str, Any]

TREE_DRAFT_TOKENS = 64
SHIPPED, SHIPPED_ANSWERS = "handbook", "handbook_answers"
"""The sets under ``eval/tasks``: one answer to each task, and three answers to some."""
REPLAYED = {"model": None}
"""Defaults of a run that replays unless a model is named."""
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
"""Published figures of the papers and their repositories, each with one source.

If a paper's text and its repository differ, both figures are here. All were read at their source:
for LLMA and Lookahead the abstracts and repositories, not the tables and figures of the papers.
``speedup`` is over plain decoding by the same system, in the source's words; ``plain`` and
``accelerated`` are tokens per second; ``tokens_per_pass`` includes the one token of every pass.
"""


def published(experiment: str) -> list[dict[str, Any]]:
    """Return the published figures of an experiment: system, setting, source and what is known."""
    return [{"experiment": experiment, **figure} for figure in PUBLISHED[experiment]["figures"]]


@dataclass(frozen=True, slots=True)
class Point:
    """A drafter in one setting, made from past requests, with its maximum number of draft tokens.

    ``parameters`` distinguish it from the other points of a result. ``budget`` is the token budget
    of a replay, and of a timed run unless ``by_cost`` is True; then the measured cost of passes
    decides how many draft tokens are verified. ``apart`` gives the drafter references that were
    tokenized alone; ``fresh`` replays every request with a new drafter.
    """

    parameters: dict[str, Any]
    make: Callable[[PastTexts], Drafter]
    budget: int
    apart: bool = False
    by_cost: bool = False
    fresh: bool = False

    @property
    def name(self) -> str:
        """The name of the point's decoder in a timed run."""
        return "x".join(map(str, self.parameters.values()))

    def replayed(self, past: PastTexts) -> ReplayedDrafter:
        """Return a new drafter for a replay."""
        return ReplayedDrafter(partial(self.make, past), self.budget, apart=self.apart)

    def timed(self, target: Target) -> Ours:
        """Return a new decoder over a model."""
        modes: dict[str, Any] = {} if self.by_cost else {"token_budget": self.budget}
        if not self.by_cost and self.budget >= TREE_DRAFT_TOKENS:
            modes["max_rows"] = 1 + self.budget
        return Ours(self.name, target, partial(self.make, History()), apart=self.apart, **modes)


def llma_point(n: int = 1, k: int = 20, *, is_swept: bool = False) -> Point:
    """Return LLMA's drafter as published; k - 1 of the k tokens of a pass are draft tokens."""
    parameters: dict[str, Any] = {"n": n, "k": k} if is_swept else {"decoder": "llma"}
    return Point(parameters, lambda _past: CopyDrafter.paper(n, k), k - 1, apart=True)


NO_DRAFTS = Point({"decoder": PLAIN}, lambda _past: NoDrafter(), 0)
TREES = Point(
    {"decoder": "ours_trie"}, lambda past: TrieDrafter(past=past), TREE_DRAFT_TOKENS, by_cost=True
)


def replay_rows(
    rows: Iterable[Recorded], points: Sequence[Point], past: PastTexts | None = None
) -> list[list[Tally]]:
    """Replay rows through every point; return the tallies of the rows for each point.

    A ``History`` of past requests grows by each row.
    """
    known = History() if past is None else past
    drafters = [point.replayed(known) for point in points]
    tallies: list[list[Tally]] = [[] for _ in points]
    for recorded in rows:
        for number, point in enumerate(points):
            if point.fresh:
                drafters[number] = point.replayed(known)
            tallies[number].append(Tally())
            drafters[number].replay(recorded, tallies[number][-1])
        if isinstance(past, History):
            past.add(recorded.prompt_ids, recorded.answer_ids)
    return tallies


def counts_of(tallies: Iterable[Tally]) -> dict[str, Any]:
    """Return the counts of all tallies together."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total.counts()


@dataclass(frozen=True, slots=True)
class Bench:
    """A run of a paper's experiment: its model, if it times one, its tokenizer and its log."""

    options: Namespace
    settings: dict[str, Any]
    target: Target | None
    tokenizer: Any
    results_log: ResultsLog

    def sweep(
        self,
        rows: Sequence[Recorded],
        points: Sequence[Point],
        past: PastTexts | None = None,
        *,
        is_timed: bool = True,
        **where: Any,
    ) -> list[Entry]:
        """Replay rows through all points, and time these on the model, if there is one.

        Return an entry for each point, in their order: ``where``, its parameters, counts and times.
        Replays in the log are not made again.
        """
        key = list(map(str, where.values()))
        logged = (row["grid"] for row in self.results_log.rows if row.get("replayed") == key)
        counts = next(logged, None)
        if counts is None:
            counts = [counts_of(tallies) for tallies in replay_rows(rows, points, past)]
            self.results_log.add({"replayed": key, "grid": counts})
        shown = [one["tokens_per_pass"] for one in counts]
        told = "/".join(key)
        note(f"{told}, {len(rows)} answers: {min(shown):.2f} to {max(shown):.2f} tokens a pass")
        times = self.times(told, rows, points) if is_timed else {}
        return [
            {**where, "answers": len(rows), **point.parameters, **one, **times.get(point.name, {})}
            for point, one in zip(points, counts, strict=True)
        ]

    def times(
        self, name: str, rows: Sequence[Recorded], points: Sequence[Point]
    ) -> dict[str, Entry]:
        """Time the points in turn on the recorded answers; return the times of each by name.

        Answers longer than the model's limit are left out with a note. Return an empty dict without
        a model.
        """
        if self.target is None:
            return {}
        limit = self.target.ours.max_positions
        most = max(TREE_DRAFT_TOKENS, *(point.budget for point in points))
        fitting = [
            one
            for one in rows
            if limit is None or len(one.prompt_ids) + len(one.answer_ids) + most <= limit
        ]
        if len(fitting) < len(rows):
            note(f"{name}: {len(rows) - len(fitting)} are longer than the model reads")
        jobs = [_job(f"{name}/{number}", one) for number, one in enumerate(fitting)]
        if not jobs:
            return {}
        timed = [point.timed(self.target) for point in points]
        capture_passes(self.target.ours, jobs, compile=False)
        repeats = self.options.repeats
        run_rounds(self.target, jobs, timed, self.results_log, repeats=repeats, forced=True)
        ids = {job.job_id for job in jobs}
        measured = [row for row in self.results_log.measurements if row["example"] in ids]
        return {label: _timed(figures) for label, figures in summarize(measured).items()}

    def result(self, kind: str, **parts: Any) -> dict[str, Any]:
        """Return the run's result with the paper's published figures."""
        theirs = published(kind.partition("_")[0])
        device = self.options.device
        return result(kind, self.settings, device=device, **parts, published=theirs)


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


def _timed(figures: dict[str, Any]) -> Entry:
    """Return one decoder's times, and its passes for comparison with the replay."""
    return {
        **{name: figures[name] for name in ("tokens_per_second", "ratio", "ratio_interval")},
        "seconds": sum(figures["seconds"][stage] for stage in ("draft", "verify", "other")),
        "timed_answers": figures["examples"],
        "timed_passes": figures["passes"],
        "timed_tokens_per_pass": round(figures["acceptance_length"], 4),
    }


def paper_options(sets: Sequence[str], limit: int | None = None) -> tuple[cli.Option, ...]:
    """Return the options of an experiment by replay that also times a model if one is named."""
    return (
        *cli.TARGET, cli.DTYPE,
        cli.option("--sets", default=",".join(sets), help="files of rag/ in the data folder"),
        cli.option("--limit", type=int, default=limit, help="rows of each file"),
        cli.integer("--repeats", 1, "rounds over all rows, where a model is timed"),
    )  # fmt: skip


def open_bench(options: Namespace, **settings: Any) -> Bench:
    """Open the bench of a run: load its model or tokenizer, and its log beside ``--out``.

    ``settings`` must agree, beside the usual ones, for two runs to be comparable.
    """
    target, whole = None, has_data(options.data)
    words = options.tokenizer or ("llama2" if whole else "reader")
    about: dict[str, Any] = {"tokenizer": words}
    if options.model:
        note(f"loading {options.model}")
        target = chosen_target(options, options.dtype)
        about = describe_target(options) | {"repeats": options.repeats}
    settings = {
        "sets": options.sets if whole else "what ships",
        "limit": options.limit,
        "timed": about.get("model", "decoding steps, replayed"),
        **about,
        "commit": current_commit(),
        **{name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()},
    }
    tokenizer = (target.tokenizer if target else load_tokenizer(words, options.data)).tokenizer
    return Bench(options, settings, target, tokenizer, open_results_log(options.out, settings))


def answered_sets(
    options: Namespace, names: str, limit: int | None, shipped: Sequence[str] = (SHIPPED,)
) -> dict[str, list[Row]]:
    """Return the first ``limit`` answered rows of comma-separated sets of ``rag/``.

    Without a data folder return those of the ``shipped`` sets.
    """
    if has_data(options.data):
        paths = {name: in_data(f"rag/{name}.jsonl", options.data) for name in names.split(",")}
    else:
        paths = {name: FOLDER / f"{name}.jsonl" for name in shipped}
        note(f"no data folder (--data, {DATA_VARIABLE}): {', '.join(shipped)} in place of {names}")
    return {name: list(islice(_answered(path), limit)) for name, path in paths.items()}


def _answered(path: Path) -> Iterable[Row]:
    return (row for row in read_rows(path) if "result" in row or row.get("answer", "").strip())


def laid_out(rows: Iterable[Row], tokenizer: Any) -> list[Recorded]:
    """Convert rows to requests in token ids, without rows whose prompts are too long."""
    return [one for row in rows if (one := lay_out(row, tokenizer)) is not None]
