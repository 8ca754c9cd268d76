"""Replay recorded answers through our drafters and the drafting rules of other engines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from eval import cli
from eval.data import Recorded, read_recorded, set_files
from eval.experiments.replay import ReplayedDrafter, Tally
from eval.models import load_tokenizer
from eval.peer_drafters import (
    ArcticSuffix,
    LlamaCppNgramMod,
    LlamaCppNgramSimple,
    OursAsChain,
    SglangNgram,
    VllmNgram,
)
from eval.runner import note, result
from ragaccel.decoding import Context, Drafter, DraftTree
from ragaccel.drafting import History, TrieDrafter

SETS = (
    "llma_msmarco_davinci003", "clapnq_dev", "mtrag_un", "pubmedqa_long", "sum_scitldr_dev",
    "sum_qmsum_valtest_goldspan", "mtrag_human_answers", "nq_open_oracle", "squad_like",
    "llma_rag_original",
)  # fmt: skip
CHAIN, TREE = 16, 64
"""The budgets: what vLLM is given as a chain, and our default as a tree."""
MIN_PROB, LOW_PROB = 0.1, 0.01
"""Where our chain is cut: tokens less likely than that are not drafted."""
MAX_NGRAM = 5
"""The longest match tried; vLLM's default is 5, and no shorter one."""
HISTORY = ("", "_history")
RULES = {
    "vllm_ngram": "vLLM 0.32.0",
    "sglang": "SGLang 0.5.23",
    "llamacpp": "llama.cpp b11434",
}
ARCTIC = {"arctic": "arctic-inference 0.3.0, its suffix tree alone"}
Make = Callable[[], ReplayedDrafter]
Figures = dict[str, dict[str, float]]


class AfterFirstToken(Drafter):
    """A drafter that is asked after the first token only, as in engines: the prompt gives it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft nothing behind the prompt alone."""
        if len(context.token_ids) == context.num_prompt:
            return DraftTree.chain(context.token_ids[-1:])
        return self._drafter.draft(context, budget)


def replayed(drafter: Drafter, budget: int, past: Any = None) -> ReplayedDrafter:
    """Return a drafter to replay; ``past`` gets each request when it ends."""
    return ReplayedDrafter(lambda: AfterFirstToken(drafter), budget, past=past)


def ours(budget: int) -> dict[str, Make]:
    """Return our drafters of a budget, without and with history."""

    def make(drafter: Callable[..., Drafter], known: str) -> ReplayedDrafter:
        if not known:
            return replayed(drafter(), budget)
        history = History()
        return replayed(drafter(past=history), budget, history)

    kinds: dict[str, Callable[..., Drafter]] = {"ours_tree": TrieDrafter}
    if budget == CHAIN:
        kinds = {
            "ours_chain": partial(OursAsChain, MIN_PROB, budget),
            "ours_chain_long": partial(OursAsChain, LOW_PROB, budget),
            **kinds,
        }
    return {
        kind + known: partial(make, drafter, known)
        for kind, drafter in kinds.items()
        for known in HISTORY
    }


def vllm(budgets: Iterable[int], settings: Iterable[tuple[int, int]]) -> dict[str, Make]:
    """Return vLLM's ngram at each budget and setting of its shortest and longest match."""
    return {
        f"vllm_ngram_{low}_{high}_{budget}": partial(replayed, VllmNgram(low, high), budget)
        for budget in budgets
        for low, high in settings
    }


def others(budget: int) -> dict[str, Make]:
    """Return the rules of other engines at a budget; a history is that of the rule itself."""
    drafters: dict[str, Callable[[], Any]] = {
        "arctic": partial(ArcticSuffix, has_history=False),
        "arctic_history": partial(ArcticSuffix, has_history=True),
        "sglang": partial(SglangNgram, has_history=False),
        "sglang_history": partial(SglangNgram, has_history=True),
        "sglang_prompt": partial(SglangNgram, has_history=False, enters_prompt=True),
        "llamacpp_simple": LlamaCppNgramSimple,
        "llamacpp_simple_3": partial(LlamaCppNgramSimple, 3),
        "llamacpp_mod_history": partial(LlamaCppNgramMod, 24, 3 * budget // 4, has_history=True),
        "llamacpp_mod_16_history": partial(LlamaCppNgramMod, 16, 1, has_history=True),
    }

    def make(drafter: Callable[[], Any]) -> ReplayedDrafter:
        made = drafter()
        return replayed(made, budget, made if hasattr(made, "add") else None)

    return {name: partial(make, drafter) for name, drafter in drafters.items()}


def count(run: ReplayedDrafter, recorded: Recorded, tally: Tally) -> None:
    """Replay an answer; the pass over the prompt and its token do not count."""
    run.replay(recorded, tally)
    tally.tokens -= 1
    tally.passes -= 1


def replay_all(rows: Sequence[Recorded], makes: dict[str, Make]) -> Figures:
    """Replay the rows through new drafters; return {drafter: tokens and draft tokens a step}."""
    found: Figures = {}
    for name, make in makes.items():
        run, tally = make(), Tally()
        for recorded in rows:
            count(run, recorded, tally)
        counted = tally.counts()
        found[name] = {
            "tokens_per_step": counted["tokens_per_pass"],
            "drafted_per_step": counted["drafted_per_pass"],
        }
    return found


def replay_set(rows: Sequence[Recorded], budget: int, *, knows_arctic: bool) -> Figures:
    """Replay the rows through all drafters of a budget.

    Of vLLM's settings the one with the most tokens a step is kept. As a chain it is replayed once
    more with fewer tokens a draft: as many as make it draft what our chain drafts, or just more.
    """
    makes = {**ours(budget), **others(budget)}
    found = replay_all(
        rows, {name: make for name, make in makes.items() if knows_arctic or "arctic" not in name}
    )
    settings = list(combinations_with_replacement(range(1, MAX_NGRAM + 1), 2))
    tried = replay_all(rows, vllm([budget], settings))
    found["vllm_ngram_default"] = tried[f"vllm_ngram_{MAX_NGRAM}_{MAX_NGRAM}_{budget}"]
    found["vllm_ngram"], setting = best_of(tried)
    if budget == CHAIN:
        shorter = replay_all(rows, vllm(range(2, CHAIN + 1, 2), [setting]))
        drafted = found["ours_chain"]["drafted_per_step"]
        enough = {n: one for n, one in shorter.items() if one["drafted_per_step"] >= drafted}
        name = next(iter(enough), list(shorter)[-1])
        found["vllm_ngram_as_many"], _ = best_of({name: shorter[name]})
    return found


def best_of(found: Figures) -> tuple[dict[str, float], tuple[int, int]]:
    """Return the figures of vLLM's best setting with the setting, and its match lengths."""
    name = max(found, key=lambda name: found[name]["tokens_per_step"])
    low, high, budget = map(int, name.split("_")[-3:])
    setting = {
        "prompt_lookup_min": low,
        "prompt_lookup_max": high,
        "num_speculative_tokens": budget,
    }
    return {**found[name], **setting}, (low, high)


def advantages(figures: Figures) -> dict[str, float]:
    """Return our chains' tokens a step over the better of vLLM's ngram and suffix decoding.

    ``as_many`` is over vLLM's ngram where it drafts as many tokens as our chain.
    """
    rates = {name: one["tokens_per_step"] for name, one in figures.items()}
    ratios = {
        f"{kind}{known}": rates[f"{kind}{known}"]
        / max(rates["vllm_ngram"], rates.get(f"arctic{known}", 0.0))
        for kind in ("ours_chain", "ours_chain_long")
        for known in HISTORY
    }
    ratios["as_many"] = rates["ours_chain"] / rates["vllm_ngram_as_many"]
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


def has_arctic() -> bool:
    """Return whether Arctic's suffix tree can be imported; say so if not."""
    try:
        ArcticSuffix(has_history=False)
    except ImportError as error:
        note(f"suffix decoding is left out, eval/README.md says how to build it: {error}")
        return False
    return True


@cli.experiment(
    *cli.set_options(SETS, 150, "llama2"),
    file="peers-replay.json",
    shown=("sets",),
)
def run_peers(options: Namespace) -> dict[str, Any]:
    """Peers: tokens a verification step of our drafts and of other engines', without a model.

        python -m eval peers --data DATA --out eval/results

    Recorded answers are replayed as in ``eval replay``, with at most 16 draft tokens a step,
    then at most 64. The step that reads the prompt gives the first token and does not count. Our
    chain is what an engine without trees can take: cut where its probability falls below 0.1, or as
    long as it may be (0.01). With history a drafter also knows the earlier requests of its file. Of
    vLLM's ngram the best of all ``prompt_lookup_min`` and ``_max`` of 1 to 5 is kept for a set.
    Suffix decoding is left out if its tree is not installed: eval/README.md says how to build it.
    """
    paths = set_files(options.sets.split(","), options.data)
    tokenizer = load_tokenizer(options.tokenizer, options.data).tokenizer
    known = has_arctic()
    sets = {path.stem: replay_file(path, tokenizer, options, known) for path in paths}
    settings = {
        "tokenizer": options.tokenizer, "rows": options.limit, "min_prob": MIN_PROB,
        "low_prob": LOW_PROB, "rules": {**RULES, **(ARCTIC if known else {})},
    }  # fmt: skip
    return result("peers", settings, sets=sets)


def replay_file(path: Path, tokenizer: Any, options: Namespace, known: bool) -> dict[str, Any]:
    """Replay one file at both budgets; return the figures by budget, and our chain's advantages."""
    rows = [row for row in read_recorded(path, tokenizer, options.limit) if len(row.answer_ids) > 1]
    budgets: dict[str, Figures] = {}
    for budget in (CHAIN, TREE):
        found = budgets[str(budget)] = replay_set(rows, budget, knows_arctic=known)
        shown = (f"{name} {one['tokens_per_step']:.2f}" for name, one in found.items())
        note(f"{path.stem}, {budget}: {', '.join(shown)}")
    return {
        "rows": len(rows),
        "tokens": sum(len(row.answer_ids) - 1 for row in rows),
        "budgets": budgets,
        "advantage": advantages(budgets[str(CHAIN)]),
    }
