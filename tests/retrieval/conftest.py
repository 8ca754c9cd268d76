"""Fixtures of the retrieval tests: a folder of documents, its index, a way to interrupt a run."""

import sqlite3
from contextlib import closing

import pytest
from hash_embedder import HashEmbedder

from ragaccel import default_index_path
from ragaccel.retrieval import Store, index_folder


@pytest.fixture
def embedder():
    return HashEmbedder()


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


@pytest.fixture
def indexed(store, embedder, folder):
    """The store with the folder's documents in it."""
    index_folder(store, embedder, folder)
    embedder.embedded.clear()
    return store


@pytest.fixture
def shipped(folder, embedder):
    """The place of an index that came with a folder, from somebody else."""
    place = default_index_path(folder)
    with Store(place) as store:
        index_folder(store, embedder, folder)
    return place


@pytest.fixture
def interrupted():
    """Run something that takes ``progress`` until the progress fulfils a condition."""

    def run(work, condition):
        def tell(progress):
            if condition(progress):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            work(progress=tell)

    return run


@pytest.fixture
def alter():
    """Change an index as somebody else's program might: any SQL, the schema's own text too."""

    def run(place, script):
        with closing(sqlite3.connect(place, isolation_level=None)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.executescript(script)

    return run
