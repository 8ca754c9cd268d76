"""QMSum: a question on a meeting, the part of its transcript, a summary by people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.examples import Example, in_data, read_unified

if TYPE_CHECKING:
    from pathlib import Path


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    return read_unified(in_data("rag/sum_qmsum_valtest_goldspan.jsonl", data), limit)
