"""The vector index: exact when small, IVF with the promised recall when large."""

import numpy as np
import pytest

from ragaccel.retrieval import VectorIndex

DIMENSION = 32


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def clustered(number, seed, dimension=DIMENSION, clusters=400):
    """Make clustered vectors, as texts of many subjects have."""
    random = np.random.default_rng(7)
    centres = random.standard_normal((clusters, dimension))
    random = np.random.default_rng(seed)
    which = random.integers(clusters, size=number)
    return unit(centres[which] + 0.7 * random.standard_normal((number, dimension)))


def recall(index, keys, vectors, queries, k=10):
    hits = 0
    for query in queries:
        true = keys[np.argsort(-(vectors @ query))[:k]]
        hits += len({key for key, _ in index.search(query, k)} & set(true.tolist()))
    return hits / (k * len(queries))


def test_flat_search_is_exact():
    vectors, keys = clustered(500, 1), np.arange(500) * 3 + 1
    index = VectorIndex(DIMENSION)
    index.build([(keys[:200], vectors[:200]), (keys[200:], vectors[200:])])
    assert index.is_exact
    assert len(index) == 500
    assert recall(index, keys, vectors, clustered(20, 2)) == 1
    found = index.search(vectors[7], 3)
    assert found[0] == (22, pytest.approx(1, abs=1e-5))
    index.remove(np.array([22, 999]))
    assert index.search(vectors[7], 1)[0][0] != 22
    index.add(np.array([5000]), vectors[7:8])
    assert index.search(vectors[7], 1)[0][0] == 5000
    assert len(index.keys()) == 500


def test_a_search_gives_the_cores_back():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    index = VectorIndex(DIMENSION)
    index.build([(np.arange(9), clustered(9, 1))])
    index.search(clustered(1, 2)[0], 3)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_empty_and_small():
    index = VectorIndex(DIMENSION)
    assert index.search(clustered(1, 1)[0], 5) == []
    index.add(np.array([3]), clustered(1, 1))
    assert len(index.search(clustered(1, 1)[0], 5)) == 1


def test_it_changes_its_kind_with_its_size():
    vectors, keys = clustered(3000, 1), np.arange(3000)
    index = VectorIndex(DIMENSION, flat_limit=1000)
    index.add(keys[:1000], vectors[:1000])
    assert index.is_exact
    index.add(keys[1000:], vectors[1000:])
    assert not index.is_exact
    assert index.keys().tolist() == keys.tolist()
    assert recall(index, keys, vectors, clustered(50, 2)) >= 0.9
    index.remove(keys[500:])
    assert index.is_exact
    assert recall(index, keys[:500], vectors[:500], clustered(50, 2)) == 1


def test_recall_at_150_000_vectors_with_inserts_and_deletes():
    dimension, number = 64, 150_000
    vectors, keys = clustered(number, 1, dimension), np.arange(number)
    queries = clustered(100, 3, dimension)
    index = VectorIndex(dimension)
    index.build([(keys, vectors)])
    assert not index.is_exact
    assert recall(index, keys, vectors, queries) >= 0.95
    extra, extra_keys = clustered(10_000, 4, dimension), np.arange(number, number + 10_000)
    index.add(extra_keys, extra)
    index.remove(keys[::10])
    left = np.ones(number, dtype=bool)
    left[::10] = False
    vectors, keys = np.concatenate([vectors[left], extra]), np.concatenate([keys[left], extra_keys])
    assert len(index) == len(keys)
    assert recall(index, keys, vectors, queries) >= 0.95
