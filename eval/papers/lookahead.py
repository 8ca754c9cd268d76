"""Lookahead's experiments (arXiv 2312.12728), with published figures next to ours.

Each request is decoded by a new drafter, so that only the past requests that it is given carry
over. There are two memories: a "cold" drafter knows the request's own texts and nothing else; a
"grown" one also knows the earlier requests of the same set.
"""

from __future__ import annotations

import random
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any

from eval import cli
from eval.data import MAX_ANSWER, RECORDED_SETS, Recorded, make_jobs
from eval.experiments.replay import ReplayedDrafter, ReplayVerifier, Tally
from eval.papers.bench import (
    NO_DRAFTS,
    REPLAYED,
    TREES,
    Bench,
    PaperDecoder,
    answered_rows,
    chosen_models,
    describe_paper_run,
    has_data,
    laid_out,
    paper_options,
    set_paths,
)
from eval.papers.published import published
from eval.report.tables import show
from eval.runner import ResultsLog, note, open_results_log, result
from eval.tasks import load_task
from ragaccel.decoding import Context, Drafter, DraftTree, merge
from ragaccel.drafting import History, NoPast, PastTexts, TrieDrafter
from ragaccel.models import Tokenizer

MEMORIES = ("cold", "grown")
MAX_DRAFT_TOKENS = ReplayVerifier.max_rows - 1

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A drafter in one setting: parameters, a function to make it from past requests, budget."""

    parameters: dict[str, Any]
    make: Callable[[PastTexts], Drafter]
    budget: int


def trie_point(decoding_length: int, branch_length: int, **mode: Any) -> Point:
    """Return our trie drafter with the Lookahead paper's two lengths and other defaults."""
    parameters = {**mode, "decoding_length": decoding_length, "branch_length": branch_length}
    return Point(
        parameters,
        lambda past: TrieDrafter(decoding_length, branch_length, past=past, **mode),
        decoding_length,
    )


def replay_rows(
    rows: Sequence[Recorded], points: Sequence[Point], past: PastTexts | None = None
) -> list[Entry]:
    """Replay rows through every point and return its counts; a ``History`` grows by each row."""
    known = NoPast() if past is None else past
    tallies = [Tally() for _ in points]
    for recorded in rows:
        for point, tally in zip(points, tallies, strict=True):
            ReplayedDrafter(partial(point.make, known), point.budget).replay(recorded, tally)
        if isinstance(known, History):
            known.add(recorded.prompt_ids, recorded.answer_ids)
    return [point.parameters | tally.counts() for point, tally in zip(points, tallies, strict=True)]


def replay_sets(
    sets: Sets, memories: Sequence[str], points: Sequence[Point], results_log: ResultsLog
) -> list[Entry]:
    """Replay each set through each point in each memory, unless logged; return all entries."""
    known = {tuple(row["replayed"]): row["grid"] for row in results_log.rows if "replayed" in row}
    grid: list[Entry] = []
    for name, rows in sets.items():
        for memory in memories:
            found = known.get((name, memory))
            if found is None:
                found = replay_rows(rows, points, History() if memory == "grown" else None)
                results_log.add({"replayed": [name, memory], "grid": found})
            shown = [entry["tokens_per_pass"] for entry in found]
            note(f"{name}, {memory}: {min(shown):.2f} to {max(shown):.2f} tokens a pass")
            grid += [{"set": name, "memory": memory, **entry} for entry in found]
    return grid


def memories(text: str) -> tuple[str, ...]:
    """Parse comma-separated names of memories."""
    names = tuple(dict.fromkeys(text.split(",")))
    if set(names) - set(MEMORIES):
        raise ArgumentTypeError(f"take some of {', '.join(MEMORIES)}")
    return names


def lengths(text: str) -> tuple[int, ...]:
    """Parse comma-separated lengths, from 1 to the maximum of a replayed pass."""
    try:
        read = tuple(int(part) for part in text.split(","))
    except ValueError:
        read = ()
    if not read or min(read) < 1 or max(read) > MAX_DRAFT_TOKENS:
        raise ArgumentTypeError(f"numbers from 1 to {MAX_DRAFT_TOKENS}, with commas between")
    return tuple(sorted(set(read)))


MEMORY = cli.option("--memory", type=memories, default=MEMORIES, help="cold, grown, or both")
PROMPTS = ("gsm8k", "humaneval")
"""Tasks whose prompts are continued unchanged."""
SETS = (*RECORDED_SETS, *PROMPTS)
SHIPPED = ("handbook", "demo")

Sets = dict[str, list[Recorded]]


def read_sets(options: Namespace, tokenizer: Any, limit: int | None) -> Sets:
    """Read the first answered rows of each named set; without data, of the shipped set."""
    if not has_data(options):
        paths = [set_paths(options, options.sets, shipped) for shipped in SHIPPED]
    else:
        paths = [
            {name: None} if name in PROMPTS else set_paths(options, name)
            for name in options.sets.split(",")
        ]
    return {
        name: laid_out(answered_rows(path, limit), tokenizer)
        if path
        else continued(options, name, tokenizer, limit)
        for one in paths
        for name, path in one.items()
    }


def continued(options: Namespace, name: str, tokenizer: Any, limit: int | None) -> list[Recorded]:
    """Return a task's prompts as requests whose recorded answer is the reference solution."""
    examples = load_task(name, limit, options.data)
    jobs = make_jobs(examples, Tokenizer(tokenizer), max_new_tokens=MAX_ANSWER + 1)
    return [Recorded(one.prompt_ids, (), (), one.answer_ids) for one in jobs]


SWEEP_LENGTHS = (4, 8, 16, 32, 64, 128)
SWEEP_BRANCH_LENGTHS = (2, 4, 8, 12, 16, 24, 32)
SWEEP_ROWS = 60


@cli.experiment(
    *paper_options(SETS, SWEEP_ROWS), MEMORY,
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
    if options.model and "cold" not in options.memory:
        raise ValueError("timed drafters start without past requests: include cold in --memory")
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options) | {
        "memory": list(options.memory),
        "decoding_lengths": list(options.decoding_lengths),
        "branch_lengths": list(options.branch_lengths),
    }
    results_log = open_results_log(options.out, settings)
    sets = read_sets(options, tokenizer, options.limit)
    asked = [(d, b) for d in options.decoding_lengths for b in options.branch_lengths]
    pairs = distinct(asked)
    grid = replay_sets(sets, options.memory, [trie_point(*pair) for pair in pairs], results_log)
    beside = {}
    for name, rows in sets.items() if target else ():
        beside[name] = add_times(grid, name, rows, Bench(target, results_log, options.repeats))
    return result(
        "lookahead_sweep",
        settings,
        device=options.device,
        sets={name: len(rows) for name, rows in sets.items()},
        grid=spread(grid, asked),
        **({"beside": beside} if target else {}),
        published=published("lookahead"),
    )


def add_times(
    grid: Sequence[dict[str, Any]], name: str, rows: Sequence[Recorded], bench: Bench
) -> dict[str, Any]:
    """Time a set's points on a model that follows the answers; add times to their cold entries.

    Every pass has the setting's number of draft tokens, whatever its cost. The drafters know no
    past requests, but keep their calibration from answer to answer. Return the times of plain
    decoding and of drafts pruned by the measured cost of a pass.
    """
    own = {
        label_of(entry): entry
        for entry in grid
        if (entry["set"], entry["memory"]) == (name, "cold")
    }
    decoders = [
        PaperDecoder(
            label,
            partial(TrieDrafter, entry["decoding_length"], entry["branch_length"]),
            entry["decoding_length"],
        )
        for label, entry in own.items()
    ]
    times = bench.times(name, rows, [NO_DRAFTS, TREES, *decoders])
    for label, entry in own.items():
        entry.update(times.pop(label, {}))
    return times


def label_of(entry: dict[str, Any]) -> str:
    """Return the name of a point's decoder."""
    return f"{entry['decoding_length']}x{entry['branch_length']}"


def distinct(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the distinct settings, with branches cut to the length of the whole draft."""
    return sorted({(draft_tokens, min(draft_tokens, branch)) for draft_tokens, branch in pairs})


def spread(
    entries: Sequence[dict[str, Any]], pairs: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Return an entry for every requested setting, by set and memory."""
    found = {
        (entry["set"], entry["memory"], entry["decoding_length"], entry["branch_length"]): entry
        for entry in entries
    }
    wheres = dict.fromkeys((entry["set"], entry["memory"]) for entry in entries)
    return [
        {**found[(*where, draft_tokens, min(draft_tokens, branch))], "branch_length": branch}
        for where in wheres
        for draft_tokens, branch in pairs
    ]


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


def points(decoding_length: int, branch_length: int) -> list[Point]:
    """Return a point for each way to branch, with the same rows and branch length."""
    one, parting, hierarchical = (
        trie_point(decoding_length, branch_length, mode=mode)
        for mode in ("one", "parallel", "hierarchical")
    )
    parallel = Point(
        hierarchical.parameters | {"mode": "parallel"},
        lambda past: BranchesApart(decoding_length, branch_length, past=past),
        decoding_length,
    )
    parting.parameters["mode"] = "parting"  # their parallel branches do not
    return [one, parallel, parting, hierarchical]


@cli.experiment(
    *paper_options(SETS, BRANCHES_ROWS), MEMORY,
    cli.option("--decoding-lengths", type=lengths, default=BRANCHES_LENGTHS, help="rows of a pass"),
    cli.integer("--branch-length", BRANCH_LENGTH, "tokens of a branch"),
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
    settings = describe_paper_run(options) | {
        "memory": list(options.memory),
        "decoding_lengths": list(options.decoding_lengths),
        "branch_length": options.branch_length,
    }
    results_log = open_results_log(options.out, settings)
    every = [p for size in options.decoding_lengths for p in points(size, options.branch_length)]
    sets = read_sets(options, chosen_models(options)[1], options.limit)
    return result(
        "lookahead_branches",
        settings,
        sets={name: len(rows) for name, rows in sets.items()},
        grid=replay_sets(sets, options.memory, every, results_log),
        published=published("lookahead"),
    )


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
    known = set(chain.from_iterable(map(texts_of, asked)))
    return [one for one in others if known.isdisjoint(texts_of(one))]


def texts_of(recorded: Recorded) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of a row's prompt and of its passages."""
    yield recorded.prompt_ids
    for passage in recorded.apart:
        yield passage.token_ids


def mixed(sets: Sequence[AskedSplit], asked: Sequence[Recorded]) -> list[Recorded]:
    """Return the warming rows of several sets in turn: the first of each, then the second ones."""
    turns = zip_longest(*(one.others for one in sets))
    return without_shared_texts(asked, [row for turn in turns for row in turn if row is not None])


def warmed(rows: Sequence[Recorded], what: str) -> History:
    """Return a history of rows, as whole requests or as answers alone."""
    history = History()
    for row in rows:
        history.add(row.prompt_ids if what == "requests" else (), row.answer_ids)
    return history


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
            for size in sizes:
                if size <= len(pool):
                    known = {"state": state, "remembered": what, "warm_rows": size}
                    yield known, Frozen(warmed(list(islice(pool, size)), what))


class Frozen:
    """Past requests that ignore additions."""

    def __init__(self, past: PastTexts) -> None:
        self.suffix_array, self.counts, self.bigrams = past.suffix_array, past.counts, past.bigrams


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
    settings = describe_paper_run(options) | {
        "warm_rows": list(options.warm_rows),
        "decoding_length": _MEMORY_LENGTHS[0],
        "branch_length": _MEMORY_LENGTHS[1],
    }
    results_log = open_results_log(options.out, settings)
    tokenizer = chosen_models(options)[1]
    read = read_sets(options, tokenizer, max(MAX_ROWS_READ, 2 * options.limit))
    first = read_sets(options, tokenizer, MAY_ASK)  # fewer where prompts are too long
    sets = {name: split_rows(rows, options.limit, len(first[name])) for name, rows in read.items()}
    known = {row["replayed"]: row["grid"] for row in results_log.rows if "replayed" in row}
    grid: list[dict[str, Any]] = []
    for name in sets:
        if name not in known:
            known[name] = replay_states(name, sets, options.warm_rows)
            results_log.add({"replayed": name, "grid": known[name]})
        grid += known[name]
    asked = {
        name: {"asked": len(one.asked), "may_warm": len(one.others)} for name, one in sets.items()
    }
    return result(
        "lookahead_memory",
        settings,
        sets=asked,
        grid=grid,
        published=published("lookahead"),
    )


def replay_states(
    name: str, sets: dict[str, AskedSplit], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    found = []
    for state, past in states(name, sets, sizes):
        (entry,) = replay_rows(sets[name].asked, [trie_point(*_MEMORY_LENGTHS)], past)
        found.append({"set": name, **state, **entry})
        note(f"{name}, {state}: {entry['tokens_per_pass']:.2f} tokens a pass")
    return found
