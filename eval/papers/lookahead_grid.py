"""Grids: drafters of many settings over the same recorded answers, in tokens a verify pass.

Each request is decoded by a drafter made for it alone, so that nothing is carried over but the
past requests that a drafter is given. Two memories: "cold" knows the request's own texts and
nothing else; "grown" begins with nothing and knows the requests before it in the same set.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from eval.replay import Contender, ReplayVerifier, Tally
from eval.script import note
from ragaccel.drafting.history import History
from ragaccel.drafting.trie import NoPast, PastTexts, TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.ledger import Ledger
    from eval.papers.lookahead_sets import Sets
    from eval.recordings import Recorded
    from ragaccel.decoding.session import Drafter

MEMORIES = ("cold", "grown")
MOST_GUESSES = ReplayVerifier.max_rows - 1

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A drafter in one setting: its parameters, how it is made of past requests, its guesses."""

    parameters: dict[str, Any]
    make: Callable[[PastTexts], Drafter]
    budget: int


def trie_point(decoding_length: int, branch_length: int, **mode: Any) -> Point:
    """Our trie drafter with the two lengths of the Lookahead paper, all else as it ships."""
    parameters = {**mode, "decoding_length": decoding_length, "branch_length": branch_length}
    return Point(
        parameters,
        lambda past: TrieDrafter(decoding_length, branch_length, past=past, **mode),
        decoding_length,
    )


def replay_rows(
    rows: Sequence[Recorded], points: Sequence[Point], past: PastTexts | None = None
) -> list[Entry]:
    """Replay rows through every point: its counts. A ``History`` grows by each row."""
    known = NoPast() if past is None else past
    tallies = [Tally() for _ in points]
    for recorded in rows:
        for point, tally in zip(points, tallies, strict=True):
            Contender(partial(point.make, known), point.budget).replay(recorded, tally)
        if isinstance(known, History):
            known.add(recorded.prompt_ids, recorded.answer_ids)
    return [point.parameters | tally.counts() for point, tally in zip(points, tallies, strict=True)]


def replay_sets(
    sets: Sets, memories: Sequence[str], points: Sequence[Point], ledger: Ledger
) -> list[Entry]:
    """Replay every set through every point in every memory, but what the ledger holds already."""
    known = {tuple(row["replayed"]): row["grid"] for row in ledger.rows if "replayed" in row}
    grid: list[Entry] = []
    for name, rows in sets.items():
        for memory in memories:
            found = known.get((name, memory))
            if found is None:
                found = replay_rows(rows, points, History() if memory == "grown" else None)
                ledger.add({"replayed": [name, memory], "grid": found})
            shown = [entry["tokens_per_pass"] for entry in found]
            note(f"{name}, {memory}: {min(shown):.2f} to {max(shown):.2f} tokens a pass")
            grid += [{"set": name, "memory": memory, **entry} for entry in found]
    return grid


def add_memory_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which memories are replayed."""
    parser.add_argument(
        "--memory",
        type=memories,
        default=MEMORIES,
        help="cold (the request's own texts), grown (and the requests before it); default: both",
    )


def memories(text: str) -> tuple[str, ...]:
    """Read comma-separated names of memories."""
    names = tuple(dict.fromkeys(text.split(",")))
    if set(names) - set(MEMORIES):
        raise argparse.ArgumentTypeError(f"take some of {', '.join(MEMORIES)}")
    return names


def lengths(text: str) -> tuple[int, ...]:
    """Read comma-separated lengths, from 1 to what a replayed pass takes."""
    try:
        read = tuple(int(part) for part in text.split(","))
    except ValueError:
        read = ()
    if not read or min(read) < 1 or max(read) > MOST_GUESSES:
        raise argparse.ArgumentTypeError(f"numbers from 1 to {MOST_GUESSES}, with commas between")
    return tuple(sorted(set(read)))
