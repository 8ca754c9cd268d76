"""Index formats: an index of another version is refused with the command that rebuilds it."""

import sqlite3
from contextlib import closing

import pytest

from ragaccel.errors import IndexUnusableError
from ragaccel.retrieval import SCHEMA_VERSION, Collection, Retriever, index_folder


def of_version(path, version):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_an_index_of_another_format_is_made_anew(store, embedder, folder, version):
    index_folder(store, embedder, folder)
    store.close()
    of_version(store.path, version)
    for use in (
        lambda: Retriever(store, embedder).search("boat", 1),
        lambda: index_folder(store, embedder, folder),
        lambda: Collection(store.path),
    ):
        with pytest.raises(IndexUnusableError, match=r"format \d+, .* --rebuild`"):
            use()
    assert index_folder(store, embedder, folder, rebuild=True).passages == 4
    assert store.check() == []
