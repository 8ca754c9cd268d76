"""Answers: what was answered to similar questions before, from which an answer may be copied."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ragaccel.errors import ConfigurationError
from ragaccel.memory.entries import Entry, Key, Vector, num_bytes, packed, unit_vector, unpacked
from ragaccel.memory.figures import AnswerFigures
from ragaccel.memory.files import Filed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from ragaccel.draft.restoring import State
    from ragaccel.memory.archive import Header

DEFAULT_BYTES = 16 << 20
LEAST_BYTES = 1024
_SAME_EMBEDDER = 0.99  # similarity of one question's vectors, that of the file and one made now


@dataclass(frozen=True, slots=True)
class SimilarAnswer:
    """An answer to an earlier question; ``similarity`` is the cosine of the two questions."""

    question: str
    answer: str
    similarity: float


class AnswerMemory(Filed):
    """Answers to earlier questions, found again by what a question means.

    The source of drafts of LLMA's cache-assisted generation (Yang et al., 2023, arXiv 2304.04487):
    a question much like an earlier one is likely to have an answer much like its answer. When it
    would outgrow ``max_bytes`` the answers used longest ago are let go; an answer counts as used
    when it is added or found. Shared by threads; nothing of one namespace is found in another.
    With a path it outlives the process: see :class:`ragaccel.memory.files.Filed`.

    Args:
        embed: turns N texts into an array [N, D]; called without a lock being held.
        max_bytes: of questions, answers, the names of their namespaces and their vectors, together.
        least_similarity: below this cosine, from -1 to 1, an earlier question is not similar.
        path: the file it is kept in; one made with another embedder is refused. If it holds
            something, one of its questions is embedded at once to tell.
        fingerprint: of the embedder, if it has one.

    Raises:
        ConfigurationError: a bound that cannot work, or ``embed`` does not do what it should.
    """

    file_format: ClassVar[str] = "ragaccel answers"

    def __init__(
        self,
        embed: Callable[[list[str]], npt.NDArray[Any]],
        *,
        max_bytes: int = DEFAULT_BYTES,
        least_similarity: float = 0.6,
        path: str | Path | None = None,
        fingerprint: str = "",
    ) -> None:
        if max_bytes < LEAST_BYTES:
            raise ConfigurationError(f"max_bytes must be {LEAST_BYTES} or more, not {max_bytes}")
        if not -1 <= least_similarity <= 1:
            raise ConfigurationError(
                f"least_similarity must be from -1 to 1, not {least_similarity}"
            )
        super().__init__(path, fingerprint, max_bytes)
        self.max_bytes, self.least_similarity = max_bytes, least_similarity
        self._embed = embed
        self._lock = Lock()
        self._hits = self._misses = self._evictions = 0
        self._dimension: int | None = None
        self._forget_all()
        self._load()
        self._require_same_embedder()

    def add(self, question: str, answer: str, namespace: str = "") -> None:
        """Remember an answer, in the place of an earlier one to the same question.

        Blank questions and answers are not remembered, nor what is larger than all there may be.

        Raises:
            ConfigurationError: ``embed`` gave no usable vector.
        """
        if not question.strip() or not answer.strip():
            return
        key = Key(namespace, question)
        with self._lock:
            known = self._kept.get(key)
        vector = known.vector if known is not None else self._vector(question)
        with self._lock:
            self._put(key, Entry(answer, vector, self._next))
        self.changes.mark()

    def similar(self, question: str, namespace: str = "", k: int = 2) -> list[SimilarAnswer]:
        """Find at most ``k`` answers to the most similar questions, the most similar first.

        Of equally similar ones the one added last comes first.

        Raises:
            ConfigurationError: ``k`` is below 1, or ``embed`` gave no usable vector.
        """
        if k < 1:
            raise ConfigurationError(f"k must be 1 or more, not {k}")
        found: list[SimilarAnswer] = []
        if question.strip() and (known := self._of(namespace)):
            found = self._nearest(self._vector(question), known, k)
        with self._lock:
            for one in reversed(found):  # the best is used last
                if (key := Key(namespace, one.question)) in self._kept:
                    self._kept.move_to_end(key)
            if found:
                self._hits += 1
            else:
                self._misses += 1
        return found

    def forget(self, namespace: str) -> None:
        """Forget a namespace."""
        with self._lock:
            for key in [key for key in self._kept if key.namespace == namespace]:
                self._take_out(key)
        self.changes.mark()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._forget_all()
        self.changes.mark()

    def figures(self) -> AnswerFigures:
        """Count what is remembered, was let go and was of use, since this memory was made."""
        with self._lock:
            return AnswerFigures(
                len(self._kept), self._num_bytes, self._evictions, self._hits, self._misses
            )

    def _of(self, namespace: str) -> list[tuple[str, Entry]]:
        with self._lock:
            return [
                (key.question, entry)
                for key, entry in self._kept.items()
                if key.namespace == namespace
            ]

    def _nearest(
        self, vector: Vector, candidates: list[tuple[str, Entry]], k: int
    ) -> list[SimilarAnswer]:
        candidates.sort(key=lambda item: -item[1].number)  # the newest first
        table = np.stack([entry.vector for _, entry in candidates])
        # not a matrix product, in which equal rows can give sums that differ by a rounding
        cosines = np.clip((table * vector).sum(axis=1), -1, 1)
        best = np.argsort(-cosines, kind="stable")[:k]
        return [
            SimilarAnswer(candidates[i][0], candidates[i][1].answer, float(cosines[i]))
            for i in best.tolist()
            if cosines[i] >= self.least_similarity
        ]

    def _vector(self, question: str) -> Vector:
        """Embed a question.

        Raises:
            ConfigurationError: no usable vector, or not as many numbers as before.
        """
        vector = unit_vector(self._embed([question]))
        with self._lock:
            if self._dimension is None:
                self._dimension = len(vector)
            if len(vector) != self._dimension:
                raise ConfigurationError(
                    f"embed returned {len(vector)} numbers for a text, and {self._dimension} "
                    f"before: an answer memory needs one and the same embedder"
                )
        return vector

    def _forget_all(self) -> None:
        self._kept: OrderedDict[Key, Entry] = OrderedDict()  # used longest ago first
        self._num_bytes = 0
        self._next = 0

    def _put(self, key: Key, entry: Entry) -> None:
        """Take an entry in, the lock being held, and let go what there is no more room for."""
        if key in self._kept:
            self._take_out(key)
        size = num_bytes(key, entry)
        if size > self.max_bytes:
            return
        self._kept[key] = entry
        self._num_bytes += size
        self._next = max(self._next, entry.number + 1)
        while self._num_bytes > self.max_bytes:
            self._take_out(next(iter(self._kept)))
            self._evictions += 1

    def _take_out(self, key: Key) -> None:
        self._num_bytes -= num_bytes(key, self._kept.pop(key))

    def _state(self) -> tuple[Header, State]:
        with self._lock:
            kept = list(self._kept.items())
        return packed(kept)

    def _restore(self, header: Header, arrays: State) -> None:
        for key, entry in unpacked(header, arrays):
            self._put(key, entry)
            self._dimension = len(entry.vector)

    def _require_same_embedder(self) -> None:
        """Refuse the file if a question of it has another vector now."""
        if not self._kept:
            return
        key, entry = next(reversed(self._kept.items()))
        vector = unit_vector(self._embed([key.question]))
        if len(vector) != len(entry.vector) or vector @ entry.vector < _SAME_EMBEDDER:
            self._forget_all()
            self._dimension, self._evictions = None, 0
            self._refuse("it was made with another embedder")
