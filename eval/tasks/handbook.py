"""Search the passages of the demo's and the handbook's tasks again, and write the task files.

The demo has 24 questions (``demo.jsonl``). The handbook has 24 tasks with answers of several
sentences: summaries, lists of steps, comparisons, quotations and three conversations of three
turns, written by the project's authors (``handbook.jsonl``; ``handbook_answers.jsonl`` has three
answers each to six of them). The passages are kept in these files, so that a run needs neither
FAISS nor an embedder and is the same on every machine. They were found when the files were written;
since then fused search has begun to rank by scores, and for most questions finds one or two other
passages among six. Results from before and after a new search of the passages are not comparable.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.data import DEMOS, as_messages, read_rows
from eval.runner import new_parser
from eval.tasks import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ragaccel import RAG
    from ragaccel.retrieval import Retriever

DEMO_PASSAGES = 6


def run_write_demo(arguments: Sequence[str] | None = None) -> None:
    """Search the demo's passages again and write ``eval/tasks/demo.jsonl``."""
    new_parser("write_demo", run_write_demo.__doc__).parse_args(arguments)
    lines = (DEMOS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    with indexed_handbook() as retriever:
        rows = [_demo_row(n, json.loads(line), retriever) for n, line in enumerate(lines)]
    _write("demo.jsonl", rows)


def run_write_handbook(arguments: Sequence[str] | None = None) -> None:
    """Search the passages of the handbook's tasks and answers again and write both files."""
    new_parser("write_handbook", run_write_handbook.__doc__).parse_args(arguments)
    from ragaccel import LLM, RAG

    with indexed_handbook() as retriever:
        rag = RAG(LLM.load(), retriever)
        for name in ("handbook.jsonl", "handbook_answers.jsonl"):
            rows = [{**row, "passages": _found(rag, row)} for row in read_rows(FOLDER / name)]
            _write(name, rows)


def _write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (FOLDER / name).write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} rows written to {name}", file=sys.stderr)


@contextmanager
def indexed_handbook() -> Iterator[Retriever]:
    """Index the handbook under demos/ and yield a retriever; delete the index at the end."""
    from ragaccel.retrieval import Retriever, Store, index_folder, load_embedder

    embedder = load_embedder()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "index.db") as store:
        index_folder(store, embedder, DEMOS / "documents")
        yield Retriever(store, embedder)


def _demo_row(number: int, asked: dict[str, Any], retriever: Retriever) -> dict[str, Any]:
    found = retriever.search(asked["question"], DEMO_PASSAGES)
    return {
        "id": f"demo-{number + 1}",
        "question": asked["question"],
        "passages": [{"title": passage.title, "text": passage.text} for passage in found],
        "answer": asked.get("answer") or "",
    }


def _found(rag: RAG, row: dict[str, Any]) -> list[dict[str, str]]:
    prompt = rag.prompt(row["question"], as_messages(row["history"]))
    return [{"title": passage.title, "text": passage.text} for passage in prompt.passages]
