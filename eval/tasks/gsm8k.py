"""GSM8K: word problems and their solutions step by step, which copy little but numbers."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from eval.examples import Example, in_data, read_rows

if TYPE_CHECKING:
    from pathlib import Path


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    rows = islice(read_rows(in_data("prompts/gsm8k_test.jsonl", data)), limit)
    return [
        Example(
            f"gsm8k-{number}",
            prompt=f"Question: {row['question']}\nAnswer:",
            answer=row["answer"],
        )
        for number, row in enumerate(rows, start=1)
    ]
