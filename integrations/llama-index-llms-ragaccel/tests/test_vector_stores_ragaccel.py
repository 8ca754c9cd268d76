import copy
import pickle
import threading

import fsspec
import pytest
from hash_embedder import HashEmbedder
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    ImageNode,
    IndexNode,
    MediaResource,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from ragaccel import (
    Collection,
    ConfigurationError,
    IndexUnusableError,
    Passage,
    Store,
    index_folder,
)
from thread_records import record_threads

from llama_index.embeddings.ragaccel import RagaccelEmbedding
from llama_index.retrievers.ragaccel import RagaccelRetriever
from llama_index.vector_stores.ragaccel import RagaccelVectorStore

EMBEDDER = HashEmbedder(dimension=1 << 10)
TEXTS = {
    "lamp": ("The lamp burns oil.", "a", {"year": 1874, "tags": ["light", "oil"], "name": "Lamp"}),
    "wick": ("The wick is cotton.", "a", {"year": 1911, "tags": ["light"], "name": "wick"}),
    "boat": ("The boat is called Petrel.", "b", {"year": 1874.5, "tags": [], "name": "Petrel"}),
    "whale": ("A whale sings at night.", "", {}),
}


def make_node(name, text, document="", metadata=None, kind=TextNode, **fields):
    node = kind(id_=name, text=text, metadata=metadata or {}, **fields)
    if document:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    node.embedding = embed(text)
    return node


def embed(text):
    return EMBEDDER.embed_query(text).tolist()


def nodes():
    return [make_node(name, *parts) for name, parts in TEXTS.items()]


def ask(text="", k=9, mode=VectorStoreQueryMode.DEFAULT, **fields):
    return VectorStoreQuery(
        query_embedding=embed(text), query_str=text, similarity_top_k=k, mode=mode, **fields
    )


def meeting(*tests, condition=FilterCondition.AND):
    filters = [
        test
        if isinstance(test, MetadataFilters)
        else MetadataFilter(key=test[0], operator=test[1], value=test[2])
        for test in tests
    ]
    return MetadataFilters(filters=filters, condition=condition)


@pytest.fixture
def store():
    store = RagaccelVectorStore()
    store.add(nodes())
    return store


# Adding and deleting


def test_a_node_comes_back_as_it_was(store):
    node = make_node("full", "Text 🙂\n", "doc", {"a": [1, {"b": None}]}, start_char_idx=3)
    node.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id="lamp")
    node.excluded_llm_metadata_keys = ["a"]
    assert store.add([node]) == ["full"]
    (again,) = store.get_nodes(["full"])
    node.embedding = None
    assert again == node
    assert again.ref_doc_id == "doc"


@pytest.mark.parametrize(
    "node",
    [
        IndexNode(id_="n", text="An index.", index_id="i", metadata={"a": 1}),
        ImageNode(id_="n", text="A picture.", image_path="x.png"),
        Node(id_="n", text_resource=MediaResource(text="Both."), metadata={"a": 1}),
    ],
)
def test_nodes_of_every_kind_come_back(store, node):
    node.embedding = embed("x")
    store.add([node])
    (again,) = store.get_nodes(["n"])
    assert type(again) is type(node)
    assert again.get_content() == node.get_content()
    assert again.metadata == node.metadata


def test_a_node_without_an_embedding_is_refused_and_nothing_is_changed(store):
    with pytest.raises(ValueError, match="embedding not set"):
        store.add([make_node("new", "x"), TextNode(id_="bare", text="y")])
    assert store.get_nodes(["new"]) == []
    with pytest.raises(IndexUnusableError):
        store.add([TextNode(id_="short", text="y", embedding=[1.0])])
    assert store.add([]) == []


def test_deleting(store):
    def left():
        return [node.node_id for node in store.get_nodes()]

    loose = TextNode(id_="loose", text="x", metadata={"file_path": "a"}, embedding=embed("x"))
    store.add([loose])
    of_1874 = meeting(("year", FilterOperator.EQ, 1874))
    store.delete_nodes(["wick", "boat"], of_1874)
    assert len(left()) == 5
    store.delete_nodes(filters=of_1874)
    store.delete_nodes([])
    assert left() == ["wick", "boat", "whale", "loose"]
    store.delete("a")
    store.delete("unknown")
    store.delete_nodes(["boat", "unknown"])
    assert left() == ["whale", "loose"]
    with pytest.raises(ConfigurationError, match="neither node_ids nor filters"):
        store.delete_nodes()
    store.clear()
    assert left() == []
    store.add([TextNode(id_="short", text="y", embedding=[1.0])])


def test_nodes_are_got_by_ids_and_filters(store):
    assert [n.node_id for n in store.get_nodes(["whale", "none", "lamp"])] == ["whale", "lamp"]
    assert store.get_nodes([]) == []
    late = meeting(("year", FilterOperator.GT, 1900))
    assert [n.node_id for n in store.get_nodes(filters=late)] == ["wick"]
    assert store.get_nodes(["lamp"], late) == []


# Queries


def test_the_nearest_come_first_with_their_cosines(store):
    result = store.query(ask("The wick is cotton.", 2))
    assert result.ids[0] == result.nodes[0].node_id == "wick"
    assert result.similarities[0] == pytest.approx(1, abs=1e-3)
    assert result.similarities[1] < 0.9
    assert len(result.ids) == len(result.nodes) == 2
    assert len(store.query(ask("x", 99)).ids) == 4


def test_words_and_vectors_are_weighed(store):
    def first(**fields):
        query = ask("Petrel", mode=VectorStoreQueryMode.HYBRID, **fields)
        query.query_embedding = embed("The wick is cotton.")
        return store.query(query).ids

    assert first(alpha=0.0)[0] == "boat"
    assert first(alpha=1.0)[0] == "wick"
    assert first()[0] == "boat", "found by both"
    assert len(first(k=3)) == 3
    assert len(first(k=3, hybrid_top_k=2)) == 2


def test_mmr_returns_diverse_nodes():
    store = RagaccelVectorStore()
    texts = ["oil lamp light", "oil lamp light", "oil boat", "zebra"]
    store.add([make_node(str(i), text) for i, text in enumerate(texts)])
    for of_query, options, diverse in (
        ({"mmr_threshold": 0.3}, {}, True),
        ({}, {"mmr_threshold": 0.3}, True),
        ({"mmr_threshold": 1.0}, {"mmr_threshold": 0.3}, True),
        ({"mmr_threshold": 1.0}, {}, False),
        ({"mmr_threshold": 0.0}, {"mmr_prefetch_k": 2}, False),
    ):
        query = ask("oil lamp light", 2, VectorStoreQueryMode.MMR, **of_query)
        assert (set(store.query(query, **options).ids) != {"0", "1"}) is diverse


MODES = [
    VectorStoreQueryMode.DEFAULT,
    VectorStoreQueryMode.TEXT_SEARCH,
    VectorStoreQueryMode.HYBRID,
    VectorStoreQueryMode.MMR,
]


@pytest.mark.parametrize("mode", MODES)
def test_filters_apply_in_every_mode(store, mode):
    text = "lamp wick boat whale"

    def found(**fields):
        return sorted(store.query(ask(text, mode=mode, **fields)).ids)

    assert found() == ["boat", "lamp", "whale", "wick"]
    assert found(filters=meeting(("year", FilterOperator.LT, 1900))) == ["boat", "lamp"]
    assert found(node_ids=["lamp", "whale", "none"]) == ["lamp", "whale"]
    assert len(found(node_ids=[], doc_ids=[])) == 4, "as an index asks that knows of no limit"
    assert found(doc_ids=["b"]) == ["boat"]
    assert found(doc_ids=["a"], node_ids=["wick", "boat"]) == ["wick"]


def test_no_operator_is_left_out():
    for operator in FilterOperator:
        filters = meeting(("x", operator, "y"))
        RagaccelVectorStore().query(ask("x", filters=filters))


def test_filters_are_joined_and_nested(store):
    light = ("tags", FilterOperator.CONTAINS, "light")
    late = ("year", FilterOperator.GT, 1900)
    boat = ("name", FilterOperator.EQ, "Petrel")

    def ids(filters):
        return [node.node_id for node in store.get_nodes(filters=filters)]

    assert ids(meeting(light, late)) == ["wick"]
    assert ids(meeting(late, boat, condition=FilterCondition.OR)) == ["wick", "boat"]
    assert ids(meeting(late, boat, condition=FilterCondition.NOT)) == ["lamp", "whale"]
    not_late = meeting(late, condition=FilterCondition.NOT)
    assert ids(meeting(light, not_late)) == ["lamp"]
    either = meeting(boat, meeting(light, late), condition=FilterCondition.OR)
    assert ids(either) == ["wick", "boat"]
    for condition in FilterCondition:
        assert len(ids(meeting(condition=condition))) == 4


def test_wrong_arguments_are_refused(store, tmp_path):
    for query, told in (
        (ask("x", mode=VectorStoreQueryMode.SVM), "does not support the query mode 'svm'"),
        (ask("x", mode="sum"), "'sum' is not a query mode: use default"),
        (VectorStoreQuery(query_str="x", similarity_top_k=1), "query_embedding"),
        (VectorStoreQuery(embed("x"), mode=VectorStoreQueryMode.HYBRID), "query_str"),
        (ask("x", 0), "k is 0"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            store.query(query)
    for wrong in (
        lambda: store.query(ask("x"), mmr_threshold=1),
        lambda: store.query(ask("x", mode="mmr"), mmr=1),
        lambda: store.add(nodes(), batch=1),
        lambda: store.delete("a", x=1),
        lambda: store.delete_nodes(["a"], x=1),
    ):
        with pytest.raises(TypeError, match=r"^unexpected keyword"):
            wrong()
    assert store.query(ask("The lamp burns oil.", 1, mode="default")).ids == ["lamp"]
    with pytest.raises(ConfigurationError, match="has its own path and fingerprint"):
        RagaccelVectorStore(tmp_path / "x.db", collection=store.client)


# Persisting


def test_to_dict_and_from_dict_round_trip(tmp_path):
    store = RagaccelVectorStore(tmp_path / "nodes.db", fingerprint="model")
    store.add(nodes())
    told = store.to_dict()
    assert told["class_name"] == "RagaccelVectorStore"
    for again in (
        RagaccelVectorStore.from_dict(told),
        RagaccelVectorStore.from_json(store.to_json()),
        pickle.loads(pickle.dumps(store)),
    ):
        assert again.query(ask("The wick is cotton.", 1)).ids == ["wick"]
        assert again.fingerprint == "model"
    with pytest.raises(IndexUnusableError):
        RagaccelVectorStore(tmp_path / "nodes.db", fingerprint="other")


def test_a_store_in_memory_is_not_pickled_or_serialized(store, tmp_path):
    with Collection() as collection:
        for temporary in (store, RagaccelVectorStore(collection=collection)):
            for keep in (pickle.dumps, RagaccelVectorStore.to_dict, RagaccelVectorStore.to_json):
                with pytest.raises(ConfigurationError, match="store in memory cannot be pickled"):
                    keep(temporary)
    kept = pickle.dumps(RagaccelVectorStore(tmp_path / "nodes.db", fingerprint="one"))
    (tmp_path / "nodes.db").unlink()
    RagaccelVectorStore(tmp_path / "nodes.db", fingerprint="two").add(nodes())
    with pytest.raises(IndexUnusableError):
        pickle.loads(kept)


def test_a_deep_copy_shares_the_nodes(store, tmp_path):
    for one in (store, RagaccelVectorStore(tmp_path / "nodes.db")):
        duplicate = copy.deepcopy(one)
        assert (duplicate.client, duplicate.path) == (one.client, one.path)


def test_persist_writes_a_copy(store, tmp_path):
    path = str(tmp_path / "new" / "copy.db")
    RagaccelVectorStore(tmp_path / "own.db").persist(str(tmp_path / "vector_store.json"))
    assert (tmp_path / "vector_store.json").exists()
    store.persist(path)
    store.clear()
    kept = RagaccelVectorStore.from_persist_path(path)
    assert kept.query(ask("The wick is cotton.", 1)).ids == ["wick"]
    with pytest.raises(ConfigurationError, match="there is no file at"):
        RagaccelVectorStore.from_persist_path(str(tmp_path / "none.db"))
    with pytest.raises(ConfigurationError, match="local file system"):
        store.persist(path, fs=fsspec.filesystem("memory"))
    store.persist(path, fs=fsspec.filesystem("file"))
    assert kept.get_nodes() == []


def test_a_storage_context_persists_a_store_in_memory(store, tmp_path):
    StorageContext.from_defaults(vector_store=store).persist(tmp_path / "storage")
    again = RagaccelVectorStore.from_persist_dir(str(tmp_path / "storage"))
    assert len(again.get_nodes()) == 4
    own = RagaccelVectorStore(tmp_path / "own.db")
    own.add(nodes())
    StorageContext.from_defaults(vector_store=own).persist(tmp_path / "other")
    assert not list((tmp_path / "other").glob("default__vector_store*"))
    loaded = StorageContext.from_defaults(vector_store=own, persist_dir=tmp_path / "other")
    assert len(loaded.vector_store.get_nodes()) == 4


# Use by the framework


@pytest.fixture
def embed_model():
    return RagaccelEmbedding(embedder=EMBEDDER)


DOCUMENTS = [
    Document(id_="d1", text="The lamp burns oil.", metadata={"kind": "light"}),
    Document(id_="d2", text="The boat is called Petrel."),
]


async def test_an_index_uses_the_store(embed_model):
    store = RagaccelVectorStore()
    storage = StorageContext.from_defaults(vector_store=store)
    VectorStoreIndex.from_documents(DOCUMENTS, storage, embed_model=embed_model)
    index = VectorStoreIndex.from_vector_store(store, embed_model)
    index.insert(Document(id_="d3", text="A whale sings at night."))
    (found,) = index.as_retriever(similarity_top_k=1).retrieve("the boat Petrel")
    assert (found.text, found.node.ref_doc_id) == ("The boat is called Petrel.", "d2")
    (awaited,) = await index.as_retriever(similarity_top_k=1).aretrieve("the boat Petrel")
    assert awaited == found
    for mode in ("hybrid", "text_search", "mmr"):
        retriever = index.as_retriever(vector_store_query_mode=mode, similarity_top_k=1)
        assert retriever.retrieve("Petrel")[0].node_id == found.node_id
    index.update_ref_doc(Document(id_="d2", text="The boat is called Gannet."))
    texts = sorted(node.text for node in store.get_nodes())
    assert texts == ["A whale sings at night.", "The boat is called Gannet.", "The lamp burns oil."]
    index.delete_ref_doc("d3")
    index.delete_nodes([node.node_id for node in store.get_nodes() if node.ref_doc_id == "d1"])
    assert [node.ref_doc_id for node in store.get_nodes()] == ["d2"]


def test_a_pipeline_brings_in_the_difference(embed_model):
    store = RagaccelVectorStore()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), embed_model],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        disable_cache=True,
    )
    assert len(pipeline.run(documents=DOCUMENTS)) == 2
    assert len(pipeline.run(documents=DOCUMENTS)) == 0
    changed = Document(id_="d2", text="The boat is called Gannet.")
    assert len(pipeline.run(documents=[DOCUMENTS[0], changed])) == 1
    assert sorted(node.text for node in store.get_nodes()) == [
        "The boat is called Gannet.",
        "The lamp burns oil.",
    ]
    pipeline.run(documents=[changed])
    assert [node.ref_doc_id for node in store.get_nodes()] == ["d2"]


# Threads and the event loop


@pytest.mark.parametrize(
    "work",
    [
        lambda store: store.async_add(nodes()),
        lambda store: store.adelete("a"),
        lambda store: store.adelete_nodes(["lamp"]),
        lambda store: store.aget_nodes(["lamp"]),
        lambda store: store.aget_nodes(),
        lambda store: store.aquery(ask("lamp")),
        lambda store: store.aquery(ask("lamp", mode=VectorStoreQueryMode.MMR), mmr_threshold=1),
        lambda store: store.aclear(),
    ],
)
async def test_file_access_never_blocks_the_event_loop(store, work, monkeypatch):
    names = ("put", "drop", "clear", "get", "search", "search_mmr", "__iter__")
    seen = record_threads(monkeypatch, Collection, names)
    await work(store)
    assert seen
    assert threading.get_ident() not in seen


def test_an_index_of_folders_is_read_as_nodes(tmp_path):
    (tmp_path / "lamp.md").write_text("# Lamp\n\nThe lamp burns oil.\n")
    with Store(tmp_path / "index.db") as kept:
        index_folder(kept, EMBEDDER, tmp_path)
    store = RagaccelVectorStore(tmp_path / "index.db")
    (node,) = store.query(VectorStoreQuery(embed("lamp"), similarity_top_k=1)).nodes
    retriever = RagaccelRetriever(
        tmp_path / "index.db", embed_model=RagaccelEmbedding(embedder=EMBEDDER)
    )
    assert node == store.get_nodes()[0] == retriever.retrieve("lamp")[0].node
    assert node.ref_doc_id == "lamp.md"


def test_metadata_that_another_framework_put_in_is_a_nodes(tmp_path):
    with Collection(tmp_path / "notes.db") as notes:
        notes.put([Passage("a", "The lamp burns oil.")], [embed("lamp")], [{"year": 1874}])
    (node,) = RagaccelVectorStore(tmp_path / "notes.db").get_nodes()
    assert (node.node_id, node.text, node.metadata["year"]) == ("a", "The lamp burns oil.", 1874)
