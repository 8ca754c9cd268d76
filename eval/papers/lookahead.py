"""Lookahead's experiments (arXiv 2312.12728), with published figures next to ours.

Each request is decoded by a new drafter, so that only the past requests that it is given carry
over. There are two memories: a "cold" drafter knows the request's own texts and nothing else; a
"grown" one also knows the earlier requests of the same set.
"""

from __future__ import annotations

import random
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from eval import cli
from eval.data import MAX_ANSWER, RECORDED_SETS, Recorded, has_data, make_jobs
from eval.experiments.replay import ReplayVerifier
from eval.papers.bench import (
    NO_DRAFTS,
    REPLAYED,
    TREES,
    Bench,
    Point,
    answered_sets,
    laid_out,
    open_bench,
    paper_options,
)
from eval.report.tables import show
from eval.tasks import load_task
from ragaccel.decoding import Context, DraftTree, merge
from ragaccel.drafting import History, PastTexts, TrieDrafter
from ragaccel.models import Tokenizer

Sets = dict[str, list[Recorded]]

MEMORIES = ("cold", "grown")
MAX_DRAFT_TOKENS = ReplayVerifier.max_rows - 1
PROMPTS = ("gsm8k", "humaneval")
"""Tasks whose prompts are continued unchanged."""
SETS = (*RECORDED_SETS, *PROMPTS)
SHIPPED = ("handbook", "demo")


def trie_point(decoding_length: int, branch_length: int, **mode: Any) -> Point:
    """Return our trie drafter with the Lookahead paper's two lengths and other defaults."""
    return Point(
        {**mode, "decoding_length": decoding_length, "branch_length": branch_length},
        lambda past: TrieDrafter(decoding_length, branch_length, past=past, **mode),
        decoding_length,
        fresh=True,
    )


def lengths(text: str) -> tuple[int, ...]:
    """Parse comma-separated lengths, from 1 to the maximum of a replayed pass."""
    try:
        read = cli.numbers_of(text)
    except ValueError:
        read = ()
    if not read or min(read) < 1 or max(read) > MAX_DRAFT_TOKENS:
        raise ArgumentTypeError(f"numbers from 1 to {MAX_DRAFT_TOKENS}, with commas between")
    return tuple(sorted(set(read)))


def read_sets(bench: Bench, limit: int | None) -> Sets:
    """Read the first answered rows of each named set; without data, of the shipped sets.

    The prompts of a task in ``PROMPTS`` are requests whose recorded answer is the reference
    solution.
    """
    options, tokenizer = bench.options, bench.tokenizer
    if not has_data(options.data):
        rows = answered_sets(options, options.sets, limit, SHIPPED)
        return {name: laid_out(own, tokenizer) for name, own in rows.items()}
    sets: Sets = {}
    for name in options.sets.split(","):
        if name in PROMPTS:
            examples = load_task(name, limit, options.data)
            jobs = make_jobs(examples, Tokenizer(tokenizer), max_new_tokens=MAX_ANSWER + 1)
            sets[name] = [Recorded(one.prompt_ids, (), (), one.answer_ids) for one in jobs]
        else:
            (rows_of_set,) = answered_sets(options, name, limit).values()
            sets[name] = laid_out(rows_of_set, tokenizer)
    return sets


SWEEP_LENGTHS = (4, 8, 16, 32, 64, 128)
SWEEP_BRANCH_LENGTHS = (2, 4, 8, 12, 16, 24, 32)
SWEEP_ROWS = 60


@cli.experiment(
    *paper_options(SETS, SWEEP_ROWS),
    cli.option("--decoding-lengths", type=lengths, default=SWEEP_LENGTHS, help="draft tokens"),
    cli.option("--branch-lengths", type=lengths, default=SWEEP_BRANCH_LENGTHS, help="tokens"),
    table=show, shown=("grid",), **REPLAYED,
)  # fmt: skip
def run_lookahead_sweep(options: Namespace) -> dict[str, Any]:
    """Sweep: what do longer drafts and longer branches gain, Lookahead's two settings?

        python -m eval lookahead_sweep --data DATA --out eval/results/lookahead-sweep.json
        python -m eval lookahead_sweep --data DATA --model random:llama-135m --limit 4

    decoding_length is the number of tokens of a draft (Lookahead's counts the last known token,
    ours does not), branch_length that of its longest branch. Tokens per verify pass are measured by
    replay. With ``--model`` wall time is measured too, since a pass over a longer draft costs more:
    for drafts of full length, for plain decoding, and for drafts pruned by the measured cost of a
    pass.
    """
    bench = open_bench(
        options, decoding_lengths=options.decoding_lengths, branch_lengths=options.branch_lengths
    )
    pairs = [(d, b) for d in options.decoding_lengths for b in options.branch_lengths]
    points = [trie_point(*pair) for pair in sorted({(d, min(d, b)) for d, b in pairs})]
    sets, grid, beside = read_sets(bench, options.limit), [], {}
    for name, rows in sets.items():
        for memory in MEMORIES:
            is_timed = bench.target is not None and memory == "cold"
            others = [NO_DRAFTS, TREES] * is_timed
            past = History() if memory == "grown" else None
            where = {"set": name, "memory": memory}
            swept = bench.sweep(rows, [*others, *points], past, is_timed=is_timed, **where)
            if is_timed:
                beside[name] = {one["decoder"]: one for one in swept[: len(others)]}
            found = {(one.get("decoding_length"), one.get("branch_length")): one for one in swept}
            # a branch is no longer than the whole draft
            grid += [{**found[d, min(d, b)], "branch_length": b} for d, b in pairs]
    return bench.result("lookahead_sweep", sets=sizes_of(sets), grid=grid, beside=beside)


def sizes_of(sets: Sets) -> dict[str, int]:
    """Return the number of rows of each set."""
    return {name: len(rows) for name, rows in sets.items()}


BRANCHES_LENGTHS = (16, 32, 64, 128)
BRANCH_LENGTH = 24  # as our drafter ships
BRANCHES_ROWS = 100


class BranchesApart(TrieDrafter):
    """A drafter of the likeliest tree's branches, with a budget as if each were verified alone.

    Every branch uses a row for each of its tokens, shared prefixes included. The branches are
    merged again before verification, which accepts the same tokens with fewer nodes.
    """

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Draft branches for at most ``budget`` rows, and at most ``decoding_length``."""
        tree = TrieDrafter.draft(self, context, budget)
        rows = min(budget, self.decoding_length)
        return merge([DraftTree.chain(tree.token_ids[:1]), *branches(tree, rows)], rows)


def branches(tree: DraftTree, rows: int) -> Iterator[DraftTree]:
    """Yield a tree's branches as chains, depth first and likelier ones first, up to ``rows`` rows.

    A row is a draft token of a branch; the last branch may be cut short.
    """
    for leaf in leaves(tree):
        if rows <= 0:
            return
        path = tree.path(leaf)[: 1 + rows]
        rows -= len(path) - 1
        yield DraftTree.chain(
            [tree.token_ids[node] for node in path],
            [tree.path_probs[node] for node in path],
            [tree.origins[node] for node in path],
        )


def leaves(tree: DraftTree) -> list[int]:
    """Return the nodes without children, depth first and likelier children first."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    found, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        if node and not children[node]:
            found.append(node)
        waiting += sorted(children[node], key=tree.path_probs.__getitem__)
    return found


def branching_points(decoding_length: int) -> list[Point]:
    """Return a point for each way to branch, with the same rows."""
    one, parting, hierarchical = (
        trie_point(decoding_length, BRANCH_LENGTH, mode=mode)
        for mode in ("one", "parallel", "hierarchical")
    )
    parallel = Point(
        hierarchical.parameters | {"mode": "parallel"},
        lambda past: BranchesApart(decoding_length, BRANCH_LENGTH, past=past),
        decoding_length,
        fresh=True,
    )
    parting.parameters["mode"] = "parting"  # their parallel branches do not
    return [one, parallel, parting, hierarchical]


@cli.experiment(
    *paper_options(SETS, BRANCHES_ROWS),
    cli.option("--decoding-lengths", type=lengths, default=BRANCHES_LENGTHS, help="rows of a pass"),
    table=show, shown=("grid",), **REPLAYED,
)  # fmt: skip
def run_lookahead_branches(options: Namespace) -> dict[str, Any]:
    """Branches: one, several apart, or a merged tree? Lookahead's ablation, in tokens a pass.

        python -m eval lookahead_branches --data DATA --out eval/results/lookahead-branches.json

    "one" is the likeliest branch alone. "parallel" verifies the branches of the tree separately,
    each from the root, likelier ones first, until the rows are used up: a shared prefix takes rows
    in each branch, as in Lookahead's parallel mode. "parting" branches begin with different tokens,
    so that no row is used twice: our drafter's own parallel mode. "hierarchical" is the merged
    tree. All have the same number of rows.
    """
    bench = open_bench(
        options, decoding_lengths=options.decoding_lengths, branch_length=BRANCH_LENGTH
    )
    points = [point for length in options.decoding_lengths for point in branching_points(length)]
    sets, grid = read_sets(bench, options.limit), []
    for name, rows in sets.items():
        for memory in MEMORIES:
            past = History() if memory == "grown" else None
            grid += bench.sweep(rows, points, past, is_timed=False, set=name, memory=memory)
    return bench.result("lookahead_branches", sets=sizes_of(sets), grid=grid)


ASKED, WARM_ROWS = 50, (10, 50, 100, 200)
MAX_ROWS_READ = 400
"""Rows read from a set: enough to ask some and to warm the memory with the others."""
MAY_ASK = 150
"""Number of first rows from which questions are drawn; our drafter was fitted to later rows."""
REMEMBERED = ("requests", "answers")
_SEED = 1
_MEMORY_LENGTHS = (64, 24)  # decoding_length and branch_length, as our drafter ships


@dataclass(frozen=True, slots=True)
class AskedSplit:
    """A set in two parts: rows to ask, and rows to warm the memory, without shared passages."""

    asked: list[Recorded]
    others: list[Recorded]


def split_rows(rows: Sequence[Recorded], num_asked: int, may_ask: int) -> AskedSplit:
    """Draw the rows to ask from the first ``may_ask``, and shuffle the rest.

    At most half of all rows are asked.
    """
    chance = random.Random(_SEED)
    drawn = chance.sample(rows[:may_ask], len(rows[:may_ask]))
    asked = drawn[: min(num_asked, len(rows) // 2)]
    left = [*drawn[len(asked) :], *rows[may_ask:]]
    return AskedSplit(asked, without_shared_texts(asked, chance.sample(left, len(left))))


def without_shared_texts(asked: Sequence[Recorded], others: Sequence[Recorded]) -> list[Recorded]:
    """Return the others without those that share a passage or the prompt with an asked row."""

    def texts(one: Recorded) -> list[tuple[int, ...]]:
        return [one.prompt_ids, *(passage.token_ids for passage in one.apart)]

    known = set(chain.from_iterable(map(texts, asked)))
    return [one for one in others if known.isdisjoint(texts(one))]


def mixed(sets: Sequence[AskedSplit], asked: Sequence[Recorded]) -> list[Recorded]:
    """Return the warming rows of several sets in turn: the first of each, then the second ones."""
    turns = zip_longest(*(one.others for one in sets))
    return without_shared_texts(asked, [row for turn in turns for row in turn if row is not None])


class Frozen:
    """Past requests, or their answers alone, that ignore additions."""

    def __init__(self, rows: Sequence[Recorded], what: str) -> None:
        past = History()
        for row in rows:
            past.add(row.prompt_ids if what == "requests" else (), row.answer_ids)
        self.suffix_array, self.counts, self.bigrams = past.suffix_array, past.counts, past.bigrams


def states(
    name: str, sets: dict[str, AskedSplit], sizes: Sequence[int]
) -> Iterator[tuple[dict[str, Any], PastTexts | None]]:
    """Yield each state of a set: its parameters and its past requests.

    Sizes larger than the number of rows are left out.
    """
    own = sets[name]
    yield {"state": "cold", "warm_rows": 0}, None
    yield {"state": "grown", "warm_rows": 0}, History()
    others = [one for other, one in sets.items() if other != name]
    pools = {"same set": own.others, "other sets": mixed(others, own.asked)}
    for state, pool in pools.items():
        for what in REMEMBERED:
            for size in (size for size in sizes if size <= len(pool)):
                known = {"state": state, "remembered": what, "warm_rows": size}
                yield known, Frozen(pool[:size], what)


@cli.experiment(
    *paper_options(SETS, ASKED),
    cli.option("--warm-rows", type=lengths, default=WARM_ROWS, help="requests that warm a memory"),
    table=show, shown=("grid",), **REPLAYED,
)  # fmt: skip
def run_lookahead_memory(options: Namespace) -> dict[str, Any]:
    """Memory: what does Lookahead's trie gain, cold or warmed, in tokens per verify pass?

        python -m eval lookahead_memory --data DATA --out eval/results/lookahead-memory.json

    The same requests are decoded in four states. A "cold" drafter knows the request's own texts
    alone. A "grown" one also knows the earlier requests of the run. "same set" is warmed with a
    number of other requests of the set, as Lookahead is with the answers of the train set. "other
    sets" is warmed with requests of the other sets, in turn. Warmed memories do not grow, so that
    the figures show the warming alone; they contain whole requests, as in our library, or answers
    alone, as in Lookahead's trie. Requests are drawn with a fixed seed from the first 150 of a set,
    to which our drafter was not fitted, and share no passage with a warming request.
    """
    bench = open_bench(options, warm_rows=options.warm_rows)
    read = read_sets(bench, max(MAX_ROWS_READ, 2 * options.limit))
    first = read_sets(bench, MAY_ASK)  # fewer where prompts are too long
    sets = {name: split_rows(rows, options.limit, len(first[name])) for name, rows in read.items()}
    point, grid = [trie_point(*_MEMORY_LENGTHS)], []
    for name, split in sets.items():
        for state, past in states(name, sets, options.warm_rows):
            grid += bench.sweep(split.asked, point, past, is_timed=False, set=name, **state)
    asked = {
        name: {"asked": len(one.asked), "may_warm": len(one.others)} for name, one in sets.items()
    }
    return bench.result("lookahead_memory", sets=asked, grid=grid)
