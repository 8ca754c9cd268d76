"""The retriever: vector search and full-text search, fused; MMR; checks of passages and ids."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ragaccel.errors import ConfigurationError, EmptyIndexError, brief
from ragaccel.retrieval.embedder import load_embedder
from ragaccel.retrieval.store import Store, require_dimension
from ragaccel.retrieval.vector_index import StoreVectorIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieval.embedder import Embedder
    from ragaccel.retrieval.reranker import Reranker

    Ranking = list[tuple[int, float]]


_MAX_INT64 = 2**63


def unit_vectors(vectors: ArrayLike) -> NDArray[np.float32]:
    """Normalize vectors [N, D] to length 1; a vector of zeros stays as it is.

    Raises:
        ConfigurationError: The vectors are not N rows of D finite numbers.
    """
    try:
        rows = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"vectors must be rows of numbers, all of one length: {error}"
        ) from None
    if rows.ndim != 2 or not rows.shape[1]:
        raise ConfigurationError(
            f"vectors have the shape {rows.shape}: give an array [N, D] with D above 0"
        )
    odd = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if odd.size:
        raise ConfigurationError(
            f"vector {odd[0]} holds NaN or an infinite number: check the embedding model's output"
        )
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows = np.divide(
        rows, largest, out=rows, where=largest > 0
    )  # scaled first, so that squares do not overflow
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = np.divide(rows, lengths, out=rows, where=lengths > 0)
    return unit.astype(np.float32)


def metadata_text(passages: Sequence[Passage], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metadata of each passage as JSON; empty strings if no metadata is given.

    Raises:
        ConfigurationError: The numbers of mappings and passages differ, or a mapping cannot be
            serialized as JSON.
    """
    if metadata and len(metadata) != len(passages):
        raise ConfigurationError(
            f"there are {len(metadata)} metadata mappings for {len(passages)} passages: give one"
            " for each passage, or none at all"
        )
    given = metadata or [{}] * len(passages)
    return [_json(passage, dict(more)) for passage, more in zip(passages, given, strict=True)]


def _json(passage: Passage, metadata: dict[str, Any]) -> str:
    try:
        _require_text_keys(metadata)
        return json.dumps(metadata, ensure_ascii=False) if metadata else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the metadata of passage {passage.passage_id!r} cannot be stored as JSON ({error}):"
            " use only strings, numbers, lists and dictionaries"
        ) from None


def _require_text_keys(value: Any) -> None:
    """Refuse keys that JSON would convert to strings, since two keys could become equal."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string")
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)


def require_storable(passages: Sequence[Passage], metadata: Sequence[str]) -> None:
    """Refuse passages without an id, with lone surrogates, or with numbers beyond 64 bits.

    Raises:
        ConfigurationError: A passage is refused; the message names it.
    """
    for passage, more in zip(passages, metadata, strict=True):
        name = passage.passage_id
        if not name:
            raise ConfigurationError("a passage has an empty passage_id: give each a unique id")
        if not isinstance(name, str):
            raise ConfigurationError(f"the passage_id {name!r} is not a string: give str({name!r})")
        _require_unicode(
            f"{name}{passage.title}{passage.path}{passage.text}{more}", f"passage {name!r}"
        )
        places = (passage.start, passage.end, passage.page or 0, passage.line or 0)
        if any(abs(place) >= _MAX_INT64 for place in places):
            raise ConfigurationError(
                f"passage {name!r} has a start, end, page or line of {max(places)}: these must fit"
                " into 64 bits"
            )


def require_strings(names: Iterable[str]) -> list[str]:
    """Return ids or paths as a list.

    Raises:
        ConfigurationError: An item is not a string, or holds a lone surrogate.
    """
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise ConfigurationError(f"the id {name!r} is not a string: give str({name!r})")
        _require_unicode(name, f"the id {name!r}")
    return found


def require_k(k: int) -> int:
    """Return the requested number of passages as an int.

    Raises:
        ConfigurationError: The number is not whole, is below 1 or is too large.
    """
    try:
        number = operator.index(k)
    except TypeError:
        raise ConfigurationError(f"k is {k!r}: ask for a whole number of passages") from None
    if not 0 < number < _MAX_INT64 // 4:  # searches look at more than k passages
        raise ConfigurationError(f"k is {k}: ask for 1 to {_MAX_INT64 // 4} passages")
    return number


def _require_unicode(text: str, owner: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{owner} holds {error.object[error.start]!r}, a lone surrogate, as broken PDFs do:"
            " replace it, e.g. by text.encode(errors='replace').decode()"
        ) from None


Key = TypeVar("Key", int, str)

MODES = ("fused", "dense", "text")
NUM_CANDIDATES = 50
_ZERO_RANK = NUM_CANDIDATES  # fusion scales cosines so that the one at this rank becomes 0
DENSE_WEIGHT = 0.5
_NUM_RERANKED = 24


class Retriever:
    """Searches a store by vectors and by words, and fuses the two rankings by score.

    Vectors are loaded at the first search that needs them, and updated when the store is indexed
    again. Safe to call from several threads.

    Args:
        store: The index.
        embedder: The embedder that made the index.
        reranker: Reorders the best 24 passages, if given.

    Raises:
        IndexUnusableError: Another embedder made the index.
        EmptyIndexError: The index does not exist.
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
        """Find the k most relevant passages for a question, best first, with their ``score``.

        Args:
            query: A question, or words.
            k: The number of passages; fewer are returned if there are no more.
            mode: ``"dense"``: vector search (score: cosine); ``"text"``: full-text search (score:
                BM25); ``"fused"``: both (score: 0 to 1, see :func:`fuse`). A reranker replaces the
                score by its own.

        Raises:
            EmptyIndexError: The index holds no passage.
        """
        if mode not in MODES:
            raise ConfigurationError(f"mode is {mode!r}: choose one of {', '.join(MODES)}")
        k = require_k(k)
        if not isinstance(query, str):
            raise ConfigurationError(f"the query is {brief(query)}: give a string")
        if not query.strip():
            return []
        num_candidates = fusion_depth(k)
        self._require_passages()
        vector = self.embedder.embed_query(query) if mode != "text" else None
        with self.store.reading():  # so that passages found cannot be removed before they are read
            rankings = self._rank(query, vector, mode, num_candidates)
            ranking = rankings[0] if len(rankings) == 1 else fuse(rankings[0], rankings[1])
            found = self._passages(ranking[: k if self.reranker is None else max(_NUM_RERANKED, k)])
        return found if self.reranker is None else self._rerank(query, found)[:k]

    def warm_up(self) -> None:
        """Load the vectors and the embedder now instead of at the first question."""
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
        dimension = self.embedder.dimension
        require_dimension(self.store.path, dimension, self.store.meta_number("dimension"))
        return dimension


def fusion_depth(k: int) -> int:
    """Return how many passages each of two searches must find before they are fused to k.

    This is more than k, since a passage far down in one ranking may be high in the other.
    """
    return max(NUM_CANDIDATES, 2 * k)


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


def open_retriever(
    index_path: str | Path,
    embedder: Embedder | None = None,
    *,
    reranker: Reranker | None = None,
) -> Retriever:
    """Open an index for searching; the default embedder is all-MiniLM-L6-v2.

    Raises:
        EmptyIndexError: There is no index at that path.
        IndexUnusableError: Another embedder made the index, or it is damaged.
    """
    return Retriever(Store(index_path), embedder or load_embedder(), reranker=reranker)


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
