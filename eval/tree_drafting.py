"""What a tree costs: the trie drafter's time from context to cut tree, without any model.

Run as ``python -m eval.drafting --tree --data DATA``. Recorded answers are followed as in
``eval.replay``, each request behind prompts of others, so that its context is long. A step is all
that a session does between two passes: take in what came, learn from it, grow the tree, check it,
and cut it to what pays, the cost of a pass being constant. The first step of a request also sorts
its context, once; it is a figure of its own. Steps without a guess do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from itertools import chain, islice
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.machine import ROOT
from eval.recordings import Recorded, read_recorded, set_files, set_tokenizer
from eval.replay import ReplayVerifier
from eval.script import result
from ragaccel.decoding.request import Request
from ragaccel.decoding.session import Session
from ragaccel.decoding.speculation import select_drafts
from ragaccel.drafting.history import History
from ragaccel.drafting.trie import NoPast, PastTexts, TrieDrafter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

FOLLOWED = "llma_msmarco_davinci003"
PAST_SETS = ("mtrag_un", "mtrag_human_answers", "sum_qmsum_valtest_goldspan")
BUDGETS = (16, 64)
NUM_ADDED = 15
_FIRST_DRAFT = "from eval.tree_drafting import first_draft_seconds as f; print(f())"


def measure_trees(options: argparse.Namespace) -> dict[str, Any]:
    """Time drafts at each budget, without a past and with one of so many tokens."""
    paths = set_files((FOLLOWED, *PAST_SETS), options.data)
    tokenizer = set_tokenizer(options.tokenizer, options.data)
    followed = list(read_recorded(paths[0], tokenizer, 2 * options.requests))
    longer = behind_others(followed, options.context)[: options.requests]
    past = chain.from_iterable(read_recorded(path, tokenizer, None) for path in paths[1:])
    history = full_history(past, options.past_tokens)
    settings = {
        "context": options.context,
        "past_tokens": len(history.corpus().token_ids),
        "requests": len(longer),
    }
    budgets = {
        str(budget): {
            "no_past": time_steps(longer, budget, NoPast()),
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


def behind_others(recorded: Sequence[Recorded], context: int) -> list[Recorded]:
    """The same requests with the prompts of others before their own: so many tokens at most."""
    made = []
    for number, one in enumerate(recorded):
        others = [*recorded[number + 1 :], *recorded[:number]]
        ids = [token for other in others for token in other.prompt_ids]
        room = max(0, context - len(one.prompt_ids))
        prompt = (*ids[len(ids) - room :], *one.prompt_ids) if room else one.prompt_ids[-context:]
        made.append(Recorded(prompt, one.references, one.apart, one.answer_ids))
    return made


def full_history(rows: Iterator[Recorded], num_tokens: int) -> History:
    """A history of so many tokens: the rows given, then the same with their prompts shuffled."""
    history, known = History(), []
    for one in rows:
        if len(history.corpus().token_ids) >= num_tokens:
            return history
        history.add(one.prompt_ids, one.answer_ids)
        known.append(one)
    rng = np.random.default_rng(0)
    while known and len(history.corpus().token_ids) < num_tokens:
        one = known[int(rng.integers(len(known)))]
        history.add(rng.permutation(one.prompt_ids).tolist(), one.answer_ids)
    return history


def time_steps(recorded: Sequence[Recorded], budget: int, past: PastTexts) -> dict[str, Any]:
    """Follow the answers, after a warm-up by the first: median and 95th percentile of a step."""
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
        "guesses_median": float(np.median(nodes)),
        "median_us": round(1e6 * float(np.median(later)), 1),
        "p95_us": round(1e6 * float(np.percentile(later, 95)), 1),
        "first_step_ms": round(1e3 * median(firsts), 2),
    }


def steps(recorded: Recorded, drafter: TrieDrafter) -> Iterator[tuple[float, int]]:
    """Decode one recorded answer: the seconds of each step and the guesses of its tree."""
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
        budget = session.budget()
        started = perf_counter()
        tree = select_drafts(session.propose(budget), verifier.cost_seconds)
        seconds = perf_counter() - started
        session.accept(verifier.verify(tree))
        yield seconds, tree.num_drafts


def add_ms(history: History, recorded: Sequence[Recorded]) -> float:
    """How long it takes to remember a request, in milliseconds; the history grows by it."""
    seconds = []
    for one in recorded:
        started = perf_counter()
        history.add(one.prompt_ids, one.answer_ids)
        seconds.append(perf_counter() - started)
    return 1e3 * median(seconds)


def first_drafts() -> dict[str, float]:
    """Seconds of the first draft of a process, with nothing compiled yet and once it is kept."""
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
    """How long this process takes to remember a request and decode another, for the first time."""
    text = tuple(range(2, 60))
    recorded = Recorded((0, *text, 5), (), (), (*text[:20], 1))
    history = History()
    started = perf_counter()
    history.add(recorded.prompt_ids, recorded.answer_ids)
    list(islice(steps(recorded, TrieDrafter(16, past=history)), 3))
    return perf_counter() - started
