"""Embedding models, indexes and collections, opened alike for all frameworks."""

from __future__ import annotations

import inspect
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ragaccel.passage import Passage
    from ragaccel.retrieval import Collection, Embedder

    Search = Callable[[str, int], list[Passage]]


@lru_cache(maxsize=8)
def get_shared_embedder(model: str | Path | None) -> Embedder:
    """Return the embedding model of a name or folder, loaded once for the process.

    Raises:
        ModelNotFoundError: the model does not exist.
    """
    from ragaccel.retrieval import load_embedder

    return load_embedder(model)


def open_search(
    index: Any, load_embedder: Callable[[], Embedder], mode: str | None = None
) -> Search:
    """Return a function of (question, number of passages) that searches an index.

    Args:
        index: an index file, the folder that contains it, or an object with ``search(query, k)``.
        load_embedder: loads the embedding model of an index file.
        mode: one of ``ragaccel.retrieval.MODES``; None for the default of the index.

    Raises:
        EmptyIndexError: there is no index.
        IndexUnusableError: the index was made with another embedding model.
        ConfigurationError: the index cannot be searched, or not in this mode.
    """
    from ragaccel.retrieval import MODES, open_retriever

    if mode is not None and mode not in MODES:
        raise ConfigurationError(f"mode {mode!r} is unknown: use one of {', '.join(MODES)}")
    source = index
    if isinstance(index, str | Path):
        source = open_retriever(Path(index).absolute(), load_embedder())
    elif not callable(getattr(index, "search", None)):
        raise ConfigurationError(
            f"index cannot be {index!r}: pass an index file, its folder, or an object with "
            "search(query, k)"
        )
    if mode is None:
        return source.search  # type: ignore[no-any-return]
    if "mode" not in inspect.signature(source.search).parameters:
        raise ConfigurationError(f"{type(source).__name__} has no modes: leave mode out")
    return partial(source.search, mode=mode)


def index_documents(
    folder: str | Path,
    index: str | Path | None,
    embedder: Embedder,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Index a folder, and return the index file; embed only new and changed files.

    Args:
        folder: the folder with the documents.
        index: the index file; by default inside the folder.
        embedder: the embedding model.
        options: further arguments of ``index_folder``.
    """
    from ragaccel.retrieval import Store, default_index_path, index_folder

    path = default_index_path(folder) if index is None else Path(index)
    with Store(path) as store:
        index_folder(store, embedder, folder, **dict(options or {}))
    return path


def open_collection(
    collection: Collection | None, path: str | Path | None, fingerprint: str
) -> Collection:
    """Return a given collection, or open the one of a path and a fingerprint.

    Raises:
        ConfigurationError: both are given.
        IndexUnusableError: the file has vectors of another embedding model.
    """
    from ragaccel.retrieval import Collection

    if collection is None:
        return Collection(path, fingerprint=fingerprint)
    if path is not None or fingerprint:
        raise ConfigurationError(
            "collection= has its own path and fingerprint: leave out path= and fingerprint="
        )
    return collection


def reject_arguments(arguments: Mapping[str, object]) -> None:
    """Raise TypeError for unknown keyword arguments, worded as Python does."""
    if arguments:
        raise TypeError(f"unexpected keyword argument {next(iter(arguments))!r}")
