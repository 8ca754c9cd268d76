"""The retriever: vector search and full-text search of a store, fused by score."""

from __future__ import annotations

import operator
import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from ragaccel.errors import ConfigurationError, EmptyIndexError, brief
from ragaccel.paths import PerProcess
from ragaccel.retrieval.embedder import as_embedder
from ragaccel.retrieval.language import is_english
from ragaccel.retrieval.store import Store, default_index_path
from ragaccel.retrieval.vector_index import VectorIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieval.embedder import AnyEmbedder
    from ragaccel.retrieval.store import StoredPassage

    Ranking = list[tuple[int, float]]  # row ids and scores, best first
    Where = Callable[[StoredPassage], bool] | None


Key = TypeVar("Key", int, str)

MODES = ("fused", "dense", "text")
NUM_CANDIDATES = 50
_ZERO_RANK = NUM_CANDIDATES  # fusion scales cosines so that the one at this rank becomes 0
DENSE_WEIGHT = 0.5
_FOREIGN_DENSE_WEIGHT = 0.15  # of an embedder that does not know the question's language
_FILE_WEIGHT, _FILE_PASSAGES = 0.6, 3  # of a file's best passages beside each of its passages
_NUM_RERANKED = 24
_MAX_K = 2**61  # searches look at more than k passages, in 64 bits
_READ_AT_ONCE = 500


class PassageSearch:
    """Searches a store by vectors and by words, for passages that meet a condition.

    Use it inside ``store.reading()``, so that what a search finds is not removed before it is read.
    Vectors are loaded at the first search that needs them, then updated as the store changes. Safe
    to use from several threads, and while another process writes to the store. A forked process
    keeps using the loaded vectors, in memory shared with its parent.

    Args:
        store: The store.
        dimension: Returns the expected dimension before vectors are loaded; it may raise an error
            if the store was rebuilt with other settings.
    """

    def __init__(self, store: Store, dimension: Callable[[], int]) -> None:
        self._store = store
        self._dimension = dimension
        self._index: VectorIndex | None = None
        self._state = ("", "")
        self._lock = PerProcess(threading.Lock)

    @contextmanager
    def vectors(self) -> Iterator[VectorIndex]:
        """Yield an index of the store's current vectors, which does not change within the block.

        If this thread has a transaction open, the vectors are those that the transaction sees.
        """
        with self._lock.get():
            state = self._store.state()
            index, self._index = self._index, None  # an interrupted update leaves no partial one
            if index is None or state[0] != self._state[0]:
                index = VectorIndex(self._dimension())
                index.build(self._store.vectors())
            elif state != self._state:
                self._update(index)
            self._index, self._state = index, state
            yield index

    def _update(self, index: VectorIndex) -> None:
        """Add the store's new rows and remove deleted ones; a row's vector never changes."""
        held, wanted = index.keys(), self._store.keys()
        gone = np.setdiff1d(held, wanted, assume_unique=True)
        new = np.setdiff1d(wanted, held, assume_unique=True)
        if gone.size:
            index.remove(gone)
        for keys, vectors in self._store.vectors(new.tolist()):
            index.add(keys, vectors)

    def nearest(self, query: NDArray[np.float32], k: int, where: Where = None) -> Ranking:
        """Return the k passages nearest to a unit vector [D] with their cosines."""
        with self.vectors() as index:
            if not len(index):
                return []
            self._store.require_dimension(len(query))
            ranking = index.ranking(query) if where else index.search(query, k)
        return self._first(((key, min(1.0, max(-1.0, x))) for key, x in ranking), k, where)

    def worded(self, text: str, k: int, where: Where = None) -> Ranking:
        """Return the k best passages that share words with a text, with their BM25 scores."""
        return self._first(self._store.search_text(text, -1 if where else k), k, where)

    def fused(
        self,
        text: str,
        query: NDArray[np.float32] | None,
        k: int,
        dense_weight: float = DENSE_WEIGHT,
        where: Where = None,
    ) -> Ranking:
        """Return the k best passages of both searches, fused by ``fuse``.

        Each search finds more than k, since a passage far down in one ranking may be high in the
        other.
        """
        depth = max(NUM_CANDIDATES, 2 * k)
        dense = [] if query is None else self.nearest(query, depth, where)
        worded = self.worded(text, depth, where) if dense_weight < 1 else []
        return fuse(dense, worded, dense_weight)[:k]

    def passages(self, ranking: Iterable[tuple[int, float]]) -> Iterator[StoredPassage]:
        """Yield the passages of a ranking with their scores; removed ones are left out."""
        return (item for _, item in self._read(ranking))

    def _first(self, ranking: Iterable[tuple[int, float]], k: int, where: Where) -> Ranking:
        if where is None:
            return list(islice(ranking, k))
        return list(islice((pair for pair, item in self._read(ranking) if where(item)), k))

    def _read(
        self, ranking: Iterable[tuple[int, float]]
    ) -> Iterator[tuple[tuple[int, float], StoredPassage]]:
        ranking = iter(ranking)
        while part := list(islice(ranking, _READ_AT_ONCE)):
            found = self._store.passages(key for key, _ in part)
            for key, score in part:
                if key in found:
                    passage = replace(found[key].passage, score=score)
                    yield (key, score), replace(found[key], passage=passage)


class Reranker(Protocol):
    """The interface of a reranker: a model that reads question and passage together."""

    def scores(self, question: str, passages: Sequence[Passage]) -> list[float]:
        """Return how well each passage answers the question; larger is better."""


class Retriever:
    """Searches a store by vectors and by words, and fuses the two rankings by score.

    Safe to call from several threads; it follows a store that is indexed again.

    Args:
        store: The index.
        embedder: The embedder that made the index, in a form that ``as_embedder`` takes.
        reranker: Reorders the best 24 passages, if given.

    Raises:
        IndexUnusableError: Another embedder made the index.
        EmptyIndexError: The index does not exist.
    """

    def __init__(
        self, store: Store, embedder: AnyEmbedder = None, *, reranker: Reranker | None = None
    ) -> None:
        if not isinstance(store, Store):
            raise ConfigurationError(
                f"{brief(store)} is not a Store: give Store(path), or call open_retriever(path)"
            )
        self.embedder = as_embedder(embedder)
        store.require_embedder(self.embedder.fingerprint)
        self.store = store
        self.reranker = reranker
        self._search = PassageSearch(store, self._checked_dimension)

    def search(self, query: str, k: int = 6, *, mode: str = "fused") -> list[Passage]:
        """Find the k most relevant passages for a question, best first, with their ``score``.

        Args:
            query: A question, or words.
            k: The number of passages; fewer are returned if there are no more.
            mode: ``"dense"``: vector search (score: cosine); ``"text"``: full-text search (score:
                BM25); ``"fused"``: both (score: 0 to 1, see ``fuse`` and ``raise_files``). A
                reranker replaces the score by its own.

        Raises:
            EmptyIndexError: The index holds no passage.
        """
        if mode not in MODES:
            raise ConfigurationError(f"mode is {mode!r}: choose one of {', '.join(MODES)}")
        k = require_k(k)
        if not isinstance(query, str):
            raise ConfigurationError(f"the query is {brief(query)}: give a string")
        if not any(map(str.isalnum, query)):  # e.g. "???", which is as near to one text as to any
            return []
        self._require_passages()
        vector = self.embedder.embed_query(query) if mode != "text" else None
        number = k if self.reranker is None else max(_NUM_RERANKED, k)
        with self.store.reading():
            ranking = self._rank(query, vector, mode, number)
            found = [item.passage for item in self._search.passages(ranking)]
        if mode == "fused":
            found = raise_files(found)[:number]
        return found if self.reranker is None else self._rerank(query, found)[:k]

    def document_passages(self, path: str) -> list[Passage]:
        """Return the passages of a document, in the order of its text; none of an unknown one."""
        return [item.passage for item in self.store.document(path)]

    def warm_up(self) -> None:
        """Load the vectors and the embedder now instead of at the first question."""
        self._require_passages()
        self.embedder.embed_query("warm-up")
        with self.store.reading(), self._search.vectors():  # locked in the order of ``search``
            pass

    def _rank(
        self, query: str, vector: NDArray[np.float32] | None, mode: str, number: int
    ) -> Ranking:
        if vector is None:
            return self._search.worded(query, number)
        if mode == "dense":
            return self._search.nearest(vector, number)
        foreign = not getattr(self.embedder, "is_multilingual", True) and not is_english(query)
        weight = _FOREIGN_DENSE_WEIGHT if foreign else DENSE_WEIGHT
        return self._search.fused(query, vector, max(NUM_CANDIDATES, number), weight)

    def _rerank(self, query: str, passages: list[Passage]) -> list[Passage]:
        assert self.reranker is not None
        scores = self.reranker.scores(query, passages)
        rescored = [replace(p, score=score) for p, score in zip(passages, scores, strict=True)]
        return sorted(rescored, key=lambda passage: -passage.score)

    def _require_passages(self) -> None:
        self.store.state()  # reopens an index that was replaced
        if self.store.rows("SELECT 1 FROM passage LIMIT 1"):
            return
        advice = "index a folder that has documents in it"
        if self.store.is_filled_by_program():
            advice = "put passages into it"
        raise EmptyIndexError(f"{self.store.path} holds no passages: {advice}")

    def _checked_dimension(self) -> int:
        """Return the embedder's dimension after checking that the index was made with it."""
        self.store.require_embedder(self.embedder.fingerprint)
        self.store.require_dimension(self.embedder.dimension)
        return self.embedder.dimension


def require_k(k: int) -> int:
    """Return the requested number of passages as an int.

    Raises:
        ConfigurationError: The number is not whole, is below 1 or is too large.
    """
    try:
        number = operator.index(k)
    except TypeError:
        raise ConfigurationError(f"k is {k!r}: ask for a whole number of passages") from None
    if not 0 < number < _MAX_K:
        few = "1 or more" if number < 1 else "fewer"
        raise ConfigurationError(f"k is {k}: ask for {few} passages")
    return number


def fuse(
    dense: Sequence[tuple[Key, float]],
    text: Sequence[tuple[Key, float]],
    dense_weight: float = DENSE_WEIGHT,
) -> list[tuple[Key, float]]:
    """Fuse two rankings by a convex combination of their scores (Bruch et al., 2023).

    Scores are scaled to 0..1 within each ranking. The best score becomes 1. The lower end is 0 for
    BM25, which means that no word is shared; cosines have no natural zero and their range depends
    on the model, so the 50th cosine, or the last of a shorter ranking, becomes 0. This rank is
    fixed, so asking for more results does not change the first ones. A passage missing from a
    ranking scores 0 there, ties go to the higher cosine, and a ranking of weight 0 is ignored.
    ``eval/README.md`` compares this with reciprocal rank fusion.

    Args:
        dense: (key, cosine), best first.
        text: (key, BM25), best first.
        dense_weight: The weight of ``dense``; ``text`` gets 1 minus this weight.

    Returns:
        (key, fused score), best first.
    """
    lowest = dense[:_ZERO_RANK][-1][1] if dense else 0.0
    scores: dict[Key, float] = {}
    for ranking, low, weight in ((dense, lowest, dense_weight), (text, 0.0, 1 - dense_weight)):
        for key, score in ranking if weight else ():
            width = ranking[0][1] - low
            share = max(0.0, score - low) / width if width > 0 else float(score >= low)
            scores[key] = scores.get(key, 0.0) + weight * share
    near = dict(dense)
    return sorted(scores.items(), key=lambda item: (-item[1], -near.get(item[0], -2.0), item[0]))


def raise_files(passages: Sequence[Passage]) -> list[Passage]:
    """Rank passages anew, those of files with several good passages higher.

    What a passage is about is often said elsewhere in its file. The new score is the mean of a
    passage's own, at weight 1, and its file's, at weight 0.6: a third of the sum of its three best
    among the first 50. Passages after these stay behind them, so that asking for more results does
    not change the first ones.

    Args:
        passages: A ranking, best first, with scores of 0 to 1. A passage without a path is the only
            one of its file.
    """
    best: dict[str, list[float]] = {}
    names = [passage.path or f"\n{number}" for number, passage in enumerate(passages)]
    for name, passage in zip(names[:NUM_CANDIDATES], passages, strict=False):
        best.setdefault(name, []).append(passage.score)
    share = _FILE_WEIGHT / _FILE_PASSAGES
    files = {name: share * sum(scores[:_FILE_PASSAGES]) for name, scores in best.items()}
    gains = [files[name] for name in names[:NUM_CANDIDATES]] + [0.0] * len(names)
    raised = (
        replace(passage, score=(passage.score + gain) / (1 + _FILE_WEIGHT))
        for passage, gain in zip(passages, gains, strict=False)
    )
    return sorted(raised, key=lambda passage: -passage.score)


def open_retriever(
    index_path: str | Path,
    embedder: AnyEmbedder = None,
    *,
    reranker: Reranker | None = None,
) -> Retriever:
    """Open an index for searching: an index file, or a folder for its index.

    The default embedder is all-MiniLM-L6-v2.

    Raises:
        EmptyIndexError: There is no index at that path.
        IndexUnusableError: Another embedder made the index, or it is damaged.
    """
    if os.path.isdir(os.path.expanduser(index_path)):
        index_path = default_index_path(index_path)
    return Retriever(Store(index_path), embedder, reranker=reranker)


def mmr(
    similarities: NDArray[np.float32], vectors: NDArray[np.float32], k: int, relevance_weight: float
) -> list[int]:
    """Choose k of N vectors by maximal marginal relevance (Carbonell & Goldstein, 1998).

    Return their positions, in the order of choice.

    Args:
        similarities: The cosine of each vector with the question, [N].
        vectors: Unit vectors, [N, D].
        k: The number to choose.
        relevance_weight: 1 weighs only the cosine, 0 only how much a passage differs from those
            already chosen.
    """
    left = np.ones(len(vectors), dtype=bool)
    redundancy = np.full(len(vectors), -1.0, dtype=np.float32)
    chosen: list[int] = []
    while len(chosen) < min(k, len(vectors)):
        gain = (
            relevance_weight * similarities - (1 - relevance_weight) * redundancy
            if chosen
            else similarities
        )
        best = int(np.argmax(np.where(left, gain, -np.inf)))
        redundancy = np.maximum(redundancy, vectors @ vectors[best])
        chosen.append(best)
        left[best] = False
    return chosen
