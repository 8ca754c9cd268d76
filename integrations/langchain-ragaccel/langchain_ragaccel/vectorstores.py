"""A LangChain vector store in one SQLite file, and its metadata filters."""

from __future__ import annotations

from collections.abc import Callable, Collection as AnyCollection, Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore
from ragaccel import ConfigurationError
from ragaccel.errors import check_arguments, require_unicode
from ragaccel.frameworks import (
    auto_references_enabled,
    combine,
    in_thread,
    metadata_condition,
    open_collection,
    reject_arguments,
)

from langchain_ragaccel.callbacks import (
    current_callbacks,
    exclude_from_collectors,
    register_search_results,
)
from langchain_ragaccel.convert import as_document, as_passage
from langchain_ragaccel.embeddings import RagaccelEmbeddings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from langchain_core.embeddings import Embeddings
    from ragaccel import Collection
    from ragaccel.frameworks import Condition, ReferenceRegistry
    from ragaccel.retrieval import StoredPassage
    from typing_extensions import Self

    Scored = list[tuple[Document, float]]


Filter = Mapping[str, Any] | Callable[[Document], bool]

_MODES = ("dense", "text", "fused")
_TESTS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$exists")


def as_condition(filter: Mapping[str, Any]) -> Condition:  # noqa: A002
    """Convert a filter to a condition on metadata.

    ``{"source": "log.pdf"}`` requires equal metadata, ``{"year": {"$gte": 1874}}`` compares
    (``$eq $ne $gt $gte $lt $lte $in $nin``, ``$exists``), and ``$and``, ``$or`` and ``$not``
    combine filters. Metadata that is missing or cannot be compared meets only ``$ne``, ``$nin``
    and ``{"$exists": False}``.

    Raises:
        ConfigurationError: The filter is not a dictionary of this form.
    """
    if not isinstance(filter, Mapping):
        raise ConfigurationError(f"a filter must be a dictionary or a function, not {filter!r}")
    return combine("and", [_condition(name, expected) for name, expected in filter.items()])


def _condition(name: str, expected: Any) -> Condition:
    if name in ("$and", "$or"):
        return combine(name[1:], [as_condition(part) for part in _require_list(name, expected)])
    if name == "$not":
        return combine("not", [as_condition(expected)])
    if name.startswith("$"):
        raise ConfigurationError(f"unknown filter operator {name}: use $and, $or or $not")
    if not (isinstance(expected, Mapping) and any(str(key).startswith("$") for key in expected)):
        return metadata_condition(name, "eq", expected)
    return combine("and", [_test(name, key, value) for key, value in expected.items()])


def _test(name: str, key: str, value: Any) -> Condition:
    if key not in _TESTS:
        raise ConfigurationError(f"{key} is not a comparison: use one of {', '.join(_TESTS)}")
    value = _require_list(key, value) if key in ("$in", "$nin") else value
    return metadata_condition(name, key[1:], value)


def _require_list(key: str, value: Any) -> list[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, AnyCollection):
        raise ConfigurationError(f"{key} needs a list, not {value!r}")
    return list(value)


def as_where(
    filter: Filter | None = None,  # noqa: A002
    **kwargs: object,
) -> Callable[[StoredPassage], bool] | None:
    """Convert a search's ``filter`` to a condition on stored passages; None without a filter.

    Raises:
        TypeError: The search has an unknown argument.
    """
    if kwargs:
        raise TypeError(f"this search takes no {', '.join(sorted(kwargs))}: use k and filter")
    if filter is None:
        return None
    if callable(filter):
        return lambda item: bool(filter(as_document(item.passage, item.metadata)))
    holds = as_condition(filter)
    return lambda item: holds(item.metadata)


def _id(given: object, document: Document) -> str:
    """Return the given id, else the document's, else a new one, as text; 0 is an id."""
    return next(
        (str(name) for name in (given, document.id) if name not in (None, "")), str(uuid4())
    )


def with_ids(documents: Iterable[Document], ids: Sequence[str | None] | None) -> list[Document]:
    """Return copies of documents with ids: the given one, else the document's, else a new one.

    Raises:
        ConfigurationError: The numbers of ids and documents differ, or a text has a lone surrogate.
    """
    documents = list(documents)
    for document in documents:
        require_unicode("a text", document.page_content)  # before it is embedded
    if ids is not None and len(ids) != len(documents):
        raise ConfigurationError(
            f"{len(ids)} ids for {len(documents)} documents: pass one id for each"
        )
    given = ids or [None] * len(documents)
    return [
        document.model_copy(update={"id": _id(name, document)})
        for name, document in zip(given, documents, strict=True)
    ]


def as_id_list(ids: Sequence[str]) -> list[str]:
    """Return ids as a list of texts; a single id becomes a list of one."""
    return [ids] if isinstance(ids, str) else [str(name) for name in ids]


_NAMES = ("embedding", "path", "collection", "fingerprint", "registry", "namespace")
_REPLACEMENTS = {
    "collection_name": "use path=: one file holds one collection",
    "connection": "use path=: the store is one local file",
    "embedding_function": "use embedding=, the first argument",
    "persist_directory": "use path=: the store is one local file",
}


class RagaccelVectorStore(VectorStore):
    """A vector store in one SQLite file, searched in memory by FAISS.

    Adding a document with a known id replaces it. Changes are on disk when a call returns. Threads
    may share one store, and processes one file. Metadata must be JSON-serializable. Search results
    are registered, so that ``ChatRagaccel`` and ``RagaccelLLM`` copy and cite those that occur in
    a prompt.

    >>> store = RagaccelVectorStore.from_texts(["The lamp burns oil."], RagaccelEmbeddings())
    >>> store.similarity_search("What does the lamp burn?")

    Args:
        embedding: The embedding model.
        path: The file, created if missing. None keeps the documents in memory.
        collection: An open ``ragaccel.Collection``, instead of ``path``.
        fingerprint: Identifies the embedding model; a file with vectors of another model is
            refused. :class:`RagaccelEmbeddings` provides it by default.
        registry: The registry for search results. By default that of :func:`collecting_into`,
            else the current run's, else the process's.
        namespace: The tenant whose results these are.

    Raises:
        ConfigurationError: ``collection`` and ``path`` or ``fingerprint`` are both given.
        IndexUnusableError: The file has vectors of another embedding model.
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        path: str | Path | None = None,
        collection: Collection | None = None,
        fingerprint: str = "",
        registry: ReferenceRegistry | None = None,
        namespace: str = "",
        **others: Any,
    ) -> None:
        check_arguments(type(self).__name__, others, _NAMES, _REPLACEMENTS)
        if isinstance(embedding, RagaccelEmbeddings) and not fingerprint and collection is None:
            fingerprint = embedding.fingerprint
        self.embedding = embedding
        self.registry = registry
        self.namespace = namespace
        self.collection = open_collection(collection, path, fingerprint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Self:
        return copy(self)

    def close(self) -> None:
        """Close the file, or free the memory."""
        self.collection.close()

    @property
    def embeddings(self) -> Embeddings:
        """Return the embedding model."""
        return self.embedding

    # Changing

    def add_documents(
        self,
        documents: list[Document],
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> list[str]:
        """Add documents, or replace those with the same ids, and return the ids.

        Either all documents are stored or none.

        Args:
            documents: The documents.
            ids: Their ids, instead of ``document.id``. Documents without an id get a new one.
            batch_size: Ignored: the embedding model makes its own batches.
            **kwargs: Not supported: any further argument raises TypeError.
        """
        reject_arguments(kwargs)
        named = with_ids(documents, ids)
        vectors = self.embedding.embed_documents([document.page_content for document in named])
        passages = [as_passage(document) for document in named]
        self.collection.put(passages, vectors, [document.metadata for document in named])
        return [passage.passage_id for passage in passages]

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts with their metadata; see :meth:`add_documents`."""
        return super().add_texts(list(texts), metadatas, **kwargs)

    def delete(self, ids: Sequence[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by their ids, or all documents if ``ids`` is None.

        Unknown ids are ignored. Results of earlier searches stay registered until
        ``registry.clear()``.
        """
        reject_arguments(kwargs)
        if ids is None:
            self.collection.clear()
        elif ids:
            self.collection.drop(as_id_list(ids))
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return documents by their ids, in the order given, without unknown ones."""
        return self._documents(self.collection.get(as_id_list(ids)))

    # Searching

    def similarity_search(
        self, query: str, k: int = 4, *, mode: str = "dense", **kwargs: Any
    ) -> list[Document]:
        """Return the k most relevant documents for a question, best first.

        Args:
            query: The question.
            k: Maximum number of documents.
            mode: ``"dense"`` searches by vector, ``"text"`` by words (BM25), ``"fused"`` by both.
            **kwargs: ``filter``, as in :meth:`similarity_search_with_score_by_vector`.
        """
        where = as_where(**kwargs)
        if mode not in _MODES:
            raise ConfigurationError(f"mode {mode!r} is unknown: use one of {', '.join(_MODES)}")
        if mode == "text":
            return self._registered(self.collection.search_text(query, k, where=where))
        vector = self.embedding.embed_query(query)
        if mode == "dense":
            return self._registered(self.collection.search(vector, k, where=where))
        return self._registered(self.collection.search_fused(query, vector, k, where=where))

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> Scored:
        """Return the k documents nearest to a question with their cosines, nearest first."""
        vector = self.embedding.embed_query(query)
        return self.similarity_search_with_score_by_vector(vector, k, **kwargs)

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> Scored:
        """Return the k documents nearest to a vector with their cosines, nearest first.

        Args:
            embedding: The vector.
            k: Number of documents; fewer are returned only if fewer match.
            **kwargs: ``filter``: metadata that must be equal, ``{"source": "log.pdf"}``, or
                compare, ``{"year": {"$gte": 1874}}``, or a function of the document; see
                :func:`langchain_ragaccel.vectorstores.as_condition`.
        """
        found = self.collection.search(embedding, k, where=as_where(**kwargs))
        scores = [item.passage.score for item in found]
        return list(zip(self._registered(found), scores, strict=True))

    asimilarity_search_with_score_by_vector = in_thread(similarity_search_with_score_by_vector)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        """Return the k documents nearest to a vector, nearest first."""
        found = self.similarity_search_with_score_by_vector(embedding, k, **kwargs)
        return [document for document, _ in found]

    def max_marginal_relevance_search(
        self, query: str, *args: Any, **kwargs: Any
    ) -> list[Document]:
        """Return near but diverse documents.

        Further arguments are those of :meth:`max_marginal_relevance_search_by_vector`.
        """
        vector = self.embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, *args, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        """Return k documents near a vector but unlike each other (maximal marginal relevance).

        Args:
            embedding: The vector.
            k: Number of documents.
            fetch_k: Number of nearest documents to choose from.
            lambda_mult: Weight of similarity against diversity, from 0 (only diversity) to 1.
            **kwargs: ``filter``, as in :meth:`similarity_search_with_score_by_vector`.
        """
        found = self.collection.search_mmr(
            embedding,
            k,
            num_candidates=fetch_k,
            relevance_weight=lambda_mult,
            where=as_where(**kwargs),
        )
        return self._registered(found)

    def _registered(self, found: list[StoredPassage]) -> list[Document]:
        """Register results in the registry, else in the current context or run; return documents.

        A direct search sends no retriever event, so nothing else registers them.
        """
        passages = [item.passage for item in found]
        if auto_references_enabled():
            if self.registry is not None:
                self.registry.register(passages, self.namespace)
            else:
                register_search_results(passages, current_callbacks(), self.namespace)
        return self._documents(found)

    def _documents(self, found: Iterable[StoredPassage]) -> list[Document]:
        documents = [as_document(item.passage, item.metadata) for item in found]
        if self.registry is not None or self.namespace:
            exclude_from_collectors(documents)
        return documents

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Return the function from cosine to relevance, which clips at 0."""
        return partial(max, 0.0)

    # Making

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create a store and add texts; further arguments are those of the constructor."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store
