"""Searching: LlamaIndex's queries asked of a collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.vector_stores.types import (
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from llama_index.retrievers.ragaccel.base import as_node as node_of
from llama_index.vector_stores.ragaccel.filtering import as_condition
from ragaccel import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llama_index.core.schema import BaseNode

    from ragaccel import Collection, Stored

    Where = Callable[[Stored], bool] | None

_TEXT_MODES = (VectorStoreQueryMode.TEXT_SEARCH, VectorStoreQueryMode.SPARSE)
_MODES = "ask for default, text_search, sparse, hybrid or mmr"
_LEAST_DIVERSE = 20
_NODE = "_node_content"


def search(collection: Collection, query: VectorStoreQuery, **kwargs: Any) -> list[Stored]:
    """Find what a query asks for, best first.

    Raises:
        ConfigurationError: A mode that is not known, or no vector or text for it.
    """
    mode, k = _mode(query), query.similarity_top_k
    where = as_where(query.filters, query.node_ids, query.doc_ids)
    if mode == VectorStoreQueryMode.MMR:
        return _diverse(collection, query, where, **kwargs)
    refuse_arguments(kwargs)
    if mode in _TEXT_MODES:
        return collection.search_words(_words(query), query.sparse_top_k or k, where=where)
    if mode == VectorStoreQueryMode.HYBRID:
        alpha = 0.5 if query.alpha is None else query.alpha
        k = query.hybrid_top_k or k
        return collection.search_fused(_words(query), _vector(query), k, alpha=alpha, where=where)
    if mode == VectorStoreQueryMode.DEFAULT:
        return collection.search(_vector(query), k, where=where)
    raise ConfigurationError(f"{mode.value!r} is a mode of other stores: {_MODES}")


def as_where(
    filters: MetadataFilters | None,
    node_ids: Sequence[str] | None = None,
    doc_ids: Sequence[str] | None = None,
) -> Where:
    """Turn all that narrows a query into one condition; None if nothing does.

    No ids are no limit: an index over a store that keeps the text asks with an empty list.
    """
    conditions: list[Callable[[Stored], bool]] = []
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


def as_node(item: Stored) -> BaseNode:
    """Turn what is stored back into the node that it was, without its embedding.

    What else such a file holds, an index of ``ragaccel index`` for one, is made one.
    """
    if _NODE not in item.metadata:
        node = node_of(item.passage)
        node.metadata |= item.metadata
        return node
    return metadata_dict_to_node(item.metadata, text=item.passage.text)


def document_of(item: Stored) -> str:
    """The id of the document that a node is of; the text ``None`` if it is of none."""
    return str(item.metadata.get("ref_doc_id"))


def refuse_arguments(more: Mapping[str, object]) -> None:
    """Refuse what a vector store may be given and this one does not know, as Python itself would.

    Raises:
        TypeError: With its name.
    """
    if more:
        raise TypeError(f"unexpected keyword argument {next(iter(more))!r}")


def require_local(fs: Any) -> None:
    """Refuse file systems that SQLite cannot write to.

    Raises:
        ConfigurationError: It is not this machine's.
    """
    if fs is not None and "file" not in fs.protocol:
        raise ConfigurationError("a store is kept on this machine's own file system only")


def _mode(query: VectorStoreQuery) -> VectorStoreQueryMode:
    try:
        return VectorStoreQueryMode(query.mode)
    except ValueError:
        raise ConfigurationError(f"{query.mode!r} is no mode of queries: {_MODES}") from None


def _diverse(
    collection: Collection, query: VectorStoreQuery, where: Where, **kwargs: Any
) -> list[Stored]:
    threshold = kwargs.pop("mmr_threshold", None)
    prefetch_k = kwargs.pop("mmr_prefetch_k", None)
    refuse_arguments(kwargs)
    k = query.similarity_top_k
    threshold = query.mmr_threshold if threshold is None else threshold
    return collection.search_diverse(
        _vector(query),
        k,
        among=prefetch_k or max(_LEAST_DIVERSE, 4 * k),
        balance=0.5 if threshold is None else threshold,
        where=where,
    )


def _vector(query: VectorStoreQuery) -> list[float]:
    if query.query_embedding is None:
        raise ConfigurationError(f"a {_mode(query).value} query needs a query_embedding")
    return query.query_embedding


def _words(query: VectorStoreQuery) -> str:
    if query.query_str is None:
        raise ConfigurationError(f"a {_mode(query).value} query needs a query_str")
    return query.query_str
