"""HumanEval-X, Python: one function a request, as SPACE's authors ask for them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from eval.examples import Example, in_data, read_rows

if TYPE_CHECKING:
    from pathlib import Path


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    rows = islice(read_rows(in_data("prompts/humaneval_x_python.jsonl", data)), limit)
    return [
        Example(row["task_id"], prompt=row["prompt"], answer=row["canonical_solution"])
        for row in rows
    ]
