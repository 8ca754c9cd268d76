"""Collections: putting in, changing, removing and searching passages."""

import asyncio
import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hash_embedder import HashEmbedder

from ragaccel.errors import (
    ConfigurationError,
    EmptyIndexError,
    IndexUnusableError,
    StorageError,
)
from ragaccel.passage import Passage
from ragaccel.retrieval import (
    Collection,
    Retriever,
    Store,
    VectorIndex,
    index_folder,
    index_passages,
    open_retriever,
)

TEXTS = {
    "lamp": "The lamp burns oil.",
    "wick": "The wick is cotton.",
    "boat": "The boat is called Petrel.",
    "whale": "A whale sings at night.",
}
PAIR = [Passage("a", "x"), Passage("b", "y")]


def vectors_of(*texts):
    return HashEmbedder().embed_documents(list(texts))


def put(collection, name, text, **fields):
    collection.put([Passage(name, text, **fields)], vectors_of(text))


def fill(collection, texts=TEXTS, **fields):
    passages = [Passage(name, text, **fields) for name, text in texts.items()]
    collection.put(passages, vectors_of(*texts.values()), [{"name": name} for name in texts])


def ids(items):
    return [item.passage.passage_id for item in items]


def found(collection, text, k=1, **more):
    return ids(collection.search(vectors_of(text)[0], k, **more))


@pytest.fixture(params=["file", "memory"])
def collection(request, tmp_path):
    path = tmp_path / "collection.db" if request.param == "file" else None
    with Collection(path) as collection:
        yield collection


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "c.db"


def test_an_empty_collection_finds_nothing(collection):
    assert len(collection) == 0
    assert list(collection) == collection.get(["x"]) == collection.document("x") == []
    assert collection.search([1.0, 0.0], 3) == collection.search_mmr([1.0, 0.0], 3) == []
    assert collection.search_text("lamp", 3) == []
    assert collection.search_fused("lamp", [1.0, 0.0], 3) == []
    assert collection.documents() == collection.vectors(["x"]) == {}
    assert collection.drop(["x"]) == collection.drop_documents(["x"]) == 0


def test_passages_are_found_by_id_by_vector_and_by_words(collection):
    fill(collection)
    assert ids(collection.get(["whale", "none", "lamp", "whale"])) == ["whale", "lamp", "whale"]
    assert ids(collection) == list(TEXTS)

    query = vectors_of("the cotton wick")[0]
    near = collection.search(query * 7, 3)
    cosines = vectors_of(*TEXTS.values()) @ query
    assert ids(near) == [list(TEXTS)[i] for i in np.argsort(-cosines)[:3]]
    scores = [item.passage.score for item in near]
    assert scores == pytest.approx(sorted(cosines)[:-4:-1], abs=1e-3)
    assert near[0].metadata == {"name": "wick"}
    (worded,) = collection.search_text("who calls a BOAT Petrel?", 3)
    assert (worded.passage.passage_id, worded.passage.score > 0) == ("boat", True)
    assert collection.search_text("'; DROP TABLE passage --", 3) == []


def test_scores_are_cosines_whatever_the_lengths_of_vectors(collection):
    rows = np.random.default_rng(0).normal(size=(50, 2))
    rows *= np.logspace(-300, 300, 50)[:, None]
    collection.put([Passage(str(i), "x") for i in range(50)], rows)
    best = [collection.search(row, 1)[0] for row in rows]
    assert all(0.999 < item.passage.score <= 1.0 for item in best)
    collection.clear()
    collection.put([Passage("zero", ""), Passage("one", "x")], [[0.0, 0.0], [1.0, 1.0]])
    for query, expected in (([1, 1], [1, 0]), ([0, 0], [0, 0])):
        scores = [item.passage.score for item in collection.search(query, 2)]
        assert scores == pytest.approx(expected, abs=1e-3)


def test_what_was_put_comes_back_whole(collection):
    passage = Passage(
        "p 1", "Text 🙂\n", "Title", "a/b.pdf", 7, 14, page=3, line=2, locations=((0, 3), (4, 5))
    )
    metadata = {"author": "Ødegård", "tags": ["a", "b"], "year": 1874, "deep": {"x": None}}
    collection.put([passage], [[3.0, 4.0]], [metadata])
    (stored,) = collection.get(["p 1"])
    assert (stored.passage, stored.metadata) == (passage, metadata)
    (vector,) = collection.vectors(["p 1", "none"]).values()
    assert vector.tolist() == pytest.approx([0.6, 0.8], abs=1e-3)


def test_fusing_weighs_words_and_vectors(collection):
    texts = {"near": "oil", "worded": "zebra stripes of the plain", "both": "zebra"}
    passages = [Passage(name, text) for name, text in texts.items()]
    collection.put(passages, [[1.0, 0.0], [0.0, 1.0], [0.9, 0.4]])
    for words, k, options, expected in (
        ("zebra", 3, {}, ["both", "near", "worded"]),
        ("stripes", 3, {"alpha": 0}, ["worded"]),
        ("stripes", 1, {"alpha": 0.6}, ["near"]),
        ("stripes", 1, {"alpha": 0.4}, ["worded"]),
    ):
        assert ids(collection.search_fused(words, [1.0, 0.0], k, **options)) == expected
    fused = collection.search_fused("zebra", [1.0, 0.0], 1)[0].passage.score
    cosine = collection.search([1.0, 0.0], 2)[1].passage.score
    assert fused == pytest.approx((cosine + 1) / 2)  # the farthest has cosine 0, its words are best


def test_mmr_avoids_similar_passages(collection):
    rows = {"best": [1, 0.1, 0], "same": [1, 0.12, 0], "other": [0.6, 0, 0.8], "far": [-1, 0, 0]}
    collection.put([Passage(name, name) for name in rows], list(rows.values()))
    query = [1, 0.09, 0]
    for weight, expected in (
        (1, ["best", "same", "other"]),
        (0.5, ["best", "other", "same"]),
        (0, ["best", "far", "other"]),
    ):
        assert ids(collection.search_mmr(query, 3, relevance_weight=weight)) == expected
    assert ids(collection.search_mmr(query, 2, num_candidates=2)) == ["best", "same"]
    among = collection.search_mmr(query, 9, where=lambda item: item.passage.text != "other")
    assert (ids(among)[0], set(ids(among))) == ("best", {"best", "far", "same"})
    assert among[0].passage.score == pytest.approx(1, abs=1e-3)


def test_a_put_under_a_known_id_replaces_all_of_it(collection):
    fill(collection, path="old.md")
    assert found(collection, "lamp oil") == ["lamp"]
    put(collection, "lamp", "A zebra grazes.", path="new.md")
    assert len(collection) == 4
    (lamp,) = collection.get(["lamp"])
    assert (lamp.passage.text, lamp.passage.path) == ("A zebra grazes.", "new.md")
    assert lamp.metadata == {}
    assert found(collection, "A zebra grazes.") == ids(collection.search_text("zebra")) == ["lamp"]
    assert collection.search_text("burns oil", 2) == []
    assert collection.documents() == {"new.md": 1, "old.md": 3}
    collection.clear()
    collection.put([Passage("a", "one"), Passage("b", "x"), Passage("a", "two")], np.eye(3))
    assert [item.passage.text for item in collection.get(["a"])] == ["two"]
    assert (ids(collection.search([0, 0, 1], 1)), len(collection)) == (["a"], 2)


def test_passages_are_taken_out(collection):
    fill(collection)
    collection.put(
        [Passage(f"d{i}", "text", path="d.md", start=9 - i) for i in range(3)], vectors_of(*"abc")
    )
    assert ids(collection.document("d.md")) == ["d2", "d1", "d0"]
    assert collection.drop(["lamp", "none", "lamp"]) == 1
    assert collection.drop(["d1"]) == 1
    assert collection.documents() == {"d.md": 2}
    assert collection.drop_documents(["d.md", "", "none"]) == 2
    assert collection.documents() == {}
    assert ids(collection) == ["wick", "boat", "whale"]
    assert "lamp" not in found(collection, "lamp oil", 9, where=lambda item: True)
    assert collection.search_text("lamp", 2) == []
    put(collection, "wick", "moved", path="e.md")
    collection.drop(["wick"])
    assert collection.documents() == {}, "a document without passages is forgotten"


def test_a_condition_does_not_reduce_the_number_of_results(collection):
    rng = np.random.default_rng(1)
    count = 2000
    passages = [Passage(str(i), f"thing {i}") for i in range(count)]
    rows = rng.normal(size=(count, 16))
    collection.put(passages, rows, [{"n": i} for i in range(count)])
    query = rng.normal(size=16)
    far = np.argsort(rows @ query / np.linalg.norm(rows, axis=1))[:5]  # the five farthest

    def is_far(item):
        return item.metadata["n"] in far

    assert ids(collection.search(query, 9, where=is_far)) == [str(i) for i in far[::-1]]
    fused = collection.search_fused("thing", query, 9, where=is_far)
    assert sorted(ids(fused)) == sorted(str(i) for i in far)
    last = collection.search_text("thing", 3, where=lambda item: item.metadata["n"] == 1999)
    assert ids(last) == ["1999"]
    assert collection.search(query, 3, where=lambda item: False) == []
    assert len(collection.search(query, 5000)) == count
    near = collection.search(query, 9, where=lambda item: item.passage.score > 0.5)
    assert all(item.passage.score > 0.5 for item in near)


def test_a_condition_may_look_at_the_collection_but_not_change_it(collection):
    fill(collection)
    assert found(collection, "wick", where=lambda item: len(collection.get(["lamp"])) == 1)
    for search in (
        lambda where: collection.search(vectors_of("wick")[0], where=where),
        lambda where: collection.search_text("wick", where=where),
    ):
        with pytest.raises(ConfigurationError, match="may only read"):
            search(lambda item: collection.drop(["lamp"]))
    assert len(collection) == 4
    collection.drop(["lamp"])


# Refusals


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"inner": value}
    return value


@pytest.mark.parametrize(
    ("passages", "vectors", "metadata", "problem"),
    [
        (PAIR, np.eye(3), (), "3 vectors for 2 passages"),
        (PAIR, [1.0, 2.0], (), "shape"),
        (PAIR, [[1.0], [1.0, 2.0]], (), "rows of numbers"),
        (PAIR, [["x"], ["y"]], (), "rows of numbers"),
        (PAIR, np.empty((2, 0)), (), "shape"),
        (PAIR, [[1.0], [float("nan")]], (), "vector 1 holds NaN or an infinite number"),
        (PAIR, [[float("inf")], [1.0]], (), "infinite number"),
        (PAIR, [[1.0], [2.0]], [{}], "1 metadata mappings for 2 passages"),
        (PAIR, [[1.0], [2.0]], [{}, {"x": object()}], "'b' cannot be stored as JSON"),
        ([Passage("", "x")], [[1.0]], (), "passage_id"),
        ([Passage("a", "x\ud800")], [[1.0]], (), "a lone surrogate"),
        ([Passage("a", "x")], [[1.0]], [{"k": "\udcff"}], "a lone surrogate"),
        ([Passage("a", "x", start=2**70)], [[1.0]], (), "64 bits"),
        ([Passage("a", "x", page=2**63)], [[1.0]], (), "64 bits"),
        ([Passage(5, "x")], [[1.0]], (), "not a string"),
        ([Passage("a", "x")], [[1.0]], [{"k": [{1: 2}]}], "the key 1 is not a string"),
        ([Passage("a", "x")], [[1.0]], [nested(5000)], "recursion"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_nothing_is_changed(
    collection, passages, vectors, metadata, problem
):
    collection.put([Passage("b", "before")], [[1.0]])
    with pytest.raises(ConfigurationError, match=problem):
        collection.put(passages, vectors, metadata)
    assert [item.passage.text for item in collection] == ["before"]


def test_arguments_that_make_no_sense_are_refused(collection):
    collection.put(PAIR, np.eye(2))
    for query in ([[1.0, 0.0]], "text", [float("nan"), 1.0], 3.0, []):
        with pytest.raises(ConfigurationError, match="vector"):
            collection.search(query, 1)
    for k in (0, -1, 2.5, "3", None, 2**63):
        for name, *query in (
            ("search", [1, 0]),
            ("search_text", "lamp"),
            ("search_fused", "lamp", [1, 0]),
            ("search_mmr", [1, 0]),
        ):
            with pytest.raises(ConfigurationError, match="k is"):
                getattr(collection, name)(*query, k)
    assert len(collection.search([1, 0], np.int64(1))) == 1
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigurationError, match="alpha"):
            collection.search_fused("zebra", [1.0, 0.0], alpha=alpha)
    with pytest.raises(ConfigurationError, match="relevance_weight"):
        collection.search_mmr([1, 0], 2, relevance_weight=2)
    for name in (5, None, "\ud800"):
        for ask in (collection.get, collection.drop, collection.vectors, collection.drop_documents):
            with pytest.raises(ConfigurationError, match="id"):
                ask([name])
        with pytest.raises(ConfigurationError, match="id"):
            collection.document(name)
    with pytest.raises(IndexUnusableError, match="vectors of 2 numbers, not of 3"):
        collection.put([Passage("c", "z")], np.eye(3)[:1])
    with pytest.raises(IndexUnusableError, match="vectors of 2 numbers, not of 3"):
        collection.search([1, 0, 0], 1)
    assert len(collection) == 2


# Files


@pytest.mark.parametrize("empty", [Collection.clear, lambda c: c.drop(["a", "b"])])
def test_an_emptied_collection_takes_vectors_of_another_model(path, empty):
    with Collection(path, fingerprint="one") as first, Collection(path) as reader:
        first.put(PAIR, np.eye(2))
        assert ids(reader.search([1, 0], 1)) == ["a"]
        empty(first)
        assert reader.search([1, 0], 1) == []
        with Collection(path, fingerprint="two") as second:
            second.put(PAIR, np.eye(3)[:2])
            assert ids(second.search([0, 1, 0], 1)) == ["b"]
        assert ids(reader.search([1, 0, 0], 1)) == ["a"]
        with pytest.raises(IndexUnusableError, match="'two', not of 'one'"):
            first.put(PAIR, np.eye(3)[:2])


def test_a_collection_persists_and_is_copied(path, monkeypatch):
    with Collection(path, fingerprint="model") as collection:
        fill(collection, path="d.md")
        assert copy.copy(collection) is copy.deepcopy(collection) is collection
        for again in (Collection(path), pickle.loads(pickle.dumps(collection))):
            with again:
                assert (again.path, ids(again)) == (path, list(TEXTS))
                assert found(again, "cotton wick") == ["wick"]
                assert again.get(["boat"])[0].metadata == {"name": "boat"}
        assert (again.fingerprint, again.is_temporary) == ("model", False)
    with pytest.raises(IndexUnusableError, match="'model', not of 'other'"):
        Collection(path, fingerprint="other")
    monkeypatch.chdir(path.parent)
    with Collection("c.db") as relative:
        monkeypatch.chdir(path.parent.parent)
        assert (len(relative), relative.path) == (4, path)
    path.unlink()
    for use in (lambda: list(relative), lambda: fill(relative)):
        with pytest.raises(EmptyIndexError, match=r"c\.db was moved or deleted"):
            use()


def test_a_copy_is_whole_and_apart(collection, path):
    fill(collection)
    collection.copy_to(path)
    put(collection, "later", "x")
    with Collection(path) as other:
        assert ids(other) == list(TEXTS)
        other.drop(["lamp"])
        assert len(collection) == 5
        collection.copy_to(path)
        other.copy_to(path)
        assert found(other, "lamp oil burns") == ["lamp"]
    with Store(path) as store:
        assert store.check() == []
    assert sorted(file.name for file in path.parent.iterdir()) == ["c.db", "c.db.lock"]


def test_a_collection_in_memory_ends_when_it_is_closed_and_is_not_pickled():
    collection = Collection()
    assert copy.deepcopy(collection) is collection
    assert (collection.is_temporary, collection.path) == (True, Path(":memory:"))
    with pytest.raises(ConfigurationError, match=r"in memory cannot be pickled.*copy_to"):
        pickle.dumps(collection)
    collection.close()
    for use in (lambda: len(collection), lambda: fill(collection), collection.clear):
        with pytest.raises(EmptyIndexError, match="was closed: make a new one"):
            use()


@pytest.mark.parametrize(
    ("damage", "problem"), [("vector = 'text'", "wrong size"), ("metadata = '{'", "JSON")]
)
def test_a_damaged_passage_is_reported(path, damage, problem):
    with Collection(path) as collection:
        fill(collection)
        with Store(path) as store:
            store.rows(f"UPDATE passage SET {damage} WHERE passage_id = 'wick'")
        with pytest.raises(IndexUnusableError, match=rf"{problem}.*put them in again"):
            collection.search(vectors_of("wick")[0], 4)


# Updates


def test_what_another_changes_is_found_without_reading_all_vectors_anew(path, monkeypatch):
    with Collection(path) as reader, Collection(path) as writer:
        fill(writer)
        assert found(reader, "cotton wick") == ["wick"]
        monkeypatch.setattr(VectorIndex, "build", lambda *_: pytest.fail("built anew"))
        added, add = [], VectorIndex.add

        def record(self, keys, rows):
            added.append(len(keys))
            add(self, keys, rows)

        monkeypatch.setattr(VectorIndex, "add", record)
        put(writer, "wick", "A zebra.")
        assert found(reader, "A zebra.") == ["wick"]
        assert found(reader, "A zebra.") == ["wick"]
        writer.drop(["wick"])
        assert sorted(found(reader, "A zebra.", 9)) == ["boat", "lamp", "whale"]
        assert added == [1]


def test_a_search_sees_one_moment_and_the_next_what_changed_meanwhile(path, monkeypatch):
    with Collection(path) as collection, Collection(path) as other:
        fill(collection)
        read = Store.keys

        def changed_meanwhile(self):
            keys = read(self)
            monkeypatch.setattr(Store, "keys", read)
            other.clear()
            return keys

        monkeypatch.setattr(Store, "keys", changed_meanwhile)
        assert found(collection, "lamp oil") == ["lamp"]
        assert found(collection, "lamp") == []
        fill(other)
        assert found(collection, "cotton wick") == ["wick"]


def test_one_that_another_makes_just_now_is_waited_for(path):
    begun = threading.Event()

    def make():
        with Store(path) as store, store.writing():
            begun.set()
            time.sleep(0.1)
            store.adopt("model")

    maker = threading.Thread(target=make)
    maker.start()
    begun.wait()
    with Collection(path), Store(path) as store:
        maker.join()
        assert store.meta("embedder") == "model"


@pytest.mark.parametrize("runner", ["threads", "asyncio"])
def test_all_may_be_done_at_once(collection, tmp_path, runner):
    fill(collection)

    def work(name):
        for number in range(4):
            text = f"thing {name} {number}"
            put(collection, f"{name}-{number % 3}", text, path=name)
            assert found(collection, text) == [f"{name}-{number % 3}"]
            near = found(collection, "cotton wick", 4)
            assert (near[0], len(near)) == ("wick", 4)
            collection.drop([f"{name}-{(number + 1) % 3}"])

    async def main():
        others = asyncio.gather(*(asyncio.to_thread(work, name) for name in names[1:]))
        await asyncio.sleep(0)
        work(names[0])  # in the loop's own thread
        await others

    names = [f"thread{i}" for i in range(8)]
    if runner == "threads":
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, names))
    else:
        asyncio.run(main())
    assert len(collection) == len(collection.search(np.ones(64), 99)) == 4 + 8 * 2
    collection.copy_to(tmp_path / "copy.db")
    with Store(tmp_path / "copy.db") as copied:
        assert copied.check() == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux what is open")
def test_threads_that_end_leave_no_connection_open(path):
    with Collection(path) as collection:
        fill(collection)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(50):
            thread = threading.Thread(target=lambda: collection.get(["lamp"]))
            thread.start()
            thread.join()
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 6


# Together with indexes of `ragaccel index` and with retrievers


def test_an_index_is_searched_but_not_changed(indexed, embedder, folder):
    with Collection(indexed.path, fingerprint=embedder.fingerprint) as collection:
        (boat,) = collection.search(embedder.embed_query("the boat called Petrel"), 1)
        assert boat.passage.citation == "sub folder 🙂/boat.txt:1"
        assert (boat.metadata, collection.documents()["lamp.md"]) == ({}, 2)
        name = boat.passage.passage_id
        for change in (
            lambda: put(collection, "x", "y"),
            lambda: collection.drop([name]),
            lambda: collection.drop_documents(["lamp.md"]),
            collection.clear,
        ):
            with pytest.raises(StorageError, match="kept by `ragaccel index`"):
                change()
        index_folder(indexed, embedder, folder, rebuild=True)
        assert len(collection) == 4
        assert ids(collection.search(embedder.embed_query("boat called Petrel"), 1)) == [name]
    with pytest.raises(IndexUnusableError):
        Collection(indexed.path, fingerprint="another")
    assert index_folder(indexed, embedder, folder).is_current


def test_a_retriever_searches_a_collection_of_its_embedder(path, embedder):
    with Collection(path, fingerprint=embedder.fingerprint) as collection:
        retriever = open_retriever(path, embedder)
        with pytest.raises(EmptyIndexError, match="put passages into it"):
            retriever.search("x")
        fill(collection, path="d.md", line=4)
        assert retriever.search("cotton wick", 1)[0].citation == "d.md:4"
        put(collection, "new", "A zebra grazes.")
        assert retriever.search("zebra", 1)[0].passage_id == "new"
        retriever.store.close()
    for stranger, problem in (
        (HashEmbedder("another"), "another embedding model"),
        (HashEmbedder(dimension=8), "not of 8"),
    ):
        with Store(path) as store, pytest.raises(IndexUnusableError, match=problem):
            Retriever(store, stranger).search("x")


def test_indexing_never_takes_a_collections_place(path, tmp_path, embedder, folder):
    tsv = tmp_path / "set.tsv"
    tsv.write_text("p1\tone\n")
    with Collection(path) as collection, Store(path) as store:
        fill(collection)
        for index, source in ((index_folder, folder), (index_passages, tsv)):
            for rebuild in (False, True):
                with pytest.raises(StorageError, match="a program put in"):
                    index(store, embedder, source, rebuild=rebuild)
        assert ids(collection) == list(TEXTS)
