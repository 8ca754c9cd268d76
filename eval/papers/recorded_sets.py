"""Recorded sets: the answers that the papers' experiments replay, or else those that ship."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.examples import DATA_VARIABLE, TASKS, in_data, read_rows
from eval.machine import current_commit
from eval.recordings import add_set_options, lay_out
from eval.script import note
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
    load_tokenizer,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from eval.recordings import Recorded
    from eval.targets import Target

    Row = dict[str, Any]

ORIGINAL, UNIFIED = "llma_rag_original", "llma_msmarco_davinci003"
SHIPPED, SHIPPED_ANSWERS = "handbook", "handbook_answers"
"""What ships under ``eval/tasks``: one answer to each task, and three answers to some."""


def add_replayed_options(parser: argparse.ArgumentParser, sets: Sequence[str]) -> None:
    """Add the options of an experiment that is replayed only."""
    add_set_options(parser)
    parser.set_defaults(sets=",".join(sets), tokenizer=None, limit=None, model=None)
    parser.add_argument("--out", type=Path, help="result file")


def add_paper_options(parser: argparse.ArgumentParser, sets: Sequence[str]) -> None:
    """Add the options of an experiment that is replayed, and timed where a model is named."""
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    parser.set_defaults(model=None)
    add("--sets", default=",".join(sets), help="files of rag/ in the data folder")
    add("--limit", type=int, help="rows of each file (default: all)")
    add("--repeats", type=int, default=1, help="rounds over all rows, where a model is timed")
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")


def has_data(options: argparse.Namespace) -> bool:
    """Whether a data folder is named; where none is, what ships is replayed."""
    return options.data is not None or DATA_VARIABLE in os.environ


def set_paths(options: argparse.Namespace, names: str, shipped: str = SHIPPED) -> dict[str, Path]:
    """Find files of ``rag/`` by names with commas between, or else what ships in their place.

    Raises:
        MissingDataError: a set that the data folder lacks.
    """
    if has_data(options):
        return {n: in_data(f"rag/{n}.jsonl", options.data) for n in names.split(",")}
    where = f"eval/tasks/{shipped}.jsonl"
    note(f"no data folder (--data, {DATA_VARIABLE}): {where}, which ships, in place of {names}")
    return {shipped: TASKS / f"{shipped}.jsonl"}


def answered_rows(path: Path, limit: int | None) -> list[Row]:
    """Read the first rows of a file that have an answer."""
    rows = (row for row in read_rows(path) if "result" in row or row.get("answer", "").strip())
    return list(islice(rows, limit))


def laid_out(rows: Sequence[Row], tokenizer: Any) -> list[Recorded]:
    """Lay out the rows whose prompts are not too long."""
    return [one for row in rows if (one := lay_out(row, tokenizer)) is not None]


def chosen_models(options: argparse.Namespace) -> tuple[Target | None, Any]:
    """Load the model of ``--model``, if one is to be timed, and the tokenizer of the answers."""
    if options.model:
        note(f"loading {options.model}")
        target = chosen_target(options, options.dtype)
        return target, target.tokenizer.tokenizer
    name = options.tokenizer or ("llama2" if has_data(options) else "reader")
    return None, load_tokenizer(name, options.data).tokenizer


def describe_paper_run(options: argparse.Namespace) -> dict[str, Any]:
    """All that must agree for two runs of an experiment to be comparable."""
    words = options.tokenizer or ("llama2" if has_data(options) else "reader")
    model = describe_target(options) | {"repeats": options.repeats} if options.model else {}
    return {
        "sets": options.sets if has_data(options) else "what ships",
        "limit": options.limit,
        "timed": model.get("model", "decoding steps, replayed"),
        **(model or {"tokenizer": words}),
        "commit": current_commit(),
    }
