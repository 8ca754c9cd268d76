"""Collections: passages that a program puts in, changes, searches and removes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ragaccel.errors import ConfigurationError, EmptyIndexError, StorageError, require_unicode
from ragaccel.retrieval.retriever import DENSE_WEIGHT, PassageSearch, mmr, require_k
from ragaccel.retrieval.store import FileRecord, Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from ragaccel.passage import Passage
    from ragaccel.retrieval.retriever import Where
    from ragaccel.retrieval.store import StoredPassage


_WAIT_SECONDS = 5.0
_MAX_INT64 = 2**63


class Collection:
    """A collection of passages by id, with the caller's vectors and metadata, in SQLite.

    It offers what a framework's vector store needs. Every change is one transaction, durable when
    the call returns; threads and processes may read while one writes. Vectors are normalized and
    stored in 16 bits a number; similarity is the cosine. An index that ``ragaccel index`` made can
    be opened to be read and searched, but not changed: its next run would undo the changes.

    Unpickling reopens the file; copying returns the same object.

    Args:
        path: The file, created if it does not exist; None: memory, freed with this object.
        fingerprint: Names the embedder of the vectors: its ``Embedder.fingerprint``, or a
            model's name. A file known to hold vectors of another one is refused, and a
            ``Retriever`` with the same embedder can search this file. With an empty string,
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
        self.fingerprint = fingerprint
        self.shared = shared
        self._store = store = Store(
            None if path is None else Path(path).expanduser().absolute(), shared=shared
        )
        self._search = PassageSearch(store, lambda: store.meta_number("dimension"))
        if store.is_blank():
            with store.writing(wait_seconds=_WAIT_SECONDS):
                if store.is_blank():  # another process may have filled it meanwhile
                    store.adopt(fingerprint)
        if fingerprint and store.count_passages():
            store.require_embedder(fingerprint)

    @property
    def path(self) -> Path:
        """The file, absolute; ``:memory:`` if there is none."""
        return self._store.path

    @property
    def is_temporary(self) -> bool:
        """Whether the passages are in memory only, without a file."""
        return self._store.in_memory

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, or free the memory."""
        self._store.close()

    def __copy__(self) -> Collection:
        return self

    def __deepcopy__(self, memo: object) -> Collection:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.is_temporary:
            raise ConfigurationError(
                "a collection in memory cannot be pickled: make it with a path, or copy_to() a file"
                " and open that"
            )
        return {"path": self.path, "fingerprint": self.fingerprint, "shared": self.shared}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def copy_to(self, path: str | Path) -> None:
        """Copy the collection as it is now to a file, replacing a collection there.

        Others may write meanwhile. Copying a file to itself does nothing.

        Raises:
            StorageError: The path cannot be written to.
            IndexUnusableError: The file there is not an index of ragaccel.
        """
        self._store.copy_to(path)

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
        _require_one_each(len(rows), "vectors", passages)
        if metadata:
            _require_one_each(len(metadata), "metadata mappings", passages)
        packed = [row.tobytes() for row in rows.astype("<f2")]
        texts = map(_metadata_text, passages, metadata or [{}] * len(passages))
        rows_to_put = zip(passages, packed, texts, strict=True)
        latest = {row[0].passage_id: row for row in rows_to_put}
        with self._changing():
            self._fit(rows.shape[1])
            self._drop(latest)
            for path, group in groupby(latest.values(), key=lambda item: item[0].path):
                file = self._store.put_file(FileRecord(path, 0, 0, "", kind="given"))
                self._store.put_passages(file, group)

    def drop(self, passage_ids: Iterable[str]) -> int:
        """Remove passages by their ids; return how many were removed."""
        wanted = _require_strings(passage_ids)
        with self._changing():
            count = self._store.count_passages()
            self._drop(wanted)
            return count - self._store.count_passages()

    def drop_documents(self, paths: Iterable[str]) -> int:
        """Remove all passages of some documents; return how many passages were removed."""
        wanted = [path for path in _require_strings(paths) if path]
        with self._changing():
            count = self._store.count_passages()
            self._store.drop_files(wanted)
            return count - self._store.count_passages()

    def clear(self) -> None:
        """Remove everything; vectors of any dimension and any model may be put in afterwards."""
        with self._changing():
            self._store.rows("DELETE FROM file")  # and all passages, by cascade
            self._store.adopt(self.fingerprint)

    def _drop(self, passage_ids: Iterable[str]) -> None:
        """Remove passages, and the records of files that have none left."""
        ids = list(passage_ids)
        query = "SELECT DISTINCT file_id FROM passage WHERE passage_id IN ({})"
        files = set(self._store.rows_in(query, ids))
        self._store.drop_ids(ids)
        self._store.run(
            "DELETE FROM file WHERE id = ?1"
            " AND NOT EXISTS (SELECT 1 FROM passage WHERE file_id = ?1)",
            files,
        )

    def _fit(self, dimension: int) -> None:
        """Refuse vectors of another dimension or embedder; an empty collection adopts both."""
        if not self._store.count_passages():
            self._store.adopt(self.fingerprint, dimension)
            return
        if self.fingerprint:
            self._store.require_embedder(self.fingerprint)
        self._store.require_dimension(dimension)

    # Reading

    def __len__(self) -> int:
        with self._snapshot():
            return self._store.count_passages()

    def __iter__(self) -> Iterator[StoredPassage]:
        """Yield every passage, in the order of insertion."""
        with self._snapshot():
            keys = self._store.keys().tolist()
        yield from self._search.passages((key, 0.0) for key in keys)

    def get(self, passage_ids: Iterable[str]) -> list[StoredPassage]:
        """Return passages by their ids, in the order given; missing ones are left out."""
        wanted = _require_strings(passage_ids)
        with self._snapshot():
            found = self._store.passages_by_id(wanted)
        return [found[name] for name in wanted if name in found]

    def documents(self) -> dict[str, int]:
        """Return the number of passages of every document, by its path."""
        with self._snapshot():
            files = self._store.files()
        return {path: record.num_passages for path, record in files.items() if path}

    def document(self, path: str) -> list[StoredPassage]:
        """Return the passages of a document, in the order of its text."""
        (path,) = _require_strings([path])
        with self._snapshot():
            return self._store.document(path)

    def vectors(self, passage_ids: Iterable[str]) -> dict[str, NDArray[np.float32]]:
        """Return the unit vectors [D] of passages, by their ids; missing ones are left out."""
        wanted = _require_strings(passage_ids)
        query = "SELECT id, passage_id FROM passage WHERE passage_id IN ({})"
        with self._snapshot():
            names = dict(self._store.rows_in(query, wanted))
            return {names[key]: row for key, row in self._store.vectors_by_key(names).items()}

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
        query, k = _unit_vector(vector), require_k(k)
        with self._snapshot():
            return list(self._search.passages(self._search.nearest(query, k, where)))

    def search_text(self, words: str, k: int = 6, *, where: Where = None) -> list[StoredPassage]:
        """Find the k best passages that share words with a text, best first (score: BM25)."""
        k = require_k(k)
        with self._snapshot():
            return list(self._search.passages(self._search.worded(words, k, where)))

    def search_fused(
        self,
        words: str,
        vector: ArrayLike,
        k: int = 6,
        *,
        alpha: float = DENSE_WEIGHT,
        where: Where = None,
    ) -> list[StoredPassage]:
        """Search by words and by vector, fused by their scores as a ``Retriever`` does.

        Args:
            words: The question.
            vector: The question's vector, [D].
            k: The number of passages; fewer are returned only if there are no more.
            alpha: The weight of the vectors: 0 uses only words, 1 only vectors.
            where: As in ``search``.
        """
        if not 0 <= alpha <= 1:
            raise ConfigurationError(f"alpha is {alpha}: choose 0 (only words) to 1 (only vectors)")
        query, k = _unit_vector(vector) if alpha > 0 else None, require_k(k)
        with self._snapshot():
            return list(self._search.passages(self._search.fused(words, query, k, alpha, where)))

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
            where: As in ``search``.
        """
        if not 0 <= relevance_weight <= 1:
            raise ConfigurationError(
                f"relevance_weight is {relevance_weight}: choose 0 (most different) to 1 (nearest)"
            )
        query, k = _unit_vector(vector), require_k(k)
        with self._snapshot():
            near = self._search.nearest(query, max(num_candidates, k), where)
            vectors = self._store.vectors_by_key(key for key, _ in near)
            rows = np.array([vectors[key] for key, _ in near])
            cosines = np.array([score for _, score in near])
            chosen = mmr(cosines, rows, k, relevance_weight)
            return list(self._search.passages(near[i] for i in chosen))

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        self._require_exists()
        with self._store.reading():
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._require_exists()
        self._store.state()
        if not self._store.is_filled_by_program():
            raise StorageError(
                f"{self.path} is kept by `ragaccel index`, whose next run would undo this change:"
                " change the documents and index again, or put the passages into another file"
            )
        with self._store.transaction():
            yield

    def _require_exists(self) -> None:
        if not self.is_temporary and not self.path.exists():
            raise EmptyIndexError(
                f"the collection {self.path} was moved or deleted: open it at its new path, or"
                " make a new one"
            )


# What a caller gives


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
    rows = _divide(rows, np.abs(rows).max(axis=1, keepdims=True))  # so that no square overflows
    return _divide(rows, np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _divide(rows: NDArray[np.float64], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    quotients: NDArray[np.float64] = np.divide(
        rows, lengths, out=np.zeros_like(rows), where=lengths > 0
    )
    return quotients


def _unit_vector(vector: ArrayLike) -> NDArray[np.float32]:
    row: NDArray[np.float32] = unit_vectors(cast("Any", [vector]))[0]
    return row


def _require_one_each(number: int, what: str, passages: Sequence[Passage]) -> None:
    if number != len(passages):
        raise ConfigurationError(
            f"there are {number} {what} for {len(passages)} passages: give one for each passage"
        )


def _metadata_text(passage: Passage, metadata: Mapping[str, Any]) -> str:
    """Return a passage's metadata as JSON, empty if there is none.

    Raises:
        ConfigurationError: The passage or its metadata cannot be stored; the message names it.
    """
    name = passage.passage_id
    if not name:
        raise ConfigurationError("a passage has an empty passage_id: give each a unique id")
    _require_strings([name], "passage_id")
    try:
        _require_text_keys(dict(metadata))
        text = json.dumps(dict(metadata), ensure_ascii=False) if metadata else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the metadata of passage {name!r} cannot be stored as JSON ({error}):"
            " use only strings, numbers, lists and dictionaries"
        ) from None
    require_unicode(f"passage {name!r}", f"{passage.title}{passage.path}{passage.text}{text}")
    places = (passage.start, passage.end, passage.page or 0, passage.line or 0)
    if any(abs(place) >= _MAX_INT64 for place in places):
        raise ConfigurationError(
            f"passage {name!r} has a start, end, page or line of {max(places)}: these must fit"
            " into 64 bits"
        )
    return text


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


def _require_strings(names: Iterable[str], what: str = "id") -> list[str]:
    """Return ids or paths as a list; refuse other values and lone surrogates."""
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise ConfigurationError(f"the {what} {name!r} is not a string: give str({name!r})")
        require_unicode(f"the {what} {name!r}", name)
    return found
