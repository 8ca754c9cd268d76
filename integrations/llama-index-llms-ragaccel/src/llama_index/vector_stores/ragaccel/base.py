"""A LlamaIndex vector store in one SQLite file, and its metadata filters."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import ConfigDict, PrivateAttr
from llama_index.core.schema import BaseComponent, BaseNode
from llama_index.core.vector_stores.simple import DEFAULT_VECTOR_STORE, NAMESPACE_SEP
from llama_index.core.vector_stores.types import (
    DEFAULT_PERSIST_DIR,
    DEFAULT_PERSIST_FNAME,
    BasePydanticVectorStore,
    FilterCondition,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from llama_index.llms.ragaccel.citations import as_passage
from llama_index.retrievers.ragaccel.base import as_node as passage_as_node
from ragaccel import ConfigurationError
from ragaccel.errors import check_arguments
from ragaccel.frameworks import (
    combine,
    in_thread,
    metadata_condition,
    open_collection,
    reject_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ragaccel import Collection
    from ragaccel.frameworks import Condition
    from ragaccel.retrieval import StoredPassage


Where = Callable[["StoredPassage"], bool]


def as_condition(filters: MetadataFilters) -> Condition:
    """Convert possibly nested filters to a condition on a node's metadata.

    Missing metadata meets only ``NE``, ``NIN`` and ``IS_EMPTY``. Values that cannot be compared,
    such as a text with a number, meet no operator. ``NOT`` is true if all of its filters are false.

    Raises:
        ConfigurationError: An operator or condition is unknown.
    """
    parts = [
        as_condition(part)
        if isinstance(part, MetadataFilters)
        else metadata_condition(part.key, part.operator.name.lower(), part.value)
        for part in filters.filters
    ]
    return combine((filters.condition or FilterCondition.AND).value if parts else "and", parts)


_TEXT_MODES = (VectorStoreQueryMode.TEXT_SEARCH, VectorStoreQueryMode.SPARSE)
_MODES = "use default, text_search, sparse, hybrid or mmr"
_MIN_MMR_PREFETCH = 20
_NODE_CONTENT = "_node_content"


def search(collection: Collection, query: VectorStoreQuery, **kwargs: Any) -> list[StoredPassage]:
    """Return the stored passages that match a query, best first.

    Raises:
        ConfigurationError: The mode is unknown, or its vector or text is missing.
    """
    mode, k = _mode(query), query.similarity_top_k
    where = as_where(query.filters, query.node_ids, query.doc_ids)
    threshold, prefetch_k = query.mmr_threshold, None
    if mode == VectorStoreQueryMode.MMR:
        given = kwargs.pop("mmr_threshold", None)
        threshold = threshold if given is None else given
        prefetch_k = kwargs.pop("mmr_prefetch_k", None)
    reject_arguments(kwargs)
    if mode in _TEXT_MODES:
        text = _required(query, "query_str")
        return collection.search_text(text, query.sparse_top_k or k, where=where)
    if mode == VectorStoreQueryMode.HYBRID:
        return collection.search_fused(
            _required(query, "query_str"),
            _required(query, "query_embedding"),
            query.hybrid_top_k or k,
            alpha=0.5 if query.alpha is None else query.alpha,
            where=where,
        )
    if mode == VectorStoreQueryMode.DEFAULT:
        return collection.search(_required(query, "query_embedding"), k, where=where)
    if mode == VectorStoreQueryMode.MMR:
        return collection.search_mmr(
            _required(query, "query_embedding"),
            k,
            num_candidates=prefetch_k or max(_MIN_MMR_PREFETCH, 4 * k),
            relevance_weight=0.5 if threshold is None else threshold,
            where=where,
        )
    raise ConfigurationError(f"this store does not support the query mode {mode.value!r}: {_MODES}")


def as_where(
    filters: MetadataFilters | None,
    node_ids: Sequence[str] | None = None,
    doc_ids: Sequence[str] | None = None,
) -> Where | None:
    """Combine filters and ids into one condition, or return None if there are none.

    An empty list of ids does not limit the search: an index over a store that
    holds the texts queries with an empty list.
    """
    conditions: list[Callable[[StoredPassage], bool]] = []
    if node_ids:
        nodes = frozenset(node_ids)
        conditions.append(lambda item: item.passage.passage_id in nodes)
    if doc_ids:
        documents = frozenset(doc_ids)
        conditions.append(lambda item: document_of(item) in documents)
    if filters is not None:
        holds = as_condition(filters)
        conditions.append(lambda item: holds(item.metadata))
    if not conditions:
        return None
    return lambda item: all(condition(item) for condition in conditions)


def as_node(item: StoredPassage) -> BaseNode:
    """Restore a stored node, without its embedding.

    Passages that were not stored as nodes, such as those of ``ragaccel index``, become new nodes.
    """
    if _NODE_CONTENT not in item.metadata:
        node = passage_as_node(item.passage)
        node.metadata |= item.metadata
        return node
    return metadata_dict_to_node(item.metadata, text=item.passage.text)


def document_of(item: StoredPassage) -> str:
    """Return the id of a node's document, or the text ``None`` if it has none."""
    return str(item.metadata.get("ref_doc_id"))


def require_local(fs: Any) -> None:
    """Raise ConfigurationError unless ``fs`` is local or None: SQLite needs a local file system."""
    if fs is not None and "file" not in fs.protocol:
        raise ConfigurationError("a store needs a local file system: leave fs out")


def _mode(query: VectorStoreQuery) -> VectorStoreQueryMode:
    try:
        return VectorStoreQueryMode(query.mode)
    except ValueError:
        raise ConfigurationError(f"{query.mode!r} is not a query mode: {_MODES}") from None


def _required(query: VectorStoreQuery, name: str) -> Any:
    """Return a query's vector or text."""
    value = getattr(query, name)
    if value is None:
        raise ConfigurationError(
            f"a {_mode(query).value} query needs a {name}: set it in VectorStoreQuery"
        )
    return value


_STORAGE_CONTEXT_SUFFIX = f"{NAMESPACE_SEP}{DEFAULT_PERSIST_FNAME}"


_REPLACEMENTS = {
    "collection_name": "use path=: one file holds one collection",
    "persist_dir": "use path= for the file, or from_persist_dir(folder)",
    "persist_path": "use path=: the store is one local file",
    "uri": "use path=: the store is one local file",
}


class RagaccelVectorStore(BasePydanticVectorStore):
    """A vector store in one SQLite file or in memory, searched in memory by FAISS.

    It keeps nodes with their texts and vectors. Adding a node with a known id replaces it. Changes
    are on disk when a call returns. Threads may share one store, and processes one file.

    Query modes are by vector (``DEFAULT``), by words (``TEXT_SEARCH``, ``SPARSE``: BM25), by both
    (``HYBRID``), and by vector for diverse nodes (``MMR``). All modes support filters with every
    operator; filtering happens before the top k are chosen.

    >>> store = RagaccelVectorStore("nodes.db")
    >>> VectorStoreIndex.from_vector_store(store, RagaccelEmbedding())

    Args:
        path: The file, created if missing. None keeps the nodes in memory.
        fingerprint: Identifies the embedding model; a file with vectors of another model is
            refused. Pass ``RagaccelEmbedding().fingerprint``.
        collection: An open ``ragaccel.Collection``, instead of both.

    Raises:
        ConfigurationError: ``collection`` and ``path`` or ``fingerprint`` are both given.
        IndexUnusableError: The file has vectors of another embedding model.
    """

    model_config = ConfigDict(extra="forbid")  # unknown names must not be ignored

    stores_text: bool = True
    is_embedding_query: bool = True
    path: str | None = None
    fingerprint: str = ""

    _collection: Collection = PrivateAttr()

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        fingerprint: str = "",
        collection: Collection | None = None,
        **fields: Any,
    ) -> None:
        known = {*type(self).model_fields, "collection", "class_name"}
        check_arguments(type(self).__name__, fields, known, _REPLACEMENTS)
        collection = open_collection(collection, path, fingerprint)
        fields |= {
            "path": None if collection.is_temporary else os.fspath(collection.path),
            "fingerprint": collection.fingerprint,
        }
        super().__init__(**fields)
        self._collection = collection

    @classmethod
    def class_name(cls) -> str:
        """Return the class name for serialization."""
        return "RagaccelVectorStore"

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RagaccelVectorStore:
        """Return a copy of the object that shares the stored nodes."""
        return self.model_copy()

    def __getstate__(self) -> dict[str, Any]:
        """Return the path to reopen; raise ConfigurationError for a store in memory."""
        self._require_path()
        state = super(BaseComponent, self).__getstate__()
        return {**state, "__pydantic_private__": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reopen the file; raise an error if that fails, unlike the base class."""
        self.__init__(**state["__dict__"])  # type: ignore[misc]

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return path and fingerprint; raise ConfigurationError for a store in memory."""
        self._require_path()
        return super().to_dict(**kwargs)

    def _require_path(self) -> None:
        if self.path is None:
            raise ConfigurationError(
                "a store in memory cannot be pickled or serialized: create it with a path, or"
                " persist() it and open that file"
            )

    @property
    def client(self) -> Collection:
        """Return the ``ragaccel.Collection`` that contains the nodes."""
        return self._collection

    # Changing

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add embedded nodes, or replace those with the same ids; return the ids.

        Either all nodes are stored or none.
        """
        reject_arguments(kwargs)
        passages = [as_passage(node) for node in nodes]
        vectors = [node.get_embedding() for node in nodes]
        kept = [node_to_metadata_dict(node, remove_text=True) for node in nodes]
        self._collection.put(passages, vectors, kept)
        return [passage.passage_id for passage in passages]

    async_add = in_thread(add)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document."""
        reject_arguments(delete_kwargs)
        items = [
            item
            for item in self._collection.document(ref_doc_id)
            if document_of(item) == ref_doc_id
        ]
        self._collection.drop(item.passage.passage_id for item in items)

    adelete = in_thread(delete)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes by ids, by filters, or by both: then a node must match both.

        Raises:
            ConfigurationError: Neither ids nor filters are given.
        """
        reject_arguments(delete_kwargs)
        if node_ids is None and filters is None:
            raise ConfigurationError(
                "neither node_ids nor filters are given: pass one of them, or call clear() to "
                "delete all nodes"
            )
        found = self._select(node_ids, filters)
        self._collection.drop(item.passage.passage_id for item in found)

    adelete_nodes = in_thread(delete_nodes)

    def clear(self) -> None:
        """Delete all nodes; the store then accepts another embedding model."""
        self._collection.clear()

    aclear = in_thread(clear)

    # Reading

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return nodes by ids, in that order, by filters or by both; without either, all nodes."""
        return [as_node(item) for item in self._select(node_ids, filters)]

    aget_nodes = in_thread(get_nodes)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Return the best nodes with their scores (by vector: cosine; by words: BM25).

        Args:
            query: A node must match ``filters``, ``node_ids`` and ``doc_ids``. ``HYBRID`` weighs
                by ``alpha`` (0: words, 1: vectors) and returns ``hybrid_top_k`` nodes if set.
            **kwargs: For ``MMR``: ``mmr_threshold``, from 0 (only diversity) to 1 (only
                similarity), instead of the query's, and ``mmr_prefetch_k``, the number of nearest
                nodes to choose from.

        Raises:
            ConfigurationError: The mode is unknown, or its vector or text is missing.
        """
        found = search(self._collection, query, **kwargs)
        return VectorStoreQueryResult(
            nodes=[as_node(item) for item in found],
            similarities=[item.passage.score for item in found],
            ids=[item.passage.passage_id for item in found],
        )

    aquery = in_thread(query)

    # Persisting

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Write a copy to another file, which can be opened by its path.

        When a storage context persists its parts, a store with its own file writes no copy.

        Raises:
            ConfigurationError: The file system is not local.
        """
        require_local(fs)
        if self.path is None or not persist_path.endswith(_STORAGE_CONTEXT_SUFFIX):
            self._collection.copy_to(persist_path)

    @classmethod
    def from_persist_path(cls, persist_path: str, fs: Any = None) -> RagaccelVectorStore:
        """Open a file written by :meth:`persist`.

        Raises:
            ConfigurationError: The file does not exist.
        """
        require_local(fs)
        if not os.path.isfile(persist_path):
            raise ConfigurationError(
                f"there is no file at {persist_path}: call persist() with this path first"
            )
        return cls(persist_path)

    @classmethod
    def from_persist_dir(
        cls,
        persist_dir: str = DEFAULT_PERSIST_DIR,
        namespace: str = DEFAULT_VECTOR_STORE,
        fs: Any = None,
    ) -> RagaccelVectorStore:
        """Open the copy that a storage context wrote of a store in memory."""
        name = f"{namespace}{NAMESPACE_SEP}{DEFAULT_PERSIST_FNAME}"
        return cls.from_persist_path(os.path.join(persist_dir, name), fs)

    def _select(
        self, node_ids: list[str] | None, filters: MetadataFilters | None
    ) -> Iterator[StoredPassage]:
        items = self._collection if node_ids is None else self._collection.get(node_ids)
        where = as_where(filters)
        return (item for item in items if where is None or where(item))
