"""The retriever: dense and full-text search, fused, compressed and diversified."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ragaccel.errors import ConfigurationError, EmptyIndexError, shown
from ragaccel.retrieval.embedder import load_embedder
from ragaccel.retrieval.store import Store, require_dimension
from ragaccel.retrieval.vector_index import StoreVectorIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from ragaccel.passage import Passage


_MAX_INT64 = 2**63


def unit_vectors(vectors: ArrayLike) -> NDArray[np.float32]:
    """Vectors [N, D] brought to length 1; one that is all zeros stays so, near to nothing.

    Raises:
        ConfigurationError: They are not N rows of D finite numbers.
    """
    try:
        rows = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"vectors must be rows of numbers, all as long: {error}") from None
    if rows.ndim != 2 or not rows.shape[1]:
        raise ConfigurationError(f"vectors have the shape {rows.shape}: give [N, D], D above 0")
    odd = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if odd.size:
        raise ConfigurationError(
            f"vector {odd[0]} holds a number that is not finite: see what the embedding model made"
        )
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows = np.divide(rows, largest, out=rows, where=largest > 0)  # a square may not overflow
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = np.divide(rows, lengths, out=rows, where=lengths > 0)
    return unit.astype(np.float32)


def metadata_text(passages: Sequence[Passage], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metadata of each passage as JSON; of none if none is given.

    Raises:
        ConfigurationError: There are not as many as passages, or one is not to be said in JSON.
    """
    if metadata and len(metadata) != len(passages):
        raise ConfigurationError(
            f"{len(metadata)} metadata for {len(passages)} passages: give one each, or none"
        )
    given = metadata or [{}] * len(passages)
    return [_json(passage, dict(more)) for passage, more in zip(passages, given, strict=True)]


def _json(passage: Passage, metadata: dict[str, Any]) -> str:
    try:
        _require_text_keys(metadata)
        return json.dumps(metadata, ensure_ascii=False) if metadata else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the metadata of passage {passage.passage_id!r} cannot be kept as JSON ({error}):"
            " give it texts, numbers, lists and dictionaries"
        ) from None


def _require_text_keys(value: Any) -> None:
    """Refuse keys that JSON would turn into texts, perhaps two into the same."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)


def require_storable(passages: Sequence[Passage], metadata: Sequence[str]) -> None:
    """Refuse passages without an id, text that is no Unicode, and places beyond 64 bits.

    Raises:
        ConfigurationError: With the passage.
    """
    for passage, more in zip(passages, metadata, strict=True):
        name = passage.passage_id
        if not name:
            raise ConfigurationError("a passage needs a passage_id to be known by: this has none")
        if not isinstance(name, str):
            raise ConfigurationError(f"the passage_id {name!r} is no text: give str({name!r})")
        _require_unicode(
            f"{name}{passage.title}{passage.path}{passage.text}{more}", f"passage {name!r}"
        )
        places = (passage.start, passage.end, passage.page or 0, passage.line or 0)
        if any(abs(place) >= _MAX_INT64 for place in places):
            raise ConfigurationError(
                f"passage {name!r} has a place (start, end, page or line) of {max(places)}: it"
                " must fit into 64 bits"
            )


def require_strings(names: Iterable[str]) -> list[str]:
    """Ids or paths as a list.

    Raises:
        ConfigurationError: One is no text, or no Unicode.
    """
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise ConfigurationError(f"{name!r} is no id: ids are texts, as in str({name!r})")
        _require_unicode(name, f"the id {name!r}")
    return found


def require_k(k: int) -> int:
    """How many passages are asked for, as Python's own number.

    Raises:
        ConfigurationError: It is none, or none can be found so many.
    """
    try:
        number = operator.index(k)
    except TypeError:
        raise ConfigurationError(f"k is {k!r}: ask for a whole number of passages") from None
    if not 0 < number < _MAX_INT64 // 4:  # some are looked at beyond k
        raise ConfigurationError(f"k is {k}: ask for one passage or more, up to {_MAX_INT64 // 4}")
    return number


def _require_unicode(text: str, owner: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{owner} holds {error.object[error.start]!r}, half a character, as broken PDFs do:"
            " replace it, e.g. by text.encode(errors='replace').decode()"
        ) from None


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.reranker import Reranker

    Ranking = list[tuple[int, float]]

Key = TypeVar("Key", int, str)

MODES = ("fused", "dense", "text")
NUM_CANDIDATES = 50
_ZERO_RANK = NUM_CANDIDATES  # whose cosine counts 0 where cosines are added to other scores
DENSE_WEIGHT = 0.5
_NUM_RERANKED = 24


class Retriever:
    """Searches a store by meaning and by words, the two fused by their scores.

    Vectors are loaded at the first search that needs them and follow the store when it is indexed
    again. Safe to call from several threads.

    Args:
        store: The index.
        embedder: The one the index was made with.
        reranker: Given the last word on the order of the best two dozen, if any.

    Raises:
        IndexUnusableError: Another embedder made the index.
        EmptyIndexError: There is no index.
    """

    def __init__(
        self, store: Store, embedder: Embedder, *, reranker: Reranker | None = None
    ) -> None:
        store.require_embedder(embedder.fingerprint)
        self.store = store
        self.embedder = embedder
        self.reranker = reranker
        self._vectors = StoreVectorIndex(store, self._checked_dimension)

    def search(self, query: str, k: int = 6, *, mode: str = "fused") -> list[Passage]:
        """Find the k passages that bear most on a question, best first, their ``score`` set.

        Args:
            query: A question, or words.
            k: How many; fewer come back when there are no more.
            mode: ``"dense"``: nearness of meaning (score: cosine); ``"text"``: shared words
                (BM25); ``"fused"``: both, by their scores (0 to 1, see :func:`fuse`). With a
                reranker the score is the reranker's.

        Raises:
            EmptyIndexError: The index holds no passage.
        """
        if mode not in MODES:
            raise ConfigurationError(f"mode {mode!r} is none of {', '.join(MODES)}")
        k = require_k(k)
        if not isinstance(query, str):
            raise ConfigurationError(f"a query is a text, not {shown(query)}")
        if not query.strip():
            return []
        num_candidates = fusion_depth(k)
        self._require_passages()
        vector = self.embedder.embed_query(query) if mode != "text" else None
        with self.store.reading():  # whoever indexes meanwhile, what is found is there
            rankings = self._rank(query, vector, mode, num_candidates)
            ranking = rankings[0] if len(rankings) == 1 else fuse(rankings[0], rankings[1])
            found = self._passages(ranking[: k if self.reranker is None else max(_NUM_RERANKED, k)])
        return found if self.reranker is None else self._rerank(query, found)[:k]

    def warm_up(self) -> None:
        """Load the vectors and the embedder now, not at the first question."""
        self._require_passages()
        with self._vectors.current():
            self.embedder.embed_query("warm-up")

    def _rank(
        self, query: str, vector: NDArray[np.float32] | None, mode: str, limit: int
    ) -> list[Ranking]:
        rankings = []
        if vector is not None:
            with self._vectors.current() as index:
                rankings.append(index.search(vector, limit))
        if mode != "dense":
            rankings.append(self.store.search_text(query, limit))
        return rankings

    def _passages(self, ranking: Ranking) -> list[Passage]:
        found = self.store.passages([key for key, _ in ranking])
        return [replace(found[key], score=score) for key, score in ranking if key in found]

    def _rerank(self, query: str, passages: list[Passage]) -> list[Passage]:
        assert self.reranker is not None
        scores = self.reranker.scores(query, passages)
        rescored = [replace(p, score=score) for p, score in zip(passages, scores, strict=True)]
        return sorted(rescored, key=lambda passage: -passage.score)

    def _require_passages(self) -> None:
        self.store.state()  # notices an index that was replaced
        if self.store.rows("SELECT 1 FROM passage LIMIT 1"):
            return
        advice = "index a folder that has documents in it"
        if self.store.is_filled_by_program():
            advice = "put passages into it"
        raise EmptyIndexError(f"{self.store.path} holds no passages: {advice}")

    def _checked_dimension(self) -> int:
        """The embedder's dimension, once the index is known to be made with it."""
        self.store.require_embedder(self.embedder.fingerprint)
        dimension = self.embedder.dimension
        require_dimension(self.store.path, dimension, self.store.meta_number("dimension"))
        return dimension


def fusion_depth(k: int) -> int:
    """Count the passages that each search finds where k are wanted: the far in one may be near."""
    return max(NUM_CANDIDATES, 2 * k)


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
    lowest = dense[:_ZERO_RANK][-1][1] if dense else 0.0
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
        EmptyIndexError: There is no index at that place.
        IndexUnusableError: Another embedder made it.
        IndexUnusableError: It is damaged.
    """
    return Retriever(Store(index_path), embedder or load_embedder(), reranker=reranker)


def mmr(
    similarities: NDArray[np.float32], vectors: NDArray[np.float32], k: int, relevance_weight: float
) -> list[int]:
    """Choose k of N by maximal marginal relevance (Carbonell & Goldstein, 1998), best first.

    Args:
        similarities: [N], the cosine of each with the question.
        vectors: [N, D], of length 1.
        k: How many.
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
