"""Decoders: those of a paper's experiment, replayed without a model and timed with one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from eval.contenders import PLAIN, Ours
from eval.jobs import Job
from eval.ledger import Ledger, kept_beside
from eval.replay import Contender, replay_set
from eval.script import note
from eval.speed import run_rounds
from eval.summary import summarize
from eval.warm import capture_passes
from ragaccel.decoding.session import NoDrafter
from ragaccel.drafting.ngram import CopyDrafter
from ragaccel.drafting.trie import TrieDrafter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from eval.recordings import Recorded
    from eval.targets import Target
    from ragaccel.decoding.session import Drafter

    Point = dict[str, Any]

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
        if self.chooses:
            return Ours(self.name, target, self.make, apart=self.apart)
        wider = {"max_rows": 1 + self.budget} if self.budget >= TREE_GUESSES else {}
        return Ours(
            self.name, target, self.make, token_budget=self.budget, apart=self.apart, **wider
        )


def llma(n: int = 1, k: int = 20, name: str = "llma") -> Decoder:
    """LLMA as published: of k tokens fed at once k - 1 are guesses."""
    return Decoder(name, partial(CopyDrafter.paper, n, k), k - 1, apart=True)


NO_DRAFTS = Decoder(PLAIN, NoDrafter, 0)
TREES = Decoder("ours_trie", TrieDrafter, TREE_GUESSES, chooses=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """What sets are run on: each decoder is replayed, and timed too where there is a model."""

    target: Target | None
    ledger: Ledger
    repeats: int = 1

    def points(
        self, name: str, recordings: Sequence[Recorded], decoders: Sequence[Decoder]
    ) -> list[Point]:
        """Run all decoders on a set: one point each, in their order."""
        counts = {one.name: replay_set(recordings, one.replayed()) for one in decoders}
        shown = "  ".join(f"{one} {c['tokens_per_pass']:.3f}" for one, c in counts.items())
        note(f"{name}, {len(recordings)} answers, tokens a pass: {shown}")
        times = self.times(name, recordings, decoders)
        return [{"decoder": one, **counts[one], **times.get(one, {})} for one in counts]

    def times(
        self, name: str, recordings: Sequence[Recorded], decoders: Sequence[Decoder]
    ) -> dict[str, Point]:
        """Have the model follow the answers under each decoder, interleaved.

        What is longer than the model reads is left out, and said. Without a model there is nothing.
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
        contenders = [decoder.timed(self.target) for decoder in decoders]
        capture_passes(self.target.ours, jobs, compile=False)
        run_rounds(self.target, jobs, contenders, self.ledger, repeats=self.repeats, forced=True)
        ids = {job.job_id for job in jobs}
        rows = [row for row in self.ledger.measurements if row["example"] in ids]
        return {label: _timed(figures) for label, figures in summarize(rows).items()}

    def _fits(self, recorded: Recorded, guesses: int) -> bool:
        limit = self.target and self.target.ours.max_positions
        size = len(recorded.prompt_ids) + len(recorded.answer_ids) + max(guesses, TREE_GUESSES)
        return limit is None or size <= limit


def open_bench(
    options: argparse.Namespace, target: Target | None, settings: dict[str, Any]
) -> Bench:
    """Set up what sets are run on; times are kept beside ``--out``, and a second run goes on."""
    ledger = Ledger(None, settings) if target is None else kept_beside(options.out, settings)
    return Bench(target, ledger, options.repeats)


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
    """The times of one decoder, and the passes that the model made, to be held against a replay."""
    return {
        "tokens_per_second": figures["tokens_per_second"],
        "ratio": figures["ratio"],
        "ratio_interval": figures["ratio_interval"],
        "seconds": sum(figures["seconds"][stage] for stage in ("draft", "verify", "other")),
        "timed_answers": figures["examples"],
        "timed_passes": figures["passes"],
        "timed_tokens_per_pass": round(figures["acceptance_length"], 4),
    }
