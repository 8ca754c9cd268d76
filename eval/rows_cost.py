"""Rows cost: what a verify pass of n rows takes here, against plain decoding's pass of one.

    python -m eval.rows_cost --model random:llama-135m --context 1200

The curve decides how many guesses pay: n rows at t(n) beat n passes at t(1) if enough are accepted.
Sizes are interleaved and each is the median of its repeats. Passes go through our engine, chains
only. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.script import measured, new_parser, note, result
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from ragaccel.engine.engine import Engine, measure_passes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eval.ledger import Ledger
    from eval.targets import Target

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("rows_cost", measure, parse(arguments))
    found = {int(rows): value for rows, value in document["milliseconds"].items()}
    for rows, value in found.items():
        print(f"{rows:4d} rows  {value:8.2f} ms  {value / found[1]:6.2f} x one row")
    print(json.dumps(document["milliseconds"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("rows_cost", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--context", type=int, default=1024, help="tokens in the cache")
    add("--repeats", type=int, default=15)
    add("--out", type=Path, help="result file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure passes of all sizes over one context."""
    target = chosen_target(options, options.dtype)
    seconds = measure_rows(target, options.context, options.repeats)
    settings = {
        **describe_target(options),
        "context": options.context,
        "repeats": options.repeats,
    }
    milliseconds = {str(rows): 1e3 * value for rows, value in seconds.items()}
    return result("rows_cost", settings, device=options.device, milliseconds=milliseconds)


def measure_rows(
    target: Target, context: int, repeats: int, sizes: Sequence[int] = ROWS
) -> dict[int, float]:
    """Measure the median seconds of a pass by its rows, over ``context`` cached tokens."""
    engine = Engine(target.ours, max_rows=max(sizes))
    return dict(measure_passes(engine, context=context, repeats=repeats, rows=sizes))


def known_costs(target: Target, ledger: Ledger, context: int, repeats: int) -> dict[int, float]:
    """Seconds of a pass by its rows: those the ledger holds, or else measured and put there."""
    if not (costs := median_costs(ledger)):
        note(f"measuring passes over {context} cached tokens")
        ledger.add(cost_row(measure_rows(target, context, repeats)))
        costs = median_costs(ledger)
    return costs


def cost_row(costs: Mapping[int, float]) -> dict[str, Any]:
    """The ledger's row of what passes cost at one moment."""
    return {"pass_seconds": {str(rows): seconds for rows, seconds in costs.items()}}


def median_costs(ledger: Ledger) -> dict[int, float]:
    """Seconds of a pass by its rows: the median of what the ledger holds; nothing if none."""
    noted = [row["pass_seconds"] for row in ledger.rows if "pass_seconds" in row]
    sizes = noted[0] if noted else ()
    return {int(rows): median(each[rows] for each in noted) for rows in sizes}


def seconds_of(rows_of_each: Sequence[int], costs: Mapping[int, float]) -> list[float]:
    """What passes of these rows take by a table of costs, linear between the sizes in it."""
    sizes = sorted(costs)
    seconds: list[float] = np.interp(rows_of_each, sizes, [costs[size] for size in sizes]).tolist()
    return seconds


if __name__ == "__main__":
    main()
