"""The retriever and its vector index: modes, fusion, reranking, compression, recall."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hash_embedder import HashEmbedder

from ragaccel import CompressingRetriever
from ragaccel.errors import ConfigurationError, EmptyIndexError, IndexUnusableError
from ragaccel.passage import Passage
from ragaccel.retrieval import (
    MODES,
    Retriever,
    Store,
    VectorIndex,
    default_index_path,
    fuse,
    index_folder,
    open_retriever,
    raise_files,
)

BOAT = "the boat called Petrel"


@pytest.fixture
def retriever(indexed, embedder):
    return Retriever(indexed, embedder)


def ranking(passages):
    return [(passage.passage_id, passage.score) for passage in passages]


def test_every_mode_finds_the_passage_and_dense_scores_are_cosines(retriever, embedder):
    for mode in MODES:
        found = retriever.search(BOAT, 2, mode=mode)
        assert found[0].citation == "sub folder 🙂/boat.txt:1"
        scores = [passage.score for passage in found]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] > 0
    first = retriever.search("The wick is cotton.", 1, mode="dense")[0]
    text = f"{first.title}\n{first.text}"
    expected = float(embedder.embed_query("The wick is cotton.") @ embedder.embed_query(text))
    assert first.score == pytest.approx(expected, abs=1e-3)


def test_a_document_s_passages_are_all_of_its_text(retriever, indexed):
    (boat,) = retriever.search(BOAT, 1)
    told = [one.text for one in CompressingRetriever(retriever).document_passages(boat.path)]
    assert told == [item.passage.text for item in indexed.document(boat.path)] != []
    assert retriever.document_passages("no file.txt") == []


def test_text_search_takes_any_question(retriever, indexed):
    for question in ('the "wick', "NEAR(a b)", "wick OR", "col:wick *", "?!", "the of", "' ; --"):
        retriever.search(question, mode="text")
    key = indexed.search_text("What is a WICKS?", 5)[0][0]  # porter stemming
    assert indexed.passages([key])[key].passage.text == "The wick is cotton."
    assert indexed.search_text("???", 5) == []
    assert indexed.search_text("is the", 5), "stop words alone are searched for"
    (found,) = indexed.search_text("is the cotton", 5)
    assert found[0] == key


def test_arguments_are_checked(retriever):
    assert len(retriever.search("lamp", 100)) == 4
    assert retriever.search("  ") == retriever.search("???") == []
    for query, options, problem in (
        ("lamp", {"k": 0}, "k is 0"),
        ("lamp", {"mode": "magic"}, "mode"),
        (7, {}, "the query is"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            retriever.search(query, **options)


# Fusion


def test_fusion_weighs_scores_within_their_rankings_whatever_their_scale():
    dense, text = [("a", 0.9), ("b", 0.6), ("c", 0.5)], [("c", 8.0), ("d", 6.0)]
    fused = fuse(dense, text)
    assert [key for key, _ in fused] == ["a", "c", "d", "b"]
    assert dict(fused) == pytest.approx({"a": 0.5, "b": 0.125, "c": 0.5, "d": 0.375})
    assert dict(fuse(dense, text, 0.8)) == pytest.approx({"a": 0.8, "b": 0.2, "c": 0.2, "d": 0.15})
    crowded = [(key, 0.8 + score / 10) for key, score in dense]
    louder = [(key, 1e-6 * score) for key, score in text]
    assert dict(fuse(crowded, louder)) == pytest.approx(dict(fused))


@pytest.mark.parametrize(
    ("dense", "text", "expected"),
    [
        ([], [], []),
        ([("a", 0.3)], [], [("a", 0.5)]),
        ([], [("a", 0.0)], [("a", 0.5)]),
        ([(2, 0.3), (1, 0.3)], [], [(1, 0.5), (2, 0.5)]),
        ([("a", -0.1), ("b", -0.4)], [("b", 3.0)], [("a", 0.5), ("b", 0.5)]),
    ],
)
def test_fusion_of_short_or_equal_rankings_keeps_their_order(dense, text, expected):
    assert fuse(dense, text) == expected


def test_the_first_of_a_fusion_are_the_same_however_many_are_asked_for():
    dense = [(number, 0.9 - number / 500) for number in range(200)]
    text = [(number, 20.0 - number / 9) for number in (10, 40, 55, 90, 100, 160)]
    deep = fuse(dense, text)
    for few in (60, 100, 200):
        assert fuse(dense[:few], text)[:20] == deep[:20]
    beyond = [key for key, score in deep if score == 0.0]  # farther than the 50th, no word shared
    assert beyond == sorted(set(range(49, 200)) - {number for number, _ in text})


def test_fused_search_fuses_both_searches_and_looks_twice_as_deep_as_it_finds(
    retriever, monkeypatch
):
    monkeypatch.setattr("ragaccel.retrieval.retriever._FILE_WEIGHT", 0.0)
    both = [ranking(retriever.search(BOAT, 9, mode=mode)) for mode in ("dense", "text")]
    fused = ranking(retriever.search(BOAT, 9))
    assert dict(fused) == pytest.approx(dict(fuse(*both)))
    assert fused[0][1] == 1.0  # first in both
    monkeypatch.setattr("ragaccel.retrieval.retriever.NUM_CANDIDATES", 1)
    question = "the boat Petrel and the wick of the lamp"
    deep = [ranking(retriever.search(question, 4, mode=mode)) for mode in ("dense", "text")]
    found = dict(ranking(retriever.search(question, 2)))
    assert found == pytest.approx(dict(fuse(*deep)[:2]))
    assert found != pytest.approx(dict(fuse(*(part[:2] for part in deep))[:2]))


def test_a_file_with_several_good_passages_is_raised():
    def ranked(*found):
        made = [Passage(passage_id=f"{n}", text="x", path=p, score=s) for n, (p, s) in found]
        return [(one.passage_id, round(one.score, 3)) for one in raise_files(made)]

    found = [(1, ("a", 0.9)), (2, ("b", 0.8)), (3, ("b", 0.8)), (4, ("b", 0.7)), (5, ("b", 0.1))]
    assert ranked(*found) == [("2", 0.787), ("3", 0.787), ("4", 0.725), ("1", 0.675), ("5", 0.35)]
    assert ranked((1, ("", 0.9)), (2, ("", 0.8)))[0] == ("1", 0.675)  # no files: nothing is raised


def test_a_reranker_decides_the_final_order(indexed, embedder):
    class OfWicks:
        def scores(self, question, passages):
            return [float(passage.text.count("wick")) for passage in passages]

    found = Retriever(indexed, embedder, reranker=OfWicks()).search("the boat", 2)
    assert [(passage.text, passage.score) for passage in found][:1] == [("The wick is cotton.", 1)]
    assert len(found) == 2


# An index that is missing, another's, or changes


def test_nothing_indexed(store, embedder, tmp_path):
    with pytest.raises(EmptyIndexError, match="no index at"):
        open_retriever(tmp_path / "none.db", embedder)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    assert index_folder(store, embedder, tmp_path / "empty").passages == 0
    for mode in MODES:
        with pytest.raises(EmptyIndexError, match="holds no passages"):
            Retriever(store, embedder).search("x", mode=mode)


def test_a_question_may_come_while_an_index_in_memory_is_warmed_up(embedder, folder, monkeypatch):
    store = Store(None)
    index_folder(store, embedder, folder)
    retriever, found = Retriever(store, embedder), []
    asking = threading.Thread(target=lambda: found.extend(retriever.search(BOAT)), daemon=True)
    vectors = Store.vectors

    def ask_meanwhile(self, *args):
        if threading.current_thread() is warming:
            asking.start()
            asking.join(0.3)  # until it waits for the index
        return vectors(self, *args)

    monkeypatch.setattr(Store, "vectors", ask_meanwhile)
    warming = threading.Thread(target=retriever.warm_up, daemon=True)
    warming.start()
    warming.join(20)
    assert asking.ident
    asking.join(20)
    assert found


def test_a_folder_may_be_named_by_its_place_below_the_home(folder, embedder, monkeypatch):
    with Store(default_index_path(folder)) as store:
        index_folder(store, embedder, folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert open_retriever(f"~/{folder.name}", embedder).search(BOAT, 1)


def test_it_follows_the_index(retriever, indexed, embedder, folder, monkeypatch):
    retriever.warm_up()
    (folder / "lamp.md").write_text("# Whale\n\nA whale sings.\n")  # the first in the index
    with Store(indexed.path) as other:
        index_folder(other, embedder, folder)
    assert retriever.search("whale sings", 1, mode="dense")[0].title == "Whale"
    assert all("wick" not in passage.text for passage in retriever.search("lamp wick", 9))
    found = Retriever(indexed, embedder).search(BOAT, 9, mode="dense")
    assert len(found) == indexed.count_passages() == 3
    assert indexed.keys().tolist() == sorted(indexed.keys().tolist())
    index_folder(indexed, embedder, folder, rebuild=True)
    assert retriever.search(BOAT, 1, mode="dense")[0].path.endswith("boat.txt")
    monkeypatch.chdir(indexed.path.parent)
    opened = open_retriever(indexed.path.name, embedder)
    opened.store.close()
    monkeypatch.chdir(folder)
    assert "Petrel" in opened.search(BOAT, 1)[0].text
    index_folder(indexed, HashEmbedder("another", 8), folder, rebuild=True)
    with pytest.raises(IndexUnusableError, match="--rebuild"):
        opened.search(BOAT, 1)
    indexed.discard()
    for mode in MODES:
        with pytest.raises(EmptyIndexError):
            retriever.search(BOAT, 1, mode=mode)


# The vector index


DIMENSION = 32


def clustered(number, seed, dimension=DIMENSION):
    """Make clustered unit vectors, as texts of many subjects have."""
    centres = np.random.default_rng(7).standard_normal((400, dimension))
    random = np.random.default_rng(seed)
    rows = centres[random.integers(400, size=number)]
    rows += 0.7 * random.standard_normal((number, dimension))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def recall(index, keys, vectors, queries, k=10):
    hits = 0
    for query in queries:
        true = keys[np.argsort(-(vectors @ query))[:k]]
        hits += len({key for key, _ in index.search(query, k)} & set(true.tolist()))
    return hits / (k * len(queries))


def test_flat_search_is_exact():
    index = VectorIndex(DIMENSION)
    assert index.search(clustered(1, 1)[0], 5) == list(index.ranking(clustered(1, 1)[0])) == []
    vectors, keys = clustered(500, 1), np.arange(500) * 3 + 1
    index.build([(keys[:200], vectors[:200]), (keys[200:], vectors[200:])])
    assert (index.is_exact, len(index)) == (True, 500)
    assert recall(index, keys, vectors, clustered(20, 2)) == 1
    assert index.search(vectors[7], 3)[0] == (22, pytest.approx(1, abs=1e-5))
    index.remove(np.array([22, 999]))
    assert index.search(vectors[7], 1)[0][0] != 22
    index.add(np.array([5000]), vectors[7:8])
    assert index.search(vectors[7], 1)[0][0] == 5000
    assert len(index.keys()) == len(index.search(vectors[7], 9999)) == 500


def test_a_search_gives_the_cores_back():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    index = VectorIndex(DIMENSION)
    index.build([(np.arange(9), clustered(9, 1))])
    index.search(clustered(1, 2)[0], 3)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_an_index_changes_its_kind_with_its_size_and_gives_all_that_are_asked_for():
    vectors, keys = clustered(3000, 1), np.arange(3000)
    index = VectorIndex(DIMENSION, flat_limit=1000)
    index.add(keys[:1000], vectors[:1000])
    assert index.is_exact
    index.add(keys[1000:], vectors[1000:])
    assert not index.is_exact
    assert index.keys().tolist() == keys.tolist()
    assert recall(index, keys, vectors, clustered(50, 2)) >= 0.9
    assert len(index.search(vectors[0], 2900)) == 2900
    exact = [key for key, _ in index.ranking(vectors[0])]
    assert exact == np.argsort(-(vectors @ vectors[0]), kind="stable").tolist()
    index.remove(keys[500:])
    assert index.is_exact
    assert recall(index, keys[:500], vectors[:500], clustered(50, 2)) == 1


@pytest.mark.slow
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


class Found:
    embedder = HashEmbedder(dimension=500)

    def __init__(self, *passages):
        self.passages = passages

    def search(self, query, k=6):
        return list(self.passages[:k])


def passage(text, name="a", start=100, line=7):
    return Passage(name, text, "Harbour", "a.md", start, start + len(text), None, line)


def search(query, *passages, **options):
    return CompressingRetriever(Found(*passages), **options).search(query)


def test_more_results_do_not_change_the_first_ones():
    made = [Passage(str(at), "x", path=str(at), score=1 - at / 100) for at in range(60)]
    made[0:3] = [replace(one, path="much.md") for one in made[0:3]]
    made[55] = replace(made[55], path="much.md")
    first = [one.passage_id for one in raise_files(made[:50])]
    assert [one.passage_id for one in raise_files(made)][:50] == first


def test_the_nearest_sentences_of_passages_with_one_id_are_their_own():
    first, second = passage("Green paint dries."), passage("Ropes lie here. Green doors.")
    retriever = CompressingRetriever(Found(first, second))
    found = retriever.nearest("green paint")
    assert [one.text for one in found] == ["Green paint dries.", "Green doors."]


def test_a_heading_is_not_taken_for_an_answer():
    whole = passage("# Green paint\n\nIt is best, says Mina of the green.\n\nRopes lie here.")
    for given, expected in (
        (whole, "It is best, says Mina of the green."),
        (passage("# Green paint"), "# Green paint"),
    ):
        assert search("Green paint", given, sentences=1)[0].text == expected


def test_the_nearest_sentences_of_all_passages_are_kept_in_place():
    first = passage("# Paint\n\nGreen paint dries. Ropes lie here. Green paint is best.")
    second = passage("Green doors. Ropes lie here.", "b")
    found = search("green paint", first, second, sentences=3)
    assert {(p.passage_id, p.text) for p in found} == {
        ("a", "Green paint dries."), ("a", "Green paint is best."), ("b", "Green doors."),
    }  # fmt: skip
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)
    assert all(0 < p.score < 1 for p in found)
    for one in found:
        text = {"a": first, "b": second}[one.passage_id].text
        assert text[one.start - 100 : one.end - 100] == one.text
        assert one.line == 7 + text[: one.start - 100].count("\n")
        assert (one.title, one.path) == ("Harbour", "a.md")
    every = search("green paint", first, second, sentences=9)
    assert [p.text for p in every[3:]] == ["Ropes lie here."], "once, and no heading"
    assert search("x", passage("  ")) == search("x") == []
    with pytest.raises(ConfigurationError, match="one or more"):
        search("x", sentences=0)


def test_in_english_sentences_are_in_the_order_of_the_ranker():
    first = passage("Ropes lie here. Mina painted the doors green. Which doors are green?")
    second, foreign = passage("Doors need paint.", "b"), passage("Двери красит Мина.", "c")
    found = search("Who painted the doors?", foreign, first, second, sentences=5)
    assert found[0].text == "Mina painted the doors green."
    assert "c" not in [one.passage_id for one in found]
    found = Found(foreign, first, second)
    nearest = CompressingRetriever(found, sentences=2).nearest("Who painted the doors?")
    assert nearest[0].text == "Mina painted the doors green."
    assert nearest[0].score > 0.5 > nearest[1].score


def test_in_other_languages_sentences_are_ordered_by_cosine_and_shared_words():
    class Nearly:
        def embed_query(self, query):
            return np.array([1.0])

        def embed_documents(self, texts):
            return np.array([[0.6 if "Ropes" in text else 0.4] for text in texts])

    found = Found(passage("Ropes lie here. Die Türen streicht Mina."))
    found.embedder = Nearly()
    first, second = CompressingRetriever(found, sentences=5).search("Wer streicht die Türen?")
    assert (first.text, first.score) == ("Die Türen streicht Mina.", 0.4)
    assert (second.text, second.score) == ("Ropes lie here.", 0.6)
