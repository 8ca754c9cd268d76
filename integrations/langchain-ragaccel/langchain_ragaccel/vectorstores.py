"""The vector store: documents in one file, with the vectors of any embedding model."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from langchain_core.runnables.config import run_in_executor
from ragaccel import Collection, ConfigurationError, check_arguments

from langchain_ragaccel.documents import as_passage
from langchain_ragaccel.embeddings import RagaccelEmbeddings
from langchain_ragaccel.searching import Searching
from langchain_ragaccel.storing import list_of_ids, refuse_arguments, text_batches, with_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from ragaccel import ReferenceRegistry
    from typing_extensions import Self


_NAMES = ("embedding", "path", "collection", "fingerprint", "registry", "namespace")
_INSTEAD = {
    "collection_name": "one file holds one collection: path=",
    "connection": "the store is one file of this machine: path=",
    "embedding_function": "it is named embedding here, and comes first",
    "persist_directory": "one file is all there is: path=",
}


class RagaccelVectorStore(Searching):
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
        **others: Any,
    ) -> None:
        check_arguments(type(self).__name__, others, _NAMES, _INSTEAD)
        if collection is not None and (path is not None or fingerprint):
            raise ConfigurationError("a ready collection has its own path and fingerprint")
        if isinstance(embedding, RagaccelEmbeddings) and not fingerprint:
            fingerprint = embedding.fingerprint
        self.embedding = embedding
        self.registry = registry
        self.namespace = namespace
        self.collection = (
            Collection(path, fingerprint=fingerprint) if collection is None else collection
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Self:
        return copy(self)

    def close(self) -> None:
        """Let go of the file; a temporary one is deleted."""
        self.collection.close()

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

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """:meth:`add_documents`, of texts and their metadata."""
        return super().add_texts(list(texts), metadatas, ids=ids, **kwargs)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """:meth:`add_texts`, awaited."""
        return await super().aadd_texts(list(texts), metadatas, ids=ids, **kwargs)

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
        return self._documents(self.collection.get(list_of_ids(ids)))

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
