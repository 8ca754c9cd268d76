"""MT-Bench: chats of two turns without recorded answers, its eight categories in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.examples import Example, alternate, in_data, read_rows

if TYPE_CHECKING:
    from pathlib import Path


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    rows = read_rows(in_data("prompts/mt_bench.jsonl", data))
    return [
        Example(f"{row['category']}-{row['question_id']}", turns=tuple(row["turns"]))
        for row in alternate(rows, lambda row: row["category"], limit)
    ]
