"""Passages as the default retriever returns them: nearest first, cut to their nearest sentences.

Such passages make training similar to use: they include the embedding model's hard negatives, and
their order hints at the answer.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from recipes.reader.passages import Shape, TargetedQuestion
from recipes.reader.sources import Piece, Source, Sources

if TYPE_CHECKING:
    from ragaccel.retrieval import Embedder

KINDS = ("human", "hipporag_2wiki", "wikitext2", "tech_docs")  # embedding the rest takes too long
PASSAGE_SENTENCES = 6  # per passage; longer articles are split
POOL_SENTENCES = 3_000  # random sentences to search for a question, with its own article
EMBEDDING_BATCH_SIZE = 2_048


class RetrievedPassages:
    """A search in a random part of all sentences, like that of ``CompressingRetriever``.

    The vector of a sentence is the mean of two, with and without the title before it. All vectors
    [S, D] are kept in the folder ``cache``.
    """

    def __init__(
        self, sources: Sources, rng: random.Random, embedder: Embedder, cache: Path | None = None
    ) -> None:
        self.rng, self.sources, self.embedder = rng, sources, embedder
        embedded_sources = [source for kind in KINDS for source in sources.by_kind[kind]]
        # shuffled, so that consecutive rows of the array do not share a subject
        random.Random(0).shuffle(embedded_sources)
        self._first_row: dict[int, int] = {}
        self._source: list[Source] = []
        self._number: list[int] = []
        for source in embedded_sources:
            self._first_row[id(source)] = len(self._source)
            self._source += [source] * len(source.sentences)
            self._number += range(len(source.sentences))
        self.vectors = self._embedded(embedded_sources, cache)
        self._people: dict[str, npt.NDArray[np.float32]] = {}

    def has(self, source: Source) -> bool:
        """Return whether the sentences of a source are indexed."""
        return id(source) in self._first_row

    def embed(self, asked: Sequence[TargetedQuestion]) -> None:
        """Embed questions in one batch and set their vectors; cache those of people's questions."""
        new = [q for q in dict.fromkeys(one.question for one in asked) if q not in self._people]
        vectors = self._people | dict(zip(new, self.embedder.embed_documents(new), strict=True))
        for one in asked:
            one.vector = vectors[one.question]
            if one.origin != "made":
                self._people[one.question] = one.vector

    def choose(
        self, asked: TargetedQuestion, shape: Shape, *, room: int, answerable: bool
    ) -> list[Piece] | None:
        """Draw passages of at most ``room`` tokens, nearest first; the answering one if answerable.

        A passage keeps the run of up to ``shape.max_sentences`` sentences around its nearest one,
        the answering passage around the answer.
        """
        rng = self.rng
        num_passages = rng.randint(max(shape.min_passages, 3), shape.max_passages)
        gold_row = self._first_row[id(asked.source)] + asked.gold
        rows = self._ranked(asked, num_passages, gold_row if answerable else None)
        pieces = []
        for row in rows:
            sentences = rng.randint(1, shape.max_sentences)
            piece = self._cut(row, sentences)
            room -= self.sources.length(piece)
            if room < 0:
                return None
            pieces.append(piece)
        return pieces

    def _ranked(self, asked: TargetedQuestion, count: int, gold_row: int | None) -> list[int]:
        """Return the row of the best sentence of each nearest passage, ``gold_row`` among them."""
        rows = self._pool(asked)
        scores = self.vectors[rows] @ asked.vector
        best: dict[tuple[int, int], tuple[float, int]] = {}
        for i in np.argsort(-scores)[: 30 * count].tolist():
            row = int(rows[i])
            passage = id(self._source[row]), self._number[row] // PASSAGE_SENTENCES
            if passage not in best and not self._answers_too(self._passage_of(row), asked):
                best[passage] = float(scores[i]), row
        if gold_row is None:
            return [row for _, row in list(best.values())[:count]]
        best.pop((id(asked.source), asked.gold // PASSAGE_SENTENCES), None)
        gold = float(self.vectors[gold_row] @ asked.vector), gold_row
        others = list(best.values())[: count - 1]
        return [row for _, row in sorted([*others, gold], reverse=True)]

    def _pool(self, asked: TargetedQuestion) -> npt.NDArray[np.int64]:
        """Return the rows of a random stretch and of all sources with the question's title."""
        size = self.rng.randint(POOL_SENTENCES // 10, POOL_SENTENCES)
        start = self.rng.randrange(max(1, len(self._source) - size))
        own = [
            row
            for source in self.sources.of_title[asked.source.title]
            if self.has(source)
            for first in (self._first_row[id(source)],)
            for row in range(first, first + len(source.sentences))
        ]
        stretch = np.arange(start, min(start + size, len(self._source)))
        return np.union1d(stretch, np.asarray(own, dtype=np.int64))

    def _answers_too(self, passage: Piece, asked: TargetedQuestion) -> bool:
        """Return whether a passage contains the answer, to reject it as a distractor."""
        sentences = passage.source.sentences[passage.start : passage.end]
        if any(sentence.text == asked.text for sentence in sentences):
            return True
        if not asked.answer:
            return False
        pattern = re.compile(rf"(?<!\w){re.escape(asked.answer)}(?!\w)", re.IGNORECASE)
        return any(pattern.search(sentence.text) for sentence in sentences)

    def _passage_of(self, row: int) -> Piece:
        source = self._source[row]
        first = self._number[row] // PASSAGE_SENTENCES * PASSAGE_SENTENCES
        return Piece(source, first, min(first + PASSAGE_SENTENCES, len(source.sentences)))

    def _cut(self, row: int, sentences: int) -> Piece:
        """Draw a run of sentences of a row's passage that contains the row's sentence."""
        passage, number = self._passage_of(row), self._number[row]
        sentences = min(sentences, len(passage.span))
        start = self.rng.randint(
            max(passage.start, number - sentences + 1), min(number, passage.end - sentences)
        )
        return Piece(passage.source, start, start + sentences)

    def _embedded(
        self, embedded_sources: Sequence[Source], folder: Path | None
    ) -> npt.NDArray[np.float32]:
        plain = [sentence.text for source in embedded_sources for sentence in source.sentences]
        titled = [
            f"{s.title}\n{sentence.text}" for s in embedded_sources for sentence in s.sentences
        ]
        texts = "\0".join([self.embedder.fingerprint, *titled])
        digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
        cache = folder / f"vectors-{digest}.npy" if folder else None
        if cache is not None and cache.exists():
            kept: npt.NDArray[np.float32] = np.load(cache)
            return kept
        parts = []
        for start in range(0, len(plain), EMBEDDING_BATCH_SIZE):
            chunk = slice(start, start + EMBEDDING_BATCH_SIZE)
            own = self.embedder.embed_documents(plain[chunk])
            parts.append((own + self.embedder.embed_documents(titled[chunk])) / 2)
            print(f"embedded {start + len(own)} of {len(plain)} sentences", file=sys.stderr)
        vectors = np.concatenate([*parts, np.empty((0, self.embedder.dimension), np.float32)])
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            half = cache.with_name("half." + cache.name)
            np.save(half, vectors)
            half.replace(cache)
        return vectors
