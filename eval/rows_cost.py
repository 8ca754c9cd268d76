"""Rows cost: what a verify pass of n rows takes here, against plain decoding's pass of one.

    python -m eval.rows_cost --model random:llama-135m --context 1200

The curve decides how many guesses pay: n rows at t(n) beat n passes at t(1) if enough are accepted.
Sizes are interleaved and each is the median of its repeats. Passes go through our engine, chains
only. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eval.machine import describe_machine, describe_run
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    default_dtype,
    shown_name,
)
from ragaccel.engine.engine import Engine
from ragaccel.engine.measuring import measure_passes
from ragaccel.errors import RagaccelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eval.ledger import Ledger
    from eval.targets import Target

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.rows_cost", description=__doc__.split("\n")[0]
    )
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--context", type=int, default=1024, help="tokens in the cache")
    add("--repeats", type=int, default=15)
    add("--out", type=Path, help="result file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    try:
        target = chosen_target(options, options.dtype)
    except (RagaccelError, FileNotFoundError) as error:
        sys.exit(f"eval.rows_cost: {error}")
    seconds = measure_rows(target, options.context, options.repeats)
    document: dict[str, Any] = {
        "kind": "rows_cost",
        "settings": {
            "model": shown_name(options.model),
            "context": options.context,
            "dtype": options.dtype or default_dtype(options.device),
            "repeats": options.repeats,
        },
        "machine": describe_machine(options.device),
        "run": describe_run("eval.rows_cost"),
        "milliseconds": {str(rows): 1e3 * value for rows, value in seconds.items()},
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for rows, value in seconds.items():
        print(f"{rows:4d} rows  {1e3 * value:8.2f} ms  {value / seconds[1]:6.2f} x one row")
    print(json.dumps(document["milliseconds"]))


def measure_rows(
    target: Target, context: int, repeats: int, sizes: Sequence[int] = ROWS
) -> dict[int, float]:
    """Measure the median seconds of a pass by its rows, over ``context`` cached tokens."""
    engine = Engine(target.ours, max_rows=max(sizes))
    return dict(measure_passes(engine, context=context, repeats=repeats, rows=sizes))


def known_costs(target: Target, ledger: Ledger, context: int, repeats: int) -> dict[int, float]:
    """Seconds of a pass by its rows: those the ledger holds, or else measured and put there."""
    for row in ledger.rows:
        if "pass_seconds" in row:
            return {int(rows): seconds for rows, seconds in row["pass_seconds"].items()}
    print(f"measuring passes over {context} cached tokens", file=sys.stderr, flush=True)
    costs = measure_rows(target, context, repeats)
    ledger.add({"pass_seconds": {str(rows): seconds for rows, seconds in costs.items()}})
    return costs


def seconds_of(rows_of_each: Sequence[int], costs: Mapping[int, float]) -> list[float]:
    """What passes of these rows take by a table of costs, linear between the sizes in it."""
    sizes = sorted(costs)
    seconds: list[float] = np.interp(rows_of_each, sizes, [costs[size] for size in sizes]).tolist()
    return seconds


if __name__ == "__main__":
    main()
