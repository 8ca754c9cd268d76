"""MTRAG, answers: three recorded answers to each turn, by people, llama-3.1-405b and gpt-4o.

Answers to one task stand together, their ids ``conversation<::>turn/who answered``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.examples import Example, in_data, read_unified

if TYPE_CHECKING:
    from pathlib import Path


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    return read_unified(in_data("rag/mtrag_human_answers.jsonl", data), limit)
