import copy
import pickle
import threading

import pytest
from hash_embedder import HashEmbedder
from langchain_core.callbacks import BaseCallbackHandler
from pydantic import ValidationError
from ragaccel import (
    ConfigurationError,
    EmptyIndexError,
    Passage,
    open_retriever,
)
from ragaccel.frameworks import default_registry

from langchain_ragaccel import RagaccelEmbeddings, RagaccelRetriever

BOAT = "The boat of the station is called Petrel.\n"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "lamp.md").write_text(
        "# Lamp\n\nThe lamp burns oil.\n\n## Wick\n\nThe wick is cotton.\n"
    )
    (folder / "boat.txt").write_text(BOAT)
    return folder


@pytest.fixture
def embeddings():
    return RagaccelEmbeddings(embedder=HashEmbedder())


@pytest.fixture
def retriever(folder, embeddings):
    return RagaccelRetriever.from_folder(folder, embeddings=embeddings, k=2)


def test_a_document_has_source_metadata(retriever, embeddings, folder):
    wick = retriever.invoke("The wick is cotton.")[0]
    expected = open_retriever(retriever.index, HashEmbedder()).search("The wick is cotton.", 1)[0]
    assert (wick.id, wick.page_content) == (expected.passage_id, "The wick is cotton.")
    assert wick.metadata == {
        "score": expected.score,
        "citation": "lamp.md:7",
        "source": "lamp.md",
        "start_index": expected.start,
        "title": expected.title,
        "line": 7,
    }
    text = (folder / "lamp.md").read_text()
    assert text[wick.metadata["start_index"] :].startswith(wick.page_content)


async def test_k_is_a_field_and_an_argument(retriever):
    assert len(retriever.invoke("lamp")) == 2
    assert len(await retriever.ainvoke("lamp", k=1)) == 1
    assert len(retriever.invoke("lamp", k=1)) == 1
    with pytest.raises(ConfigurationError, match="k is 0"):
        retriever.invoke("lamp", k=0)


def test_copies_and_pickles_search_the_same_index(retriever):
    for again in (copy.deepcopy(retriever), pickle.loads(pickle.dumps(retriever))):
        assert again.invoke("lamp") == retriever.invoke("lamp")
        assert (again.k, again.mode) == (retriever.k, retriever.mode)
    assert copy.deepcopy(retriever)._search is retriever._search
    with_mode = retriever.model_copy(update={"k": 1})
    assert len(pickle.loads(pickle.dumps(with_mode)).invoke("lamp")) == 1


async def test_awaiting_leaves_the_loop_free():
    here = threading.get_ident()

    class Source:
        def search(self, query, k):
            return [Passage(str(threading.get_ident() == here), query)]

    (found,) = await RagaccelRetriever(index=Source()).ainvoke("x")
    assert found.id == "False"


def test_missing_position_fields_are_left_out():
    class Source:
        def search(self, query, k):
            return [Passage("p", "text", page=3, score=0.5)] * k

    assert RagaccelRetriever(index=Source(), k=2).invoke("x")[0].metadata == {
        "score": 0.5,
        "citation": "p:3",
        "start_index": 0,
        "page": 3,
    }


def test_wrong_arguments_are_refused_at_once(folder, embeddings, tmp_path):
    with pytest.raises(EmptyIndexError, match="ragaccel index"):
        RagaccelRetriever(index=tmp_path / "none.db", embeddings=embeddings)
    with pytest.raises((ConfigurationError, ValidationError), match="search"):
        RagaccelRetriever(index=3)
    for wrong in ({"k": 0}, {"mode": "magic"}, {"indx": 1}):
        with pytest.raises((TypeError, ValidationError)):
            RagaccelRetriever(index=folder, embeddings=embeddings, **wrong)


def test_traces_name_the_retriever(retriever):
    class Tracer(BaseCallbackHandler):
        def on_retriever_start(self, serialized, query, *, metadata=None, **kwargs):
            seen.update(metadata)

    seen = {}
    retriever.invoke("lamp", {"callbacks": [Tracer()]})
    assert seen["ls_retriever_name"] == "ragaccel"
    assert seen["ls_vector_store_provider"] == "ragaccel"
    assert seen["ls_embedding_model"] == "HashEmbedder"


def test_found_passages_are_registered_with_their_position(retriever):
    default_registry().clear()
    retriever.invoke("the boat Petrel", k=1)
    (match,) = default_registry().match(f"Context: {BOAT}")
    assert (match.passage.path, match.passage.line) == ("boat.txt", 1)
    default_registry().clear()


def test_unpickling_reopens_the_absolute_path(folder, embeddings, retriever, monkeypatch):
    monkeypatch.chdir(folder.parent)
    relative = RagaccelRetriever(index=folder.name, embeddings=embeddings, mode="text")
    kept = pickle.dumps(relative)
    monkeypatch.chdir(folder)
    again = pickle.loads(kept)
    assert again._search is not relative._search
    assert again.invoke("lamp") == relative.invoke("lamp") != []
