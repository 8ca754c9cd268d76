"""Entries: answered questions with their vectors, and the arrays they are kept as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragaccel.draft.restoring import checked
from ragaccel.errors import ConfigurationError
from ragaccel.memory.files import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.draft.restoring import State
    from ragaccel.memory.archive import Header

Vector = npt.NDArray[np.float32]
_INEXACT = 1e-3  # how far the length of a vector may be from 1


class Key(NamedTuple):
    """A question of a namespace; there is one answer to it."""

    namespace: str
    question: str


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An answer; its question's vector [D], of length 1; a number that grows with every entry."""

    answer: str
    vector: Vector
    number: int


def num_bytes(key: Key, entry: Entry) -> int:
    """How large an entry is: its texts in UTF-8, and four bytes for each number."""
    texts = (key.namespace, key.question, entry.answer)
    return sum(len(_utf8(text)) for text in texts) + 4 * len(entry.vector)


def unit_vector(found: Any) -> Vector:
    """Return the vector [D] of one text from what an embedder returned for it, with length 1.

    Raises:
        ConfigurationError: it is not of shape [1, D], or the vector has no direction.
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
            f"it must return numbers [1, D]"
        )
    vector = array[0].astype(np.float64)
    largest = np.abs(vector).max()
    if not np.isfinite(largest) or largest == 0:
        raise ConfigurationError(
            "embed returned a vector of zeros, or of numbers that are not finite: "
            "it must give every text a direction"
        )
    vector /= largest  # or its squares might be too large, or too small
    unit: Vector = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


def packed(entries: Sequence[tuple[Key, Entry]]) -> tuple[Header, State]:
    """Return entries, in their order, as a header and arrays."""
    names = list(dict.fromkeys(key.namespace for key, _ in entries))
    number_of = {name: number for number, name in enumerate(names)}
    questions = [_utf8(key.question) for key, _ in entries]
    answers = [_utf8(entry.answer) for _, entry in entries]
    came = np.argsort(np.array([entry.number for _, entry in entries], np.int64))
    vectors = [entry.vector for _, entry in entries]
    return {"namespaces": names}, {
        "text": np.frombuffer(b"".join([*questions, *answers]), np.uint8),
        "question_lengths": np.array([len(text) for text in questions], np.int32),
        "answer_lengths": np.array([len(text) for text in answers], np.int32),
        "namespace_of": np.array([number_of[key.namespace] for key, _ in entries], np.int32),
        "came": np.argsort(came).astype(np.int32),  # each one's rank
        "vectors": np.stack(vectors) if vectors else np.zeros((0, 0), np.float32),
    }


def unpacked(header: Header, arrays: State) -> list[tuple[Key, Entry]]:
    """Return the entries that were packed, in their order.

    Raises:
        ValueError: arrays that are no entries.
    """
    names = named(header, "namespaces")
    text = checked(arrays, "text", np.uint8, (None,), low=0, high=255).tobytes()
    size = len(text)
    questions = checked(arrays, "question_lengths", np.int32, (None,), low=1, high=size)
    num = len(questions)
    answers = checked(arrays, "answer_lengths", np.int32, (num,), low=1, high=size)
    of = checked(arrays, "namespace_of", np.int32, (num,), low=0, high=len(names) - 1)
    came = checked(arrays, "came", np.int32, (num,), low=0, high=num - 1)
    vectors = checked(arrays, "vectors", np.float32, (num, None), low=-2, high=2)
    if np.any(np.abs(np.linalg.norm(vectors, axis=1) - 1) > _INEXACT):
        raise ValueError("vectors are not of length 1")
    ends = np.cumsum(np.concatenate([questions, answers]), dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != size:
        raise ValueError("the lengths of the texts do not add up")
    texts = [
        text[start:end].decode("utf-8", "surrogatepass")
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    keys = [Key(names[of[i]], texts[i]) for i in range(num)]
    if len(set(keys)) < num or len(np.unique(came)) < num:
        raise ValueError("an entry stands there twice")
    made = [Entry(texts[num + i], vectors[i].copy(), int(came[i])) for i in range(num)]
    return list(zip(keys, made, strict=True))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # half a surrogate pair is a text too
