"""The vector index: FAISS in memory over the store's vectors, flat or IVF by their number.

Shapes: N vectors held, D their dimension, n vectors given.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ragaccel.errors import MissingExtraError
from ragaccel.forking import PerProcess, is_forked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    Keys = NDArray[np.int64]
    Vectors = NDArray[np.float32]

FLAT_LIMIT = 100_000
TARGET_RECALL = 0.97
_POINTS_A_CELL = 40
_TUNING_QUERIES = 256
_NEIGHBOURS = 10


class VectorIndex:
    """Inner-product search over vectors with keys; exact up to ``flat_limit`` vectors, IVF beyond.

    The number of IVF cells a query visits is not guessed: it is doubled until the neighbours found
    for a sample of the vectors held are, to 97 %, those of exact search. Safe to search from
    several threads while one changes it.

    Args:
        dimension: D.
        flat_limit: The most vectors that are searched exactly.
    """

    def __init__(self, dimension: int, flat_limit: int = FLAT_LIMIT) -> None:
        self.dimension = dimension
        self.flat_limit = flat_limit
        self._lock = PerProcess(threading.Lock)
        self._faiss = _import_faiss()
        self._index = self._flat()
        self._trained_on = 0

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def is_exact(self) -> bool:
        """Whether the search is exact, not IVF."""
        return self._trained_on == 0

    def build(self, parts: Iterable[tuple[Keys, Vectors]]) -> None:
        """Start anew with the given (keys [n], vectors [n, D])."""
        with self._changing():
            flat = self._flat()
            for keys, vectors in parts:
                flat.add_with_ids(_floats(vectors), keys)
            self._settle(flat)

    def add(self, keys: Keys, vectors: Vectors) -> None:
        """Add vectors [n, D] under new keys [n]."""
        with self._changing():
            self._index.add_with_ids(_floats(vectors), np.asarray(keys, dtype=np.int64))
            self._resettle()

    def remove(self, keys: Keys) -> None:
        """Remove the vectors of keys; keys that are not held are passed over."""
        with self._changing():
            self._index.remove_ids(np.asarray(keys, dtype=np.int64))
            self._resettle()

    def keys(self) -> Keys:
        """The keys held, ascending."""
        with self._lock.get():
            return np.sort(self._entries(self._index)[0])

    def search(self, query: Vectors, k: int) -> list[tuple[int, float]]:
        """The k nearest to a query [D], as (key, inner product), nearest first."""
        with self._lock.get():
            k = min(k, len(self))
            if not k:
                return []
            with self._threads(1):  # waiting for a second core takes longer than the search
                scores, keys = self._index.search(_floats(query[None]), k)
        pairs = zip(keys[0].tolist(), scores[0].tolist(), strict=True)
        found = [(key, score) for key, score in pairs if key >= 0]
        # the cells visited may hold fewer
        return found if len(found) == k else list(islice(self.ranking(query), k))

    def ranking(self, query: Vectors) -> Iterator[tuple[int, float]]:
        """All keys with their inner product with a query [D], nearest first; always exact."""
        with self._lock.get():
            keys, vectors = self._entries(self._index)
        scores = vectors @ _floats(query)
        order = np.lexsort((keys, -scores))
        return zip(keys[order].tolist(), scores[order].tolist(), strict=True)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; in a forked process with one thread, for OpenMP would wait for others."""
        cores = 1 if is_forked() else self._faiss.omp_get_max_threads()
        with self._lock.get(), self._threads(cores):
            yield

    @contextmanager
    def _threads(self, number: int) -> Iterator[None]:
        """Let this thread use so many cores for a moment; torch may share the setting."""
        before = self._faiss.omp_get_max_threads()
        self._faiss.omp_set_num_threads(number)
        try:
            yield
        finally:
            self._faiss.omp_set_num_threads(before)

    def _flat(self) -> Any:
        return self._faiss.IndexIDMap2(self._faiss.IndexFlatIP(self.dimension))

    def _resettle(self) -> None:
        """Change the kind of index, or train it again, once its size has changed by half."""
        size, trained_on = len(self), self._trained_on
        too_large = not trained_on and size > self.flat_limit
        grown = trained_on and size > 1.5 * trained_on
        shrunk = trained_on and size < max(trained_on // 2, 0.8 * self.flat_limit)
        if too_large or grown or shrunk:
            flat = self._flat()
            keys, vectors = self._entries(self._index)
            flat.add_with_ids(vectors, keys)
            self._settle(flat)

    def _settle(self, flat: Any) -> None:
        self._index, self._trained_on = flat, 0
        if flat.ntotal > self.flat_limit:
            self._index = self._inverted(flat)
            self._trained_on = flat.ntotal

    def _inverted(self, flat: Any) -> Any:
        faiss, size = self._faiss, int(flat.ntotal)
        keys, vectors = self._entries(flat)
        cells = max(1, min(int(4 * size**0.5), size // _POINTS_A_CELL))
        coarse = faiss.IndexFlatIP(self.dimension)
        index = faiss.IndexIVFFlat(coarse, self.dimension, cells, faiss.METRIC_INNER_PRODUCT)
        index.own_fields = True
        coarse.this.disown()
        index.cp.niter = 6
        index.cp.max_points_per_centroid = _POINTS_A_CELL
        index.cp.seed = 1
        index.train(vectors)
        index.add_with_ids(vectors, keys)
        chosen = np.random.default_rng(1).choice(size, min(_TUNING_QUERIES, size), replace=False)
        _tune(index, flat, vectors[np.sort(chosen)])
        return index

    def _entries(self, index: Any) -> tuple[Keys, Vectors]:
        """All keys and vectors of an index."""
        faiss, dimension = self._faiss, self.dimension
        if isinstance(index, faiss.IndexIDMap2):
            keys = faiss.vector_to_array(index.id_map)
            return keys, index.index.reconstruct_n(0, index.ntotal).reshape(-1, dimension)
        lists = index.invlists
        found_keys, found = [np.empty(0, np.int64)], [np.empty((0, dimension), np.float32)]
        for cell in range(index.nlist):
            size = lists.list_size(cell)
            if size:
                found_keys.append(faiss.rev_swig_ptr(lists.get_ids(cell), size).copy())
                codes = faiss.rev_swig_ptr(lists.get_codes(cell), size * dimension * 4)
                found.append(codes.view(np.float32).reshape(size, dimension).copy())
        return np.concatenate(found_keys), np.concatenate(found)


def _tune(index: Any, exact: Any, queries: Vectors) -> None:
    """Let a query visit as many cells as the recall aimed at takes."""
    _, true = exact.search(queries, _NEIGHBOURS)
    index.nprobe = 4
    while index.nprobe < index.nlist:
        _, found = index.search(queries, _NEIGHBOURS)
        hits = sum(len(np.intersect1d(a, b)) for a, b in zip(true, found, strict=True))
        if hits >= TARGET_RECALL * true.size:
            return
        index.nprobe = min(2 * index.nprobe, index.nlist)


def _floats(vectors: Vectors) -> Vectors:
    return np.ascontiguousarray(vectors, dtype=np.float32)


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise MissingExtraError("faiss-cpu, which searches vectors,", "retrieval") from None
    return faiss
