"""Searching: the ways in which a vector store is searched, each awaited as well."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from ragaccel import ConfigurationError

from langchain_ragaccel.collecting import keep_from_collectors
from langchain_ragaccel.documents import as_document
from langchain_ragaccel.storing import as_where, register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from ragaccel import Collection, ReferenceRegistry, Stored

    Scored = list[tuple[Document, float]]

MODES = ("dense", "text", "fused")


class Searching(VectorStore):
    """A vector store that searches a collection, and registers what it finds."""

    collection: Collection
    embedding: Embeddings
    registry: ReferenceRegistry | None
    namespace: str

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

    def _by_mode(
        self, mode: str, query: str, vector: list[float], *, k: int, **how: Any
    ) -> list[Document]:
        where = as_where(**how)
        if mode == "dense":
            return self._told(self.collection.search(vector, k, where=where))
        if mode == "text":
            return self._told(self.collection.search_words(query, k, where=where))
        return self._told(self.collection.search_fused(query, vector, k, where=where))

    def _told(self, found: list[Stored]) -> list[Document]:
        """What was found as documents, registered; a search by hand is no event to listen to."""
        register(found, self.registry, self.namespace)
        return self._documents(found)

    def _documents(self, found: Iterable[Stored]) -> list[Document]:
        documents = [as_document(item.passage, item.metadata) for item in found]
        if self._is_apart:
            keep_from_collectors(documents)
        return documents

    @property
    def _is_apart(self) -> bool:
        """Whether what is found is registered in a place of its own, and in no other."""
        return self.registry is not None or bool(self.namespace)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """A cosine below 0 is as far away as one of 0."""
        return partial(max, 0.0)


def _takes_vector(mode: str) -> bool:
    if mode not in MODES:
        raise ConfigurationError(f"mode {mode!r} is none of {', '.join(MODES)}")
    return mode != "text"
