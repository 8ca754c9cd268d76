"""Collections: putting in, changing, removing and searching passages."""

import asyncio
import copy
import multiprocessing
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
    StoreVectorIndex,
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


def vectors_of(*texts):
    return HashEmbedder().embed_documents(list(texts))


def fill(collection, texts=TEXTS, **fields):
    passages = [Passage(name, text, **fields) for name, text in texts.items()]
    collection.put(passages, vectors_of(*texts.values()), [{"name": name} for name in texts])


def ids(items):
    return [item.passage.passage_id for item in items]


@pytest.fixture
def collection(tmp_path):
    with Collection(tmp_path / "collection.db") as collection:
        yield collection


def test_an_empty_collection_finds_nothing(collection):
    assert len(collection) == 0
    assert list(collection) == collection.get(["x"]) == []
    assert collection.search([1.0, 0.0], 3) == []
    assert collection.search_text("lamp", 3) == []
    assert collection.search_fused("lamp", [1.0, 0.0], 3) == []
    assert collection.documents() == collection.vectors(["x"]) == {}
    assert collection.drop(["x"]) == collection.drop_documents(["x"]) == 0


def test_a_passage_is_read_back_as_it_was_put(collection):
    passage = Passage("p 1", "Text 🙂\n", "Title", "a/b.pdf", 7, 14, page=3, line=2)
    metadata = {"author": "Ødegård", "tags": ["a", "b"], "year": 1874, "deep": {"x": None}}
    collection.put([passage], [[3.0, 4.0]], [metadata])
    (stored,) = collection.get(["p 1"])
    assert stored.passage == passage
    assert stored.metadata == metadata
    assert collection.vectors(["p 1"])["p 1"].tolist() == pytest.approx([0.6, 0.8], abs=1e-3)


def test_ids_are_got_in_the_order_given(collection):
    fill(collection)
    assert ids(collection.get(["whale", "none", "lamp", "whale"])) == ["whale", "lamp", "whale"]
    assert ids(collection) == list(TEXTS)
    assert set(collection.vectors(["boat", "none"])) == {"boat"}


def test_the_nearest_come_first_with_their_cosines(collection):
    fill(collection)
    query = vectors_of("the cotton wick")[0]
    found = collection.search(query * 7, 3)
    cosines = vectors_of(*TEXTS.values()) @ query
    expected = [list(TEXTS)[i] for i in np.argsort(-cosines)[:3]]
    assert ids(found) == expected
    assert [i.passage.score for i in found] == pytest.approx(
        sorted(-cosines)[:3] * np.array(-1), abs=1e-3
    )
    assert found[0].metadata == {"name": "wick"}


def test_a_score_is_never_beyond_one(collection):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 8))
    collection.put([Passage(str(i), "x") for i in range(50)], rows)
    best = [collection.search(row, 1)[0] for row in rows]
    assert ids(best) == [str(i) for i in range(50)]
    assert all(0.999 < item.passage.score <= 1.0 for item in best)


def test_full_text_search_finds_shared_words(collection):
    fill(collection)
    found = collection.search_text("who calls a BOAT Petrel?", 3)
    assert ids(found) == ["boat"]
    assert found[0].passage.score > 0
    assert collection.search_text("'; DROP TABLE passage --", 3) == []


def test_fusing_weighs_words_and_vectors(collection):
    texts = {"near": "oil", "worded": "zebra stripes of the plain", "both": "zebra"}
    collection.put(
        [Passage(name, text) for name, text in texts.items()], [[1.0, 0.0], [0.0, 1.0], [0.9, 0.4]]
    )
    assert ids(collection.search_fused("zebra", [1.0, 0.0], 3)) == ["both", "near", "worded"]
    assert ids(collection.search_fused("zebra", [1.0, 0.0], 1, alpha=1)) == ["near"]
    assert ids(collection.search_fused("stripes", [1.0, 0.0], 1, alpha=0)) == ["worded"]
    fused = collection.search_fused("zebra", [1.0, 0.0], 1)[0].passage.score
    cosine = collection.search([1.0, 0.0], 2)[1].passage.score
    assert fused == pytest.approx((cosine + 1) / 2)  # the farthest has cosine 0, its words are best
    assert ids(collection.search_fused("stripes", [1.0, 0.0], 3, alpha=0)) == ["worded"]
    assert ids(collection.search_fused("stripes", [1.0, 0.0], 1, alpha=0.6)) == ["near"]
    assert ids(collection.search_fused("stripes", [1.0, 0.0], 1, alpha=0.4)) == ["worded"]
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigurationError, match="alpha"):
            collection.search_fused("zebra", [1.0, 0.0], alpha=alpha)


def test_mmr_avoids_similar_passages(collection):
    rows = {"best": [1, 0.1, 0], "same": [1, 0.12, 0], "other": [0.6, 0, 0.8], "far": [-1, 0, 0]}
    collection.put([Passage(name, name) for name in rows], list(rows.values()))
    query = [1, 0.09, 0]
    assert ids(collection.search(query, 3)) == ["best", "same", "other"]
    assert ids(collection.search_mmr(query, 3, relevance_weight=1)) == ["best", "same", "other"]
    assert ids(collection.search_mmr(query, 3, relevance_weight=0.5)) == ["best", "other", "same"]
    assert ids(collection.search_mmr(query, 3, relevance_weight=0))[:2] == ["best", "far"]
    assert ids(collection.search_mmr(query, 2, num_candidates=2, relevance_weight=0.5)) == [
        "best",
        "same",
    ]
    among = collection.search_mmr(query, 9, where=lambda item: item.passage.text != "other")
    assert ids(among) == ["best", "far", "same"] or ids(among) == ["best", "same", "far"]
    assert among[0].passage.score == pytest.approx(1, abs=1e-3)
    with pytest.raises(ConfigurationError, match="relevance_weight"):
        collection.search_mmr(query, 2, relevance_weight=2)
    collection.clear()
    assert collection.search_mmr(query, 2) == []


def test_a_put_under_a_known_id_replaces_all_of_it(collection):
    fill(collection, path="old.md")
    collection.search(vectors_of("lamp")[0], 1)
    collection.put(
        [Passage("lamp", "A zebra grazes.", path="new.md")], vectors_of("A zebra grazes.")
    )
    assert len(collection) == 4
    (lamp,) = collection.get(["lamp"])
    assert (lamp.passage.text, lamp.passage.path, lamp.metadata) == (
        "A zebra grazes.",
        "new.md",
        {},
    )
    assert ids(collection.search(vectors_of("A zebra grazes.")[0], 1)) == ["lamp"]
    assert ids(collection.search_text("zebra", 2)) == ["lamp"]
    assert ids(collection.search_text("burns oil", 2)) == []
    assert collection.documents() == {"new.md": 1, "old.md": 3}


def test_of_one_id_given_twice_the_later_wins(collection):
    collection.put([Passage("a", "one"), Passage("b", "x"), Passage("a", "two")], np.eye(3))
    assert [item.passage.text for item in collection.get(["a"])] == ["two"]
    assert ids(collection.search([0, 0, 1], 1)) == ["a"]
    assert len(collection) == 2


def test_passages_are_taken_out(collection):
    fill(collection)
    collection.put(
        [Passage(f"d{i}", "text", path="d.md", start=9 - i) for i in range(3)], vectors_of(*"abc")
    )
    assert ids(collection.document("d.md")) == ["d2", "d1", "d0"]
    assert collection.drop(["lamp", "none", "lamp"]) == 1
    assert collection.drop_documents(["d.md", "", "none"]) == 3
    assert collection.documents() == {}
    assert ids(collection) == ["wick", "boat", "whale"]
    assert (
        ids(collection.search(vectors_of("lamp oil")[0], 9, where=lambda item: True)).count("lamp")
        == 0
    )
    assert collection.search_text("lamp", 2) == []
    with Store(collection.path) as store:
        assert store.check() == []


def test_a_document_that_loses_its_last_passage_is_forgotten(collection):
    collection.put([Passage("a", "x", path="d.md"), Passage("b", "y", path="e.md")], np.eye(2))
    collection.drop(["a"])
    assert collection.documents() == {"e.md": 1}
    collection.put([Passage("b", "y", path="f.md")], [[1.0, 0.0]])
    assert collection.documents() == {"f.md": 1}


def test_a_condition_does_not_reduce_the_number_of_results(collection):
    rng = np.random.default_rng(1)
    count = 2000
    passages = [Passage(str(i), f"thing {i}") for i in range(count)]
    rows = rng.normal(size=(count, 16))
    collection.put(passages, rows, [{"n": i} for i in range(count)])
    query = rng.normal(size=16)
    far = np.argsort(rows @ query / np.linalg.norm(rows, axis=1))[:5]  # the five farthest
    found = collection.search(query, 9, where=lambda item: item.metadata["n"] in far)
    assert ids(found) == [str(i) for i in far[::-1]]
    assert ids(
        collection.search_text("thing", 3, where=lambda item: item.metadata["n"] == 1999)
    ) == ["1999"]
    fused = collection.search_fused("thing", query, 9, where=lambda item: item.metadata["n"] in far)
    assert sorted(ids(fused)) == sorted(str(i) for i in far)
    assert collection.search(query, 3, where=lambda item: False) == []
    assert len(collection.search(query, 5000)) == count


def test_a_condition_sees_the_score(collection):
    collection.put([Passage("a", "x"), Passage("b", "y")], [[1.0, 0.0], [0.0, 1.0]])
    assert ids(collection.search([1, 0], 2, where=lambda item: item.passage.score > 0.5)) == ["a"]


def test_an_inexact_index_gives_all_that_are_asked_for(monkeypatch):
    rng = np.random.default_rng(2)
    index = VectorIndex(8, flat_limit=500)
    rows = rng.normal(size=(1000, 8)).astype(np.float32)
    index.add(np.arange(1000), rows)
    assert not index.is_exact
    found = index.search(rows[0], 900)
    assert len(found) == 900
    exact = list(index.ranking(rows[0]))
    assert [key for key, _ in exact] == np.argsort(-(rows @ rows[0]), kind="stable").tolist()


def test_a_zero_vector_is_near_to_nothing(collection):
    collection.put([Passage("zero", ""), Passage("one", "x")], [[0.0, 0.0], [1.0, 1.0]])
    assert [i.passage.score for i in collection.search([1, 1], 2)] == pytest.approx(
        [1, 0], abs=1e-3
    )
    assert [i.passage.score for i in collection.search([0, 0], 2)] == [0, 0]


def test_vectors_of_any_length_are_compared_by_direction(collection):
    collection.put([Passage("large", "x"), Passage("small", "y")], [[1e300, 1e300], [1e-300, 0]])
    assert ids(collection.search([1, 1], 1)) == ["large"]
    assert ids(collection.search([1e-300, 0], 1)) == ["small"]


def deep(depth):
    value = {}
    for _ in range(depth):
        value = {"inner": value}
    return value


PAIR = [Passage("a", "x"), Passage("b", "y")]


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
        ([Passage("a", "x")], [[1.0]], [deep(5000)], "recursion"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_nothing_is_changed(
    collection, passages, vectors, metadata, problem
):
    collection.put([Passage("b", "before")], [[1.0]])
    with pytest.raises(ConfigurationError, match=problem):
        collection.put(passages, vectors, metadata)
    assert [item.passage.text for item in collection] == ["before"]


@pytest.mark.parametrize("query", [[[1.0, 0.0]], "text", [float("nan"), 1.0], 3.0, []])
def test_a_query_that_is_not_a_vector_is_refused(collection, query):
    collection.put(PAIR, np.eye(2))
    with pytest.raises(ConfigurationError, match="vector"):
        collection.search(query, 1)


def test_k_is_checked(collection):
    fill(collection)
    for search in (
        lambda: collection.search(vectors_of("x")[0], 0),
        lambda: collection.search_text("lamp", 0),
        lambda: collection.search_fused("lamp", vectors_of("x")[0], 0),
    ):
        with pytest.raises(ConfigurationError, match="k is 0"):
            search()
    for k in (2.5, "3", None, 2**63):
        with pytest.raises(ConfigurationError, match="k is"):
            collection.search(vectors_of("x")[0], k)
        with pytest.raises(ConfigurationError, match="k is"):
            collection.search_text("lamp", k)
    assert len(collection.search(vectors_of("x")[0], np.int64(2))) == 2


@pytest.mark.parametrize("name", [5, None, "\ud800"])
def test_ids_that_are_no_texts_are_refused(collection, name):
    for ask in (collection.get, collection.drop, collection.vectors, collection.drop_documents):
        with pytest.raises(ConfigurationError, match="id"):
            ask([name])
    with pytest.raises(ConfigurationError, match="id"):
        collection.document(name)


def test_vectors_of_another_length_are_refused(collection):
    collection.put(PAIR, np.eye(2))
    with pytest.raises(IndexUnusableError, match="vectors of 2 numbers, not of 3"):
        collection.put([Passage("c", "z")], np.eye(3)[:1])
    with pytest.raises(IndexUnusableError, match="vectors of 2 numbers, not of 3"):
        collection.search([1, 0, 0], 1)
    assert len(collection) == 2


@pytest.mark.parametrize("empty", [Collection.clear, lambda c: c.drop(["a", "b"])])
def test_an_emptied_collection_takes_vectors_of_another_model(tmp_path, empty):
    path = tmp_path / "c.db"
    with Collection(path, fingerprint="one") as first:
        first.put(PAIR, np.eye(2))
        assert ids(first.search([1, 0], 1)) == ["a"]
        with Collection(path) as reader:
            reader.search([1, 0], 1)
            empty(first)
            assert reader.search([1, 0], 1) == []
            with Collection(path, fingerprint="two") as second:
                second.put(PAIR, np.eye(3)[:2])
                assert ids(second.search([0, 1, 0], 1)) == ["b"]
            assert ids(reader.search([1, 0, 0], 1)) == ["a"]
        with pytest.raises(IndexUnusableError, match="'two', not of 'one'"):
            first.put(PAIR, np.eye(3)[:2])


def test_a_collection_persists(tmp_path):
    path = tmp_path / "new folder" / "c.db"
    with Collection(path, fingerprint="model") as collection:
        fill(collection, path="d.md")
    for fingerprint in ("model", ""):
        with Collection(path, fingerprint=fingerprint) as again:
            assert ids(again) == list(TEXTS)
            assert ids(again.search(vectors_of("cotton wick")[0], 1)) == ["wick"]
            assert again.get(["boat"])[0].metadata == {"name": "boat"}
    with pytest.raises(IndexUnusableError, match="'model', not of 'other'"):
        Collection(path, fingerprint="other")


def test_a_closed_collection_in_memory_says_so():
    collection = Collection()
    collection.close()
    for use in (lambda: len(collection), lambda: fill(collection), lambda: collection.clear()):
        with pytest.raises(EmptyIndexError, match="was closed: make a new one"):
            use()


def test_one_that_was_deleted_says_so(tmp_path):
    with Collection(tmp_path / "c.db") as collection:
        fill(collection)
        collection.path.unlink()
        for use in (lambda: list(collection), lambda: fill(collection)):
            with pytest.raises(EmptyIndexError, match=r"c\.db was moved or deleted"):
                use()


def test_copying_returns_the_same_object_and_unpickling_reopens_the_file(tmp_path):
    with Collection(tmp_path / "c.db", fingerprint="model") as collection:
        fill(collection)
        assert copy.copy(collection) is copy.deepcopy(collection) is collection
        with pickle.loads(pickle.dumps(collection)) as again:
            assert (again.path, again.fingerprint) == (collection.path, "model")
            assert ids(again.search(vectors_of("cotton wick")[0], 1)) == ["wick"]
    with Collection() as temporary:
        assert (temporary.is_temporary, collection.is_temporary) == (True, False)
        assert copy.deepcopy(temporary) is temporary
        with pytest.raises(ConfigurationError, match=r"in memory cannot be pickled.*copy_to"):
            pickle.dumps(temporary)


def test_a_relative_path_survives_a_change_of_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Collection("c.db") as collection:
        fill(collection)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        collection._store.close()
        assert len(collection) == 4
        assert collection.path == tmp_path / "c.db"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("vector = x'00'", "wrong size"),
        ("vector = 'text'", "wrong size"),
        ("metadata = '{'", "JSON"),
    ],
)
def test_a_damaged_passage_is_reported(collection, damage, problem):
    fill(collection)
    with Store(collection.path) as store, store.transaction():
        store.rows(f"UPDATE passage SET {damage} WHERE passage_id = 'wick'")
    with pytest.raises(IndexUnusableError, match=rf"{problem}.*put them in again"):
        collection.search(vectors_of("wick")[0], 4)


def test_an_empty_one_is_not_to_be_indexed(tmp_path, embedder):
    with Collection(tmp_path / "c.db", fingerprint=embedder.fingerprint) as collection:
        retriever = open_retriever(collection.path, embedder)
    with pytest.raises(EmptyIndexError, match="put passages into it"):
        retriever.search("x")


def test_a_copy_is_whole_and_apart(tmp_path):
    path = tmp_path / "new" / "copy.db"
    with Collection(fingerprint="model") as collection:
        fill(collection)
        collection.copy_to(path)
        collection.put([Passage("later", "x")], vectors_of("x"))
        with Collection(path, fingerprint="model") as copy:
            assert ids(copy) == list(TEXTS)
            assert ids(copy.search(vectors_of("cotton wick")[0], 1)) == ["wick"]
            copy.drop(["lamp"])
            assert len(collection) == 5
            collection.copy_to(path)
            collection.copy_to(collection.path)
            assert len(copy) == len(collection) == 5
            assert ids(copy.search(vectors_of("lamp oil burns")[0], 1)) == ["lamp"]
    with Store(path) as store:
        assert store.check() == []
    assert sorted(file.name for file in path.parent.iterdir()) == ["copy.db", "copy.db.lock"]
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes " * 20)
    with Collection() as collection, pytest.raises(IndexUnusableError, match="not replaced"):
        collection.copy_to(notes)


def test_files_of_others_are_left_alone(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes " * 20)
    with pytest.raises(IndexUnusableError, match="not a ragaccel index"):
        Collection(notes)
    assert notes.read_text() == "my notes " * 20
    with pytest.raises(StorageError):
        Collection(notes / "c.db")


# Updates


def test_one_passage_more_does_not_build_the_vectors_anew(collection, monkeypatch):
    fill(collection)
    collection.search(vectors_of("x")[0], 1)
    monkeypatch.setattr(VectorIndex, "build", lambda *_: pytest.fail("built anew"))
    added = []
    add = VectorIndex.add
    monkeypatch.setattr(
        VectorIndex,
        "add",
        lambda self, keys, rows: (added.append(len(keys)), add(self, keys, rows)),
    )
    collection.put([Passage("new", "A zebra.")], vectors_of("A zebra."))
    assert ids(collection.search(vectors_of("A zebra.")[0], 1)) == ["new"]
    collection.drop(["new"])
    assert ids(collection.search(vectors_of("A zebra.")[0], 9)).count("new") == 0
    assert added == [1]


def test_what_another_puts_in_is_found(tmp_path):
    path = tmp_path / "c.db"
    with Collection(path) as reader, Collection(path) as writer:
        fill(writer)
        assert ids(reader.search(vectors_of("cotton wick")[0], 1)) == ["wick"]
        writer.put([Passage("wick", "A zebra.")], vectors_of("A zebra."))
        assert [i.passage.text for i in reader.search(vectors_of("A zebra.")[0], 1)] == ["A zebra."]


def test_one_that_another_makes_just_now_is_waited_for(tmp_path):
    path, begun = tmp_path / "c.db", threading.Event()

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


def put_many(path, name, count):
    with Collection(path) as collection:
        for number in range(count):
            passage = Passage(f"{name}{number}", f"thing {name} {number}")
            collection.put([passage], vectors_of(passage.text))


def test_processes_may_write_at_the_same_time(tmp_path):
    path = tmp_path / "c.db"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=put_many, args=(path, name, 10)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    with Collection(path) as collection:
        assert sorted(ids(collection)) == sorted(f"{n}{i}" for n in "ab" for i in range(10))


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("runner", ["threads", "asyncio"])
def test_all_may_be_done_at_once(tmp_path, place, runner):
    with Collection(tmp_path / "c.db" if place == "file" else None) as collection:
        fill(collection)

        def work(name):
            for number in range(8):
                passage = Passage(f"{name}-{number % 3}", f"thing {name} {number}", path=name)
                collection.put([passage], vectors_of(passage.text), [{"n": number}])
                assert ids(collection.search(vectors_of(passage.text)[0], 1)) == [
                    passage.passage_id
                ]
                assert ids(collection.search(vectors_of("cotton wick")[0], 1)) == ["wick"]
                collection.drop([f"{name}-{(number + 1) % 3}"])

        names = [f"thread{i}" for i in range(8)]
        if runner == "threads":
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(work, names))
        else:

            async def main():
                others = asyncio.gather(*(asyncio.to_thread(work, name) for name in names[1:]))
                await asyncio.sleep(0)
                work(names[0])  # in the loop's own thread
                await others

            asyncio.run(main())
        assert len(collection) == 4 + 8 * 2
        assert len(collection.search(np.ones(64), 99)) == 20
        with Store(tmp_path / "copy.db") as copy:
            collection.copy_to(copy.path)
            assert copy.check() == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux what is open")
def test_threads_that_end_leave_no_connection_open(collection):
    fill(collection)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        thread = threading.Thread(target=lambda: collection.get(["lamp"]))
        thread.start()
        thread.join()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 6


def test_a_search_sees_one_moment_and_the_next_what_changed_meanwhile(collection, monkeypatch):
    fill(collection)
    with Collection(collection.path) as other:
        read = Store.keys

        def changed_meanwhile(self):
            keys = read(self)
            monkeypatch.setattr(Store, "keys", read)
            other.clear()
            return keys

        monkeypatch.setattr(Store, "keys", changed_meanwhile)
        assert ids(collection.search(vectors_of("lamp oil")[0], 1)) == ["lamp"]
        assert collection.search(vectors_of("lamp")[0], 1) == []
        fill(other)
        assert ids(collection.search(vectors_of("cotton wick")[0], 1)) == ["wick"]


def test_a_search_finds_all_that_it_is_asked_for_while_passages_come_and_go(collection):
    rng = np.random.default_rng(0)
    collection.put([Passage(str(i), f"thing {i}") for i in range(50)], rng.normal(size=(50, 8)))
    stop = threading.Event()

    def churn():
        number = 0
        while not stop.is_set():
            number += 1
            collection.put(
                [Passage("always", f"thing {number}"), Passage("x", "x")], np.ones((2, 8))
            )
            collection.drop(["x"])

    collection.put([Passage("always", "thing")], np.ones((1, 8)))
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            near = collection.search(np.ones(8), 3)
            assert len(near) == 3
            assert "always" in ids(near)
            fused = collection.search_fused("thing", np.ones(8), 51)
            assert len(fused) == 51
            assert "always" in ids(fused)
    finally:
        stop.set()
        thread.join()


def test_a_condition_may_look_at_the_collection_but_not_change_it(collection):
    fill(collection)
    query = vectors_of("cotton wick")[0]
    found = collection.search(query, 1, where=lambda item: len(collection.get(["lamp"])) == 1)
    assert ids(found) == ["wick"]
    for search in (collection.search, lambda _, **more: collection.search_text("wick", **more)):
        with pytest.raises(ConfigurationError, match="may only read"):
            search(query, where=lambda item: collection.drop(["lamp"]))
    assert len(collection) == 4
    collection.drop(["lamp"])


# Together with indexes of `ragaccel index`


def test_an_index_is_searched_but_not_changed(store, embedder, folder):
    index_folder(store, embedder, folder)
    with Collection(store.path, fingerprint=embedder.fingerprint) as collection:
        found = collection.search(embedder.embed_query("the boat called Petrel"), 1)
        assert found[0].passage.citation == "sub folder 🙂/boat.txt:1"
        assert found[0].metadata == {}
        assert collection.documents()["lamp.md"] == 2
        name = found[0].passage.passage_id
        for change in (
            lambda: collection.put([Passage("x", "y")], vectors_of("y")),
            lambda: collection.drop([name]),
            lambda: collection.drop_documents(["lamp.md"]),
            collection.clear,
        ):
            with pytest.raises(StorageError, match="kept by `ragaccel index`"):
                change()
        index_folder(store, embedder, folder, rebuild=True)
        assert len(collection) == 4
        assert ids(collection.search(embedder.embed_query("the boat called Petrel"), 1)) == [name]
    with pytest.raises(IndexUnusableError):
        Collection(store.path, fingerprint="another")
    assert index_folder(store, embedder, folder).is_current


def test_a_retriever_searches_a_collection(tmp_path, embedder):
    path = tmp_path / "c.db"
    with Collection(path, fingerprint=embedder.fingerprint) as collection:
        fill(collection, path="d.md", line=4)
        retriever = open_retriever(path, embedder)
        assert retriever.search("cotton wick", 1)[0].citation == "d.md:4"
        collection.put([Passage("new", "A zebra grazes.")], vectors_of("A zebra grazes."))
        assert retriever.search("zebra", 1)[0].passage_id == "new"
        retriever.store.close()

    class Other(HashEmbedder):
        fingerprint = "another"

    with Store(path) as store, pytest.raises(IndexUnusableError, match="another embedding model"):
        Retriever(store, Other())


def test_a_retriever_of_another_dimension_is_refused(tmp_path, embedder):
    with Collection(tmp_path / "c.db") as collection:
        collection.put(PAIR, np.eye(2))
        with Store(collection.path) as store, pytest.raises(IndexUnusableError, match="not of 64"):
            Retriever(store, embedder).search("x")


@pytest.mark.parametrize("rebuild", [False, True])
def test_indexing_never_takes_a_collections_place(tmp_path, embedder, folder, rebuild):
    tsv = tmp_path / "set.tsv"
    tsv.write_text("p1\tone\n")
    with Collection(tmp_path / "c.db") as collection, Store(collection.path) as store:
        fill(collection)
        with pytest.raises(StorageError, match="a program put in"):
            index_folder(store, embedder, folder, rebuild=rebuild)
        with pytest.raises(StorageError, match="a program put in"):
            index_passages(store, embedder, tsv, rebuild=rebuild)
        assert ids(collection) == list(TEXTS)
        fill(collection)


def test_vectors_are_updated_not_read_twice(collection, monkeypatch):
    fill(collection)
    followed = StoreVectorIndex(collection._store, lambda: 64)
    with followed.current() as first:
        pass
    with followed.current() as second:
        assert first is second
