"""A LlamaIndex retriever over an index of local documents."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import (
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

import llama_index.llms.ragaccel  # noqa: F401  (registers the collector)
from llama_index.embeddings.ragaccel import RagaccelEmbedding
from ragaccel import ConfigurationError
from ragaccel.errors import check_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ragaccel import Passage

_EXCLUDED_METADATA = ("citation", "file_path", "page_label", "line")
_MODES = ("fused", "dense", "text")
_OWN_ARGUMENTS = ("index", "similarity_top_k", "mode", "embed_model")
_BASE_ARGUMENTS = frozenset(inspect.signature(BaseRetriever.__init__).parameters) - {
    "self",
    "kwargs",
}
_REPLACEMENTS = {
    "vector_store_query_mode": 'use mode="dense", "text" or "fused"',
    "top_k": "use similarity_top_k=",
}


class RagaccelRetriever(BaseRetriever):
    """A retriever of passages from an index made by ``ragaccel index`` or :meth:`from_folder`.

    A node's metadata has ``citation`` (``guide.pdf:3``), ``file_path`` and, if known, ``title``,
    ``page_label`` and ``line``; only the title is shown to models. Start and end are characters of
    the file's text. Changes to the index are visible to the next search.

    >>> RagaccelRetriever("documents/", similarity_top_k=3).retrieve("Who keeps the lamp?")

    Args:
        index: An index file or the folder that contains it, or any object with
            ``search(query, k)``, such as a ``ragaccel.retrieval.CompressingRetriever``.
        similarity_top_k: Number of passages.
        mode: ``"dense"`` searches by vector (score: cosine), ``"text"`` by words (BM25),
            ``"fused"`` by both; None means ``"fused"``.
        embed_model: The embedding model of the index; only for an index file or folder.
        **kwargs: Arguments of ``BaseRetriever``, such as ``callback_manager`` or ``object_map``.

    Raises:
        EmptyIndexError: There is no index.
        IndexUnusableError: The index was made with another embedding model.
        ConfigurationError: ``index`` cannot be searched, or not in this mode.
    """

    def __init__(
        self,
        index: Any,
        similarity_top_k: int = 6,
        *,
        mode: str | None = None,
        embed_model: RagaccelEmbedding | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(
            type(self).__name__, kwargs, {*_OWN_ARGUMENTS, *_BASE_ARGUMENTS}, _REPLACEMENTS
        )
        if similarity_top_k < 1:
            raise ConfigurationError(f"similarity_top_k is {similarity_top_k}: pass 1 or more")
        self.similarity_top_k = similarity_top_k
        self._source = _open_index(index, embed_model)
        self._search_options = _search_options(self._source, mode)
        super().__init__(**kwargs)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        index: str | Path | None = None,
        embed_model: RagaccelEmbedding | None = None,
        index_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> RagaccelRetriever:
        """Index a folder and return a retriever over it; embed only new and changed files.

        Args:
            folder: The folder with the documents.
            index: The index file; by default inside the folder.
            embed_model: The embedding model for documents and questions.
            index_kwargs: Further arguments of ``ragaccel.index_folder``, such as
                ``{"include": ["*.txt"]}``.
            **kwargs: Further arguments of the constructor.
        """
        from ragaccel import Store, default_index_path, index_folder

        embed_model = embed_model or RagaccelEmbedding()
        path = default_index_path(folder) if index is None else Path(index)
        with Store(path) as store:
            index_folder(store, embed_model.load(), folder, **dict(index_kwargs or {}))
        return cls(path, embed_model=embed_model, **kwargs)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query = query_bundle.query_str
        found = self._source.search(query, self.similarity_top_k, **self._search_options)
        return [NodeWithScore(node=as_node(passage), score=passage.score) for passage in found]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def as_node(passage: Passage) -> TextNode:
    """Convert a passage to a node whose source document is the passage's path."""
    metadata = {
        "citation": passage.citation,
        "file_path": passage.path,
        "title": passage.title,
        "page_label": "" if passage.page is None else str(passage.page),
        "line": "" if passage.line is None else passage.line,
    }
    node = TextNode(
        id_=passage.passage_id,
        text=passage.text,
        metadata={name: value for name, value in metadata.items() if value != ""},
        start_char_idx=passage.start,
        end_char_idx=passage.end,
        excluded_llm_metadata_keys=list(_EXCLUDED_METADATA),
        excluded_embed_metadata_keys=list(_EXCLUDED_METADATA),
    )
    if passage.path:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=passage.path)
    return node


def _open_index(index: Any, embed_model: RagaccelEmbedding | None) -> Any:
    if not isinstance(index, str | Path):
        if callable(getattr(index, "search", None)):
            return index
        raise ConfigurationError(
            f"index cannot be {index!r}: pass an index file, its folder, or an object with "
            "search(query, k)"
        )
    from ragaccel import default_index_path, open_retriever

    place = default_index_path(index) if Path(index).is_dir() else index
    return open_retriever(place, (embed_model or RagaccelEmbedding()).load())


def _search_options(source: Any, mode: str | None) -> dict[str, str]:
    if mode is None:
        return {}
    if mode not in _MODES:
        raise ConfigurationError(f"mode {mode!r} is unknown: use one of {', '.join(_MODES)}")
    if "mode" not in inspect.signature(source.search).parameters:
        raise ConfigurationError(f"{type(source).__name__} has no modes: leave mode out")
    return {"mode": mode}
