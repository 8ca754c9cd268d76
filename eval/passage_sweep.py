"""How long passages should be, and whether to overlap; part of ``python -m eval.quality --sweep``.

Documents are cut to each length and searched with the question; a passage answers when it holds the
answer whole, at its place in the paragraph that the question was asked of. More of long passages
than of short ones would always hold it, so lengths are compared at the same *number of tokens*
found, titles included, as they would fill a prompt: worth is the share of questions whose answer is
within so many tokens, averaged over four budgets. With overlap, a passage begins in the middle of
the one before; what stands in two of them is paid for twice.

``squad_articles``: the paragraphs of an article, one document; gold is the short answer.
``clapnq_articles``: CLAP NQ's passages in the same collection; gold is the sentence that the long
answer repeats most. ``demo``: the documents and answers that ship.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.choosing import choose, gain
from eval.examples import in_data, read_rows
from eval.question_sets import (
    Question,
    QuestionSet,
    demo_documents,
    demo_questions,
    spoken_title,
)
from eval.reader import clapnq_questions
from ragaccel.passage import Document, Passage
from ragaccel.retrieval.chunking import DEFAULT_PASSAGE_TOKENS, split_document
from ragaccel.retrieval.store import embedded_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from eval.choosing import Questions
    from ragaccel.retrieval.retriever import Retriever

    CountTokens = Callable[[list[str]], list[int]]
    Needed = Sequence[int | None]
    Row = dict[str, Any]

LENGTHS = (32, 64, 96, 128, 170)  # all-MiniLM-L6-v2 sees 254 tokens, a third kept for the title
BUDGETS = (256, 512, 768, 1024)
DEPTH = 50


@dataclass(frozen=True, slots=True)
class Cut:
    """How documents are cut: the most tokens of a passage, and whether neighbours share half."""

    tokens: int = DEFAULT_PASSAGE_TOKENS
    overlap: bool = False

    @property
    def name(self) -> str:
        """For people and for files."""
        return f"{self.tokens}-overlapping" if self.overlap else str(self.tokens)

    def passages(self, document: Document, count_tokens: CountTokens) -> list[Passage]:
        """Cut a document."""
        if not self.overlap:
            return split_document(document, count_tokens, self.tokens)
        return joined(document, split_document(document, count_tokens, self.tokens // 2))


LIBRARY = Cut()


def cuts_swept() -> list[Cut]:
    return [Cut(tokens, overlap) for overlap in (False, True) for tokens in LENGTHS]


def joined(document: Document, halves: Sequence[Passage]) -> list[Passage]:
    """Join every passage with the next one under the same heading; one that has none stays."""
    passages = []
    for number, first in enumerate(halves):
        follows = halves[number + 1] if number + 1 < len(halves) else None
        before = halves[number - 1] if number else None
        if follows is not None and follows.title == first.title:
            text = document.text[first.start : follows.end]
            passages.append(replace(first, text=text, end=follows.end))
        elif before is None or before.title != first.title:  # else it is in the one before
            passages.append(first)
    return passages


@dataclass(frozen=True, slots=True)
class Asked:
    """A question on an article, and where in the document its answer stands."""

    text: str
    path: str
    places: tuple[tuple[int, int], ...]

    def question(self, passages: Iterable[Passage]) -> Question:
        """The question with the passages, of its own document, that hold an answer whole."""
        own = (
            p.passage_id
            for p in passages
            if any(p.start <= start and end <= p.end for start, end in self.places)
        )
        return Question(self.text, frozenset(own), self.path)


class Articles:
    """Documents made of paragraphs, in the order given, a paragraph of an article once."""

    def __init__(self) -> None:
        self._paragraphs: dict[str, dict[str, int]] = {}  # by path: paragraph → where it starts
        self._lengths: dict[str, int] = {}

    def place(self, title: str, paragraph: str) -> tuple[str, int]:
        """Put a paragraph into its article if it is not there; return (path, offset)."""
        path = re.sub(r"\W+", "-", title) + ".txt"
        known = self._paragraphs.setdefault(path, {})
        if paragraph not in known:
            known[paragraph] = self._lengths.get(path, 0)
            self._lengths[path] = known[paragraph] + len(paragraph) + len("\n\n")
        return path, known[paragraph]

    def documents(self) -> list[Document]:
        """The articles, each its paragraphs with an empty line between them."""
        return [Document(path, "\n\n".join(known)) for path, known in self._paragraphs.items()]


def load_articles(data: Path | None) -> tuple[list[Document], dict[str, list[Asked]]]:
    """SQuAD's and CLAP NQ's passages as articles, and what is asked of them.

    Raises:
        MissingDataError: The sets are not at hand.
    """
    articles = Articles()
    squad = [
        _asked(articles, row["question"], spoken_title(part["title"]), part["text"], row["answer"])
        for row in read_rows(in_data("rag/squad_like.jsonl", data))
        for part in row["passages"]
    ]
    clapnq = [
        _asked(articles, one.question, one.title, " ".join(one.sentences), one.sentences[one.gold])
        for one in clapnq_questions(in_data("rag", data).parent)
    ]
    asked = {"squad_articles": _once_each(squad), "clapnq_articles": _once_each(clapnq)}
    return articles.documents(), asked


def _asked(articles: Articles, question: str, title: str, paragraph: str, answer: str) -> Asked:
    path, offset = articles.place(title, paragraph)
    found = re.finditer(re.escape(answer), paragraph)
    places = tuple((offset + place.start(), offset + place.end()) for place in found)
    return Asked(question.strip(), path, places)


def _once_each(asked: Iterable[Asked]) -> list[Asked]:
    """Every question of an article once, with all places at which any of its answers stands."""
    places: dict[tuple[str, str], dict[tuple[int, int], None]] = {}
    for one in asked:
        places.setdefault((one.text, one.path), {}).update(dict.fromkeys(one.places))
    return [Asked(text, path, tuple(known)) for (text, path), known in places.items()]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents with the questions of one or more sets, which are searched for in all of them."""

    name: str
    documents: Sequence[Document]
    asked: dict[str, list[Asked]]  # by set; empty for the demo, whose answers know no place

    def cut(self, cut: Cut, count_tokens: CountTokens) -> dict[str, QuestionSet]:
        """The sets with the documents cut one way; all have the same passages."""
        passages = [p for one in self.documents for p in cut.passages(one, count_tokens)]
        of_path: dict[str, list[Passage]] = {}
        for passage in passages:
            of_path.setdefault(passage.path, []).append(passage)
        questions = {
            name: [one.question(of_path[one.path]) for one in all_]
            for name, all_ in self.asked.items()
        } or {self.name: demo_questions(passages)}
        index = f"{self.name}-{cut.name}"
        return {
            name: QuestionSet(index, tuple(passages), tuple(all_))
            for name, all_ in questions.items()
        }


def demo_corpus() -> Corpus:
    return Corpus("demo", demo_documents(), {})


def articles_corpus(data: Path | None, limit: int | None = None) -> Corpus:
    """The articles, with the first ``limit`` questions of each set."""
    documents, asked = load_articles(data)
    return Corpus("articles", documents, {name: all_[:limit] for name, all_ in asked.items()})


def tokens_needed(asked: QuestionSet, retriever: Retriever) -> list[int | None]:
    """Count the tokens found up to the end of the first passage that answers; None: none does."""
    texts = [embedded_text(passage) for passage in asked.passages]
    counts = retriever.embedder.count_tokens(texts)
    size = {p.passage_id: count for p, count in zip(asked.passages, counts, strict=True)}
    needed: list[int | None] = []
    for question in asked.questions:
        found = [p.passage_id for p in retriever.search(question.text, DEPTH)]
        first = next((i for i, name in enumerate(found) if name in question.relevant), None)
        needed.append(None if first is None else sum(size[name] for name in found[: first + 1]))
    return needed


def within(needed: Needed, budget: int) -> list[float]:
    """1 for each answer that was within so many tokens, else 0."""
    return [float(tokens is not None and tokens <= budget) for tokens in needed]


def worth(needed: Needed) -> list[float]:
    """The share of the budgets that each answer was within."""
    return np.mean([within(needed, budget) for budget in BUDGETS], axis=0).tolist()


def passage_row(name: str, asked: QuestionSet, retriever: Retriever, cut: Cut) -> Row:
    """Ask a set's questions of its documents cut one way."""
    return {
        "set": name,
        **asdict(cut),
        "passages": len(asked.passages),
        "needed": tokens_needed(asked, retriever),
    }


def grid_entry(row: Row) -> Row:
    """What the grid holds of a cut and set."""
    needed = row["needed"]
    return {
        "sweep": "passages",
        **{key: value for key, value in row.items() if key != "needed"},
        **{f"within_{n}": round(float(np.mean(within(needed, n))), 4) for n in BUDGETS},
        "worth": round(float(np.mean(worth(needed))), 4),
    }


def verdict(rows: Iterable[Row], questions: Questions) -> dict[str, Any]:
    """The cut chosen by some sets, and what it gains over the library's."""
    values: dict[Cut, dict[str, list[float]]] = {}
    for row in rows:
        if row["set"] in questions:
            cut = Cut(row["tokens"], row["overlap"])
            values.setdefault(cut, {})[row["set"]] = worth(row["needed"])
    best = choose(values, questions)
    found = {"setting": asdict(best), "gain": gain(values[best], values[LIBRARY], questions)}
    return {"by": "worth", "library": asdict(LIBRARY), "chosen": {"length and overlap": found}}
