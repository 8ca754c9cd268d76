"""Measure the time of a draft without a model, and fit the weights of matches.

Run as ``python -m eval drafting --data DATA``. Recorded answers are followed as in
``eval replay``, each request after the prompts of other requests, so that its context is long. A
step is the session's work between two passes: take in the new tokens, learn from them, build the
tree, check it and prune it, with a constant cost of a pass. The first step of a request also
sorts its context and is a separate figure. Steps without draft tokens do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from eval import cli
from eval.data import FITTED, Recorded, read_recorded, set_files
from eval.experiments.replay import ReplayVerifier
from eval.models import load_tokenizer
from eval.report.tables import show
from eval.runner import ROOT, note, result
from ragaccel.decoding import Context, Request, Session, allocate_alone
from ragaccel.drafting import (
    MAX_BEYOND_MATCH,
    MAX_GAP,
    MAX_MATCH,
    MAX_MATCHES,
    MAX_PAST_MATCHES,
    MAX_SUPPORT,
    MIN_CLEAR_MATCH,
    MIN_PAST_MATCH,
    PAST_PROMPT,
    History,
    Ids,
    PastTexts,
    RequestText,
    SuffixArray,
    TrieDrafter,
    insertion_rank,
    match_beyond,
    match_length,
)
from ragaccel.jit import compiled

FOLLOWED = "llma_msmarco_davinci003"
PAST_SETS = ("mtrag_un", "mtrag_human_answers", "sum_qmsum_valtest_goldspan")
BUDGETS = (16, 64)
NUM_ADDED = 15
_FIRST_DRAFT = "from eval.experiments.drafting import first_draft_seconds as f; print(f())"


def behind_others(recorded: Sequence[Recorded], context: int) -> list[Recorded]:
    """Return the requests with other prompts before their own, at most ``context`` tokens each."""
    made = []
    for number, one in enumerate(recorded):
        others = [*recorded[number + 1 :], *recorded[:number]]
        ids = [token for other in others for token in other.prompt_ids]
        room = max(0, context - len(one.prompt_ids))
        prompt = (*ids[len(ids) - room :], *one.prompt_ids) if room else one.prompt_ids[-context:]
        made.append(Recorded(prompt, one.references, one.apart, one.answer_ids))
    return made


def full_history(rows: Iterator[Recorded], num_tokens: int) -> History:
    """Return a history of ``num_tokens`` tokens: the rows, then rows with shuffled prompts."""
    history, known = History(), []
    for one in rows:
        if len(history.suffix_array().token_ids) >= num_tokens:
            return history
        history.add(one.prompt_ids, one.answer_ids)
        known.append(one)
    rng = np.random.default_rng(0)
    while known and len(history.suffix_array().token_ids) < num_tokens:
        one = known[int(rng.integers(len(known)))]
        history.add(rng.permutation(one.prompt_ids).tolist(), one.answer_ids)
    return history


def time_steps(recorded: Sequence[Recorded], budget: int, past: PastTexts) -> dict[str, Any]:
    """Follow the answers and return the median and the 95th percentile of a step's time."""
    drafter = TrieDrafter(budget, past=past)
    list(steps(recorded[0], drafter))
    firsts, later, nodes = [], [], []
    for one in recorded:
        for number, (seconds, num_drafts) in enumerate(steps(one, drafter)):
            if number == 0:
                firsts.append(seconds)
            elif num_drafts:
                later.append(seconds)
                nodes.append(num_drafts)
    return {
        "steps": len(later),
        "draft_tokens_median": float(np.median(nodes)),
        "median_us": round(1e6 * float(np.median(later)), 1),
        "p95_us": round(1e6 * float(np.percentile(later, 95)), 1),
        "first_step_ms": round(1e3 * median(firsts), 2),
    }


def steps(recorded: Recorded, drafter: TrieDrafter) -> Iterator[tuple[float, int]]:
    """Decode one recorded answer; yield each step's seconds and number of draft tokens."""
    request = Request(
        recorded.prompt_ids,
        recorded.references,
        max_new_tokens=len(recorded.answer_ids) + drafter.decoding_length,
        eos_ids=frozenset(recorded.answer_ids[-1:]),
        min_new_tokens=len(recorded.answer_ids) - 1,
    )
    verifier = ReplayVerifier(recorded.answer_ids)
    session = Session(verifier, drafter, request, token_budget=drafter.decoding_length)
    session.prefill()
    while session.finish_reason is None:
        started = perf_counter()
        session.draft()
        tree = allocate_alone(session)
        seconds = perf_counter() - started
        session.accept(verifier.verify(tree))
        yield seconds, tree.num_drafts


def add_ms(history: History, recorded: Sequence[Recorded]) -> float:
    """Add requests to the history and return the median milliseconds of adding one."""
    seconds = []
    for one in recorded:
        started = perf_counter()
        history.add(one.prompt_ids, one.answer_ids)
        seconds.append(perf_counter() - started)
    return 1e3 * median(seconds)


def first_drafts() -> dict[str, float]:
    """Return the seconds of a new process's first draft, without and with compiled functions."""
    with tempfile.TemporaryDirectory() as folder:
        both = [_in_new_process({"NUMBA_CACHE_DIR": folder}) for _ in range(2)]
    return dict(zip(("compiling_seconds", "compiled_seconds"), both, strict=True))


def _in_new_process(variables: dict[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_DRAFT],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return round(float(done.stdout), 3)


def first_draft_seconds() -> float:
    """Return the seconds of this process's first remembered and first decoded request."""
    text = tuple(range(2, 60))
    recorded = Recorded((0, *text, 5), (), (), (*text[:20], 1))
    history = History()
    started = perf_counter()
    history.add(recorded.prompt_ids, recorded.answer_ids)
    list(islice(steps(recorded, TrieDrafter(16, past=history)), 3))
    return perf_counter() - started


@cli.experiment(
    cli.DATA,
    cli.option("--tokenizer", default="llama2", help="of the data folder, or a folder"),
    cli.integer("--context", 8_000, "tokens of a prompt"),
    cli.integer("--past-tokens", 1_000_000, "of the history"),
    cli.integer("--requests", 40, "answers followed"),
    table=show,
    shown=("budgets",),
)
def run_drafting(options: Namespace) -> dict[str, Any]:
    """Time the drafts of trees on recorded answers at each budget, with and without a history.

    python -m eval drafting --data DATA --out eval/results/drafting.json
    """
    paths = set_files((FOLLOWED, *PAST_SETS), options.data)
    tokenizer = load_tokenizer(options.tokenizer, options.data).tokenizer
    followed = list(read_recorded(paths[0], tokenizer, 2 * options.requests))
    longer = behind_others(followed, options.context)[: options.requests]
    past = chain.from_iterable(read_recorded(path, tokenizer, None) for path in paths[1:])
    history = full_history(past, options.past_tokens)
    settings = {
        "context": options.context,
        "past_tokens": len(history.suffix_array().token_ids),
        "requests": len(longer),
    }
    budgets = {
        str(budget): {
            "no_past": time_steps(longer, budget, History()),
            "past": time_steps(longer, budget, history),
        }
        for budget in BUDGETS
    }
    return result(
        "drafting",
        settings,
        budgets=budgets,
        first_draft=first_drafts(),
        add_ms=round(add_ms(history, followed[:NUM_ADDED]), 2),
    )


SAME, LENGTH, KIND, BEYOND = range(4)
VOCABULARY = 32_000  # unseen tokens share probability over so many tokens


@compiled
def gather(
    suffix_array: SuffixArray,
    context: Ids,
    end: int,
    least: int,
    true: int,
    found: npt.NDArray[np.int8],
) -> int:
    """Write the features of each match to ``found`` [votes, 4]; return the longest match's length.

    ``true`` is the token that came, ``least`` the minimum length of a match.
    """
    at = insertion_rank(suffix_array, context, end)
    before, after, num, longest = at - 1, at, 0, 0
    while num < len(found):
        left = right = 0
        if before >= 0:
            left = match_length(
                suffix_array.token_ids, suffix_array.positions[before], context, end
            )
        if after < suffix_array.num_positions:
            right = match_length(
                suffix_array.token_ids, suffix_array.positions[after], context, end
            )
        length = max(left, right)
        longest = max(longest, length)
        if length < least:
            break
        if left >= right:
            position = suffix_array.positions[before]
            before -= 1
        else:
            position = suffix_array.positions[after]
            after += 1
        found[num, SAME] = suffix_array.token_ids[position] == true
        found[num, LENGTH], found[num, KIND] = length, suffix_array.kinds[position]
        found[num, BEYOND] = match_beyond(
            suffix_array.token_ids, position - length, context, end - length
        )
        num += 1
    return longest


def observe(recorded: Iterable[Recorded]) -> tuple[Tensor, Tensor]:
    """Gather the features of matches and of frequency at each of P tokens of recorded answers.

    Returns:
        Features of the matches [P, votes, 4], and lengths and frequencies [P, 7].
    """
    history, votes, figures = History(), [], []
    for one in recorded:
        context = Context(one.prompt_ids, one.references)
        text, past, pairs = RequestText(context), history.suffix_array(), history.bigrams()
        before = history.counts()
        for token in one.answer_ids:
            own = np.full((MAX_MATCHES, 4), -1, np.int8)
            old = np.full((MAX_PAST_MATCHES, 4), -1, np.int8)
            ids = text.suffix_array.token_ids[: text.end]
            longest = gather(text.suffix_array, ids, text.end, 1, token, own)
            longest_past = 0
            if longest < MIN_CLEAR_MATCH:
                longest_past = gather(past, ids, text.end, MIN_PAST_MATCH, token, old)
            here = text.counts(0)
            share = here[token] / here.sum() if token < len(here) else 0.0
            share_before = before[token] / before.sum() if token < len(before) else 0.0
            last = int(ids[-1])
            row = pairs.row_of[last] if last < len(pairs.row_of) else -1
            times = pairs.counts[row][pairs.token_ids[row] == token].sum() if row >= 0 else 0.0
            total, distinct = (pairs.totals[row], pairs.distinct[row]) if row >= 0 else (0.0, 0.0)
            votes.append(np.concatenate([own, old]))
            figures.append((longest, longest_past, share, share_before, times, total, distinct))
            context.token_ids.append(token)
            text.advance()
        history.add(one.prompt_ids, one.answer_ids)
    return torch.from_numpy(np.array(votes)), torch.tensor(figures, dtype=torch.float32)


class Weights(nn.Module):
    """The logarithms of the match weights as trainable tables, named as in ``MatchWeights``."""

    def __init__(self) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.linspace(0, 3, MAX_MATCH + 1).repeat(5, 1))
        self.beyond = nn.Parameter(torch.zeros(2, MAX_BEYOND_MATCH + 1, MAX_GAP + 1))
        self.backoff = nn.Parameter(torch.ones(2, MAX_MATCH + 1))
        self.support = nn.Parameter(torch.zeros(2, MAX_SUPPORT + 1))
        self.frequency = nn.Parameter(torch.zeros(3))

    def forward(self, votes: Tensor, figures: Tensor) -> Tensor:
        """Return the log-probability of each token that came: [P]."""
        same, length, kind, beyond = votes.long().unbind(-1)
        is_vote, past = kind >= 0, (kind >= PAST_PROMPT).long()
        kind, length, beyond = kind.clamp(min=0), length.clamp(min=0), beyond.clamp(min=0)
        scores = self.length[kind, length]
        scores = scores + self.beyond[past, length.clamp(max=MAX_BEYOND_MATCH), beyond]
        scores = scores.masked_fill(~is_vote, -1e9)
        backoff = self._backoff(is_vote, past, length, figures[:, :2].long())
        weight = torch.logsumexp(torch.cat([scores, backoff[:, None]], 1), 1)
        foretold = torch.logsumexp(scores.masked_fill(same != 1, -1e9), 1)
        return torch.logaddexp(foretold, backoff + self._share(figures).log()) - weight

    def _backoff(self, is_vote: Tensor, past: Tensor, length: Tensor, longest: Tensor) -> Tensor:
        backoff = self.backoff[0, longest[:, 0]] + self.backoff[1, longest[:, 1]]
        for i in (0, 1):
            as_long = is_vote & (past == i) & (length == longest[:, i : i + 1])
            backoff = backoff + self.support[i, (as_long.sum(1) + 1.0).log2().round().long()]
        return backoff

    def _share(self, figures: Tensor) -> Tensor:
        here, before, times, total, distinct = figures[:, 2:].unbind(1)
        parts = torch.softmax(torch.cat([self.frequency[:2], torch.zeros(1)]), 0)
        share = parts[0] * here + parts[1] * before + parts[2] / VOCABULARY
        seen = total + self.frequency[2].exp() * distinct + 1e-6
        return times / seen + (1 - total / seen) * share

    def tables(self) -> dict[str, list[object]]:
        """Return all weights for JSON; the shares of the back-off mass are normalized."""
        with torch.no_grad():
            whole = torch.logsumexp(torch.cat([self.frequency[:2], torch.zeros(1)]), 0)
            shift = torch.stack([whole, whole, torch.zeros(())])
            tables = dict(self.named_parameters())
            tables["frequency"] = nn.Parameter(self.frequency - shift)
            return {name: torch.round(t, decimals=3).tolist() for name, t in tables.items()}


def fit(sets: dict[str, tuple[Tensor, Tensor]], steps: int, per_set: int = 8_000) -> Weights:
    """Fit weights by gradient descent on all sets, ``per_set`` tokens of each."""
    torch.manual_seed(0)
    weights = Weights()
    optimizer = torch.optim.Adam(weights.parameters(), lr=0.05)
    parts = []
    for votes, figures in sets.values():
        chosen = torch.randperm(len(votes))[:per_set]
        parts.append((votes[chosen], figures[chosen]))
    votes, figures = (torch.cat(part) for part in zip(*parts, strict=True))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 if step < 2 * steps // 3 else 0.01
        rows = torch.randint(len(votes), (2_000,))
        rough = 1e-3 * (weights.beyond**2).mean()
        for table in (weights.length, weights.backoff):
            rough = rough + 1e-2 * ((table[:, 1:] - table[:, :-1]) ** 2).mean()
        loss = rough - weights(votes[rows], figures[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights


@cli.command(cli.DATA, cli.integer("--steps", 400), cli.option("--out", type=Path, required=True))
def run_fit_evidence(options: Namespace) -> None:
    """Fit the match weights of the trie drafter to recorded answers.

        python -m eval fit_evidence --data DATA --out ragaccel/drafting/match_weights.json

    At each token of each answer all matches are gathered as the drafter would find them, and the
    weights are fitted by gradient descent on the log-loss of the token that came. The rows are
    ``eval.data.FITTED``: from files that are not reported, and rows after the first 150 of others.
    Results on fitted rows (answers of other models as references, conversations turn by turn) say
    so.
    """
    try:
        paths = set_files(list(FITTED), options.data)
    except FileNotFoundError as error:
        sys.exit(f"eval fit_evidence: {error}")
    tokenizer = load_tokenizer("llama2", options.data).tokenizer
    sets = {}
    for path, (name, rows) in zip(paths, FITTED.items(), strict=True):
        sets[name] = observe(read_recorded(path, tokenizer, rows.stop, rows.start))
        note(f"{name}: {len(sets[name][0]):,} tokens")
    weights = fit(sets, options.steps)
    with torch.no_grad():
        losses = {name: round(-weights(*given).mean().item(), 4) for name, given in sets.items()}
    options.out.write_text(json.dumps(weights.tables()) + "\n", encoding="utf-8")
    print(json.dumps({"nats_a_token": losses}))
