"""Demo: the 24 questions on the handbook under demos/, with passages that our retriever found.

The passages are kept in ``demo.jsonl`` beside this file, so that a run needs neither FAISS nor an
embedder and asks the same of every machine. They are those of the day they were written: since
then fused search has come to rank by scores, and finds others for most questions, one or two in
six. ``python -m eval.tasks.demo`` writes them anew; results from before do not compare with those.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.examples import Example, read_unified

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragaccel.retrieval.retriever import Retriever

_DEMOS = Path(__file__).parents[2] / "demos"
_FILE = Path(__file__).with_suffix(".jsonl")


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:  # noqa: ARG001
    return read_unified(_FILE, limit)


def write(num_passages: int = 6) -> int:
    """Retrieve for every question of ``demos/questions.jsonl`` and write the file; count them."""
    lines = (_DEMOS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    with indexed_handbook() as retriever:
        rows = [_row(n, json.loads(line), retriever, num_passages) for n, line in enumerate(lines)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    _FILE.write_text(text, encoding="utf-8")
    return len(lines)


@contextmanager
def indexed_handbook() -> Iterator[Retriever]:
    """Index the handbook under demos/, for as long as the context is open."""
    from ragaccel.retrieval.embedder import load_embedder
    from ragaccel.retrieval.indexing import index_folder
    from ragaccel.retrieval.retriever import Retriever
    from ragaccel.retrieval.store import Store

    embedder = load_embedder()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "index.db") as store:
        index_folder(store, embedder, _DEMOS / "documents")
        yield Retriever(store, embedder)


def _row(
    number: int, asked: dict[str, Any], retriever: Retriever, num_passages: int
) -> dict[str, Any]:
    found = retriever.search(asked["question"], num_passages)
    return {
        "id": f"demo-{number + 1}",
        "question": asked["question"],
        "passages": [{"title": passage.title, "text": passage.text} for passage in found],
        "answer": asked.get("answer") or "",
    }


if __name__ == "__main__":
    print(f"{write()} questions written to {_FILE.name}", file=sys.stderr)
