"""Stored passages: read, and deleted, by id, row or document, with their metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ragaccel.retrieve.schema import damaged
from ragaccel.retrieve.store import PASSAGE_COLUMNS, PASSAGE_TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieve.store import Store

    Where = Callable[["Stored"], bool] | None

_AT_ONCE = 500  # SQLite takes no more than some hundreds of values in one question
_SELECT = f"SELECT {PASSAGE_COLUMNS}, p.metadata FROM {PASSAGE_TABLES}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A passage as a collection keeps it; ``passage.score`` is set when it was searched for."""

    passage: Passage
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def ranked(self) -> tuple[str, float]:
        """Its id and its score."""
        return self.passage.passage_id, self.passage.score

    def scored(self, score: float) -> Stored:
        """The same with a score."""
        return replace(self, passage=replace(self.passage, score=score))


def read_ids(store: Store, passage_ids: Sequence[str]) -> dict[str, Stored]:
    """Passages by their ids; those that are not there are left out."""
    found: dict[str, Stored] = {}
    for part in _parts(passage_ids):
        rows = store.rows(f"{_SELECT} WHERE p.passage_id IN ({_marks(part)})", part)
        found.update((row[1], _stored(store, row)) for row in rows)
    return found


def read_rows(store: Store, keys: Sequence[int]) -> Iterator[tuple[int, Stored]]:
    """Yield passages with their rows, in the order given; those that are gone are left out."""
    for part in _parts(keys):
        rows = store.rows(f"{_SELECT} WHERE p.id IN ({_marks(part)})", part)
        found = {row[0]: row for row in rows}
        yield from ((key, _stored(store, found[key])) for key in part if key in found)


def read_first(
    store: Store, ranking: Iterator[tuple[int, float]], k: int, where: Where
) -> list[Stored]:
    """The first k passages of a ranking, given by their rows, for which a condition holds."""
    chosen: list[Stored] = []
    while len(chosen) < k and (part := dict(islice(ranking, _AT_ONCE))):
        scored = (item.scored(part[key]) for key, item in read_rows(store, list(part)))
        chosen += [item for item in scored if where is None or where(item)]
    return chosen[:k]


def read_document(store: Store, path: str) -> list[Stored]:
    """The passages of a document, in its order."""
    rows = store.rows(f"{_SELECT} WHERE f.path = ? ORDER BY p.start, p.id", (path,))
    return [_stored(store, row) for row in rows]


def read_vectors(store: Store, passage_ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """The vectors [D] of passages by their ids; those that are not there are left out."""
    found: dict[str, NDArray[np.float32]] = {}
    for part in _parts(passage_ids):
        query = f"SELECT passage_id, vector FROM passage WHERE passage_id IN ({_marks(part)})"
        rows = store.rows(query, part)
        if rows:
            names, packed = zip(*rows, strict=True)
            found.update(zip(names, store.unpacked(packed), strict=True))
    return found


def delete_ids(store: Store, passage_ids: Sequence[str]) -> set[int]:
    """Delete passages; return the rows of the files that they were of."""
    files: set[int] = set()
    for part in _parts(passage_ids):
        chosen = f"passage WHERE passage_id IN ({_marks(part)})"
        files.update(row for (row,) in store.rows(f"SELECT file_id FROM {chosen}", part))
        store.rows(f"DELETE FROM {chosen}", part)
    return files


def delete_emptied(store: Store, files: Iterable[int]) -> None:
    """Delete files, given by their rows, of which no passage is left."""
    for part in _parts(list(files)):
        store.rows(
            f"DELETE FROM file WHERE id IN ({_marks(part)})"
            " AND NOT EXISTS (SELECT 1 FROM passage WHERE file_id = file.id)",
            part,
        )


def _stored(store: Store, row: Sequence[Any]) -> Stored:
    *columns, metadata = row
    passage = store.passage_of(columns)
    if metadata == "":
        return Stored(passage, {})
    try:
        found = json.loads(metadata)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise damaged(store.path, f"the metadata of {row[1]!r} is no JSON")
    return Stored(passage, found)


def _parts(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[first : first + _AT_ONCE] for first in range(0, len(values), _AT_ONCE))


def _marks(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))
