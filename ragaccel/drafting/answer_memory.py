"""Answer memory: answers to earlier questions, found by the similarity of the questions."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ragaccel.drafting.arrays import Field, check_state
from ragaccel.drafting.history import AnswerMemoryStats
from ragaccel.drafting.memory import PersistentMemory, read_namespaces
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ragaccel.drafting.arrays import State
    from ragaccel.drafting.memory import Header


Vector = npt.NDArray[np.float32]
_NORM_TOLERANCE = 1e-3  # tolerance of a vector's length around 1


class Key(NamedTuple):
    """The key of an answer: its namespace and its question."""

    namespace: str
    question: str


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An answer, its question's unit vector [D], and a number that increases with every entry."""

    answer: str
    vector: Vector
    number: int


def num_bytes(key: Key, entry: Entry) -> int:
    """Return the size of an entry: its texts in UTF-8 and four bytes per number."""
    texts = (key.namespace, key.question, entry.answer)
    return sum(len(_utf8(text)) for text in texts) + 4 * len(entry.vector)


def unit_vector(found: Any) -> Vector:
    """Return the vector [D] of length 1 from what an embedder returned for one text.

    Raises:
        ConfigurationError: the array is not [1, D], or the vector is zero or not finite.
    """
    try:
        array = np.asarray(found)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"embed must return an array [N, D] for N texts: {error}"
        ) from error
    if array.ndim != 2 or len(array) != 1 or not array.size or array.dtype.kind not in "fiu":
        raise ConfigurationError(
            f"embed returned an array of shape {array.shape} and type {array.dtype} for one text: "
            f"it must return numbers of shape [1, D]"
        )
    vector = array[0].astype(np.float64)
    largest = np.abs(vector).max()
    if not np.isfinite(largest) or largest == 0:
        raise ConfigurationError(
            "embed returned a vector of zeros, or one with NaN or infinite numbers: "
            "it must return a finite, nonzero vector for every text"
        )
    vector /= largest  # prevents overflow and underflow of the squares
    unit: Vector = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


def pack(entries: Sequence[tuple[Key, Entry]]) -> tuple[Header, State]:
    """Return entries as a header and arrays to store; ``unpack`` reads them back in order."""
    names = list(dict.fromkeys(key.namespace for key, _ in entries))
    number_of = {name: number for number, name in enumerate(names)}
    questions = [_utf8(key.question) for key, _ in entries]
    answers = [_utf8(entry.answer) for _, entry in entries]
    ranks = np.argsort(np.array([entry.number for _, entry in entries], np.int64))
    vectors = [entry.vector for _, entry in entries]
    return {"namespaces": names}, {
        "text": np.frombuffer(b"".join([*questions, *answers]), np.uint8),
        "question_lengths": np.array([len(text) for text in questions], np.int32),
        "answer_lengths": np.array([len(text) for text in answers], np.int32),
        "namespace_of": np.array([number_of[key.namespace] for key, _ in entries], np.int32),
        "came": np.argsort(ranks).astype(np.int32),  # each entry's rank by age
        "vectors": np.stack(vectors) if vectors else np.zeros((0, 0), np.float32),
    }


def unpack(header: Header, arrays: State) -> list[tuple[Key, Entry]]:
    """Return the entries that ``pack`` stored, in their order.

    Raises:
        ValueError: the arrays are not valid entries.
    """
    names = read_namespaces(header)
    fields = {
        "text": Field(np.uint8, ("bytes",)),
        "question_lengths": Field(np.int32, ("entries",), 1),
        "answer_lengths": Field(np.int32, ("entries",), 1),
        "namespace_of": Field(np.int32, ("entries",), 0, len(names) - 1),
        "came": Field(np.int32, ("entries",)),
        "vectors": Field(np.float32, ("entries", "dimension"), -2, 2),
    }
    text, questions, answers, of, ranks, vectors = check_state(arrays, fields)
    num = len(questions)
    if np.any(np.abs(np.linalg.norm(vectors, axis=1) - 1) > _NORM_TOLERANCE):
        raise ValueError("vectors are not of length 1")
    ends = np.cumsum(np.concatenate([questions, answers]), dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != len(text):
        raise ValueError("the lengths of the texts do not add up")
    texts = [
        text[start:end].tobytes().decode("utf-8", "surrogatepass")
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    keys = [Key(names[of[i]], texts[i]) for i in range(num)]
    if len(set(keys)) < num or sorted(ranks) != list(range(num)):
        raise ValueError("an entry occurs twice")
    made = [Entry(texts[num + i], vectors[i].copy(), int(ranks[i])) for i in range(num)]
    return list(zip(keys, made, strict=True))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a lone surrogate is allowed


DEFAULT_BYTES = 16 << 20
MIN_BYTES = 1024
_SAME_EMBEDDER = 0.99  # cosine of a question's stored vector and its new one


@dataclass(frozen=True, slots=True)
class SimilarAnswer:
    """An answer to an earlier question; ``similarity`` is the cosine of the two questions."""

    question: str
    answer: str
    similarity: float


class AnswerMemory(PersistentMemory):
    """Answers to earlier questions, found by the meaning of the question.

    The source of drafts in LLMA's cache-assisted generation (Yang et al., 2023, arXiv 2304.04487):
    similar questions are likely to have similar answers. A memory that would exceed ``max_bytes``
    evicts the least recently used answers; adding or finding an answer counts as use. Threads may
    share it; nothing from one namespace is found in another. With a path it outlives the process:
    see ``ragaccel.drafting.memory.PersistentMemory``.

    Args:
        embed: turns N texts into an array [N, D]; called without holding a lock.
        max_bytes: size limit of questions, answers, names of namespaces and vectors together.
        min_similarity: lowest cosine, from -1 to 1, of a similar question.
        path: the file that stores it; a file of another embedder is refused. If the file is not
            empty, one of its questions is embedded at once to check that.
        fingerprint: identifies the embedder; "" if it has no fingerprint.

    Raises:
        ConfigurationError: a limit is invalid, or ``embed`` returns something other than vectors.
    """

    file_format: ClassVar[str] = "ragaccel answers"

    def __init__(
        self,
        embed: Callable[[list[str]], npt.NDArray[Any]],
        *,
        max_bytes: int = DEFAULT_BYTES,
        min_similarity: float = 0.6,
        path: str | Path | None = None,
        fingerprint: str = "",
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ConfigurationError(f"max_bytes must be {MIN_BYTES} or more, not {max_bytes}")
        if not -1 <= min_similarity <= 1:
            raise ConfigurationError(f"min_similarity must be from -1 to 1, not {min_similarity}")
        super().__init__(path, fingerprint, max_bytes)
        self.max_bytes, self.min_similarity = max_bytes, min_similarity
        self._embed = embed
        self._lock = Lock()
        self._hits = self._misses = self._evictions = 0
        self._dimension: int | None = None
        self._reset()
        self._load()
        self._check_embedder()

    def add(self, question: str, answer: str, namespace: str = "") -> None:
        """Add an answer, or replace the earlier one to the same question.

        Ignore blank questions and answers, and an entry larger than ``max_bytes``.

        Raises:
            ConfigurationError: ``embed`` returned no valid vector.
        """
        if not question.strip() or not answer.strip():
            return
        key = Key(namespace, question)
        with self._lock:
            known = self._entries.get(key)
        vector = known.vector if known is not None else self._vector(question)
        with self._lock:
            self._insert(key, Entry(answer, vector, self._next))
        self.mark_changed()

    def similar(self, question: str, namespace: str = "", k: int = 2) -> list[SimilarAnswer]:
        """Return answers to at most ``k`` similar questions, the most similar first.

        Ties go to the answer added last.

        Raises:
            ConfigurationError: ``k`` is below 1, or ``embed`` returned no valid vector.
        """
        if k < 1:
            raise ConfigurationError(f"k must be 1 or more, not {k}")
        found: list[SimilarAnswer] = []
        if question.strip() and (known := self._entries_of(namespace)):
            found = self._nearest(self._vector(question), known, k)
        with self._lock:
            for one in reversed(found):  # so that the best is the most recently used
                if (key := Key(namespace, one.question)) in self._entries:
                    self._entries.move_to_end(key)
            if found:
                self._hits += 1
            else:
                self._misses += 1
        return found

    def forget(self, namespace: str) -> None:
        """Delete all answers of a namespace, also from the file at the next save."""
        with self._lock:
            for key in [key for key in self._entries if key.namespace == namespace]:
                self._remove(key)
        self.mark_changed()

    def clear(self) -> None:
        """Delete all answers of all namespaces, also from the file at the next save."""
        with self._lock:
            self._reset()
        self.mark_changed()

    def stats(self) -> AnswerMemoryStats:
        """Return the present size, and the evictions and hits since this memory was created."""
        with self._lock:
            return AnswerMemoryStats(
                len(self._entries), self._num_bytes, self._evictions, self._hits, self._misses
            )

    def _entries_of(self, namespace: str) -> list[tuple[str, Entry]]:
        with self._lock:
            return [
                (key.question, entry)
                for key, entry in self._entries.items()
                if key.namespace == namespace
            ]

    def _nearest(
        self, vector: Vector, candidates: list[tuple[str, Entry]], k: int
    ) -> list[SimilarAnswer]:
        candidates.sort(key=lambda item: -item[1].number)  # newest first
        table = np.stack([entry.vector for _, entry in candidates])
        # Not a matrix product: there, equal rows can differ by a rounding error.
        cosines = np.clip((table * vector).sum(axis=1), -1, 1)
        best = np.argsort(-cosines, kind="stable")[:k]
        return [
            SimilarAnswer(candidates[i][0], candidates[i][1].answer, float(cosines[i]))
            for i in best.tolist()
            if cosines[i] >= self.min_similarity
        ]

    def _vector(self, question: str) -> Vector:
        """Return the unit vector of a question.

        Raises:
            ConfigurationError: ``embed`` returned no valid vector, or one of another length.
        """
        vector = unit_vector(self._embed([question]))
        with self._lock:
            if self._dimension is None:
                self._dimension = len(vector)
            if len(vector) != self._dimension:
                raise ConfigurationError(
                    f"embed returned a vector of {len(vector)} numbers, but one of "
                    f"{self._dimension} before: use one embedder for each answer memory"
                )
        return vector

    def _reset(self) -> None:
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._next = 0

    def _insert(self, key: Key, entry: Entry) -> None:
        """Insert an entry and evict others as needed. The caller holds the lock."""
        if key in self._entries:
            self._remove(key)
        size = num_bytes(key, entry)
        if size > self.max_bytes:
            return
        self._entries[key] = entry
        self._num_bytes += size
        self._next = max(self._next, entry.number + 1)
        while self._num_bytes > self.max_bytes:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def _remove(self, key: Key) -> None:
        self._num_bytes -= num_bytes(key, self._entries.pop(key))

    def _state(self) -> tuple[Header, State]:
        with self._lock:
            kept = list(self._entries.items())
        return pack(kept)

    def _restore(self, header: Header, arrays: State) -> None:
        for key, entry in unpack(header, arrays):
            self._insert(key, entry)
            self._dimension = len(entry.vector)

    def _check_embedder(self) -> None:
        """Refuse the file if the embedder no longer gives a stored question the same vector."""
        if not self._entries:
            return
        key, entry = next(reversed(self._entries.items()))
        vector = unit_vector(self._embed([key.question]))
        if len(vector) != len(entry.vector) or vector @ entry.vector < _SAME_EMBEDDER:
            self._reset()
            self._dimension, self._evictions = None, 0
            self._refuse("it was made with another embedder")
