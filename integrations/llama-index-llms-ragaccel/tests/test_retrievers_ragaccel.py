import threading

import pytest
from hash_embedder import HashEmbedder
from llama_index.core.schema import MetadataMode
from ragaccel import (
    ConfigurationError,
    Passage,
    default_index_path,
    open_retriever,
)
from ragaccel.frameworks import default_registry

from llama_index.embeddings.ragaccel import RagaccelEmbedding
from llama_index.llms.ragaccel.citations import as_passage
from llama_index.retrievers.ragaccel import RagaccelRetriever

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
def embed_model():
    return RagaccelEmbedding(embedder=HashEmbedder())


@pytest.fixture
def retriever(folder, embed_model):
    return RagaccelRetriever.from_folder(folder, embed_model=embed_model, similarity_top_k=2)


def test_a_node_has_source_metadata(retriever, folder):
    found = retriever.retrieve("The wick is cotton.")
    expected = open_retriever(default_index_path(folder), HashEmbedder()).search(
        "The wick is cotton.", 2
    )
    assert [item.node_id for item in found] == [passage.passage_id for passage in expected]
    assert [item.score for item in found] == [passage.score for passage in expected]
    node = found[0].node
    assert node.metadata == {
        "citation": "lamp.md:7",
        "file_path": "lamp.md",
        "title": expected[0].title,
        "line": 7,
    }
    assert node.ref_doc_id == "lamp.md"
    text = (folder / "lamp.md").read_text()
    assert text[node.start_char_idx : node.end_char_idx] == node.text == "The wick is cotton."


def test_models_are_shown_the_title_and_the_text(retriever):
    node = retriever.retrieve("The wick is cotton.")[0].node
    assert node.get_content(MetadataMode.LLM).splitlines() == [
        f"title: {node.metadata['title']}",
        "",
        "The wick is cotton.",
    ]
    assert node.get_content(MetadataMode.EMBED) == node.get_content(MetadataMode.LLM)


def test_page_labels_follow_the_framework():
    class Source:
        def search(self, query, k):
            return [Passage("p", "text", page=3, score=0.5)] * k

    (found,) = RagaccelRetriever(Source(), 1).retrieve("x")
    assert found.node.metadata == {"citation": "p:3", "page_label": "3"}
    assert found.node.ref_doc_id is None
    assert as_passage(found) == Passage("p", "text", end=4, page=3, score=0.5)


async def test_awaiting_leaves_the_loop_free():
    here = threading.get_ident()

    class Source:
        def search(self, query, k):
            return [Passage(str(threading.get_ident() == here), query)]

    (found,) = await RagaccelRetriever(Source()).aretrieve("x")
    assert found.node_id == "False"


def test_wrong_arguments_are_refused_at_once(folder, embed_model):
    with pytest.raises(ConfigurationError, match="search"):
        RagaccelRetriever(3)
    with pytest.raises(ConfigurationError, match="magic"):
        RagaccelRetriever(folder, mode="magic", embed_model=embed_model)
    with pytest.raises(ConfigurationError, match="similarity_top_k"):
        RagaccelRetriever(folder, 0)


def test_found_passages_are_registered_with_their_position(retriever):
    retriever.retrieve("the boat Petrel")
    matches = default_registry().match(f"Context: {BOAT}")
    assert [match.passage.path for match in matches] == ["boat.txt"]
