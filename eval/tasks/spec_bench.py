"""Spec-Bench without its summaries: translation, questions, sums, RAG and MT-Bench, in turn.

Prompts of one message or two without recorded answers; ids begin with the category. What is asked
about retrieved texts holds them in its message, so that there are no passages to copy from but the
prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.examples import Example, alternate, in_data, read_rows

if TYPE_CHECKING:
    from pathlib import Path

CATEGORIES = ("translation", "qa", "math_reasoning", "rag")
CHATS = "mt_bench"  # whatever has none of the categories above: eight more, of ten rows each


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    rows = read_rows(in_data("rag/spec_bench.jsonl", data))
    return [
        Example(f"{category(row)}-{row['question_id']}", turns=tuple(row["turns"]))
        for row in alternate(rows, category, limit)
    ]


def category(row: dict[str, Any]) -> str:
    """The category of a row as the benchmark's authors report it."""
    return row["category"] if row["category"] in CATEGORIES else CHATS
