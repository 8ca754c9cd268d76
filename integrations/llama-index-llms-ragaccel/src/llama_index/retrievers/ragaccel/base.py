"""A LlamaIndex retriever over an index of local documents."""

from __future__ import annotations

import inspect
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
from ragaccel.frameworks import in_thread, index_documents, open_search

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ragaccel import Passage

_EXCLUDED_METADATA = ("citation", "file_path", "page_label", "line")
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
        self._search = open_search(index, (embed_model or RagaccelEmbedding()).load, mode)
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
        embed_model = embed_model or RagaccelEmbedding()
        path = index_documents(folder, index, embed_model.load(), index_kwargs)
        return cls(path, embed_model=embed_model, **kwargs)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._search(query_bundle.query_str, self.similarity_top_k)
        return [NodeWithScore(node=as_node(passage), score=passage.score) for passage in found]

    _aretrieve = in_thread(_retrieve)


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
