"""The vector store: documents in one file, with the vectors of any embedding model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from ragaccel import Collection, ConfigurationError

from langchain_ragaccel.documents import as_passage
from langchain_ragaccel.embeddings import RagaccelEmbeddings
from langchain_ragaccel.storing import (
    Gone,
    as_document,
    as_where,
    list_of_ids,
    refuse_arguments,
    register,
    text_batches,
    with_ids,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from ragaccel import ReferenceRegistry, Stored
    from typing_extensions import Self

    Scored = list[tuple[Document, float]]

MODES = ("dense", "text", "fused")


class RagaccelVectorStore(VectorStore):
    """Documents with their vectors in one SQLite file, searched in memory by FAISS.

    Adding under a known id replaces; every change is kept when the call returns. Threads may share
    one, and processes the file. Metadata must be sayable in JSON. What is found is registered, so
    that a ``ChatRagaccel`` or ``RagaccelLLM`` copies from it where it stands in a prompt.

    >>> store = RagaccelVectorStore.from_texts(["The lamp burns oil."], RagaccelEmbeddings())
    >>> store.similarity_search("What does the lamp burn?")

    Args:
        embedding: Makes the vectors.
        path: The file, made if there is none; None: a temporary one, gone with this object.
        collection: A ready ``ragaccel.Collection``, in place of ``path``.
        fingerprint: Names the embedding model, so that a file with vectors of another is refused;
            known by itself of :class:`RagaccelEmbeddings`.
        registry: Where what is found is registered; that of :func:`collecting_into`, or else the
            process's own, by default.
        namespace: Whose it is.
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
    ) -> None:
        if collection is not None and (path is not None or fingerprint):
            raise ConfigurationError("a ready collection has its own path and fingerprint")
        if isinstance(embedding, RagaccelEmbeddings) and not fingerprint:
            fingerprint = embedding.fingerprint
        self.embedding = embedding
        self._is_temporary = collection is None and path is None
        self.registry = registry
        self.namespace = namespace
        self.collection: Any = (
            Collection(path, fingerprint=fingerprint) if collection is None else collection
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; a temporary one is deleted."""
        self.collection.close()
        if self._is_temporary:
            self.collection = Gone()

    @property
    def embeddings(self) -> Embeddings:
        """What makes the vectors."""
        return self.embedding

    # Changing

    def add_documents(
        self,
        documents: list[Document],
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
        **more: Any,
    ) -> list[str]:
        """Add documents, or replace those of the same ids, all or none; return their ids.

        Args:
            documents: With ids of their own, or without.
            ids: Theirs, which go before; where there is neither, one is made.
            batch_size: How many are embedded at once.
            **more: Refused: a name written wrong shall not pass unseen.
        """
        refuse_arguments(more)
        named = with_ids(documents, ids)
        vectors: list[list[float]] = []
        for texts in text_batches(named, batch_size):
            vectors += self.embedding.embed_documents(texts)
        return self._put(named, vectors)

    async def aadd_documents(
        self,
        documents: list[Document],
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
        **more: Any,
    ) -> list[str]:
        """:meth:`add_documents`, awaited."""
        refuse_arguments(more)
        named = with_ids(documents, ids)
        vectors: list[list[float]] = []
        for texts in text_batches(named, batch_size):
            vectors += await self.embedding.aembed_documents(texts)
        return await run_in_executor(None, self._put, named, vectors)

    def delete(self, ids: Sequence[str] | None = None, **more: Any) -> bool:
        """Take documents out by their ids, those that are there; everything without ids.

        What was found of them before stays registered; ``registry.clear`` forgets that.
        """
        refuse_arguments(more)
        if ids is None:
            self.collection.clear()
        elif ids:
            self.collection.drop(list_of_ids(ids))
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents by their ids, in the order given; those that are not there are left out."""
        return [as_document(item) for item in self.collection.get(list_of_ids(ids))]

    # Searching: ``filter`` may be given to each, as to similarity_search_by_vector

    def similarity_search(
        self, query: str, k: int = 4, *, mode: str = "dense", **how: Any
    ) -> list[Document]:
        """Find the k documents that bear most on a question, best first.

        Args:
            query: The question.
            k: How many; fewer come back when there are no more.
            mode: ``"dense"``: by the vectors; ``"text"``: by words (BM25); ``"fused"``: by both.
            **how: ``filter``, as in :meth:`similarity_search_with_score_by_vector`.
        """
        vector = self.embedding.embed_query(query) if _takes_vector(mode) else []
        return self._by_mode(mode, query, vector, k=k, **how)

    async def asimilarity_search(
        self, query: str, k: int = 4, *, mode: str = "dense", **how: Any
    ) -> list[Document]:
        """:meth:`similarity_search`, awaited."""
        vector = await self.embedding.aembed_query(query) if _takes_vector(mode) else []
        return await run_in_executor(None, self._by_mode, mode, query, vector, k=k, **how)

    def similarity_search_with_score(self, query: str, k: int = 4, **how: Any) -> Scored:
        """Find the k documents nearest to a question with their cosines, the nearest first."""
        vector = self.embedding.embed_query(query)
        return self.similarity_search_with_score_by_vector(vector, k, **how)

    async def asimilarity_search_with_score(self, query: str, k: int = 4, **how: Any) -> Scored:
        """:meth:`similarity_search_with_score`, awaited."""
        vector = await self.embedding.aembed_query(query)
        return await self.asimilarity_search_with_score_by_vector(vector, k, **how)

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **how: Any
    ) -> Scored:
        """Find the k documents nearest to a vector with their cosines, the nearest first.

        Args:
            embedding: The vector.
            k: How many; fewer come back only when there are no more.
            **how: ``filter``: metadata to be equal, ``{"source": "log.pdf"}``, or compared,
                ``{"year": {"$gte": 1874}}``, or a function of the document; all that
                :func:`langchain_ragaccel.filtering.as_condition` takes.
        """
        found = self.collection.search(embedding, k, where=as_where(**how))
        return list(zip(self._told(found), (item.passage.score for item in found), strict=True))

    async def asimilarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **how: Any
    ) -> Scored:
        """:meth:`similarity_search_with_score_by_vector`, awaited."""
        search = self.similarity_search_with_score_by_vector
        return await run_in_executor(None, search, embedding, k, **how)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **how: Any
    ) -> list[Document]:
        """Find the k documents nearest to a vector, the nearest first."""
        found = self.similarity_search_with_score_by_vector(embedding, k, **how)
        return [document for document, _ in found]

    def max_marginal_relevance_search(self, query: str, *args: Any, **how: Any) -> list[Document]:
        """Find near documents that do not say the same; arguments as for the one by vector."""
        vector = self.embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, *args, **how)

    async def amax_marginal_relevance_search(
        self, query: str, *args: Any, **how: Any
    ) -> list[Document]:
        """:meth:`max_marginal_relevance_search`, awaited."""
        vector = await self.embedding.aembed_query(query)
        search = self.max_marginal_relevance_search_by_vector
        return await run_in_executor(None, search, vector, *args, **how)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **how: Any,
    ) -> list[Document]:
        """Find k documents near to a vector that do not say the same (maximal marginal relevance).

        Args:
            embedding: The vector.
            k: How many.
            fetch_k: The nearest that they are chosen from.
            lambda_mult: 1 looks at nearness alone, 0 only at how unlike they are.
            **how: ``filter``, as in :meth:`similarity_search_with_score_by_vector`.
        """
        where = as_where(**how)
        search = partial(self.collection.search_diverse, among=fetch_k, balance=lambda_mult)
        return self._told(search(embedding, k, where=where))

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
        """Make a store and add texts to it; further arguments are those of the constructor."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    # Within

    def _put(self, documents: Sequence[Document], vectors: Sequence[Sequence[float]]) -> list[str]:
        passages = [as_passage(document) for document in documents]
        self.collection.put(passages, vectors, [document.metadata for document in documents])
        return [passage.passage_id for passage in passages]

    def _by_mode(
        self, mode: str, query: str, vector: list[float], *, k: int, **how: Any
    ) -> list[Document]:
        where = as_where(**how)
        if mode == "dense":
            return self._told(self.collection.search(vector, k, where=where))
        if mode == "text":
            return self._told(self.collection.search_words(query, k, where=where))
        return self._told(self.collection.search_fused(query, vector, k, where=where))

    def _told(self, found: Iterable[Stored]) -> list[Document]:
        """What was found as documents, registered; a search by hand is no event to listen to."""
        found = list(found)
        register(found, self.registry, self.namespace)
        return [as_document(item) for item in found]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """A cosine below 0 is as far away as one of 0."""
        return partial(max, 0.0)


def _takes_vector(mode: str) -> bool:
    if mode not in MODES:
        raise ConfigurationError(f"mode {mode!r} is none of {', '.join(MODES)}")
    return mode != "text"
