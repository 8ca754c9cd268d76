"""The collection: what is asked about, brought into one index on disk as a user would have it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from eval.examples import MissingDataError, load_task
from eval.rag_clock import TimedEmbedder, TimedSource
from eval.script import note
from ragaccel import Retriever, Store, index_folder, index_passages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eval.examples import Example
    from ragaccel import Embedder

DOCUMENTS = Path(__file__).parents[1] / "demos" / "documents"
ABOUT_DOCUMENTS = frozenset({"demo", "handbook"})
"""Tasks that ask about the documents that ship: the index is made of those."""
TASK, SHIPPED = "llma", "handbook"


@dataclass(frozen=True, slots=True)
class Collection:
    """An open index: what searches it, and how many passages it holds."""

    source: TimedSource
    num_passages: int


def load_questions(name: str | None, data: Path | None) -> tuple[str, list[Example]]:
    """Load a task by name; without one, the search questions, or those that ship."""
    try:
        return name or TASK, load_task(name or TASK, None, data)
    except MissingDataError as error:
        if name is not None:
            raise
        note(f"{error}: taking the questions on demos/documents, which ship")
        return SHIPPED, load_task(SHIPPED)


@contextmanager
def open_collection(
    task: str, examples: Sequence[Example], embedder: Embedder
) -> Iterator[Collection]:
    """Index the passages of all examples, or the documents they ask about; gone at the end."""
    timed = TimedEmbedder(embedder)
    with TemporaryDirectory() as folder, Store(Path(folder) / "index.db") as store:
        if task in ABOUT_DOCUMENTS:
            index_folder(store, embedder, DOCUMENTS)
        else:
            index_passages(store, embedder, write_passages(examples, Path(folder) / "all.jsonl"))
        note(f"{store.count_passages():,} passages indexed")
        yield Collection(TimedSource(Retriever(store, timed), timed), store.count_passages())


def write_passages(examples: Sequence[Example], path: Path) -> Path:
    """Write all passages as a collection, each text once."""
    once = {passage.text: passage for example in examples for passage in example.passages}
    lines = (
        json.dumps({"id": passage.passage_id, "title": passage.title, "text": passage.text})
        for passage in once.values()
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def share_found(collection: Collection, examples: Sequence[Example], k: int) -> float:
    """The share of the questions' own passages, from which answers were written, among the k found.

    At most k of each question count.
    """
    found = wanted = 0
    for example in examples:
        own = {passage.text for passage in example.passages}
        texts = {passage.text for passage in collection.source.search(example.question, k)}
        found, wanted = found + len(own & texts), wanted + min(k, len(own))
    return found / wanted
