import asyncio
import copy
import pickle
import threading

import pytest
from hash_embedder import HashEmbedder
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, FakeEmbeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.retrievers import BaseRetriever
from ragaccel import (
    Collection,
    ConfigurationError,
    IndexUnusableError,
    Passage,
)
from ragaccel.frameworks import ReferenceRegistry, default_registry
from thread_records import record_threads

from langchain_ragaccel import (
    RagaccelEmbeddings,
    RagaccelVectorStore,
    ReferenceCollector,
    collecting_into,
)

DOCUMENTS = [
    Document(
        id="lamp", page_content="The lamp burns oil.", metadata={"source": "a.md", "year": 1874}
    ),
    Document(
        id="wick", page_content="The wick is cotton.", metadata={"source": "a.md", "year": 1911}
    ),
    Document(id="boat", page_content="The boat is called Petrel.", metadata={"source": "b.md"}),
]


@pytest.fixture
def embeddings():
    return RagaccelEmbeddings(embedder=HashEmbedder())


@pytest.fixture
def store(embeddings):
    with RagaccelVectorStore(embeddings) as store:
        store.add_documents(DOCUMENTS)
        yield store


class PassthroughRetriever(BaseRetriever):
    """Returns the results of another retriever."""

    retriever: BaseRetriever

    def _get_relevant_documents(self, query, *, run_manager):
        return self.retriever.invoke(query, {"callbacks": run_manager.get_child()})


def ids(documents):
    return [document.id for document in documents]


def test_the_nearest_comes_first_as_it_was_added(store):
    assert store.similarity_search("Which boat is called Petrel?", 1) == [DOCUMENTS[2]]
    assert ids(store.similarity_search("the lamp oil wick")) == ["lamp", "wick", "boat"]


def test_a_store_is_a_retriever(store):
    assert ids(store.as_retriever(search_kwargs={"k": 1}).invoke("cotton wick")) == ["wick"]
    near = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.99}
    )
    assert ids(near.invoke("The wick is cotton.")) == ["wick"]
    by_words = store.as_retriever(search_kwargs={"mode": "text", "filter": {"source": "b.md"}})
    assert ids(by_words.invoke("Petrel lamp")) == ["boat"]
    diverse = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 3})
    assert len(diverse.invoke("lamp")) == 2


def test_every_mode_finds(store):
    for mode in ("dense", "text", "fused"):
        assert ids(store.similarity_search("the boat Petrel", 1, mode=mode)) == ["boat"]
    assert ids(store.similarity_search("Petrel", 3, mode="text")) == ["boat"]
    with pytest.raises(ConfigurationError, match="mode"):
        store.similarity_search("x", mode="magic")


def test_filters_hold_in_every_search(store, embeddings):
    vector = embeddings.embed_query("The boat is called Petrel.")
    how = {"filter": {"source": "a.md"}}
    query = "The boat is called Petrel."
    for found in (
        store.similarity_search(query, 9, **how),
        store.similarity_search(query, 9, mode="fused", **how),
        [document for document, _ in store.similarity_search_with_score(query, 9, **how)],
        store.similarity_search_by_vector(vector, 9, **how),
        store.max_marginal_relevance_search(query, 9, **how),
        store.max_marginal_relevance_search_by_vector(vector, 9, **how),
    ):
        assert sorted(ids(found)) == ["lamp", "wick"]
    assert ids(store.similarity_search(query, filter=lambda document: document.id == "lamp")) == [
        "lamp"
    ]
    assert ids(store.similarity_search(query, filter={"year": {"$gt": 1900}})) == ["wick"]


def test_mmr_weighs_similarity_against_diversity(embeddings):
    texts = ["oil lamp light", "oil lamp light", "oil boat", "zebra"]
    store = RagaccelVectorStore.from_texts(texts, embeddings, ids=["0", "1", "2", "3"])
    for weight, diverse in ((0.3, True), (1.0, False)):
        found = store.max_marginal_relevance_search("oil lamp light", 2, lambda_mult=weight)
        assert (len({document.page_content for document in found}) == 2) is diverse


def test_ids_come_from_the_call_the_document_or_are_new(embeddings):
    with RagaccelVectorStore(embeddings) as store:
        documents = [Document(id="own", page_content="a"), Document(id="b", page_content="b")]
        assert store.add_documents(documents, ids=[None, "given"]) == ["own", "given"]
        first, second = store.add_texts(["same", "same"], [{"n": 1}, {"n": 2}])
        assert first != second
        assert [d.metadata for d in store.get_by_ids([second, first])] == [{"n": 2}, {"n": 1}]
        assert store.add_documents([]) == []


def test_deleting(store):
    assert store.delete(["lamp", "missing"]) is True
    assert ids(store.get_by_ids(["boat", "lamp", "wick"])) == ["boat", "wick"]
    assert store.delete([]) is True
    assert store.delete("wick") is True
    assert len(store.collection) == 1
    assert store.delete() is True
    assert len(store.collection) == 0


def test_wrong_arguments_are_refused_and_nothing_is_changed(store):
    document = Document(page_content="x")
    for wrong in (
        lambda: store.add_documents([document], ids=["a", "b"]),
        lambda: store.add_documents([document], idss=["a"]),
        lambda: store.add_documents([Document(page_content="x", metadata={"x": object()})]),
        lambda: store.delete(ids=["lamp"], namespace="x"),
        lambda: store.add_texts(["half \ud800"]),
        lambda: store.add_texts(["x"], [{1: "x"}]),
        lambda: store.delete(["\ud800"]),
        lambda: store.similarity_search("x", k=2.5),
        lambda: store.similarity_search("x", foo=5),
        lambda: store.max_marginal_relevance_search("x", foo=5),
        lambda: store.similarity_search_with_score("x", mode="text"),
        lambda: RagaccelVectorStore(store.embeddings, collection=store.collection, path="x.db"),
    ):
        with pytest.raises((ConfigurationError, TypeError)):
            wrong()
    assert len(store.collection) == 3


async def test_texts_may_be_an_iterator(embeddings):
    with RagaccelVectorStore(embeddings) as store:
        names = store.add_texts(text for text in ("one", "two"))
        names += await store.aadd_texts(text for text in ("three", "four"))
        found = [document.page_content for document in store.get_by_ids(names)]
        assert found == ["one", "two", "three", "four"]


def test_a_copy_shares_the_documents_and_a_store_in_memory_is_not_pickled(tmp_path):
    embeddings = FakeEmbeddings(size=4)
    with RagaccelVectorStore(embeddings, registry=ReferenceRegistry()) as store:
        retriever = store.as_retriever().model_copy(deep=True)
        for duplicate in (copy.deepcopy(store), retriever.vectorstore):
            assert (duplicate.collection, duplicate.registry) == (store.collection, store.registry)
        with pytest.raises(ConfigurationError, match="collection in memory cannot be pickled"):
            pickle.dumps(RagaccelVectorStore(embeddings))
    with RagaccelVectorStore(embeddings, path=tmp_path / "s.db") as store:
        store.add_texts(["x"], ids=["a"])
        with pickle.loads(pickle.dumps(store)) as again:
            assert ids(again.get_by_ids(["a"])) == ["a"]


def test_it_is_there_when_opened_again(tmp_path, embeddings):
    path = tmp_path / "store.db"
    with RagaccelVectorStore.from_documents(DOCUMENTS, embeddings, path=path):
        pass
    with RagaccelVectorStore(embeddings, path=path) as again:
        assert ids(again.similarity_search("cotton wick", 1)) == ["wick"]
        assert again.get_by_ids(["boat"]) == [DOCUMENTS[2]]
    other = RagaccelEmbeddings(embedder=HashEmbedder(fingerprint="other"))
    with pytest.raises(IndexUnusableError):
        RagaccelVectorStore(other, path=path)
    named = {"path": tmp_path / "named.db", "fingerprint": "one"}
    RagaccelVectorStore.from_texts(["x"], DeterministicFakeEmbedding(size=4), **named).close()
    with pytest.raises(IndexUnusableError):
        RagaccelVectorStore(DeterministicFakeEmbedding(size=4), **{**named, "fingerprint": "two"})


def test_a_ready_collection_is_used(embeddings):
    with Collection() as collection:
        collection.put(
            [Passage("p", "A zebra.")], embeddings.embed_documents(["A zebra."]), [{"x": 1}]
        )
        store = RagaccelVectorStore(embeddings, collection=collection)
        assert store.similarity_search("zebra") == [
            Document(id="p", page_content="A zebra.", metadata={"x": 1})
        ]
    assert store.embeddings is embeddings


# The index API


@pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full"])
def test_indexing_again_brings_in_the_difference(embeddings, cleanup):
    def run(*documents):
        how = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        counts = index(list(documents), records, store, **how)
        assert counts["num_updated"] == 0
        return tuple(counts[f"num_{what}"] for what in ("added", "skipped", "deleted"))

    records = InMemoryRecordManager("test")
    records.create_schema()
    with RagaccelVectorStore(embeddings) as store:
        a, b = (Document(page_content=text, metadata={"source": text}) for text in "ab")
        assert run(a, b) == (2, 0, 0)
        assert run(a, b) == (0, 2, 0)
        changed = Document(page_content="a, changed", metadata={"source": "a"})
        assert run(changed, b) == (1, 1, 1)
        texts = sorted(d.page_content for d in store.similarity_search("a", 9))
        assert texts == ["a, changed", "b"]
        assert run(b) == (0, 1, 1 if cleanup == "full" else 0)


# Threads and the event loop


@pytest.mark.parametrize(
    "work",
    [
        lambda store: store.adelete(["lamp"]),
        lambda store: store.aget_by_ids(["lamp"]),
        lambda store: store.asimilarity_search("x", 1),
        lambda store: store.asimilarity_search_by_vector([1.0] * 64, 1),
        lambda store: store.asimilarity_search_with_score_by_vector([1.0] * 64, 1),
        lambda store: store.amax_marginal_relevance_search_by_vector([1.0] * 64, 1),
        lambda store: store.aadd_documents(DOCUMENTS),
    ],
)
async def test_file_access_never_blocks_the_event_loop(store, work, monkeypatch):
    seen = record_threads(monkeypatch, Collection, ("put", "drop", "get", "search", "search_mmr"))
    await work(store)
    assert seen
    assert threading.get_ident() not in seen


# Search results as references


LONG = "The keeper of Gannet Ledge trims the wick at dusk, and again at midnight, in all weathers."


@pytest.mark.parametrize(
    "search",
    [
        lambda store: store.similarity_search("keeper"),
        lambda store: store.similarity_search("keeper", mode="text"),
        lambda store: store.similarity_search_with_score("keeper"),
        lambda store: store.similarity_search_by_vector([1.0] * 64),
        lambda store: store.max_marginal_relevance_search("keeper"),
        lambda store: asyncio.run(store.asimilarity_search("keeper")),
    ],
)
def test_search_results_are_registered(embeddings, search):
    with RagaccelVectorStore(embeddings) as store:
        store.add_texts([LONG], [{"source": "log.pdf"}], ids=["p"])
        assert len(default_registry()) == 0
        search(store)
        (match,) = default_registry().match(f"Context: {LONG} Question?")
        assert (match.passage.passage_id, match.passage.path) == ("p", "log.pdf")


@pytest.mark.parametrize(
    "apart", [{"registry": ReferenceRegistry()}, {"namespace": "tenant"}], ids=["registry", "name"]
)
async def test_a_store_with_a_registry_registers_nowhere_else(embeddings, apart):
    store = RagaccelVectorStore.from_texts([LONG], embeddings, **apart)
    retriever = store.as_retriever(search_kwargs={"k": 1})
    around = PassthroughRetriever(retriever=retriever)
    retriever.invoke("x")
    await retriever.ainvoke("x")
    around.invoke("x")
    store.as_retriever(search_type="mmr").invoke("x")
    assert default_registry().match(LONG) == []
    registry = apart.get("registry", default_registry())
    assert len(registry.match(LONG, apart.get("namespace", ""))) == 1
    given = ReferenceRegistry()
    retriever.invoke("x", {"callbacks": [ReferenceCollector(given)]})
    assert len(given.match(LONG)) == 1, "who asks for it by hand is told"


def test_a_search_by_hand_registers_where_its_context_collects(embeddings):
    own = ReferenceRegistry()
    store = RagaccelVectorStore.from_texts([LONG], embeddings)
    with collecting_into(own, "tenant"):
        store.similarity_search("x")
        store.as_retriever().invoke("x")
    assert len(own.match(LONG, "tenant")) == 1
    assert len(default_registry()) == 0


def test_nothing_is_registered_where_that_is_switched_off(embeddings, monkeypatch):
    monkeypatch.setenv("RAGACCEL_AUTO_REFERENCES", "0")
    RagaccelVectorStore.from_texts([LONG], embeddings).similarity_search("keeper")
    assert len(default_registry()) == 0
