"""The retriever: three modes, fusion, reranking, and an index that changes under it."""

import threading

import numpy as np
import pytest
from hash_embedder import HashEmbedder

from ragaccel.errors import ConfigurationError, EmptyIndexError, IndexUnusableError
from ragaccel.retrieval import MODES, Retriever, Store, fuse, index_folder, open_retriever


@pytest.fixture
def retriever(store, embedder, folder):
    index_folder(store, embedder, folder)
    return Retriever(store, embedder)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_finds_the_passage(retriever, mode):
    found = retriever.search("the boat called Petrel", 2, mode=mode)
    assert found[0].path == "sub folder 🙂/boat.txt"
    assert found[0].citation == "sub folder 🙂/boat.txt:1"
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)
    assert found[0].score > 0


def test_dense_scores_are_cosines(retriever, embedder):
    first = retriever.search("The wick is cotton.", 1, mode="dense")[0]
    text = f"{first.title}\n{first.text}"
    expected = float(embedder.embed_query("The wick is cotton.") @ embedder.embed_query(text))
    assert first.score == pytest.approx(expected, abs=1e-3)


def test_text_search_takes_any_question(retriever, store):
    for question in ('the "wick', "NEAR(a b)", "wick OR", "col:wick *", "?!", "the of", "' ; --"):
        retriever.search(question, mode="text")
    key = store.search_text("What is a WICKS?", 5)[0][0]  # porter stemming
    assert store.passages([key])[key].passage.text == "The wick is cotton."
    assert store.search_text("???", 5) == []


def test_fusion_weighs_scores_within_their_rankings():
    dense, text = [("a", 0.9), ("b", 0.6), ("c", 0.5)], [("c", 8.0), ("d", 6.0)]
    fused = fuse(dense, text)
    assert [key for key, _ in fused] == ["a", "c", "d", "b"]
    assert dict(fused) == pytest.approx({"a": 0.5, "b": 0.125, "c": 0.5, "d": 0.375})
    assert dict(fuse(dense, text, 0.8)) == pytest.approx({"a": 0.8, "b": 0.2, "c": 0.2, "d": 0.15})


def test_fusion_knows_no_model_and_no_scale():
    dense, text = [("a", 0.9), ("b", 0.6), ("c", 0.5)], [("c", 8.0), ("d", 6.0)]
    crowded = [(key, 0.8 + score / 10) for key, score in dense]
    louder = [(key, 1e-6 * score) for key, score in text]
    assert dict(fuse(crowded, louder)) == pytest.approx(dict(fuse(dense, text)))


def test_fusion_of_short_or_equal_rankings_keeps_their_order():
    assert fuse([], []) == []
    assert fuse([("a", 0.3)], []) == fuse([], [("a", 0.0)]) == [("a", 0.5)]
    assert fuse([(2, 0.3), (1, 0.3)], []) == [(1, 0.5), (2, 0.5)]
    assert fuse([("a", -0.1), ("b", -0.4)], [("b", 3.0)]) == [("a", 0.5), ("b", 0.5)]


def test_the_first_of_a_fusion_are_the_same_however_many_are_asked_for():
    dense = [(number, 0.9 - number / 500) for number in range(200)]
    text = [(number, 20.0 - number / 9) for number in (10, 40, 55, 90, 100, 160)]
    deep = fuse(dense, text)
    for few in (60, 100, 200):
        assert fuse(dense[:few], text)[:20] == deep[:20]
    beyond = [key for key, score in deep if score == 0.0]  # farther than the 50th, no word shared
    assert beyond == sorted(set(range(49, 200)) - {number for number, _ in text})


def test_fused_search_is_of_both_searches_scores(retriever):
    dense, text = (retriever.search("the boat Petrel", 9, mode=m) for m in ("dense", "text"))
    expected = fuse(*([(p.passage_id, p.score) for p in found] for found in (dense, text)))
    fused = [(p.passage_id, p.score) for p in retriever.search("the boat Petrel", 9)]
    assert dict(fused) == pytest.approx(dict(expected))
    assert fused[0][1] == 1.0  # first in both


def test_fused_search_looks_twice_as_deep_as_it_finds(retriever, monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.retriever.NUM_CANDIDATES", 1)
    question = "the boat Petrel and the wick of the lamp"
    rankings = [
        [(p.passage_id, p.score) for p in retriever.search(question, 4, mode=mode)]
        for mode in ("dense", "text")
    ]
    found = [(p.passage_id, p.score) for p in retriever.search(question, 2)]
    assert dict(found) == pytest.approx(dict(fuse(*rankings)[:2]))
    shallow = fuse(*(ranking[:2] for ranking in rankings))[:2]
    assert dict(found) != pytest.approx(dict(shallow))


def test_k_and_mode_are_checked(retriever):
    assert len(retriever.search("lamp", 100)) == 4
    assert retriever.search("  ") == []
    with pytest.raises(ConfigurationError, match="k is 0"):
        retriever.search("lamp", 0)
    with pytest.raises(ConfigurationError, match="mode"):
        retriever.search("lamp", mode="magic")


def test_it_follows_the_index(retriever, store, embedder, folder):
    retriever.warm_up()
    (folder / "lamp.md").unlink()
    (folder / "whale.md").write_text("# Whale\n\nA whale sings.\n")
    with Store(store.path) as other:
        index_folder(other, embedder, folder)
    assert retriever.search("whale sings", 1, mode="dense")[0].title == "Whale"
    assert all(p.path != "lamp.md" for p in retriever.search("lamp wick", 9))
    index_folder(store, embedder, folder, rebuild=True)
    assert retriever.search("boat called Petrel", 1, mode="dense")[0].path.endswith("boat.txt")


def test_opening_an_index_while_a_file_changes_misses_nothing(store, embedder, folder):
    index_folder(store, embedder, folder)
    (folder / "lamp.md").write_text("# Other\n\nA zebra grazes.\n")  # the first in the index
    index_folder(store, embedder, folder)
    found = Retriever(store, embedder).search("the boat called Petrel", 9, mode="dense")
    assert len(found) == store.count_passages()
    assert store.keys().tolist() == sorted(store.keys().tolist())


def test_a_reranker_decides_the_final_order(store, embedder, folder):
    class OfWicks:
        def scores(self, question, passages):
            return [float(passage.text.count("wick")) for passage in passages]

    index_folder(store, embedder, folder)
    found = Retriever(store, embedder, reranker=OfWicks()).search("the boat", 2)
    assert (found[0].text, found[0].score) == ("The wick is cotton.", 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_indexed(store, embedder, tmp_path, mode):
    with pytest.raises(EmptyIndexError, match="no index at"):
        open_retriever(tmp_path / "none.db", embedder)
    (tmp_path / "empty").mkdir()
    index_folder(store, embedder, tmp_path / "empty")
    with pytest.raises(EmptyIndexError, match="holds no passages"):
        Retriever(store, embedder).search("x", mode=mode)


def test_another_embedder_is_refused(retriever, store):
    with pytest.raises(IndexUnusableError, match="--rebuild"):
        Retriever(store, HashEmbedder("another"))


def test_searching_from_threads_while_indexing(retriever, store, embedder, folder):
    errors = []

    def search():
        try:
            for _ in range(20):
                assert retriever.search("the boat called Petrel", 1)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    with Store(store.path) as other:
        for number in range(5):
            (folder / f"{number}.md").write_text(f"# {number}\n\nText {number}.\n")
            index_folder(other, HashEmbedder(), folder)
    for thread in threads:
        thread.join()
    assert errors == []
    with retriever._search.vectors() as index:
        assert np.array_equal(index.keys(), store.keys())


def test_an_open_index_survives_a_change_of_working_directory(store, embedder, folder, monkeypatch):
    index_folder(store, embedder, folder)
    monkeypatch.chdir(store.path.parent)
    retriever = open_retriever(store.path.name, embedder)
    retriever.store.close()
    monkeypatch.chdir(folder)
    assert "Petrel" in retriever.search("the boat called Petrel", 1)[0].text
