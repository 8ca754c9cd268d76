"""Collections: passages that a program puts in, changes, searches and removes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ragaccel.errors import ConfigurationError, EmptyIndexError
from ragaccel.retrieval.retriever import (
    DENSE_WEIGHT,
    fuse,
    fusion_depth,
    metadata_text,
    mmr,
    require_k,
    require_storable,
    require_strings,
    unit_vectors,
)
from ragaccel.retrieval.store import (
    PASSAGE_COLUMNS,
    PASSAGE_TABLES,
    FileRecord,
    Store,
    corrupt_index_error,
    require_dimension,
)
from ragaccel.retrieval.vector_index import StoreVectorIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from ragaccel.passage import Passage

    Where = Callable[["StoredPassage"], bool] | None


class FileBacked:
    """An object stored in a file: unpickling reopens the file, copying returns the same object.

    Args:
        path: The file; None: a file in a temporary folder, deleted with this object.
        name: The name of the temporary file.
    """

    def __init__(self, path: str | Path | None, name: str) -> None:
        self._finalizer: weakref.finalize[Any, Any] | None = None
        if path is None:
            folder = tempfile.mkdtemp(prefix="ragaccel-")
            self._finalizer = weakref.finalize(self, _delete_folder, folder, os.getpid())
            path = Path(folder) / name
        self.path = Path(path).absolute()  # the program may change its working directory

    @property
    def is_temporary(self) -> bool:
        """Whether the file is deleted with this object."""
        return self._finalizer is not None

    def _delete_temporary(self) -> None:
        """Delete the temporary folder, if there is one."""
        if self._finalizer is not None:
            self._finalizer()

    def _require_exists(self) -> None:
        """Raise an error if the file no longer exists.

        Raises:
            EmptyIndexError: The collection was closed, moved or deleted.
        """
        if self._finalizer is not None and not self._finalizer.alive:
            raise EmptyIndexError("this temporary collection was closed: make a new one")
        if not self.path.exists():
            raise EmptyIndexError(
                f"the collection {self.path} was moved or deleted: open it at its new path, or"
                " make a new one"
            )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.is_temporary:
            raise ConfigurationError(
                "a temporary collection cannot be pickled, because its file is deleted with it:"
                " make it with a path, or copy_to() a file and open that"
            )
        return {"path": self.path}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _delete_folder(folder: str, process: int) -> None:
    """Delete a temporary folder, but only in the process that created it, not in a fork."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


_MAX_SQL_VALUES = 500  # SQLite limits the number of values in one query
_SELECT = f"SELECT {PASSAGE_COLUMNS}, p.metadata FROM {PASSAGE_TABLES}"


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage of a collection with its metadata; searches set ``passage.score``."""

    passage: Passage
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def id_and_score(self) -> tuple[str, float]:
        """The passage's id and its score of the search, an entry of a ranking."""
        return self.passage.passage_id, self.passage.score

    def with_score(self, score: float) -> StoredPassage:
        """Return a copy with another score."""
        return replace(self, passage=replace(self.passage, score=score))


def _batches(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (
        values[first : first + _MAX_SQL_VALUES] for first in range(0, len(values), _MAX_SQL_VALUES)
    )


def _placeholders(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))


class Collection(FileBacked):
    """A collection of passages by id, with the caller's vectors and metadata, in a SQLite file.

    It offers what a framework's vector store needs. Every change is one transaction, durable when
    the call returns; threads and processes may read while one writes. Vectors are normalized and
    stored in 16 bits a number; similarity is the cosine. An index that ``ragaccel index`` made can
    be opened to be read and searched, but not changed: its next run would undo the changes.

    Args:
        path: The file, created if it does not exist; None: a temporary file, deleted with this
            object.
        fingerprint: Names the embedder of the vectors: its :attr:`Embedder.fingerprint`, or a
            model's name. A file known to hold vectors of another one is refused, and a
            :class:`Retriever` with the same embedder can search this file. With an empty string,
            nothing is compared.
        shared: Let other users of this machine read the file; by default a new file is private to
            its owner.

    Raises:
        IndexUnusableError: Another embedder made the vectors in the file, the file is damaged, or
            it is not an index of ragaccel.
        StorageError: The file cannot be created.
    """

    def __init__(
        self, path: str | Path | None = None, *, fingerprint: str = "", shared: bool = False
    ) -> None:
        super().__init__(path, "collection.db")
        self.fingerprint = fingerprint
        self.shared = shared
        self._store = Store(self.path, shared=shared)
        self.copy_to = self._store.copy_to
        self._vectors = StoreVectorIndex(self._store, self._dimension)
        self._store.open_for_program(fingerprint)

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; delete it if it is temporary."""
        self._store.close()
        self._delete_temporary()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fingerprint": self.fingerprint, "shared": self.shared}

    # Changing

    def put(
        self,
        passages: Sequence[Passage],
        vectors: ArrayLike,
        metadata: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Add passages, or replace those with the same ids, atomically.

        If an id occurs twice, the last passage wins.

        Args:
            passages: The passages; ``path`` names the document of each, if any.
            vectors: [N, D], with the D of the vectors already in the collection.
            metadata: One JSON-serializable mapping for each passage; none by default.

        Raises:
            ConfigurationError: The numbers of passages, vectors and metadata differ, or a value
                cannot be stored.
            IndexUnusableError: The collection holds vectors of another dimension.
            StorageError: The file is an index that ``ragaccel index`` keeps, or it cannot be
                written to.
            IndexBusyError: Another process is writing to the file.
        """
        if not passages:
            return
        rows = unit_vectors(vectors)
        if len(rows) != len(passages):
            raise ConfigurationError(
                f"there are {len(rows)} vectors for {len(passages)} passages: give one vector for"
                " each passage"
            )
        kept = metadata_text(passages, metadata)
        require_storable(passages, kept)
        packed = [row.tobytes() for row in rows.astype("<f2")]
        latest = {p.passage_id: (p, *more) for p, *more in zip(passages, packed, kept, strict=True)}
        with self._write_transaction():
            self._store.ensure_dimension(self.fingerprint, rows.shape[1])
            left = self._delete_ids(list(latest))
            for path, group in groupby(latest.values(), key=lambda item: item[0].path):
                file = self._store.put_file(FileRecord(path, 0, 0, "", kind="given"))
                self._store.put_rows((file, *item) for item in group)
            self._delete_emptied(left)

    def drop(self, passage_ids: Iterable[str]) -> int:
        """Remove passages by their ids; return how many were removed."""
        wanted = require_strings(passage_ids)
        with self._write_transaction():
            count = self._store.count_passages()
            self._delete_emptied(self._delete_ids(wanted))
            return count - self._store.count_passages()

    def drop_documents(self, paths: Iterable[str]) -> int:
        """Remove all passages of some documents; return how many passages were removed."""
        wanted = [(path,) for path in require_strings(paths) if path]
        with self._write_transaction() as connection:
            count = self._store.count_passages()
            connection.executemany("DELETE FROM file WHERE path = ?", wanted)  # cascades
            return count - self._store.count_passages()

    def clear(self) -> None:
        """Remove everything; vectors of any dimension and any model may be put in afterwards."""
        with self._write_transaction() as connection:
            connection.execute("DELETE FROM passage")
            connection.execute("DELETE FROM file")
            self._store.reset_dimension(self.fingerprint)

    # Reading

    def __len__(self) -> int:
        with self._snapshot():
            return self._store.count_passages()

    def __iter__(self) -> Iterator[StoredPassage]:
        """Yield every passage, in the order of insertion."""
        with self._snapshot():
            keys = self._store.keys().tolist()
        for _, item in self._read_rows(keys):
            yield item

    def get(self, passage_ids: Iterable[str]) -> list[StoredPassage]:
        """Return passages by their ids, in the order given; missing ones are left out."""
        wanted = require_strings(passage_ids)
        with self._snapshot():
            found = self._read_ids(wanted)
        return [found[name] for name in wanted if name in found]

    def documents(self) -> dict[str, int]:
        """Return the number of passages of every document, by its path."""
        with self._snapshot():
            files = self._store.files()
        return {path: record.num_passages for path, record in files.items() if path}

    def document(self, path: str) -> list[StoredPassage]:
        """Return the passages of a document, in the order of its text."""
        (path,) = require_strings([path])
        with self._snapshot():
            return self._read_document(path)

    def vectors(self, passage_ids: Iterable[str]) -> dict[str, NDArray[np.float32]]:
        """Return the unit vectors [D] of passages, by their ids; missing ones are left out."""
        wanted = require_strings(passage_ids)
        with self._snapshot():
            return self._read_vectors(wanted)

    # Searching

    def search(self, vector: ArrayLike, k: int = 6, *, where: Where = None) -> list[StoredPassage]:
        """Find the k passages nearest to a vector [D], nearest first (score: cosine).

        Args:
            vector: The query, of any norm.
            k: The number of passages; fewer are returned only if there are no more.
            where: A condition that every passage must fulfil. It is checked on passages, nearest
                first, until k are found, so the result is exact at any size.

        Raises:
            ConfigurationError: The query is not a vector, or k is below 1.
            IndexUnusableError: The collection holds vectors of another dimension.
        """
        query = unit_vectors(cast("Any", [vector]))[0]
        k = require_k(k)
        with self._snapshot():
            with self._vectors.current() as index:
                if not len(index):
                    return []
                require_dimension(self.path, len(query), index.dimension)
                ranking = index.ranking(query) if where else iter(index.search(query, k))
            near = ((key, min(1.0, max(-1.0, score))) for key, score in ranking)
            return self._read_first(near, k, where)

    def search_text(self, words: str, k: int = 6, *, where: Where = None) -> list[StoredPassage]:
        """Find the k best passages that share words with a text, best first (score: BM25)."""
        k = require_k(k)
        with self._snapshot():
            ranking = self._store.search_text(words, -1 if where else k)
            return self._read_first(iter(ranking), k, where)

    def search_fused(
        self,
        words: str,
        vector: ArrayLike,
        k: int = 6,
        *,
        alpha: float = DENSE_WEIGHT,
        where: Where = None,
    ) -> list[StoredPassage]:
        """Search by words and by vector, fused by their scores as a :class:`Retriever` does.

        Args:
            words: The question.
            vector: The question's vector, [D].
            k: The number of passages; fewer are returned only if there are no more.
            alpha: The weight of the vectors: 0 uses only words, 1 only vectors.
            where: As in :meth:`search`.
        """
        if not 0 <= alpha <= 1:
            raise ConfigurationError(f"alpha is {alpha}: choose 0 (only words) to 1 (only vectors)")
        deep = fusion_depth(k := require_k(k))
        with self._snapshot():
            near = self.search(vector, deep, where=where) if alpha > 0 else []
            worded = self.search_text(words, deep, where=where) if alpha < 1 else []
        found = {item.passage.passage_id: item for item in (*near, *worded)}
        dense, text = ([item.id_and_score for item in items] for items in (near, worded))
        return [found[name].with_score(score) for name, score in fuse(dense, text, alpha)[:k]]

    def search_mmr(
        self,
        vector: ArrayLike,
        k: int = 6,
        *,
        num_candidates: int = 20,
        relevance_weight: float = 0.5,
        where: Where = None,
    ) -> list[StoredPassage]:
        """Find k passages near to a vector that differ from one another (score: cosine).

        Args:
            vector: The question's vector, [D].
            k: The number of passages.
            num_candidates: How many of the nearest passages to choose from, by maximal marginal
                relevance.
            relevance_weight: 1 weighs only the cosine, 0 only how much a passage differs from
                those already chosen.
            where: As in :meth:`search`.
        """
        if not 0 <= relevance_weight <= 1:
            raise ConfigurationError(
                f"relevance_weight is {relevance_weight}: choose 0 (most different) to 1 (nearest)"
            )
        k = require_k(k)
        with self._snapshot():
            near = self.search(vector, max(num_candidates, k), where=where)
            vectors = self.vectors(item.passage.passage_id for item in near)
        rows = np.array([vectors[item.passage.passage_id] for item in near])
        similarities = np.array([item.passage.score for item in near])
        return [near[i] for i in mmr(similarities, rows, k, relevance_weight)]

    def _read_ids(self, passage_ids: Sequence[str]) -> dict[str, StoredPassage]:
        """Return passages by their ids; missing ones are left out."""
        found: dict[str, StoredPassage] = {}
        for part in _batches(passage_ids):
            rows = self._store.rows(
                f"{_SELECT} WHERE p.passage_id IN ({_placeholders(part)})", part
            )
            found.update((row[1], self._stored_from_row(row)) for row in rows)
        return found

    def _read_rows(self, keys: Sequence[int]) -> Iterator[tuple[int, StoredPassage]]:
        """Yield (row id, passage) in the order given; missing ones are left out."""
        for part in _batches(keys):
            rows = self._store.rows(f"{_SELECT} WHERE p.id IN ({_placeholders(part)})", part)
            found = {row[0]: row for row in rows}
            yield from ((key, self._stored_from_row(found[key])) for key in part if key in found)

    def _read_first(
        self, ranking: Iterator[tuple[int, float]], k: int, where: Where
    ) -> list[StoredPassage]:
        """Return the first k passages of a ranking of (row id, score) that fulfil a condition."""
        chosen: list[StoredPassage] = []
        while len(chosen) < k and (part := dict(islice(ranking, _MAX_SQL_VALUES))):
            scored = (item.with_score(part[key]) for key, item in self._read_rows(list(part)))
            chosen += [item for item in scored if where is None or where(item)]
        return chosen[:k]

    def _read_document(self, path: str) -> list[StoredPassage]:
        """Return the passages of a document, in the order of its text."""
        rows = self._store.rows(f"{_SELECT} WHERE f.path = ? ORDER BY p.start, p.id", (path,))
        return [self._stored_from_row(row) for row in rows]

    def _read_vectors(self, passage_ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return the vectors [D] of passages, by their ids; missing ones are left out."""
        found: dict[str, NDArray[np.float32]] = {}
        for part in _batches(passage_ids):
            chosen = f"passage WHERE passage_id IN ({_placeholders(part)})"
            rows = self._store.rows(f"SELECT passage_id, vector FROM {chosen}", part)
            if rows:
                names, packed = zip(*rows, strict=True)
                found.update(zip(names, self._store.unpack_vectors(packed), strict=True))
        return found

    def _delete_ids(self, passage_ids: Sequence[str]) -> set[int]:
        """Delete passages; return the row ids of the files they belonged to."""
        files: set[int] = set()
        for part in _batches(passage_ids):
            chosen = f"passage WHERE passage_id IN ({_placeholders(part)})"
            files.update(row for (row,) in self._store.rows(f"SELECT file_id FROM {chosen}", part))
            self._store.rows(f"DELETE FROM {chosen}", part)
        return files

    def _delete_emptied(self, files: Iterable[int]) -> None:
        """Delete the records of those files, given by row id, that have no passage left."""
        for part in _batches(list(files)):
            self._store.rows(
                f"DELETE FROM file WHERE id IN ({_placeholders(part)})"
                " AND NOT EXISTS (SELECT 1 FROM passage WHERE file_id = file.id)",
                part,
            )

    def _stored_from_row(self, row: Sequence[Any]) -> StoredPassage:
        *columns, metadata = row
        passage = self._store.passage_from_row(columns)
        if metadata == "":
            return StoredPassage(passage, {})
        try:
            found = json.loads(metadata)
        except (TypeError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise corrupt_index_error(
                self.path, f"the metadata of passage {row[1]!r} is not a JSON object"
            )
        return StoredPassage(passage, found)

    def _dimension(self) -> int:
        return self._store.meta_number("dimension")

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        self._require_exists()
        with self._store.reading():
            yield

    @contextmanager
    def _write_transaction(self) -> Iterator[Any]:
        self._require_exists()
        self._store.state()
        self._store.require_filled_by_program()
        with self._store.transaction() as connection:
            yield connection
