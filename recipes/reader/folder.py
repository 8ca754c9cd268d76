"""Folders to ask people's questions of: sentences of articles, and those nearest to a question."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragaccel.passage import NearestSentence, Passage
from ragaccel.retrieval.compression import SHARED_WORD_WEIGHT
from ragaccel.retrieval.language import content_words
from recipes.reader.corpus import Corpus, Question

if TYPE_CHECKING:
    from ragaccel.retrieval import Embedder

    Vectors = npt.NDArray[np.float32]

EMBEDDED_AT_ONCE = 4_096
NUM_PASSAGES = 6  # found for a question, as ``RAG`` does
POOL_PARAGRAPHS = 400  # random ones beside the article's
NUM_NEAREST = 8
NUM_COMPARED = 100  # sentences, by cosine, whose words are compared with the question's

Without = str
NOTHING, ANSWER, ARTICLE = "nothing", "answer", "article"


def embedded(texts: Sequence[str], embedder: Embedder, folder: Path, name: str) -> Vectors:
    """Return a vector [E] of each text; finished parts are kept in ``folder`` and used again."""
    digest = hashlib.sha256("\0".join([embedder.fingerprint, *texts]).encode()).hexdigest()[:12]
    kept = folder / f"{name}-{digest}"
    kept.mkdir(parents=True, exist_ok=True)
    parts = []
    for start in range(0, len(texts), EMBEDDED_AT_ONCE):
        part = kept / f"{start}.npy"
        if not part.exists():
            vectors = embedder.embed_documents(list(texts[start : start + EMBEDDED_AT_ONCE]))
            half_written = kept / "half.npy"
            np.save(half_written, vectors.astype(np.float16))
            half_written.replace(part)
            print(f"{name}: {start + len(vectors)} of {len(texts)} embedded", file=sys.stderr)
        parts.append(np.load(part).astype(np.float32))
    return np.concatenate(parts)


class Folder:
    """All sentences of one part of a corpus with their vectors, to draw folders from.

    Args:
        corpus: Paragraphs and questions.
        part: Only its paragraphs and questions are used.
        embedder: That of the retriever.
        cache: Keeps all vectors.
    """

    def __init__(self, corpus: Corpus, part: str, embedder: Embedder, cache: Path) -> None:
        self.corpus = corpus
        self.questions = corpus.of_part(part)
        self.paragraphs = [i for i, p in enumerate(corpus.paragraphs) if p.part == part]
        self.of_article: dict[str, list[int]] = defaultdict(list)
        self.first_row: dict[int, int] = {}
        titled: list[str] = []
        for index in self.paragraphs:
            paragraph = corpus.paragraphs[index]
            self.of_article[paragraph.article].append(index)
            self.first_row[index] = len(titled)
            titled += [f"{paragraph.title}\n{sentence}" for sentence in paragraph.sentences]
        self._words = [content_words(text) for text in titled]
        self.vectors = embedded(titled, embedder, cache, f"{part}-sentences")
        asked = [question.text for question in self.questions]
        self.question_vectors = embedded(asked, embedder, cache, f"{part}-questions")
        self._paragraph_of = np.repeat(
            np.arange(len(self.paragraphs)),
            [len(corpus.paragraphs[index].sentences) for index in self.paragraphs],
        )

    def gold_row(self, question: Question) -> int:
        """Return the row of the sentence that answers a question."""
        return self.first_row[question.paragraph] + question.sentence

    def paragraph_of(self, row: int) -> int:
        """Return the corpus' index of the paragraph of a row."""
        return self.paragraphs[self._paragraph_of[row]]

    def sentence(self, row: int) -> str:
        """Return the sentence of a row."""
        paragraph = self.paragraph_of(row)
        return self.corpus.paragraphs[paragraph].sentences[row - self.first_row[paragraph]]

    def sentences_of(
        self, rows: Sequence[int], similarities: Sequence[float]
    ) -> list[NearestSentence]:
        """Return the sentences of rows as the library does."""
        found = []
        for row, similarity in zip(rows, similarities, strict=True):
            title, text = self.corpus.paragraphs[self.paragraph_of(row)].title, self.sentence(row)
            passage = Passage(f"{row}", text, title=title)
            found.append(NearestSentence(passage, 0, len(text), similarity))
        return found

    def nearest(
        self, number: int, rng: random.Random, *, without: Without = NOTHING
    ) -> list[tuple[int, float]]:
        """Return (row, similarity) of the sentences of the passages found, in the order of use.

        Args:
            number: That of the question in ``questions``.
            rng: Draws the other paragraphs of the folder.
            without: What the folder does not hold: nothing, the question's paragraph and other
                sentences with its answer, or its whole article.
        """
        question = self.questions[number]
        article = self.corpus.paragraphs[question.paragraph].article
        own = self.of_article[article]
        drawn = rng.randrange(max(1, len(self.paragraphs) - POOL_PARAGRAPHS))
        pool = self.paragraphs[drawn : drawn + POOL_PARAGRAPHS]
        if without == ARTICLE:
            paragraphs = [i for i in pool if self.corpus.paragraphs[i].article != article]
        else:
            paragraphs = list(dict.fromkeys([*own, *pool]))
        rows = np.concatenate([np.arange(0), *map(self._rows_of, paragraphs)])
        scores = self.vectors[rows] @ self.question_vectors[number]
        kept: list[tuple[int, float]] = []
        passages: set[int] = set()
        for at in self._in_order_of_use(rows, scores, question):
            row = int(rows[at])
            paragraph = int(self._paragraph_of[row])
            if without != NOTHING and self._answers(row, question):
                continue
            if len(passages) == NUM_PASSAGES and paragraph not in passages:
                continue
            passages.add(paragraph)
            kept.append((row, float(scores[at])))
            if len(kept) == NUM_NEAREST:
                break
        return kept

    def _in_order_of_use(
        self, rows: npt.NDArray[np.int64], scores: Vectors, question: Question
    ) -> list[int]:
        """Return indices of the nearest sentences, by cosine and the words that they share."""
        nearest = np.argsort(-scores, kind="stable")[:NUM_COMPARED]
        asked = content_words(question.text)
        shared = np.array([len(asked & self._words[row]) for row in rows[nearest].tolist()])
        values = scores[nearest] + SHARED_WORD_WEIGHT * shared / max(1, len(asked))
        found: list[int] = nearest[np.argsort(-values, kind="stable")].tolist()
        return found

    def _rows_of(self, paragraph: int) -> npt.NDArray[np.int64]:
        first = self.first_row[paragraph]
        return np.arange(first, first + len(self.corpus.paragraphs[paragraph].sentences))

    def _answers(self, row: int, question: Question) -> bool:
        if self.paragraph_of(row) == question.paragraph:
            return True
        return bool(question.answer) and question.answer.casefold() in self.sentence(row).casefold()
