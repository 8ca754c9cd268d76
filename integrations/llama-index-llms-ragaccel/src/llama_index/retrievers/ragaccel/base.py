"""The retriever: an index of your documents, searched by meaning and by words."""

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

import llama_index.llms.ragaccel  # noqa: F401  (what is retrieved is registered from then on)
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
    "vector_store_query_mode": 'mode="dense", "text" or "fused"',
    "top_k": "similarity_top_k=",
}


class RagaccelRetriever(BaseRetriever):
    """Finds passages in an index that ``ragaccel index`` or :meth:`from_folder` made.

    A node's metadata holds ``citation`` (``guide.pdf:3``), ``file_path``, and ``title``,
    ``page_label`` and ``line`` where it has them, of which only the title is shown to models; its
    characters are those of the file's text. The index is followed: what is indexed again is found
    at once.

    >>> RagaccelRetriever("documents/", similarity_top_k=3).retrieve("Who keeps the lamp?")

    Args:
        index: An index file, or the folder it is in; or anything that has ``search(query, k)``,
            such as a ``ragaccel.retrieval.CompressingRetriever``.
        similarity_top_k: How many passages.
        mode: ``"dense"``: by meaning (score: cosine); ``"text"``: by words (BM25); ``"fused"``: by
            both, which is meant by None.
        embed_model: What the index was made with; for an index file only.
        **kwargs: Those of ``BaseRetriever``: ``callback_manager``, ``object_map`` and the like.

    Raises:
        EmptyIndexError: There is no index.
        IndexUnusableError: It was made with another embedding model.
        ConfigurationError: It is nothing that can be searched, or not in that mode.
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
            raise ConfigurationError(f"similarity_top_k is {similarity_top_k}: ask for 1 or more")
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
        """Bring the index of a folder up to date, then search it; only what is new is embedded.

        Args:
            folder: Where the documents are.
            index: The index file; without one it is kept in the folder.
            embed_model: What embeds the documents, and the questions later.
            index_kwargs: Further arguments of ``ragaccel.index_folder``, such as
                ``{"include": ["*.txt"]}``.
            **kwargs: Those of the constructor.
        """
        from ragaccel import Store, index_folder
        from ragaccel.retrieval import default_index_path

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
    """Turn a found passage into a node, of the document that its path names."""
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
            f"index is {index!r}: give an index file, its folder, or what has search(query, k)"
        )
    from ragaccel import open_retriever
    from ragaccel.retrieval import default_index_path

    place = default_index_path(index) if Path(index).is_dir() else index
    return open_retriever(place, (embed_model or RagaccelEmbedding()).load())


def _search_options(source: Any, mode: str | None) -> dict[str, str]:
    if mode is None:
        return {}
    if mode not in _MODES:
        raise ConfigurationError(f"mode {mode!r} is none of {', '.join(_MODES)}")
    if "mode" not in inspect.signature(source.search).parameters:
        raise ConfigurationError(f"{type(source).__name__} has no modes: leave mode out")
    return {"mode": mode}
