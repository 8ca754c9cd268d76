"""Passages as the default retriever gives them: nearest first, cut to their nearest sentences.

A reader trained on these meets in training what it will meet in use: negatives that an embedder
takes for answers, and an order that is worth trusting where words do not decide.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragaccel.train.reader.passages import Asked, Shape
from ragaccel.train.reader.sources import Piece, Source, Sources

if TYPE_CHECKING:
    from ragaccel.retrieve.embedder import Embedder

KINDS = ("human", "hipporag_2wiki", "wikitext2", "tech_docs")  # embedding the rest takes too long
PASSAGE_SENTENCES = 6  # longer articles are cut into passages of so many
POOL_SENTENCES = 3_000  # that one question is asked of, beside the whole of its own article
EMBED_AT_ONCE = 2_048


class RetrievedPassages:
    """Searches a random part of all sentences, as :class:`ragaccel.FocusedRetriever` would.

    Vectors [S, D] are the mean of each sentence's alone and after its title, which is what that
    retriever compares with the question. ``cache``: a folder that keeps them.
    """

    def __init__(
        self, sources: Sources, rng: random.Random, embedder: Embedder, cache: Path | None = None
    ) -> None:
        self.rng, self.sources, self.embedder = rng, sources, embedder
        held = [source for kind in KINDS for source in sources.by_kind[kind]]
        random.Random(0).shuffle(held)  # neighbours in the array are no neighbours in subject
        self._first_row: dict[int, int] = {}
        self._source: list[Source] = []
        self._number: list[int] = []
        for source in held:
            self._first_row[id(source)] = len(self._source)
            self._source += [source] * len(source.sentences)
            self._number += range(len(source.sentences))
        self.vectors = self._embedded(held, cache)
        self._people: dict[str, npt.NDArray[np.float32]] = {}

    def has(self, source: Source) -> bool:
        """Whether questions on a source can be asked here."""
        return id(source) in self._first_row

    def embed(self, asked: Sequence[Asked]) -> None:
        """Give questions their vectors: many at once are faster. People's are kept."""
        new = [q for q in dict.fromkeys(one.question for one in asked) if q not in self._people]
        vectors = self._people | dict(zip(new, self.embedder.embed_documents(new), strict=True))
        for one in asked:
            one.vector = vectors[one.question]
            if one.asked_in != "made":
                self._people[one.question] = one.vector

    def choose(
        self, asked: Asked, shape: Shape, *, room: int, answerable: bool
    ) -> list[Piece] | None:
        """Draw passages of at most ``room`` tokens, nearest first; the answering one if answerable.

        A passage keeps the run of up to ``shape.max_sentences`` sentences around its nearest one.
        Without a margin the answer is put among the passages wherever it ranks; with one it has to
        be found, else there is nothing to draw.
        """
        find = self._among_others if shape.margin is None else self._as_in_use
        gold_row = self._first_row[id(asked.source)] + asked.gold
        pieces = find(asked, shape, gold_row, answerable)
        if pieces is None or sum(map(self.sources.length, pieces)) > room:
            return None
        return pieces

    def _among_others(
        self, asked: Asked, shape: Shape, gold_row: int, answerable: bool
    ) -> list[Piece]:
        """The nearest passages, and the answering one around its answer, in its place."""
        rng = self.rng
        count = rng.randint(max(shape.min_passages, 3), shape.max_passages)
        best: dict[int, tuple[float, int]] = {}
        for score, row in self._nearest(asked, 30 * count):
            passage = self._passage_row(row)
            if passage not in best and not self._gives_away(self._passage_of(row), asked):
                best[passage] = score, row
        ranked = list(best.values())
        if answerable:
            gold = float(self.vectors[gold_row] @ asked.vector), gold_row
            ranked = sorted([*ranked[: count - 1], gold], reverse=True)
        return [self._cut(row, rng.randint(1, shape.max_sentences)) for _, row in ranked[:count]]

    def _as_in_use(
        self, asked: Asked, shape: Shape, gold_row: int, answerable: bool
    ) -> list[Piece] | None:
        """Each passage's nearest sentence, none much farther than the first.

        None where the answer is not among them. Where it shall not be, its passage is missing or
        only its sentence: then a neighbour is what a reader has to see through.
        """
        assert shape.margin is not None
        rng = self.rng
        missing = -1 if answerable or rng.random() < 0.5 else self._passage_row(gold_row)
        margin = rng.uniform(*shape.margin)
        found: dict[int, Piece] = {}
        is_found, least = False, -1.0
        for score, row in self._nearest(asked, 30 * shape.max_passages):
            passage = self._passage_row(row)
            if score < least or len(found) == shape.max_passages:
                break
            if passage in found or passage == missing:
                continue
            piece = self._cut(row, rng.randint(1, shape.max_sentences))
            answers = answerable and row == gold_row
            if not answers and self._gives_away(piece, asked):
                continue
            found[passage] = piece
            is_found = is_found or answers
            least = max(least, score - margin)
        return list(found.values()) if is_found or not answerable else None

    def _nearest(self, asked: Asked, count: int) -> Iterator[tuple[float, int]]:
        """Scores and rows of the nearest sentences, nearest first."""
        rows = self._pool(asked)
        scores = self.vectors[rows] @ asked.vector
        for i in np.argsort(-scores)[:count].tolist():
            yield float(scores[i]), int(rows[i])

    def _pool(self, asked: Asked) -> npt.NDArray[np.int64]:
        """Rows of a random stretch of everything, and of all that has the source's title."""
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

    def _gives_away(self, passage: Piece, asked: Asked) -> bool:
        """Whether a passage answers as well."""
        sentences = passage.source.sentences[passage.start : passage.end]
        if any(sentence.text == asked.text for sentence in sentences):
            return True
        if not asked.answer:
            return False
        pattern = re.compile(rf"(?<!\w){re.escape(asked.answer)}(?!\w)", re.IGNORECASE)
        return any(pattern.search(sentence.text) for sentence in sentences)

    def _passage_row(self, row: int) -> int:
        """The row of the first sentence of a row's passage, which tells passages apart."""
        return row - self._number[row] % PASSAGE_SENTENCES

    def _passage_of(self, row: int) -> Piece:
        source, first = self._source[row], self._number[self._passage_row(row)]
        return Piece(source, first, min(first + PASSAGE_SENTENCES, len(source.sentences)))

    def _cut(self, row: int, sentences: int) -> Piece:
        """A run of so many sentences of a row's passage, its own among them."""
        passage, number = self._passage_of(row), self._number[row]
        sentences = min(sentences, len(passage.span))
        start = self.rng.randint(
            max(passage.start, number - sentences + 1), min(number, passage.end - sentences)
        )
        return Piece(passage.source, start, start + sentences)

    def _embedded(self, held: Sequence[Source], folder: Path | None) -> npt.NDArray[np.float32]:
        plain = [sentence.text for source in held for sentence in source.sentences]
        titled = [f"{s.title}\n{sentence.text}" for s in held for sentence in s.sentences]
        texts = "\0".join([self.embedder.fingerprint, *titled])
        digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
        cache = folder / f"vectors-{digest}.npy" if folder else None
        if cache is not None and cache.exists():
            kept: npt.NDArray[np.float32] = np.load(cache)
            return kept
        parts = []
        for start in range(0, len(plain), EMBED_AT_ONCE):
            chunk = slice(start, start + EMBED_AT_ONCE)
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
