"""Replay recorded answers through any drafter, without a model."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eval import cli
from eval.data import (
    RECORDED_SETS,
    MissingDataError,
    Recorded,
    read_recorded,
    set_files,
)
from eval.models import load_tokenizer
from eval.peer_drafters import VllmNgram
from eval.runner import note, result, shown_json, write_whole
from ragaccel.decoding import (
    Context,
    Drafter,
    DraftTree,
    Request,
    SampledTokens,
    Session,
    Verifier,
)
from ragaccel.drafting import (
    SOURCES,
    BigramTable,
    Calibration,
    CopyDrafter,
    History,
    Ids,
    MatchWeights,
    Memory,
    PastTexts,
    SuffixArray,
    TrieDrafter,
    bucket_starts,
    default_match_weights,
    empty_bigrams,
)


class ReplayVerifier(Verifier):
    """A verifier whose target model always gives the recorded answer."""

    max_rows = 1 + 256

    def __init__(self, answer_ids: Sequence[int]) -> None:
        self._answer, self._said = answer_ids, 0

    def verify(self, tree: DraftTree, num_alternatives: int = 0) -> SampledTokens:  # noqa: ARG002
        """Return the recorded next token for each node on the recorded path, and -1 for others."""
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
        """Advance by the emitted tokens."""
        self._said += len(path)


@dataclass(slots=True)
class Tally:
    """Counts of one drafter on one set.

    ``drafted`` and ``accepted`` are draft tokens, ``triggered`` passes with a draft.
    """

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    triggered: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in ("tokens", "passes", "drafted", "accepted", "triggered"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tokens_per_pass(self) -> float:
        """Return the tokens per pass, rounded for a table."""
        return round(self.tokens / max(1, self.passes), 3)

    def counts(self) -> dict[str, Any]:
        """Return the counts with ratios per pass and per triggered pass, for a point of a grid."""
        passes, triggered = max(1, self.passes), max(1, self.triggered)
        return {
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": round(self.tokens / passes, 4),
            "drafted_per_pass": round(self.drafted / passes, 4),
            "triggered": round(self.triggered / passes, 4),
            "accepted_per_trigger": round(self.accepted / triggered, 4),
        }


class ReplayedDrafter:
    """A drafter with its token budget and, if it remembers requests, their history ``past``."""

    def __init__(
        self, make: Callable[[], Drafter], budget: int, *, past: Any = None, apart: bool = False
    ) -> None:
        self.drafter, self.budget, self.past, self.apart = make(), budget, past, apart

    def replay(self, recorded: Recorded, tally: Tally) -> None:
        """Decode one recorded answer, count it in ``tally``, and add it to the history."""
        request = Request(
            recorded.prompt_ids,
            recorded.apart if self.apart else recorded.references,
            max_new_tokens=len(recorded.answer_ids) + self.budget,
            eos_ids=frozenset(recorded.answer_ids[-1:]),
            min_new_tokens=len(recorded.answer_ids) - 1,
        )
        verifier = ReplayVerifier(recorded.answer_ids)
        session = Session(verifier, self.drafter, request, token_budget=self.budget)
        tally.triggered += sum(step.num_drafts > 0 for step in session)
        result = session.result()
        assert result.token_ids == recorded.answer_ids, "a drafter changed the answer"
        tally.tokens += result.stats.new_tokens
        tally.passes += result.stats.verify_passes
        tally.drafted += result.stats.draft_tokens
        tally.accepted += result.stats.accepted_tokens
        if self.past is not None:
            self.past.add(recorded.prompt_ids, recorded.answer_ids)


def replayed_drafters(memory_bytes: int | None = None) -> dict[str, ReplayedDrafter]:
    """Return new drafters, which know nothing yet, by name.

    ``memory_bytes`` limits the history like the history of a namespace in a memory of that size.
    Prompt lookup of transformers is the rule of vLLM's ngram, for matches of two tokens, then one.
    """
    history = History() if memory_bytes is None else Memory(memory_bytes).of("").history
    return {
        "ours_64_history": ReplayedDrafter(lambda: TrieDrafter(past=history), 64, past=history),
        "ours_64": ReplayedDrafter(TrieDrafter, 64),
        "ours_16": ReplayedDrafter(TrieDrafter, 16),
        "copy": ReplayedDrafter(CopyDrafter, 31),
        "llma": ReplayedDrafter(CopyDrafter.paper, 19, apart=True),
        "lookup": ReplayedDrafter(lambda: VllmNgram(1, 2), 10),
    }


def replay(
    paths: Sequence[Path], tokenizer: Any, limit: int | None, memory_bytes: int | None = None
) -> dict[str, dict[str, float]]:
    """Replay every file through every drafter; return {set: {drafter: tokens a pass}}."""
    results: dict[str, dict[str, float]] = {}
    for path in paths:
        runs = replayed_drafters(memory_bytes)
        tallies = {name: Tally() for name in runs}
        for recorded in read_recorded(path, tokenizer, limit):
            for name, run in runs.items():
                run.replay(recorded, tallies[name])
        results[path.stem] = {name: tally.tokens_per_pass for name, tally in tallies.items()}
        shown = "  ".join(f"{name} {rate:.3f}" for name, rate in results[path.stem].items())
        note(f"{path.stem}: {shown}")
    return results


RECORDED = cli.set_options(RECORDED_SETS, 150, "llama2")


@cli.command(
    *RECORDED,
    cli.option("--folder", type=Path, help="JSONL files of your own, all of them"),
    cli.option("--memory-bytes", type=int, help="of a memory whose history is used (default: 64M)"),
    cli.option("--json", type=Path, help="write {set: {drafter: tokens a pass}} there"),
)
def run_replay(options: Namespace) -> None:
    """Replay: tokens per verify pass of every drafter, from recorded answers, without a model.

        python -m eval replay --data DATA --tokenizer llama2 --json results.json
        python -m eval replay --folder FOLDER_OF_JSONL --tokenizer llama2 --limit 150

    A verifier that knows the answer replaces the model, so it accepts exactly the draft tokens that
    a model with this answer would accept. Cold drafters know the text of one request; drafters with
    history also know the earlier requests in the same file. All our drafters calibrate their
    probabilities from row to row. The last line is one JSON document.
    """
    try:
        paths = files_of(options)
    except FileNotFoundError as error:
        sys.exit(f"eval replay: {error}")
    tokenizer = load_tokenizer(options.tokenizer, options.data).tokenizer
    results = replay(paths, tokenizer, options.limit, options.memory_bytes)
    if options.json:
        write_whole(options.json, shown_json(results))
    print(json.dumps(results))


def files_of(options: Namespace) -> list[Path]:
    """Return the files of the named sets, or all files of ``--folder``."""
    if options.folder is None:
        return set_files(options.sets.split(","), options.data)
    paths = sorted(options.folder.glob("*.jsonl"))
    if not paths:
        raise MissingDataError(f"{options.folder} holds no .jsonl file: choose another --folder")
    return paths


DRAFTERS = {"64_history": (64, True), "16": (16, False)}
Figures = dict[str, float]


def variants(past: PastTexts | None, nodes: int) -> dict[str, TrieDrafter]:
    """Return the full drafter and variants that each lack one part, by name.

    Variants without a part of the past requests are left out if ``past`` is None.
    """
    weights = default_match_weights()
    known = History() if past is None else past
    drafter: Callable[..., TrieDrafter] = partial(TrieDrafter, nodes, past=known)
    made = {
        "full": drafter(),
        "no_beyond": drafter(match_weights=weights._replace(beyond=np.ones_like(weights.beyond))),
        "one_branch": drafter(mode="one"),
        "parallel_branches": drafter(mode="parallel"),
        "no_calibration": drafter(calibration=Unlearning()),
        "no_support": drafter(
            match_weights=weights._replace(support=np.ones_like(weights.support))
        ),
        "no_frequent": drafter(match_weights=without_frequency(weights)),
    }
    for source in ("reference", "prompt", "output"):
        made[f"no_{source}"] = WithoutSource(nodes, past=known, kind=SOURCES.index(source))
    if past is not None:
        for source in ("past prompt", "past answer"):
            name = f"no_{source.replace(' ', '_')}"
            made[name] = drafter(past=PartOfPast(past, hidden=SOURCES.index(source)))
        made["no_successors"] = drafter(past=PartOfPast(past, has_bigrams=False))
        made["no_past"] = drafter(past=History())
    return made


class Unlearning(Calibration):
    """A calibration whose corrections stay 1."""

    def learn(self, *_outcomes: Any) -> None:
        """Do nothing, so that the corrections never change."""


def without_frequency(weights: MatchWeights) -> MatchWeights:
    frequency = weights.frequency.copy()
    frequency[:2] = 0.0
    return weights._replace(frequency=frequency)


class PartOfPast:
    """Past requests without one kind of text, or without the bigram table."""

    def __init__(self, past: PastTexts, *, hidden: int = -1, has_bigrams: bool = True) -> None:
        self._past, self._hidden, self._has_bigrams = past, hidden, has_bigrams

    def suffix_array(self) -> SuffixArray:
        """Return the suffix array without the hidden kind of text."""
        left = without(self._past.suffix_array(), self._hidden)
        return left._replace(bucket_starts=bucket_starts(left.token_ids, left.positions))

    def counts(self) -> Ids:
        """Return how often each token occurs, hidden text included."""
        return self._past.counts()

    def bigrams(self) -> BigramTable:
        """Return the bigram table, or an empty one."""
        return self._past.bigrams() if self._has_bigrams else empty_bigrams()


@dataclass(frozen=True, slots=True, eq=False)
class WithoutSource(TrieDrafter):
    """A drafter that does not copy from one kind of the request's own text."""

    kind: int = 0

    def _open(self, context: Context) -> Any:
        return HiddenText(TrieDrafter._open(self, context), self.kind)


class HiddenText:
    """The searched text of a request without the positions of one kind of text."""

    def __init__(self, text: Any, kind: int) -> None:
        self._text, self._kind = text, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    @property
    def suffix_array(self) -> SuffixArray:
        """Return the suffix array without the hidden kind of text."""
        return without(self._text.suffix_array, self._kind)


def without(suffix_array: SuffixArray, kind: int) -> SuffixArray:
    """Return a suffix array without the positions of a kind of text, and with old buckets.

    The caller must compute ``bucket_starts`` again if it needs them.
    """
    positions = suffix_array.positions[: suffix_array.num_positions]
    positions = positions[suffix_array.kinds[positions] != kind]
    return suffix_array._replace(positions=positions, num_positions=len(positions))


def ablate(rows: Sequence[Recorded], nodes: int, *, has_past: bool) -> dict[str, float]:
    """Replay the rows of one set through all variants; return their tokens per pass."""
    history = History()
    made = variants(history if has_past else None, nodes)
    runs = {name: ReplayedDrafter(lambda one=one: one, nodes) for name, one in made.items()}
    tallies = {name: Tally() for name in runs}
    for recorded in rows:
        for name, run in runs.items():
            run.replay(recorded, tallies[name])
        history.add(recorded.prompt_ids, recorded.answer_ids)
    return {name: tally.tokens_per_pass for name, tally in tallies.items()}


def tabulated(by_set: dict[str, dict[str, float]]) -> dict[str, dict[str, Figures]]:
    """Convert {set: {variant: tokens per pass}} to figures by variant and set.

    Each entry also has the difference to the full drafter.
    """
    names = list(next(iter(by_set.values())))
    return {
        name: {
            title: {
                "tokens_per_pass": row[name],
                "difference": round(row[name] - row["full"], 3),
            }
            for title, row in by_set.items()
        }
        for name in names
    }


@cli.experiment(*RECORDED, shown=("drafters",))
def run_ablation(options: Namespace) -> dict[str, Any]:
    """Ablation: what is each idea and source of the trie drafter worth, in tokens a verify pass?

        python -m eval ablation --data DATA --out eval/results/ablation.json

    Recorded answers are replayed as in ``eval replay``, through the full drafter and through
    variants that each lack one part. The match weights are not fitted again for the variants, so a
    difference is the loss of this drafter without the part, which is larger than the loss of one
    that was fitted without it. A variant without a source does not copy from it, but the source
    still counts in the frequencies of tokens, and past texts in the bigram table. All variants of a
    set know the same past requests; each calibrates its own probabilities.
    """
    paths = set_files(options.sets.split(","), options.data)
    tokenizer = load_tokenizer(options.tokenizer, options.data).tokenizer
    found: dict[str, dict[str, dict[str, float]]] = {label: {} for label in DRAFTERS}
    for path in paths:
        rows = list(read_recorded(path, tokenizer, options.limit))
        for label, (nodes, has_past) in DRAFTERS.items():
            found[label][path.stem] = ablate(rows, nodes, has_past=has_past)
            note(f"{path.stem}, {label}: {found[label][path.stem]}")
    drafters = {label: tabulated(by_set) for label, by_set in found.items()}
    settings = {"tokenizer": options.tokenizer, "rows": options.limit}
    return result("ablation", settings, drafters=drafters)


BINS = 10
JudgedToken = tuple[float, bool]  # estimated chance, whether it was accepted


class ObservedDrafter(Drafter):
    """A drafter that records its draft tokens: estimated probability and whether accepted."""

    def __init__(self, drafter: TrieDrafter) -> None:
        self._drafter = drafter
        self.draft_tokens: dict[str, list[JudgedToken]] = defaultdict(list)

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Record the outcomes of the last tree, then draft."""
        if context.last is not None:
            accepted = set(context.last.accepted)
            tree = context.last.tree
            for node in range(1, len(tree)):
                source = tree.origins[node][0].source
                self.draft_tokens[source].append((tree.path_probs[node], node in accepted))
        return self._drafter.draft(context, budget)


def bins_of(draft_tokens: Sequence[JudgedToken], num: int = BINS) -> list[tuple[float, float, int]]:
    """Return bins of equal mass, by estimate: (mean estimate, share accepted, draft tokens)."""
    ordered = sorted(draft_tokens, key=lambda token: token[0])  # ties stay in order
    edges = [len(ordered) * i // num for i in range(num + 1)]
    bins = []
    for low, high in pairwise(edges):
        part = ordered[low:high]
        if part:
            estimate = sum(prob for prob, _ in part) / len(part)
            bins.append((estimate, sum(came for _, came in part) / len(part), len(part)))
    return bins


def figures(draft_tokens: Sequence[JudgedToken]) -> dict[str, Any]:
    """Return the calibration error, the log-loss against the best constant, and the bins."""
    bins = bins_of(draft_tokens)
    error = sum(num * abs(estimate - share) for estimate, share, num in bins) / len(draft_tokens)
    rate = sum(came for _, came in draft_tokens) / len(draft_tokens)
    loss = sum(_log_loss(prob, came) for prob, came in draft_tokens) / len(draft_tokens)
    constant = sum(_log_loss(rate, came) for _, came in draft_tokens) / len(draft_tokens)
    return {
        "draft_tokens": len(draft_tokens),
        "accepted": round(rate, 4),
        "calibration_error": round(error, 4),
        "log_loss": round(loss, 4),
        "log_loss_constant": round(constant, 4),
        "below_constant": round(1 - loss / constant, 3) if constant else 0.0,
        "bins": [[round(a, 4), round(b, 4), num] for a, b, num in bins],
    }


def _log_loss(prob: float, came: bool) -> float:
    prob = min(max(prob, 1e-6), 1 - 1e-6)
    return -math.log(prob if came else 1 - prob)


@cli.experiment(*RECORDED, shown=("sources",))
def run_reliability(options: Namespace) -> dict[str, Any]:
    """Reliability: the trie drafter's estimated probabilities against the accepted share.

        python -m eval reliability --data DATA --out eval/results/reliability.json

    Recorded answers are replayed as in ``eval replay``. Every draft token has an estimated
    probability of acceptance, and was accepted or not; the last pass of an answer does not count.
    The figures for each source are the expected calibration error over bins of equal mass, and how
    far the log-loss is below that of the source's best constant. Calibration starts with the first
    half of each file; the figures are of the second half, and each draft token is judged before the
    calibration learns from it.
    """
    paths = set_files(options.sets.split(","), options.data)
    tokenizer = load_tokenizer(options.tokenizer, options.data).tokenizer
    seen = judged(paths, tokenizer, options.limit)
    settings = {"tokenizer": options.tokenizer, "rows": options.limit}
    sources = {source: figures(draft_tokens) for source, draft_tokens in sorted(seen.items())}
    return result("reliability", settings, sources=sources)


def judged(
    paths: Sequence[Path], tokenizer: Any, limit: int | None
) -> dict[str, list[JudgedToken]]:
    """Replay every file and return the judged draft tokens of its second half, by source."""
    draft_tokens: dict[str, list[JudgedToken]] = defaultdict(list)
    for path in paths:
        rows = list(read_recorded(path, tokenizer, limit))
        history = History()
        observed = ObservedDrafter(TrieDrafter(past=history))
        replayed = ReplayedDrafter(lambda observed=observed: observed, 64, past=history)  # type: ignore[misc]
        for number, recorded in enumerate(rows):
            if number == len(rows) // 2:
                observed.draft_tokens.clear()
            replayed.replay(recorded, Tally())
        for source, seen in observed.draft_tokens.items():
            draft_tokens[source] += seen
    return draft_tokens
