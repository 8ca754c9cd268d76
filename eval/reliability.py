r"""Do the chances mean what they say? The trie drafter's estimates against what was accepted.

    python -m eval.reliability --data DATA --out eval/results/reliability.json \
        --picture eval/results/reliability.svg

Every drafted node of recorded answers, replayed as in ``eval.replay``: its estimated chance of
acceptance, and whether it was accepted; the last pass of an answer aside. For each source the
expected calibration error over bins of equal mass, and by how much the log-loss is below that of
the source's best constant. Corrections are learned from the first half of each file on; figures are
of the second half, each guess judged before anything is learned from it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.recordings import add_set_options, read_recorded, set_files, set_tokenizer
from eval.replay import Contender, Tally
from eval.script import measured, new_parser, result
from ragaccel.drafting.history import History
from ragaccel.drafting.trie import TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.session import Context
    from ragaccel.decoding.tree import DraftTree

BINS = 10
Guess = tuple[float, bool]  # estimated chance, whether it was accepted


class Watched:
    """A drafter whose guesses are noted with what became of them."""

    mask_ids: Sequence[int] = ()

    def __init__(self, drafter: TrieDrafter) -> None:
        self._drafter = drafter
        self.guesses: dict[str, list[Guess]] = defaultdict(list)

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Note the last tree's outcomes, then draft."""
        if context.last is not None:
            accepted = set(context.last.accepted)
            tree = context.last.tree
            for node in range(1, len(tree)):
                source = tree.origins[node][0].source
                self.guesses[source].append((tree.path_probs[node], node in accepted))
        return self._drafter.draft(context, budget)


def bins_of(guesses: Sequence[Guess], num: int = BINS) -> list[tuple[float, float, int]]:
    """Bins of equal mass, by estimate: (mean estimate, share accepted, guesses)."""
    ordered = sorted(guesses, key=lambda guess: guess[0])  # equal ones as they came
    edges = [len(ordered) * i // num for i in range(num + 1)]
    bins = []
    for low, high in pairwise(edges):
        part = ordered[low:high]
        if part:
            estimate = sum(prob for prob, _ in part) / len(part)
            bins.append((estimate, sum(came for _, came in part) / len(part), len(part)))
    return bins


def figures(guesses: Sequence[Guess]) -> dict[str, Any]:
    """Calibration error, log-loss against the best constant, and the bins of the diagram."""
    bins = bins_of(guesses)
    error = sum(num * abs(estimate - share) for estimate, share, num in bins) / len(guesses)
    rate = sum(came for _, came in guesses) / len(guesses)
    loss = sum(_log_loss(prob, came) for prob, came in guesses) / len(guesses)
    constant = sum(_log_loss(rate, came) for _, came in guesses) / len(guesses)
    return {
        "guesses": len(guesses),
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


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.picture and find_spec("matplotlib") is None:
        sys.exit("eval.reliability: --picture needs `pip install ragaccel[eval]`")
    sources = measured("reliability", measure, options)["sources"]
    if options.picture:
        from eval.plots.reliability_diagram import reliability_svg

        options.picture.parent.mkdir(parents=True, exist_ok=True)
        options.picture.write_text(reliability_svg(sources), encoding="utf-8")
    print(json.dumps({s: {k: v for k, v in f.items() if k != "bins"} for s, f in sources.items()}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("reliability", __doc__)
    add_set_options(parser)
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--picture", type=Path, help="the diagram, as SVG")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Judge the guesses of every set, by source."""
    paths = set_files(options.sets.split(","), options.data)
    tokenizer = set_tokenizer(options.tokenizer, options.data)
    seen = judged(paths, tokenizer, options.limit)
    settings = {"tokenizer": options.tokenizer, "rows": options.limit}
    sources = {source: figures(guesses) for source, guesses in sorted(seen.items())}
    return result("reliability", settings, sources=sources)


def judged(paths: Sequence[Path], tokenizer: Any, limit: int | None) -> dict[str, list[Guess]]:
    """Replay every file; the guesses of its second half, by source."""
    guesses: dict[str, list[Guess]] = defaultdict(list)
    for path in paths:
        rows = list(read_recorded(path, tokenizer, limit))
        history = History()
        watched = Watched(TrieDrafter(past=history))
        contender = Contender(lambda watched=watched: watched, 64, past=history)  # type: ignore[misc]
        for number, recorded in enumerate(rows):
            if number == len(rows) // 2:
                watched.guesses.clear()
            contender.replay(recorded, Tally())
        for source, seen in watched.guesses.items():
            guesses[source] += seen
    return guesses


if __name__ == "__main__":
    main()
