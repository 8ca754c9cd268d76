"""Question sets: questions, the passages they are asked of, and which of those answer them.

A set is one collection: every question is searched for among all passages of its set. ``squad``,
``nq`` and ``clapnq``: each question has one relevant passage, the one it was written on; another
passage that answers it too counts as wrong, so the figures are lower bounds. ``msmarco``: the ten
passages that a search engine returned for a question are all taken as relevant, since no judgement
of them is recorded: the figures tell whether they are told from the other questions' passages, not
whether they answer. ``demo``: the passages of ``demos/documents`` that hold a question's answer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.examples import in_data, read_rows
from eval.questions import DEMOS, plain, read_questions
from ragaccel.passage import Document, Passage
from ragaccel.retrieval.chunking import split_document
from ragaccel.retrieval.files import list_folder
from ragaccel.retrieval.indexing import index_passages
from ragaccel.retrieval.loaders import read_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.store import Store

_FILES = {
    "squad": "rag/squad_like.jsonl",
    "nq": "rag/nq_open_oracle.jsonl",
    "clapnq": "rag/clapnq_dev.jsonl",
    "msmarco": "rag/llma_msmarco_davinci003.jsonl",
}
SETS = (*_FILES, "demo")


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the ids of the passages that answer it, and the article that it is about."""

    text: str
    relevant: frozenset[str]
    group: str

    @property
    def is_held_out(self) -> bool:
        """Whether settings are judged by it; those of other articles are what they are chosen by.

        Told from the article's name alone, so that no passage is on both sides.
        """
        return hashlib.sha256(self.group.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions and all passages that are searched for them."""

    name: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]

    @property
    def digest(self) -> str:
        """Tells these passages from others."""
        texts = "\0".join(f"{p.passage_id}\0{p.title}\0{p.text}" for p in self.passages)
        return hashlib.sha256(texts.encode()).hexdigest()[:16]

    def index(self, store: Store, embedder: Embedder, folder: Path) -> None:
        """Bring the passages into an index, by a file of them that is written into a folder.

        An index that was begun is gone on with; of one that is whole nothing is embedded again.
        """
        write_passages(self.passages, folder / f"{self.name}.jsonl")
        index_passages(store, embedder, folder / f"{self.name}.jsonl")


def write_passages(passages: Iterable[Passage], path: Path) -> None:
    """Write passages as a collection that ``index_passages`` reads, unless they are there."""
    rows = ({"id": p.passage_id, "title": p.title, "text": p.text} for p in passages)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def load_set(
    name: str, embedder: Embedder, data: Path | None = None, limit: int | None = None
) -> QuestionSet:
    """Load a set, or its first ``limit`` questions with all of its passages.

    Raises:
        MissingDataError: Its corpus is not at hand; says how to point at it.
    """
    if name != "demo":
        passages, questions = _pairs(name, data)
    else:
        documents = demo_documents()
        passages = [p for one in documents for p in split_document(one, embedder.count_tokens)]
        questions = demo_questions(passages)
    return QuestionSet(name, tuple(passages), tuple(questions[:limit]))


def _pairs(name: str, data: Path | None) -> tuple[list[Passage], list[Question]]:
    """Every distinct passage once, and every distinct pair of question and passages."""
    ids: dict[tuple[str, str], str] = {}
    asked: dict[tuple[str, frozenset[str]], Question] = {}
    for row in read_rows(in_data(_FILES[name], data)):
        texts = [(spoken_title(part["title"]), part["text"]) for part in row["passages"]]
        own = frozenset(ids.setdefault(text, f"p{len(ids)}") for text in texts)
        question = row["question"]
        group = texts[0][0] or question
        asked.setdefault((question, own), Question(question.strip(), own, group))
    passages = [Passage(key, text, title, end=len(text)) for (title, text), key in ids.items()]
    return passages, list(asked.values())


def spoken_title(title: str) -> str:
    """A Wikipedia article's title as it is read."""
    return title.replace("_", " ").strip()


def demo_documents() -> list[Document]:
    """The documents that ship, as an index reads them."""
    files = list_folder(DEMOS / "documents").files
    return [read_document(file.path, name=file.name) for file in files]


def demo_questions(passages: Sequence[Passage]) -> list[Question]:
    """The demo's answerable questions, and which of its documents' passages answer them."""
    questions = []
    for asked in read_questions(DEMOS / "questions.jsonl"):
        if asked["answer"] is None:
            continue
        wanted, file = plain(str(asked["answer"])), str(asked["file"])
        own = (p.passage_id for p in passages if p.path == file and wanted in plain(p.text))
        questions.append(Question(str(asked["question"]), frozenset(own), file))
    return questions
