"""Which drafter? Recorded answers through any of them, without a model: tokens a verify pass.

    python -m eval.replay --data DATA --tokenizer llama2 --json results.json
    python -m eval.replay --folder FOLDER_OF_JSONL --tokenizer llama2 --limit 150

A verifier that knows the answer stands in for the model, so acceptance is exactly what a model that
gave this answer would have accepted. Cold drafters know the text of one request; those with history
know the requests before it in the same file, and start with none. How far chances are to be
believed is learned from row to row by all of ours. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eval.baselines import LookupDrafter, SuffixDrafter
from eval.examples import MissingDataError
from eval.recordings import add_set_options, read_recorded, set_files, set_tokenizer
from eval.script import new_parser, note
from ragaccel.decoding.request import Request
from ragaccel.decoding.session import SampledTokens, Session
from ragaccel.drafting.history import History
from ragaccel.drafting.memory import Memory
from ragaccel.drafting.ngram import CopyDrafter
from ragaccel.drafting.trie import TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from eval.recordings import Recorded
    from ragaccel.decoding.session import Context, Drafter
    from ragaccel.decoding.tree import DraftTree


class ReplayVerifier:
    """A target model that says the recorded answer, whatever is drafted."""

    max_rows = 1 + 256
    chains_only = False

    def __init__(self, answer_ids: Sequence[int]) -> None:
        self._answer, self._said = answer_ids, 0

    def prefill(self, request: Request) -> None:
        """Nothing to cache."""

    def verify(self, tree: DraftTree, num_alternatives: int = 0) -> SampledTokens:  # noqa: ARG002
        """Choose the recorded token after every node that is on the recorded path; -1 elsewhere."""
        next_ids = [-1] * len(tree)
        depth_of = {0: 0}
        for node in range(len(tree)):
            parent = tree.parents[node]
            if node and parent in depth_of and tree.token_ids[node] == next_ids[parent]:
                depth_of[node] = depth_of[parent] + 1
            if node in depth_of and self._said + depth_of[node] < len(self._answer):
                next_ids[node] = self._answer[self._said + depth_of[node]]
        return SampledTokens(next_ids)

    def commit(self, path: Sequence[int]) -> None:
        """Go on behind what was emitted."""
        self._said += len(path)

    def cost_seconds(self, rows: int) -> float:  # noqa: ARG002
        """Every pass costs the same: the budget alone bounds the tree."""
        return 1.0

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(slots=True)
class Tally:
    """What one contender did on one set."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    triggered: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count another's answers too."""
        for name in ("tokens", "passes", "drafted", "accepted", "triggered"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for source, num in other.by_source.items():
            self.by_source[source] = self.by_source.get(source, 0) + num
        self.seconds += other.seconds

    def counts(self) -> dict[str, Any]:
        """Count decoding steps, and how many had a draft: a point of a grid."""
        passes, triggered = max(1, self.passes), max(1, self.triggered)
        return {
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": round(self.tokens / passes, 4),
            "drafted_per_pass": round(self.drafted / passes, 4),
            "accepted_per_pass": round(self.accepted / passes, 4),
            "triggered": round(self.triggered / passes, 4),
            "accepted_per_trigger": round(self.accepted / triggered, 4),
        }

    def figures(self) -> dict[str, Any]:
        """Sum up: tokens and guesses a pass, drafting in microseconds a step that drafts."""
        times = sorted(self.seconds) or [0.0]
        return {
            "tokens_per_pass": round(self.tokens / max(1, self.passes), 3),
            "drafted_per_pass": round(self.drafted / max(1, self.passes), 1),
            "accepted_by_source": dict(sorted(self.by_source.items(), key=lambda i: -i[1])),
            "draft_us_median": round(1e6 * statistics.median(times), 1),
            "draft_us_p95": round(1e6 * times[int(0.95 * (len(times) - 1))], 1),
        }


class Timed:
    """A drafter whose steps are timed; those that draft nothing do not count."""

    def __init__(self, drafter: Drafter, seconds: list[float]) -> None:
        self._drafter, self._seconds = drafter, seconds
        self.mask_ids = drafter.mask_ids

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft, and note how long it took."""
        started = perf_counter()
        tree = self._drafter.draft(context, budget)
        if len(tree) > 1:
            self._seconds.append(perf_counter() - started)
        return tree


class Contender:
    """A drafter, the budget it is given, and whether it remembers."""

    def __init__(
        self, make: Callable[[], Drafter], budget: int, *, past: Any = None, apart: bool = False
    ) -> None:
        self.drafter, self.budget, self.past, self.apart = make(), budget, past, apart

    def replay(self, recorded: Recorded, tally: Tally) -> None:
        """Decode one recorded answer, then remember it."""
        request = Request(
            recorded.prompt_ids,
            recorded.apart if self.apart else recorded.references,
            max_new_tokens=len(recorded.answer_ids) + self.budget,
            eos_ids=frozenset(recorded.answer_ids[-1:]),
            min_new_tokens=len(recorded.answer_ids) - 1,
        )
        drafter = Timed(self.drafter, tally.seconds)
        verifier = ReplayVerifier(recorded.answer_ids)
        session = Session(verifier, drafter, request, token_budget=self.budget)
        tally.triggered += sum(step.num_drafts > 0 for step in session)
        result = session.result()
        assert result.token_ids == recorded.answer_ids, "a drafter changed the answer"
        tally.tokens += result.stats.new_tokens
        tally.passes += result.stats.verify_passes
        tally.drafted += result.stats.draft_tokens
        tally.accepted += result.stats.accepted_tokens
        for source, num in result.stats.accepted_by_source.items():
            tally.by_source[source] = tally.by_source.get(source, 0) + num
        if self.past is not None:
            self.past.add(recorded.prompt_ids, recorded.answer_ids)


def contenders(memory_bytes: int | None = None) -> dict[str, Contender]:
    """Make the contenders anew: none knows anything yet.

    ``memory_bytes`` bounds the history as a memory of so many bytes bounds that of a namespace.
    """
    history = History() if memory_bytes is None else Memory(memory_bytes).of("").history
    outputs = SuffixDrafter.Outputs()
    return {
        "ours_64_history": Contender(lambda: TrieDrafter(past=history), 64, past=history),
        "ours_64": Contender(TrieDrafter, 64),
        "ours_16": Contender(TrieDrafter, 16),
        "copy": Contender(CopyDrafter, 31),
        "llma": Contender(CopyDrafter.paper, 19, apart=True),
        "lookup": Contender(LookupDrafter, 10),
        "suffix": Contender(lambda: SuffixDrafter(outputs), 32, past=outputs),
    }


def replay_set(recordings: Iterable[Recorded], contender: Contender) -> dict[str, Any]:
    """Replay all answers of one set through one contender: its counts."""
    tally = Tally()
    for recorded in recordings:
        contender.replay(recorded, tally)
    return tally.counts()


def replay(
    paths: Sequence[Path], tokenizer: Any, limit: int | None, memory_bytes: int | None = None
) -> dict[str, dict[str, Any]]:
    """Replay every file through every contender: {set: {contender: figures}}."""
    results: dict[str, dict[str, Any]] = {}
    for path in paths:
        runs = contenders(memory_bytes)
        tallies = {name: Tally() for name in runs}
        for recorded in read_recorded(path, tokenizer, limit):
            for name, run in runs.items():
                run.replay(recorded, tallies[name])
        results[path.stem] = {name: tally.figures() for name, tally in tallies.items()}
        shown = "  ".join(f"{n} {f['tokens_per_pass']:.3f}" for n, f in results[path.stem].items())
        note(f"{path.stem}: {shown}")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        paths = files_of(options)
    except FileNotFoundError as error:
        sys.exit(f"eval.replay: {error}")
    tokenizer = set_tokenizer(options.tokenizer, options.data)
    results = replay(paths, tokenizer, options.limit, options.memory_bytes)
    if options.json:
        table = {
            name: {run: figures["tokens_per_pass"] for run, figures in runs.items()}
            for name, runs in results.items()
        }
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("replay", __doc__)
    add_set_options(parser)
    add = parser.add_argument
    add("--folder", type=Path, help="JSONL files of your own, all of them")
    told = "of a memory whose namespace's history is used; else that is bounded by 64 MiB alone"
    add("--memory-bytes", type=int, help=told)
    add("--json", type=Path, help="write {set: {contender: tokens a pass}} there")
    return parser.parse_args(arguments)


def files_of(options: argparse.Namespace) -> list[Path]:
    """The sets that are named, or all files of a folder.

    Raises:
        MissingDataError: there are none.
    """
    if options.folder is None:
        return set_files(options.sets.split(","), options.data)
    paths = sorted(options.folder.glob("*.jsonl"))
    if not paths:
        raise MissingDataError(f"{options.folder} holds no .jsonl file: choose another --folder")
    return paths


if __name__ == "__main__":
    main()
