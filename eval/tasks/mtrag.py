"""MTRAG-UN: turns of conversations on about three passages, answers by mixtral-8x7b."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.examples import Example, in_data, read_unified

if TYPE_CHECKING:
    from pathlib import Path


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:
    return read_unified(in_data("rag/mtrag_un.jsonl", data), limit)
