"""Collections: passages put in, changed, searched and taken out by a program."""

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
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    from ragaccel.passage import Passage


class FileBacked:
    """What lives in a file: pickled it is opened again there, copied it is the same.

    Args:
        path: The file; None: one in a temporary folder, which goes with this object.
        name: What the temporary one is called.
    """

    def __init__(self, path: str | Path | None, name: str) -> None:
        self._finalizer: weakref.finalize[Any, Any] | None = None
        if path is None:
            folder = tempfile.mkdtemp(prefix="ragaccel-")
            self._finalizer = weakref.finalize(self, _delete_folder, folder, os.getpid())
            path = Path(folder) / name
        self.path = Path(path).absolute()  # a program may change its folder

    @property
    def is_temporary(self) -> bool:
        """Whether its file goes with it."""
        return self._finalizer is not None

    def _delete_temporary(self) -> None:
        """Delete what is temporary."""
        if self._finalizer is not None:
            self._finalizer()

    def _require_exists(self) -> None:
        """Refuse to go on without a file.

        Raises:
            EmptyIndexError: With the cause.
        """
        if self._finalizer is not None and not self._finalizer.alive:
            raise EmptyIndexError("this temporary collection was closed: make a new one")
        if not self.path.exists():
            raise EmptyIndexError(
                f"the collection {self.path} was moved or deleted: open it at its new place, or"
                " make a new one"
            )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.is_temporary:
            raise ConfigurationError(
                "a temporary collection cannot be pickled, for its file goes with it: make it with"
                " a path, or copy_to() a file and open that"
            )
        return {"path": self.path}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _delete_folder(folder: str, process: int) -> None:
    """Delete a temporary folder, but not from a process that was forked off meanwhile."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieval.store import Store

    Where = Callable[["StoredPassage"], bool] | None

_MAX_SQL_VALUES = 500  # SQLite takes no more than some hundreds of values in one question
_SELECT = f"SELECT {PASSAGE_COLUMNS}, p.metadata FROM {PASSAGE_TABLES}"


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage as a collection keeps it; ``passage.score`` is set when it was searched for."""

    passage: Passage
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def id_and_score(self) -> tuple[str, float]:
        """Its id and its score."""
        return self.passage.passage_id, self.passage.score

    def with_score(self, score: float) -> StoredPassage:
        """The same with a score."""
        return replace(self, passage=replace(self.passage, score=score))


def _batches(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (
        values[first : first + _MAX_SQL_VALUES] for first in range(0, len(values), _MAX_SQL_VALUES)
    )


def _placeholders(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))


class Collection(FileBacked):
    """Passages under their ids, with vectors that the caller makes and metadata of its own.

    What a framework's vector store needs, in one SQLite file, like an index: every change is one
    transaction, kept when the call returns; threads and processes may read while one writes.
    Nearness is the cosine, of vectors kept in 16 bits a number: of any length given, they are kept
    at length 1. An index that ``ragaccel index`` made can be opened as well, to be read and
    searched; its next run would undo changes, so that they are refused.

    Args:
        path: The file, made if there is none; None: a temporary one, gone with this object.
        fingerprint: What makes the vectors (:attr:`Embedder.fingerprint`, a model's name): a file
            known to hold another's is refused, and a :class:`Retriever` with that very embedder
            can search it. Nothing is compared if it is empty.
        shared: Whether other users of this machine may read the file; else its owner alone, if it
            is made here.

    Raises:
        IndexUnusableError: The vectors in the file were made by something else.
        StorageError: The file cannot be made.
        IndexUnusableError: It is none of ours, or damaged.
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
        """Let go of the file; a temporary one is deleted."""
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
        """Add passages, or replace those of the same ids, all or none; a later one wins.

        Args:
            passages: Their ``path`` is the document they belong to, if any.
            vectors: [N, D]; D is that of the vectors put in before.
            metadata: What can be said in JSON, one each; nothing is kept if none is given.

        Raises:
            ConfigurationError: They do not fit one another, or cannot be kept.
            IndexUnusableError: The collection holds vectors of another length.
            StorageError: The file is an index that ``ragaccel index`` keeps, or cannot be
                written to.
            IndexBusyError: Another process goes on writing to it.
        """
        if not passages:
            return
        rows = unit_vectors(vectors)
        if len(rows) != len(passages):
            raise ConfigurationError(f"{len(rows)} vectors for {len(passages)} passages: one each")
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
        """Take passages out by their ids; return how many there were."""
        wanted = require_strings(passage_ids)
        with self._write_transaction():
            count = self._store.count_passages()
            self._delete_emptied(self._delete_ids(wanted))
            return count - self._store.count_passages()

    def drop_documents(self, paths: Iterable[str]) -> int:
        """Take out all passages of documents; return how many passages there were."""
        wanted = [(path,) for path in require_strings(paths) if path]
        with self._write_transaction() as connection:
            count = self._store.count_passages()
            connection.executemany("DELETE FROM file WHERE path = ?", wanted)  # passages with it
            return count - self._store.count_passages()

    def clear(self) -> None:
        """Take out everything; vectors of any length and of any model may be put in then."""
        with self._write_transaction() as connection:
            connection.execute("DELETE FROM passage")
            connection.execute("DELETE FROM file")
            self._store.reset_dimension(self.fingerprint)

    # Reading

    def __len__(self) -> int:
        with self._snapshot():
            return self._store.count_passages()

    def __iter__(self) -> Iterator[StoredPassage]:
        """Every passage, in the order put in."""
        with self._snapshot():
            keys = self._store.keys().tolist()
        for _, item in self._read_rows(keys):
            yield item

    def get(self, passage_ids: Iterable[str]) -> list[StoredPassage]:
        """Passages by their ids, in the order given; those that are not there are left out."""
        wanted = require_strings(passage_ids)
        with self._snapshot():
            found = self._read_ids(wanted)
        return [found[name] for name in wanted if name in found]

    def documents(self) -> dict[str, int]:
        """The path of every document that passages were put in with, and how many it has."""
        with self._snapshot():
            files = self._store.files()
        return {path: record.num_passages for path, record in files.items() if path}

    def document(self, path: str) -> list[StoredPassage]:
        """The passages of a document, in its order."""
        (path,) = require_strings([path])
        with self._snapshot():
            return self._read_document(path)

    def vectors(self, passage_ids: Iterable[str]) -> dict[str, NDArray[np.float32]]:
        """The vectors [D] of passages, of length 1, by their ids; those not there are left out."""
        wanted = require_strings(passage_ids)
        with self._snapshot():
            return self._read_vectors(wanted)

    # Searching

    def search(self, vector: ArrayLike, k: int = 6, *, where: Where = None) -> list[StoredPassage]:
        """Find the k passages nearest to a vector [D], nearest first (score: cosine).

        Args:
            vector: Of any length.
            k: How many; fewer come back only when there are no more.
            where: Asked of passages, nearest first, until k are found; exact at any size.

        Raises:
            ConfigurationError: It is no vector, or k is below 1.
            IndexUnusableError: The collection holds vectors of another length.
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
        """Find the k passages that share words with a text, best first (score: BM25)."""
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
            vector: [D], the question's.
            k: How many; fewer come back only when there are no more.
            alpha: 0 weighs only words, 1 only vectors.
            where: As in :meth:`search`.
        """
        if not 0 <= alpha <= 1:
            raise ConfigurationError(f"alpha is {alpha}: 0 (words alone) to 1 (vectors alone)")
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
        """Find k passages near to a vector that are unlike one another (score: cosine).

        Args:
            vector: [D], the question's.
            k: How many.
            num_candidates: How many of the nearest passages to choose from, by maximal marginal
                relevance.
            relevance_weight: 1 weighs only the cosine, 0 only how much a passage differs from
                those already chosen.
            where: As in :meth:`search`.
        """
        if not 0 <= relevance_weight <= 1:
            raise ConfigurationError(
                f"relevance_weight is {relevance_weight}: 0 (unlike) to 1 (near)"
            )
        k = require_k(k)
        with self._snapshot():
            near = self.search(vector, max(num_candidates, k), where=where)
            vectors = self.vectors(item.passage.passage_id for item in near)
        rows = np.array([vectors[item.passage.passage_id] for item in near])
        similarities = np.array([item.passage.score for item in near])
        return [near[i] for i in mmr(similarities, rows, k, relevance_weight)]

    def _read_ids(self, passage_ids: Sequence[str]) -> dict[str, StoredPassage]:
        """Passages by their ids; those that are not there are left out."""
        found: dict[str, StoredPassage] = {}
        for part in _batches(passage_ids):
            rows = self._store.rows(
                f"{_SELECT} WHERE p.passage_id IN ({_placeholders(part)})", part
            )
            found.update((row[1], self._stored_from_row(row)) for row in rows)
        return found

    def _read_rows(self, keys: Sequence[int]) -> Iterator[tuple[int, StoredPassage]]:
        """Yield passages with their rows, in the order given; those that are gone are left out."""
        for part in _batches(keys):
            rows = self._store.rows(f"{_SELECT} WHERE p.id IN ({_placeholders(part)})", part)
            found = {row[0]: row for row in rows}
            yield from ((key, self._stored_from_row(found[key])) for key in part if key in found)

    def _read_first(
        self, ranking: Iterator[tuple[int, float]], k: int, where: Where
    ) -> list[StoredPassage]:
        """The first k passages of a ranking, given by their rows, for which a condition holds."""
        chosen: list[StoredPassage] = []
        while len(chosen) < k and (part := dict(islice(ranking, _MAX_SQL_VALUES))):
            scored = (item.with_score(part[key]) for key, item in self._read_rows(list(part)))
            chosen += [item for item in scored if where is None or where(item)]
        return chosen[:k]

    def _read_document(self, path: str) -> list[StoredPassage]:
        """The passages of a document, in its order."""
        rows = self._store.rows(f"{_SELECT} WHERE f.path = ? ORDER BY p.start, p.id", (path,))
        return [self._stored_from_row(row) for row in rows]

    def _read_vectors(self, passage_ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """The vectors [D] of passages by their ids; those that are not there are left out."""
        found: dict[str, NDArray[np.float32]] = {}
        for part in _batches(passage_ids):
            chosen = f"passage WHERE passage_id IN ({_placeholders(part)})"
            rows = self._store.rows(f"SELECT passage_id, vector FROM {chosen}", part)
            if rows:
                names, packed = zip(*rows, strict=True)
                found.update(zip(names, self._store.unpack_vectors(packed), strict=True))
        return found

    def _delete_ids(self, passage_ids: Sequence[str]) -> set[int]:
        """Delete passages; return the rows of the files that they were of."""
        files: set[int] = set()
        for part in _batches(passage_ids):
            chosen = f"passage WHERE passage_id IN ({_placeholders(part)})"
            files.update(row for (row,) in self._store.rows(f"SELECT file_id FROM {chosen}", part))
            self._store.rows(f"DELETE FROM {chosen}", part)
        return files

    def _delete_emptied(self, files: Iterable[int]) -> None:
        """Delete files, given by their rows, of which no passage is left."""
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
            raise corrupt_index_error(self.path, f"the metadata of {row[1]!r} is no JSON")
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
