"""Memory: what is Lookahead's trie worth cold, and warmed with what, in tokens a verify pass?

    python -m eval.papers.lookahead_memory --data DATA --out eval/results/lookahead-memory.json

Four states, each asked the same requests. "cold": a request knows its own texts and nothing else.
"grown": and the requests before it in this run. "same set": and so many other requests of its set,
as Lookahead is warmed with the answers of the train set before it is measured. "other sets": and so
many requests of the other sets, in turn. Warmed memories do not grow meanwhile, so that a figure
tells of the warming alone; they hold whole requests, as our library remembers them, or their
answers alone, as Lookahead's trie. Requests are drawn from the first 150 of a set, to which our
drafter was not fitted, always the same ones, and none that warms shares a passage with one that is
asked. Ends in one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

from eval.ledger import kept_beside
from eval.papers.lookahead_grid import lengths, replay_rows, trie_point
from eval.papers.lookahead_sets import SETS, read_sets
from eval.papers.lookahead_tables import memory_states_table
from eval.papers.published import published
from eval.papers.recorded_sets import add_replayed_options, chosen_models, describe_paper_run
from eval.script import measured, new_parser, note, result
from ragaccel.drafting.history import History

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eval.recordings import Recorded
    from ragaccel.drafting.trie import PastTexts

ASKED, WARM_ROWS = 50, (10, 50, 100, 200)
MOST_READ = 400
"""Rows read of a set: enough to ask some and to warm with the others."""
MAY_ASK = 150
"""Rows from which those that are asked are drawn: our drafter was fitted to later ones."""
REMEMBERED = ("requests", "answers")
_SEED = 1
_LENGTHS = (64, 24)  # decoding_length and branch_length, as our drafter ships


@dataclass(frozen=True, slots=True)
class Parted:
    """A set in two: the rows that are asked, and those that may warm, which share no passage."""

    asked: list[Recorded]
    others: list[Recorded]


def parted(rows: Sequence[Recorded], num_asked: int, may_ask: int) -> Parted:
    """Draw the rows to be asked among the first ``may_ask``; put the rest in an order as random.

    At most half of all rows are asked.
    """
    chance = random.Random(_SEED)
    drawn = chance.sample(rows[:may_ask], len(rows[:may_ask]))
    asked = drawn[: min(num_asked, len(rows) // 2)]
    left = [*drawn[len(asked) :], *rows[may_ask:]]
    return Parted(asked, apart_from(asked, chance.sample(left, len(left))))


def apart_from(asked: Sequence[Recorded], others: Sequence[Recorded]) -> list[Recorded]:
    """Leave out those that share a passage, or the prompt, with one that is asked."""
    known = set(chain.from_iterable(map(texts_of, asked)))
    return [one for one in others if known.isdisjoint(texts_of(one))]


def texts_of(recorded: Recorded) -> Iterator[tuple[int, ...]]:
    """A row's prompt and its passages."""
    yield recorded.prompt_ids
    for passage in recorded.apart:
        yield passage.token_ids


def mixed(sets: Sequence[Parted], asked: Sequence[Recorded]) -> list[Recorded]:
    """Rows of several sets in turn: the first of each, the second of each, and so on."""
    turns = zip_longest(*(one.others for one in sets))
    return apart_from(asked, [row for turn in turns for row in turn if row is not None])


def warmed(rows: Sequence[Recorded], what: str) -> History:
    """Remember rows: whole requests, or their answers."""
    history = History()
    for row in rows:
        history.add(row.prompt_ids if what == "requests" else (), row.answer_ids)
    return history


def states(
    name: str, sets: dict[str, Parted], sizes: Sequence[int]
) -> Iterator[tuple[dict[str, Any], PastTexts | None]]:
    """What is known in each state of a set: its parameters, and the past requests.

    A size that there are too few rows for is left out.
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
    """Past requests to which none is added."""

    def __init__(self, past: PastTexts) -> None:
        self.suffix_array, self.counts, self.bigrams = past.suffix_array, past.counts, past.bigrams


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.lookahead_memory", measure, parse(arguments))
    print(memory_states_table(document))
    print(json.dumps({"grid": document["grid"]}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.lookahead_memory", __doc__)
    add_replayed_options(parser, SETS)
    parser.set_defaults(limit=ASKED)
    parser.add_argument(
        "--warm-rows", type=lengths, default=WARM_ROWS, help="requests that warm a memory"
    )
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replay the asked rows of every set in every state."""
    settings = describe_paper_run(options) | {
        "warm_rows": list(options.warm_rows),
        "decoding_length": _LENGTHS[0],
        "branch_length": _LENGTHS[1],
    }
    ledger = kept_beside(options.out, settings)
    tokenizer = chosen_models(options)[1]
    read = read_sets(options, tokenizer, max(MOST_READ, 2 * options.limit))
    first = read_sets(options, tokenizer, MAY_ASK)  # fewer where prompts are too long
    sets = {name: parted(rows, options.limit, len(first[name])) for name, rows in read.items()}
    known = {row["replayed"]: row["grid"] for row in ledger.rows if "replayed" in row}
    grid: list[dict[str, Any]] = []
    for name in sets:
        if name not in known:
            known[name] = replay_states(name, sets, options.warm_rows)
            ledger.add({"replayed": name, "grid": known[name]})
        grid += known[name]
    asked = {
        name: {"asked": len(one.asked), "may_warm": len(one.others)} for name, one in sets.items()
    }
    return result(
        "lookahead_memory",
        settings,
        module="papers.lookahead_memory",
        sets=asked,
        grid=grid,
        published=published("lookahead"),
    )


def replay_states(name: str, sets: dict[str, Parted], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Replay one set in every state: an entry each."""
    found = []
    for state, past in states(name, sets, sizes):
        (entry,) = replay_rows(sets[name].asked, [trie_point(*_LENGTHS)], past)
        found.append({"set": name, **state, **entry})
        note(f"{name}, {state}: {entry['tokens_per_pass']:.2f} tokens a pass")
    return found


if __name__ == "__main__":
    main()
