"""Decoders: those of a paper's experiment, replayed without a model and timed with one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from eval.contenders import PLAIN, Ours
from eval.jobs import Job
from eval.replay import Contender
from eval.script import note
from eval.speed import run_rounds
from eval.summary import summarize
from ragaccel.decode.interfaces import NoDrafter
from ragaccel.draft.copying import CopyDrafter
from ragaccel.draft.trie import TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eval.ledger import Ledger
    from eval.recordings import Recorded
    from eval.targets import Target
    from ragaccel.decode.interfaces import Drafter

TREE_GUESSES = 64


@dataclass(frozen=True, slots=True)
class Decoder:
    """A drafter and how many guesses it may make.

    ``budget`` is that of a replay, and of a timed run unless ``chooses``: then as many are verified
    as the measured cost of passes makes worth it. ``apart`` gives it references tokenized alone.
    """

    name: str
    make: Callable[[], Drafter]
    budget: int
    apart: bool = False
    chooses: bool = False

    def replayed(self) -> Contender:
        """Make it anew for a replay."""
        return Contender(self.make, self.budget, apart=self.apart)

    def timed(self, target: Target) -> Ours:
        """Make it anew over a model."""
        budget = None if self.chooses else self.budget
        return Ours(self.name, target, self.make, token_budget=budget, apart=self.apart)


def llma(n: int = 1, k: int = 20, name: str = "llma") -> Decoder:
    """LLMA as published: of k tokens fed at once k - 1 are guesses."""
    return Decoder(name, partial(CopyDrafter.paper, n, k), k - 1, apart=True)


NO_DRAFTS = Decoder(PLAIN, NoDrafter, 0)
TREES = Decoder("ours_trie", TrieDrafter, TREE_GUESSES, chooses=True)
LABELS = {
    PLAIN: "plain decoding",
    "llma": "LLMA as published, n = 1, k = 20",
    "ours_trie": "ours, trees, nothing remembered",
}


def time_set(
    target: Target,
    name: str,
    recordings: Sequence[Recorded],
    decoders: Sequence[Decoder],
    ledger: Ledger,
    repeats: int = 1,
) -> dict[str, dict[str, Any]]:
    """Have a model follow the answers of a set under each decoder, interleaved: their figures."""
    limit = target.ours.max_positions
    fitting = [r for r in recordings if limit is None or _size(r) <= limit]
    if len(fitting) < len(recordings):
        note(f"{name}: {len(recordings) - len(fitting)} rows are longer than the model reads")
    jobs = [_job(f"{name}/{number}", recorded) for number, recorded in enumerate(fitting)]
    if not jobs:
        return {}
    contenders = [decoder.timed(target) for decoder in decoders]
    run_rounds(target, jobs, contenders, ledger, repeats=repeats, forced=True)
    ours = {job.job_id for job in jobs}
    rows = [row for row in ledger.measurements if row["example"] in ours]
    return {label: _timed(figures) for label, figures in summarize(rows).items()}


def _size(recorded: Recorded) -> int:
    return len(recorded.prompt_ids) + len(recorded.answer_ids) + TREE_GUESSES


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


def _timed(figures: dict[str, Any]) -> dict[str, Any]:
    kept = ("tokens_per_second", "ratio", "ratio_interval", "seconds", "runs")
    return {key: figures[key] for key in kept if key in figures} | {
        "timed_tokens_per_pass": round(figures["acceptance_length"], 4)
    }
