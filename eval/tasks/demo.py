"""Demo: the 24 questions on the handbook under demos/, with the passages our retriever finds.

The passages are kept in ``demo.jsonl`` beside this file, so that a run needs neither FAISS nor an
embedder and asks the same of every machine. ``python -m eval.tasks.demo`` writes them anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from eval.examples import Example, read_unified

_DEMOS = Path(__file__).parents[2] / "demos"
_FILE = Path(__file__).with_suffix(".jsonl")


def load(limit: int | None = None, data: Path | None = None) -> list[Example]:  # noqa: ARG001
    return read_unified(_FILE, limit)


def write(num_passages: int = 6) -> int:
    """Retrieve for every question of ``demos/questions.jsonl`` and write the file; count them."""
    from ragaccel.retrieve.embedder import load_embedder
    from ragaccel.retrieve.indexing import index_folder
    from ragaccel.retrieve.retriever import Retriever
    from ragaccel.retrieve.store import Store

    embedder = load_embedder()
    lines = (_DEMOS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder, _FILE.open("w", encoding="utf-8") as file:
        store = Store(Path(folder) / "index.db")
        index_folder(store, embedder, _DEMOS / "documents")
        retriever = Retriever(store, embedder)
        for number, line in enumerate(lines, start=1):
            asked = json.loads(line)
            found = retriever.search(asked["question"], num_passages)
            row = {
                "id": f"demo-{number}",
                "question": asked["question"],
                "passages": [{"title": passage.title, "text": passage.text} for passage in found],
                "answer": asked.get("answer") or "",
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return len(lines)


if __name__ == "__main__":
    print(f"{write()} questions written to {_FILE.name}", file=sys.stderr)
