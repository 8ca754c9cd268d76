"""Fixtures of the retrieval tests: a folder of documents, an embedder that records its texts."""

import pytest
from hash_embedder import HashEmbedder

from ragaccel.retrieval import Store


class CountingEmbedder(HashEmbedder):
    """A HashEmbedder that records every text it embeds."""

    def __init__(self):
        self.texts = []

    def embed_documents(self, texts):
        self.texts += texts
        return super().embed_documents(texts)


@pytest.fixture
def embedder():
    return CountingEmbedder()


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "docs"
    (root / "sub folder 🙂").mkdir(parents=True)
    (root / "lamp.md").write_text(
        "# Lamp\n\nThe lamp burns oil.\n\n## Wick\n\nThe wick is cotton.\n"
    )
    (root / "sub folder 🙂/boat.txt").write_text("The boat is called Petrel.\n")
    (root / "table.csv").write_text("name,year\nGannet,1874\nWether,1911\n")
    return root


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "index.db") as store:
        yield store
