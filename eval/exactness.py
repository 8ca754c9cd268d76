"""Exactness: which of our modes give the same answers as which decoder, and what each mode costs.

    python -m eval.exactness --model reader --task xquad --data DATA --limit 200 --dtype bfloat16

The model gives its own answers, by transformers' ``generate`` and by ours: drafting trees, the same
plainly, and in exact mode drafting and plainly. Exact mode must give the same with drafts as
without, to the last token. What else differs was nearly tied: each first difference tells its place
and the gap of the logits there in transformers' own pass, as in ``eval.lossless``. Decoders run one
after the other on each example, the order rotated, so that what a mode costs is a ratio within an
example. Progress goes to stderr; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.answer_tables import exactness_table
from eval.contenders import make_contender
from eval.examples import load_task
from eval.jobs import jobs_for
from eval.ledger import kept_beside
from eval.lossless import Rows, compare, rows_of
from eval.machine import current_commit
from eval.ratios import paired_ratio
from eval.script import measured, new_parser, note, result
from eval.speed import run_rounds
from eval.summary import summarize
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


DECODERS = (
    "generate",
    "ours_tree",
    "ours_plain",
    "ours_exact_plain",
    "ours_exact",
)
MUST = ("ours_exact", "ours_exact_plain")
"""Those that must give the same."""
PAIRS = (
    ("ours_tree", "generate"),
    ("ours_plain", "generate"),
    ("ours_exact", "generate"),
    ("ours_tree", "ours_plain"),
    MUST,
)
COSTS = (
    ("ours_exact", "ours_tree"),
    ("ours_exact_plain", "ours_plain"),
    MUST,
)


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("exactness", measure, parse(arguments))
    print(exactness_table(document))
    print(json.dumps({"pairs": document["pairs"], "costs": document["costs"]}))
    exact = next(pair for pair in document["pairs"] if (pair["found"], pair["wanted"]) == MUST)
    if exact["differences"]:
        sys.exit(f"eval.exactness: {len(exact['differences'])} exact answers differ when drafted")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("exactness", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", default="demo", help="a file of eval/tasks, or a .jsonl file of your own")
    add("--limit", type=int, help="examples to take (default: all)")
    add("--max-new-tokens", type=int, default=128)
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Decode whatever the ledger lacks by every decoder, and compare."""
    examples = load_task(options.task, options.limit, options.data)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    jobs = jobs_for(target, examples, options.max_new_tokens)
    settings = {
        **describe_target(options),
        "task": Path(options.task).name,
        "examples": len(jobs),
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }
    ledger = kept_beside(options.out, settings)
    decoders = [make_contender(name, target) for name in DECODERS]
    run_rounds(target, jobs, decoders, ledger, repeats=1, forced=False, keep_answers=True)
    rows = {name: rows_of(name, ledger.measurements) for name in DECODERS}
    return result(
        "exactness",
        settings,
        device=options.device,
        pairs=[compare(target, jobs, rows, *pair) for pair in PAIRS],
        costs=[cost(rows, *pair) for pair in COSTS],
        contenders=summarize(ledger.measurements),
    )


def cost(rows: dict[str, Rows], decoder: str, against: str) -> dict[str, Any]:
    """Tell what a decoder takes as a multiple of another, which may give other answers.

    ``decode_seconds`` are by token and ``prefill_seconds`` by prompt, both medians over examples;
    ``passes`` are all passes over all tokens.
    """
    ones, others = rows[decoder], rows[against]
    result: dict[str, Any] = {"decoder": decoder, "against": against}
    for label in ("decode_seconds", "prefill_seconds"):
        ratio = paired_ratio(_seconds(ones, label), _seconds(others, label))
        result[label], result[f"{label}_interval"] = ratio.value, [ratio.low, ratio.high]
    return {**result, "passes": _passes_a_token(ones) / _passes_a_token(others)}


def _seconds(rows: Rows, label: str) -> dict[tuple[str, int], float]:
    by_token = label == "decode_seconds"
    return {key: row[label] / (row["tokens"] if by_token else 1) for key, row in rows.items()}


def _passes_a_token(rows: Rows) -> float:
    return float(
        sum(row["passes"] for row in rows.values()) / sum(row["tokens"] for row in rows.values())
    )


if __name__ == "__main__":
    main()
