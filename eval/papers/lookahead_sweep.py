"""Sweep: what do longer drafts and longer branches give, Lookahead's two settings?

    python -m eval.papers.lookahead_sweep --data DATA --out eval/results/lookahead-sweep.json
    python -m eval.papers.lookahead_sweep --data DATA --model random:llama-135m --limit 4

decoding_length is how many tokens a draft has (theirs counts the last known token, ours does not),
branch_length how many its longest branch. In tokens a verify pass by replay, always; with
``--model`` in wall time too, where a pass over a longer draft costs more: each draft of full
length, beside our plain decoding and beside drafts cut to what the measured cost of a pass makes
worth it. Ends in one JSON document.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from eval.ledger import kept_beside
from eval.papers.decoders import NO_DRAFTS, TREES, Bench, Decoder
from eval.papers.lookahead_grid import add_memory_option, lengths, replay_sets, trie_point
from eval.papers.lookahead_sets import SETS, read_sets
from eval.papers.lookahead_tables import sweep_table
from eval.papers.published import published
from eval.papers.recorded_sets import add_paper_options, chosen_models, describe_paper_run
from eval.script import measured, new_parser, result
from ragaccel.drafting.trie import TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.recordings import Recorded

DECODING_LENGTHS = (4, 8, 16, 32, 64, 128)
BRANCH_LENGTHS = (2, 4, 8, 12, 16, 24, 32)
ROWS = 60


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.lookahead_sweep", measure, parse(arguments))
    print(sweep_table(document))
    print(json.dumps({"grid": document["grid"]}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.lookahead_sweep", __doc__)
    add_paper_options(parser, SETS)
    parser.set_defaults(limit=ROWS)
    add_memory_option(parser)
    add = parser.add_argument
    add("--decoding-lengths", type=lengths, default=DECODING_LENGTHS, help="guesses of a draft")
    add("--branch-lengths", type=lengths, default=BRANCH_LENGTHS, help="tokens of a branch")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replay every point of the sweep; time it too, where a model is given.

    Raises:
        ValueError: a model is given, and no cold drafters to be timed.
    """
    if options.model and "cold" not in options.memory:
        raise ValueError("drafters that are timed know no past requests: leave cold in --memory")
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options) | {
        "memory": list(options.memory),
        "decoding_lengths": list(options.decoding_lengths),
        "branch_lengths": list(options.branch_lengths),
    }
    ledger = kept_beside(options.out, settings)
    sets = read_sets(options, tokenizer, options.limit)
    asked = [(d, b) for d in options.decoding_lengths for b in options.branch_lengths]
    pairs = distinct(asked)
    grid = replay_sets(sets, options.memory, [trie_point(*pair) for pair in pairs], ledger)
    beside = {}
    for name, rows in sets.items() if target else ():
        beside[name] = add_times(grid, name, rows, Bench(target, ledger, options.repeats))
    return result(
        "lookahead_sweep",
        settings,
        module="papers.lookahead_sweep",
        device=options.device,
        sets={name: len(rows) for name, rows in sets.items()},
        grid=spread(grid, asked),
        **({"beside": beside} if target else {}),
        published=published("lookahead"),
    )


def add_times(
    grid: Sequence[dict[str, Any]], name: str, rows: Sequence[Recorded], bench: Bench
) -> dict[str, Any]:
    """Time a set's points on a model that follows the answers, and note it in their cold entries.

    Every pass has as many guesses as the setting says, whatever they cost. The drafters know no
    past requests; corrections of their chances last from answer to answer. Returns the times of
    plain decoding and of drafts cut to what the measured cost of a pass makes worth it.
    """
    own = {
        label_of(entry): entry
        for entry in grid
        if (entry["set"], entry["memory"]) == (name, "cold")
    }
    decoders = [
        Decoder(
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
    """What the decoder of a point is called."""
    return f"{entry['decoding_length']}x{entry['branch_length']}"


def distinct(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The settings that differ: no branch is longer than its whole draft."""
    return sorted({(guesses, min(guesses, branch)) for guesses, branch in pairs})


def spread(
    entries: Sequence[dict[str, Any]], pairs: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Give every setting that was asked for its entry, set by set and memory by memory."""
    found = {
        (entry["set"], entry["memory"], entry["decoding_length"], entry["branch_length"]): entry
        for entry in entries
    }
    wheres = dict.fromkeys((entry["set"], entry["memory"]) for entry in entries)
    return [
        {**found[(*where, guesses, min(guesses, branch))], "branch_length": branch}
        for where in wheres
        for guesses, branch in pairs
    ]


if __name__ == "__main__":
    main()
