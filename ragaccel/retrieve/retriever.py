"""The retriever: a question in, the passages that bear on it out, best first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ragaccel.checks import shown
from ragaccel.errors import ConfigurationError, NothingIndexedError
from ragaccel.retrieve.embedder import load_embedder
from ragaccel.retrieve.fingerprints import is_filled_by_program, require_dimension, require_embedder
from ragaccel.retrieve.following import FollowedVectors
from ragaccel.retrieve.given import require_k
from ragaccel.retrieve.store import Store
from ragaccel.retrieve.word_search import search_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieve.embedder import Embedder
    from ragaccel.retrieve.reranker import Reranker

    Ranking = list[tuple[int, float]]

Key = TypeVar("Key", int, str)

MODES = ("fused", "dense", "text")
CANDIDATES = 50
_ZERO_PLACE = CANDIDATES  # whose cosine counts 0 where cosines are added to other scores
DENSE_WEIGHT = 0.5
_RERANKED = 24


class Retriever:
    """Searches a store by meaning and by words, the two fused by their scores.

    Vectors are loaded at the first search that needs them and follow the store when it is indexed
    again. Safe to call from several threads.

    Args:
        store: The index.
        embedder: The one the index was made with.
        reranker: Given the last word on the order of the best two dozen, if any.

    Raises:
        IndexMismatchError: Another embedder made the index.
        NothingIndexedError: There is no index.
    """

    def __init__(
        self, store: Store, embedder: Embedder, *, reranker: Reranker | None = None
    ) -> None:
        require_embedder(store, embedder.fingerprint)
        self.store = store
        self.embedder = embedder
        self.reranker = reranker
        self._vectors = FollowedVectors(store, self._fit_dimension)

    def search(self, query: str, k: int = 6, *, mode: str = "fused") -> list[Passage]:
        """Find the k passages that bear most on a question, best first, their ``score`` set.

        Args:
            query: A question, or words.
            k: How many; fewer come back when there are no more.
            mode: ``"dense"``: nearness of meaning (score: cosine); ``"text"``: shared words
                (BM25); ``"fused"``: both, by their scores (0 to 1, see :func:`fuse`). With a
                reranker the score is the reranker's.

        Raises:
            NothingIndexedError: The index holds no passage.
        """
        if mode not in MODES:
            raise ConfigurationError(f"mode {mode!r} is none of {', '.join(MODES)}")
        k = require_k(k)
        if not isinstance(query, str):
            raise ConfigurationError(f"a query is a text, not {shown(query)}")
        if not query.strip():
            return []
        num_candidates = fused_depth(k)
        self._require_passages()
        vector = self.embedder.embed_query(query) if mode != "text" else None
        with self.store.reading():  # whoever indexes meanwhile, what is found is there
            rankings = self._rankings(query, vector, mode, num_candidates)
            ranking = rankings[0] if len(rankings) == 1 else fuse(rankings[0], rankings[1])
            found = self._passages(ranking[: k if self.reranker is None else max(_RERANKED, k)])
        return found if self.reranker is None else self._reranked(query, found)[:k]

    def warm_up(self) -> None:
        """Load the vectors and the embedder now, not at the first question."""
        self._require_passages()
        with self._vectors.current():
            self.embedder.embed_query("warm-up")

    def _rankings(
        self, query: str, vector: NDArray[np.float32] | None, mode: str, limit: int
    ) -> list[Ranking]:
        rankings = []
        if vector is not None:
            with self._vectors.current() as index:
                rankings.append(index.search(vector, limit))
        if mode != "dense":
            rankings.append(search_words(self.store, query, limit))
        return rankings

    def _passages(self, ranking: Ranking) -> list[Passage]:
        found = self.store.passages([key for key, _ in ranking])
        return [replace(found[key], score=score) for key, score in ranking if key in found]

    def _reranked(self, query: str, passages: list[Passage]) -> list[Passage]:
        assert self.reranker is not None
        scores = self.reranker.scores(query, passages)
        rescored = [replace(p, score=score) for p, score in zip(passages, scores, strict=True)]
        return sorted(rescored, key=lambda passage: -passage.score)

    def _require_passages(self) -> None:
        self.store.state()  # notices an index that was replaced
        if self.store.rows("SELECT 1 FROM passage LIMIT 1"):
            return
        advice = "index a folder that has documents in it"
        if is_filled_by_program(self.store):
            advice = "put passages into it"
        raise NothingIndexedError(f"{self.store.path} holds no passages: {advice}")

    def _fit_dimension(self) -> int:
        """The embedder's dimension, once the index is known to be made with it."""
        require_embedder(self.store, self.embedder.fingerprint)
        dimension = self.embedder.dimension
        require_dimension(self.store.path, dimension, self.store.number("dimension"))
        return dimension


def fused_depth(k: int) -> int:
    """Count the passages that each search finds where k are wanted: the far in one may be near."""
    return max(CANDIDATES, 2 * k)


def fuse(
    dense: Sequence[tuple[Key, float]],
    text: Sequence[tuple[Key, float]],
    dense_weight: float = DENSE_WEIGHT,
) -> list[tuple[Key, float]]:
    """Fuse two rankings by their scores, a convex combination (Bruch et al., 2023).

    The best of each counts 1. BM25 counts from 0, which is no word shared; cosines, which have no
    such zero and lie elsewhere with every embedding model, from that of the 50th found or of the
    last: however many are asked for, so that more of them do not change the first. What a ranking
    does not hold counts 0 in it; of equals the nearer one is first; a ranking of no weight adds
    nothing. ``eval/README.md`` has what this finds more than fusion by reciprocal rank.

    Args:
        dense: (key, cosine), best first.
        text: (key, BM25), best first.
        dense_weight: Of 1; the rest is the weight of ``text``.
    """
    lowest = dense[:_ZERO_PLACE][-1][1] if dense else 0.0
    scores: dict[Key, float] = {}
    for ranking, low, weight in ((dense, lowest, dense_weight), (text, 0.0, 1 - dense_weight)):
        for key, score in ranking if weight else ():
            width = ranking[0][1] - low
            share = max(0.0, score - low) / width if width > 0 else float(score >= low)
            scores[key] = scores.get(key, 0.0) + weight * share
    near = dict(dense)
    return sorted(scores.items(), key=lambda item: (-item[1], -near.get(item[0], -2.0), item[0]))


def open_retriever(
    index_path: str | Path,
    embedder: Embedder | None = None,
    *,
    reranker: Reranker | None = None,
) -> Retriever:
    """Open an index for searching; all-MiniLM-L6-v2 without an embedder.

    Raises:
        NothingIndexedError: There is no index at that place.
        IndexMismatchError: Another embedder made it.
        IndexCorruptError: It is damaged.
    """
    return Retriever(Store(index_path), embedder or load_embedder(), reranker=reranker)
