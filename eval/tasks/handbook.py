"""Handbook: 24 tasks on the handbook under demos/, with answers of several sentences.

Summaries, lists of steps, comparisons, quotations and three conversations of three turns, written
by the project's authors; the passages are those that the library found when these were written,
earlier turns considered, and the answers are written from them.
``handbook_answers.jsonl`` holds three answers each to six of them. Both files are kept, so that a
run needs neither FAISS nor an embedder; ``python -m eval.tasks.handbook`` finds all passages anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.examples import Example, as_messages, read_rows, read_unified
from eval.tasks.demo import indexed_handbook

if TYPE_CHECKING:
    from ragaccel import RAG

_FILE = Path(__file__).with_suffix(".jsonl")
_ANSWERS = _FILE.with_stem("handbook_answers")


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:  # noqa: ARG001
    return read_unified(_FILE, limit)


def write() -> int:
    """Find the passages of every row of both files again and write them; count the rows."""
    from ragaccel import LLM, RAG

    count = 0
    with indexed_handbook() as retriever:
        rag = RAG(LLM.load(), retriever)
        for path in (_FILE, _ANSWERS):
            rows = [{**row, "passages": _found(rag, row)} for row in read_rows(path)]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            path.write_text(text, encoding="utf-8")
            count += len(rows)
    return count


def _found(rag: RAG, row: dict[str, Any]) -> list[dict[str, str]]:
    prompt = rag.prompt(row["question"], as_messages(row["history"]))
    return [{"title": passage.title, "text": passage.text} for passage in prompt.passages]


if __name__ == "__main__":
    print(f"passages found for {write()} rows", file=sys.stderr)
