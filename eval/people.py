"""People's questions, with the sentence that answers each, and folders to ask them of.

All paragraphs of an article are in one part: ``TRAIN``, ``DEVELOPMENT``, on which things may be
chosen, or ``HELD_OUT``, on which they are only measured. The bundled reader was trained on parts of
two of the sets (SQuAD 2.0's and Natural Questions'), and on none of the others.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragaccel.errors import ConfigurationError
from ragaccel.passage import NearestSentence, Passage, split_sentences
from recipes.reader.corpus import detokenized

if TYPE_CHECKING:
    from ragaccel.retrieval import Embedder

    Vectors = npt.NDArray[np.float32]

TRAIN, DEVELOPMENT, HELD_OUT = "train", "development", "held-out"
DEVELOPMENT_SHARE, HELD_OUT_SHARE = 0.04, 0.04  # of the articles
NUM_HELD_OUT_XQUAD = 16
XQUAD_START = 2910  # the lines before are of SQuAD 2.0

# Left out: chat logs (molweni), answers from several sentences (hotpotqa), plots (narrativeqa) and
# reports (tatqa), in which a single sentence seldom answers.
QUESTION_SETS = ("squad1_train_part", "squadshifts_newwiki", "tydiqa_en", "onestopqa", "qamr",
                 "selqa", "fairytaleqa")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of an article, split into sentences.

    Attributes:
        article: Names the article across all sets.
        part: ``TRAIN``, ``DEVELOPMENT`` or ``HELD_OUT``: all paragraphs of an article are in one.
    """

    title: str
    sentences: tuple[str, ...]
    article: str
    part: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question written by a person.

    Attributes:
        paragraph: Index of the paragraph that it was asked of.
        sentence: Index of the sentence that answers it.
        answer: The short answer, or "".
        source: Name of its set.
    """

    text: str
    paragraph: int
    sentence: int
    answer: str
    source: str


@dataclass(slots=True)
class Corpus:
    """All paragraphs, and the questions asked of them."""

    paragraphs: list[Paragraph]
    questions: list[Question]

    def of_part(self, part: str) -> list[Question]:
        """Return the questions of a part."""
        return [q for q in self.questions if self.paragraphs[q.paragraph].part == part]

    def digest(self) -> str:
        """Return a digest of all questions and paragraphs, to be told with the trained model."""
        every = (
            [(q.text, q.paragraph, q.sentence) for q in self.questions],
            [(p.title, p.sentences, p.part) for p in self.paragraphs],
        )
        return _digest(json.dumps(every))[:16]


def load_corpus(data: Path) -> Corpus:
    """Read the question sets under ``data``.

    Raises:
        ConfigurationError: The folder holds none.
    """
    files = [data / "qa" / f"{name}.jsonl.xz" for name in QUESTION_SETS]
    if not all(file.exists() for file in files):
        raise ConfigurationError(
            f"there are no question sets in {data / 'qa'}: pass --data FOLDER or set RAGACCEL_DATA"
        )
    builder = _Builder(held_out=held_out_titles(data))
    for line, row in enumerate(rows_of(data / "rag" / "squad_like.jsonl")):
        builder.add(row, "xquad" if line >= XQUAD_START else "squad")
    for row in rows_of(data / "rag" / "nq_open_oracle.jsonl"):
        builder.add(row, "nq")
    for file in files:
        for row in rows_of(file):
            builder.add(row, file.name.split(".")[0])
    return Corpus(builder.paragraphs, builder.questions)


def held_out_titles(data: Path) -> frozenset[str]:
    """Return the titles of the sixteen XQuAD articles that nothing is trained or chosen on."""
    squad = rows_of(data / "rag" / "squad_like.jsonl")
    others = {row["passages"][0]["title"] for row in squad[:XQUAD_START]}
    xquad = {row["passages"][0]["title"] for row in squad[XQUAD_START:]} - others
    return frozenset(sorted(xquad, key=_digest)[:NUM_HELD_OUT_XQUAD])


class _Builder:
    """Collects paragraphs once each, and the questions whose sentence is found in them."""

    def __init__(self, held_out: frozenset[str]) -> None:
        self.held_out = held_out
        self.paragraphs: list[Paragraph] = []
        self.questions: list[Question] = []
        self._index_of: dict[tuple[str, tuple[str, ...]], int] = {}
        self._asked: set[tuple[str, int]] = set()

    def add(self, row: dict[str, Any], source: str) -> None:
        answer, given = row["answer"], row.get("sentence", "")
        if not answer or (source not in ("xquad", "squad", "nq") and not given):
            return
        for passage in row["passages"]:
            text = detokenized(passage["text"]) if source == "nq" else passage["text"]
            sentences = tuple(filter(None, map(one_line, split_sentences(text))))
            place = _place_of(sentences, row["question"], answer, one_line(given))
            if place is None:
                continue
            index = self._paragraph(passage["title"], sentences, source)
            question = Question(one_line(row["question"]), index, place, answer, source)
            if (question.text, index) not in self._asked:
                self._asked.add((question.text, index))
                self.questions.append(question)
            return

    def _paragraph(self, title: str, sentences: tuple[str, ...], source: str) -> int:
        shown = title.replace("_", " ").strip()
        if (shown, sentences) not in self._index_of:
            # titles of two sets may be the same article's
            article = shown.casefold() or _digest(sentences[0])
            part = HELD_OUT if title in self.held_out else _part(article, source)
            self._index_of[shown, sentences] = len(self.paragraphs)
            self.paragraphs.append(Paragraph(shown, sentences, article, part))
        return self._index_of[shown, sentences]


def _part(article: str, source: str) -> str:
    drawn = int(_digest(article)[:8], 16) / 2**32
    if source == "xquad":
        return TRAIN
    if drawn < HELD_OUT_SHARE:
        return HELD_OUT
    return DEVELOPMENT if drawn < HELD_OUT_SHARE + DEVELOPMENT_SHARE else TRAIN


def _place_of(sentences: tuple[str, ...], question: str, answer: str, given: str) -> int | None:
    """Return the index of the sentence that answers, or None if two answer equally well.

    It is the one that was given, else the one with the answer and most words of the question.
    """
    if given:
        holding = [i for i, s in enumerate(sentences) if given in s or s in given]
        return max(holding, key=lambda i: len(sentences[i]), default=None)
    holding = [i for i, s in enumerate(sentences) if answer.casefold() in s.casefold()]
    asked = _words(question)
    shared: dict[int, list[int]] = defaultdict(list)
    for i in holding:
        shared[len(asked & _words(sentences[i]))].append(i)
    best = shared[max(shared)] if shared else []
    return best[0] if len(best) == 1 else None


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def one_line(text: str) -> str:
    """Return text with every run of white space as one space."""
    return re.sub(r"\s+", " ", text).strip()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON-lines file, also of a packed one (``.xz``)."""
    raw = path.read_bytes()
    raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
    lines: Iterable[str] = raw.decode("utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


EMBEDDED_AT_ONCE = 4_096
NUM_PASSAGES = 6  # found for a question, as ``RAG`` does
POOL_PARAGRAPHS = 400  # random ones beside the article's
NUM_NEAREST = 8

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

    def nearest_sentence(self, row: int, similarity: float) -> NearestSentence:
        """Return the sentence of a row as the library does."""
        title, text = self.corpus.paragraphs[self.paragraph_of(row)].title, self.sentence(row)
        return NearestSentence(Passage(f"{row}", text, title=title), 0, len(text), similarity)

    def nearest(
        self, number: int, rng: random.Random, *, without: Without = NOTHING
    ) -> list[tuple[int, float]]:
        """Return (row, similarity) of the sentences of the passages found, nearest first.

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
        rows = np.concatenate([self._rows_of(i) for i in paragraphs])
        scores = self.vectors[rows] @ self.question_vectors[number]
        order = np.argsort(-scores, kind="stable")
        kept: list[tuple[int, float]] = []
        passages: set[int] = set()
        for at in order.tolist():
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

    def _rows_of(self, paragraph: int) -> npt.NDArray[np.int64]:
        first = self.first_row[paragraph]
        return np.arange(first, first + len(self.corpus.paragraphs[paragraph].sentences))

    def _answers(self, row: int, question: Question) -> bool:
        if self.paragraph_of(row) == question.paragraph:
            return True
        return bool(question.answer) and question.answer.casefold() in self.sentence(row).casefold()
