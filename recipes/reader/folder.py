"""Folders to ask people's questions of: sentences of articles, and those nearest to a question."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ragaccel.passage import NearestSentence, Passage
from ragaccel.retrieval.language import frequent_words, words_of
from recipes.reader.corpus import Corpus, Question

if TYPE_CHECKING:
    from ragaccel.retrieval import Embedder
    from ragaccel.retrieval.sentence_ranker import SentenceRanker

    Vectors = npt.NDArray[np.float32]

EMBEDDED_AT_ONCE = 4_096
NUM_PASSAGES = 6  # found for a question, as ``RAG`` does
POOL_PARAGRAPHS = 400  # random ones beside the article's
NUM_NEAREST = 8
SHARED_WORD_WEIGHT = 0.6  # of the share of the question's words, beside the cosine
NUM_COMPARED = 100  # sentences, by cosine, whose words are compared with the question's

PASSAGE_TOKENS = 128  # as passages are split in use
NUM_RANKED = 40  # sentences whose passages the ranker reads

SHARE_OF_SET = {"qamr": 0.3}  # its passages are single sentences

Without = str
NOTHING, ANSWER, ARTICLE = "nothing", "answer", "article"


class Nearest(NamedTuple):
    """A sentence near to a question.

    Attributes:
        row: That of the sentence in the folder.
        similarity: The cosine of both.
        relevance: What the ranker gives it; 0 without a ranker.
    """

    row: int
    similarity: float
    relevance: float = 0.0


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
        ranker: Orders the sentences of the passages found, as in use; without one they are in the
            order of their similarities and shared words.

    Attributes:
        passages: The rows of each passage: a paragraph, or a part of a long one.
        passage_of: The index of each row's passage.
    """

    def __init__(
        self,
        corpus: Corpus,
        part: str,
        embedder: Embedder,
        cache: Path,
        ranker: SentenceRanker | None = None,
    ) -> None:
        self.corpus, self.ranker = corpus, ranker
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
        self.passages: list[list[int]] = []
        self.passage_of: list[int] = []
        for index in self.paragraphs:
            self._split(embedder.count_tokens(list(corpus.paragraphs[index].sentences)))
        self._words = [content_words(text) for text in titled]
        self.vectors = embedded(titled, embedder, cache, f"{part}-sentences")
        asked = [question.text for question in self.questions]
        self.question_vectors = embedded(asked, embedder, cache, f"{part}-questions")
        self._paragraph_of = np.repeat(
            np.arange(len(self.paragraphs)),
            [len(corpus.paragraphs[index].sentences) for index in self.paragraphs],
        )

    def order(self, seed: int) -> Iterator[int]:
        """Yield numbers of questions, all of an epoch before the next, for ever."""
        rng = random.Random(seed)
        while True:
            numbers = list(range(len(self.questions)))
            rng.shuffle(numbers)
            for number in numbers:
                if rng.random() < SHARE_OF_SET.get(self.questions[number].source, 1.0):
                    yield number

    def gold_row(self, question: Question) -> int:
        """Return the row of the sentence that answers a question."""
        return self.first_row[question.paragraph] + question.sentence

    def paragraph_of(self, row: int) -> int:
        """Return the corpus' index of the paragraph of a row."""
        return self.paragraphs[self._paragraph_of[row]]

    def has_answer(self, passage: int, question: Question) -> bool:
        """Return whether a passage is of the question's paragraph or has the answer's words."""
        return any(self._answers(row, question) for row in self.passages[passage])

    def has_words_of(self, row: int, question: Question) -> bool:
        """Return whether a row's sentence has the words of a question's answer."""
        return bool(question.answer) and question.answer.casefold() in self.sentence(row).casefold()

    def sentence(self, row: int) -> str:
        """Return the sentence of a row."""
        paragraph = self.paragraph_of(row)
        return self.corpus.paragraphs[paragraph].sentences[row - self.first_row[paragraph]]

    def sentences_of(self, nearest: Sequence[Nearest]) -> list[NearestSentence]:
        """Return sentences as the library does."""
        found = []
        for row, _, relevance in nearest:
            title, text = self.title(row), self.sentence(row)
            passage = Passage(f"{row}", text, title=title)
            found.append(NearestSentence(passage, 0, len(text), relevance))
        return found

    def title(self, row: int) -> str:
        """Return the title of the paragraph of a row."""
        return self.corpus.paragraphs[self.paragraph_of(row)].title

    def nearest(
        self,
        number: int,
        rng: random.Random,
        *,
        without: Without = NOTHING,
        count: int = NUM_NEAREST,
    ) -> list[Nearest]:
        """Return sentences of the passages found for a question, in the order of use.

        Args:
            number: That of the question in ``questions``.
            rng: Draws the other paragraphs of the folder.
            without: What the folder does not hold: nothing, the question's paragraph and other
                sentences with its answer, or its whole article.
            count: The number of sentences.
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
        kept: list[Nearest] = []
        passages: set[int] = set()
        for at in self._in_order_of_use(rows, scores, question):
            row = int(rows[at])
            paragraph = int(self._paragraph_of[row])
            if without != NOTHING and self._answers(row, question):
                continue
            if len(passages) == NUM_PASSAGES and paragraph not in passages:
                continue
            passages.add(paragraph)
            kept.append(Nearest(row, float(scores[at])))
            if len(kept) == (count if self.ranker is None else NUM_RANKED):
                break
        return kept if self.ranker is None else self._ranked(number, kept, without)[:count]

    def _ranked(self, number: int, near: Sequence[Nearest], without: Without) -> list[Nearest]:
        """Return all sentences of the passages of some, in the order of the ranker."""
        assert self.ranker is not None
        question = self.questions[number]
        found = list(dict.fromkeys(self.passage_of[one.row] for one in near))[:NUM_PASSAGES]
        rows = [
            [r for r in self.passages[at] if without == NOTHING or not self._answers(r, question)]
            for at in found
        ]
        asked = [(self.title(of[0]), [self.sentence(row) for row in of]) for of in rows]
        scores = self.ranker.scores(question.text, asked)
        every = [
            Nearest(row, float(self.vectors[row] @ self.question_vectors[number]), relevance)
            for of, relevances in zip(rows, scores, strict=True)
            for row, relevance in zip(of, relevances, strict=True)
        ]
        return sorted(every, key=lambda one: -one.relevance)

    def _split(self, sizes: Sequence[int]) -> None:
        """Add the passages of a paragraph, given the tokens of its sentences."""
        room = 0
        for place, size in enumerate(sizes):
            if size > room or not place:
                self.passages.append([])
                room = PASSAGE_TOKENS
            room -= size
            self.passages[-1].append(len(self.passage_of))
            self.passage_of.append(len(self.passages) - 1)

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
        return self.paragraph_of(row) == question.paragraph or self.has_words_of(row, question)


def content_words(text: str) -> set[str]:
    """Return the stems of an English text's words without the frequent ones."""
    words = (word.removesuffix("'s").removesuffix("’s") for word in words_of(text))
    frequent = frequent_words("English")
    return {_stem(word) for word in words if word not in frequent}


def _stem(word: str) -> str:
    for ending in ("ings", "ing", "ies", "ied", "es", "ed", "s", "ly", "er", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word
