"""Compare the speed of this checkout with that of another."""

from __future__ import annotations

import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval import cli
from eval.experiments.trees_worker import KINDS, ROOT
from eval.runner import note, result
from eval.worker import Work, Worker

_WORKER = Path(__file__).with_name("trees_worker.py").resolve()


def start(tree: Path, settings: Work) -> Worker:
    """Start a process that does measured work with the code of one checkout."""
    own = tree / ".venv" / "bin" / "python"
    command = [str(own) if own.exists() else sys.executable, str(_WORKER)]
    return Worker(command, tree, {"PYTHONPATH": str(tree)}, {**settings, "tree": str(tree)})


def pairs(kind: str, here: Worker, other: Worker, rounds: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds of both workers for the same piece of work; the first one alternates."""
    number = here.ask(kind=kind, at=0)["of"]
    other.ask(kind=kind, at=0)
    for at in range(number * rounds):
        order = [here, other] if at % 2 == 0 else [other, here]
        found = {worker: worker.ask(kind=kind, at=at) for worker in order}
        ours, theirs = found[here], found[other]
        if ours["did"] != theirs["did"]:
            raise ValueError(f"{kind} {at}: {ours['did']} here, {theirs['did']} there")
        yield ours["seconds"], theirs["seconds"]


def figures(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of both times, and the median and quartiles of their ratio."""
    ratios = [ours / theirs for ours, theirs in times]
    spread = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    return {
        "pairs": len(times),
        "seconds": round(statistics.median(ours for ours, _ in times), 4),
        "seconds_other": round(statistics.median(theirs for _, theirs in times), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(one, 4) for one in spread],
    }


@cli.experiment(
    cli.option("--other", type=Path, required=True, help="another checkout of this project"),
    cli.DATA,
    cli.option("--documents", type=Path, default=ROOT / "demos" / "documents", help="to index"),
    cli.option("--model", default="random:llama-135m", help="a model for decoding"),
    cli.option("--task", default="llma", help="the recorded answers to decode: llma, clapnq, ..."),
    cli.integer("--limit", 8, "recorded answers to decode"),
    cli.integer("--rounds", 3, "times that each piece of work is done"),
    cli.option("--only", default=",".join(KINDS), help="comma-separated"),
    shown=("kinds",),
)
def run_trees(options: Namespace) -> dict[str, Any]:
    """Two checkouts side by side: is this one slower than another?

        python -m eval trees --other CHECKOUT --data DATA --documents FOLDER --out eval/results

    Each checkout runs in a process of its own and does one piece of work at a time, in alternating
    order, so that a change of the machine's speed affects both. The figures are medians, and the
    ratio of this checkout's seconds to the other's, pair by pair: below 1 this one is faster. Both
    must give the same tokens and index the same number of passages. The other checkout runs with
    its own ``.venv`` if it has one. For documents, reading, cutting and storing are timed: the
    embedder only hashes words.
    """
    kinds = cli.names_of(options.only)
    if options.data is None and "decoding" in kinds:
        note("no data folder (--data): decoding is left out")
        kinds.remove("decoding")
    shown = {"model": options.model, "task": options.task, "limit": options.limit}
    settings = {**shown, "data": str(options.data), "documents": str(options.documents.resolve())}
    here, other = (start(tree.resolve(), settings) for tree in (ROOT, options.other))
    found = {}
    try:
        for kind in kinds:
            found[kind] = figures(list(pairs(kind, here, other, options.rounds)))
            note(f"{kind}: {found[kind]}")
    finally:
        here.close()
        other.close()
    commit = subprocess.run(
        ["git", "-C", str(options.other), "rev-parse", "--short=12", "HEAD"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    shown |= {"rounds": options.rounds, "other": commit or "unknown"}
    return result("trees", shown, kinds=found)
