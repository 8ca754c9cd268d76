"""Given passages: what a caller puts into a collection, checked and made ready for the store."""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from ragaccel.passage import Passage

_TOO_LARGE = 2**63


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
        if any(abs(place) >= _TOO_LARGE for place in places):
            raise ConfigurationError(
                f"passage {name!r} has a place (start, end, page or line) of {max(places)}: it"
                " must fit into 64 bits"
            )


def require_texts(names: Iterable[str]) -> list[str]:
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
    if not 0 < number < _TOO_LARGE // 4:  # some are looked at beyond k
        raise ConfigurationError(f"k is {k}: ask for one passage or more, up to {_TOO_LARGE // 4}")
    return number


def _require_unicode(text: str, whose: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{whose} holds {error.object[error.start]!r}, half a character, as broken PDFs do:"
            " replace it, e.g. by text.encode(errors='replace').decode()"
        ) from None
