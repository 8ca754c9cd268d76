"""LLMA's Figures 4 and 5: the length n that must match and the tokens k fed at once, swept.

    python -m eval.papers.llma_sweep --data DATA
    python -m eval.papers.llma_sweep --data DATA --model random:llama-135m --limit 10 --out FILE

Each point has its decoding steps, how many of them a match triggered, and the tokens accepted a
trigger, replayed; with ``--model`` also its speed, all points interleaved on every answer. From
these the paper's claim is checked that speed-up follows the reduction of decoding steps: the
correlation of both and the line through them, over points and over answers.
"""

from __future__ import annotations

import argparse
import json
from statistics import StatisticsError, correlation, linear_regression
from typing import TYPE_CHECKING, Any

from eval.contenders import PLAIN
from eval.papers.decoders import NO_DRAFTS, llma, open_bench
from eval.papers.llma_layout import llma_sweep_table
from eval.papers.published import published
from eval.papers.recorded_sets import (
    ORIGINAL,
    add_paper_options,
    answered_rows,
    chosen_models,
    describe_paper_run,
    laid_out,
    set_paths,
)
from eval.script import measured, new_parser, result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.papers.decoders import Bench, Point
    from eval.recordings import Recorded

LENGTHS, COPIES = (1, 2, 3, 4, 5), (2, 5, 10, 15, 20, 25, 30)


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.llma_sweep", measure, parse(arguments))
    print(llma_sweep_table(document))
    print(json.dumps({"grid": document["grid"], "follows": document["follows"]}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.llma_sweep", __doc__)
    add_paper_options(parser, (ORIGINAL,))
    parser.add_argument("--n", type=_numbers, default=LENGTHS, help="tokens that must match")
    parser.add_argument("--k", type=_numbers, default=COPIES, help="tokens fed at once")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the grid on every set."""
    target, tokenizer = chosen_models(options)
    settings = describe_paper_run(options) | {"n": list(options.n), "k": list(options.k)}
    bench = open_bench(options, target, settings)
    grid, plain = [], {}
    for name, path in set_paths(options, options.sets).items():
        recordings = laid_out(answered_rows(path, options.limit), tokenizer)
        points = swept(bench, name, recordings, [(n, k) for n in options.n for k in options.k])
        plain[name] = points.pop(0)
        grid += points
    return result(
        "llma_sweep",
        settings,
        device=options.device,
        module="papers.llma_sweep",
        plain=plain,
        grid=grid,
        follows=follows(grid, bench.ledger.measurements) if target else None,
        published=published("llma"),
    )


def swept(
    bench: Bench, name: str, recordings: Sequence[Recorded], grid: Sequence[tuple[int, int]]
) -> list[Point]:
    """Run plain decoding and every (n, k) of the grid on a set: the points, plain decoding's first.

    Raises:
        ValueError: an n or k that LLMA's rules do not have.
    """
    named = {f"n{n}_k{k}": (n, k) for n, k in grid}
    decoders = [NO_DRAFTS, *(llma(n, k, label) for label, (n, k) in named.items())]
    points = []
    for point in bench.points(name, recordings, decoders):
        label = point.pop("decoder")
        place = dict(zip(("n", "k"), named.get(label, ()), strict=False))
        points.append({"set": name, "answers": len(recordings), **place, **point})
    return points


def follows(grid: Sequence[Point], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fit speed-up over plain decoding to the reduction of decoding steps.

    Over the points of the grid; over those of one k, whose passes cost alike; and over single
    answers under every point. A line through (1, 1) with slope 1 would be a speed-up as great as
    the reduction; what is missing is what wider passes and drafting cost.
    """
    pairs = [(point["timed_tokens_per_pass"], point["ratio"]) for point in grid]
    copies = sorted({point["k"] for point in grid})
    return {
        "points": fitted(pairs),
        "by_k": {
            str(k): fitted([pair for pair, p in zip(pairs, grid, strict=True) if p["k"] == k])
            for k in copies
        },
        "answers": fitted(answer_pairs(rows)),
    }


def fitted(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Fit a line and tell the correlation; None where the pairs do not differ."""
    reduction, speedup = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    try:
        line, together = linear_regression(reduction, speedup), correlation(reduction, speedup)
    except StatisticsError:
        return None
    return {
        "pairs": len(pairs),
        "correlation": round(together, 4),
        "slope": round(line.slope, 4),
        "intercept": round(line.intercept, 4),
    }


def answer_pairs(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Reduction of steps and speed-up of each answer under each point, within a round."""
    plain = {
        (row["example"], row["round"]): row["decode_seconds"]
        for row in rows
        if row["contender"] == PLAIN
    }
    return [
        (row["tokens"] / row["passes"], plain[row["example"], row["round"]] / row["decode_seconds"])
        for row in rows
        if row["contender"] != PLAIN
    ]


if __name__ == "__main__":
    main()
