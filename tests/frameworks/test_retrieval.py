import pytest
from hash_embedder import HashEmbedder

from ragaccel.errors import ConfigurationError, EmptyIndexError, IndexUnusableError
from ragaccel.frameworks import get_shared_embedder, index_documents, open_search
from ragaccel.retrieval import CompressingRetriever, default_index_path, open_retriever

BOAT = "The boat of the station is called Petrel."


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lamp.md").write_text("# Lamp\n\nThe lamp burns oil.\n\n## Wick\n\nIt is cotton.\n")
    (tmp_path / "boat.txt").write_text(BOAT)
    return tmp_path


def texts(found):
    return [passage.text for passage in found]


def test_an_index_is_named_by_its_file_or_its_folder_and_sees_changes(folder):
    path = index_documents(folder, None, HashEmbedder())
    assert path == default_index_path(folder)
    for index in (folder, str(folder), path):
        search = open_search(index, HashEmbedder)
        assert texts(search("the boat Petrel", 1)) == [BOAT]
        assert len(search("lamp", 9)) == 3
    (folder / "zebra.md").write_text("A zebra grazes.")
    embedder = HashEmbedder()
    index_documents(folder, None, embedder)
    assert len(embedder.embedded) == 1  # only what is new
    assert texts(search("a zebra grazes", 1)) == ["A zebra grazes."]


def test_an_index_may_be_elsewhere_take_options_and_be_searched_in_every_mode(folder):
    place = folder / "elsewhere.db"
    assert index_documents(folder, place, HashEmbedder(), {"include": ["*.txt"]}) == place
    assert texts(open_search(place, HashEmbedder)("lamp oil boat", 9)) == [BOAT]
    for mode in ("fused", "dense", "text"):
        expected = open_retriever(place, HashEmbedder()).search("the boat Petrel", 1, mode=mode)
        assert open_search(place, HashEmbedder, mode)("the boat Petrel", 1) == expected


def test_whatever_searches_is_an_index(folder):
    retriever = open_retriever(index_documents(folder, None, HashEmbedder()), HashEmbedder())
    search = open_search(CompressingRetriever(retriever, sentences=1), HashEmbedder)
    assert texts(search("Which boat is called Petrel?", 1)) == [BOAT]
    assert texts(open_search(retriever, HashEmbedder, "text")("Petrel", 1)) == [BOAT]


def test_what_cannot_be_searched_is_refused(folder):
    class Source:
        def search(self, query, k):
            return []

    with pytest.raises(ConfigurationError, match="index cannot be 3: pass an index file"):
        open_search(3, HashEmbedder)
    with pytest.raises(ConfigurationError, match="Source has no modes: leave mode out"):
        open_search(Source(), HashEmbedder, "text")
    with pytest.raises(ConfigurationError, match="mode 'magic' is unknown: use one of fused"):
        open_search(Source(), HashEmbedder, "magic")
    with pytest.raises(EmptyIndexError):
        open_search(folder / "none.db", HashEmbedder)
    path = index_documents(folder, None, HashEmbedder())
    assert get_shared_embedder(None) is get_shared_embedder(None)
    with pytest.raises(IndexUnusableError):
        open_search(path, lambda: HashEmbedder(fingerprint="other"))
