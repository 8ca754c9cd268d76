"""A LangChain retriever over an index of local documents."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from ragaccel.errors import check_arguments
from ragaccel.frameworks import index_documents, open_search

from langchain_ragaccel.convert import as_document, passage_metadata
from langchain_ragaccel.embeddings import RagaccelEmbeddings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
    )
    from langchain_core.documents import Document
    from typing_extensions import Self


_REPLACEMENTS = {
    "search_kwargs": "pass its fields by name, such as k=3",
    "search_type": 'use mode="dense", "text" or "fused"',
    "vectorstore": "use RagaccelVectorStore(...).as_retriever()",
}


class RagaccelRetriever(BaseRetriever):
    """A retriever of passages from an index made by ``ragaccel index`` or :meth:`from_folder`.

    Each document has an ``id``, and as metadata ``score``, ``citation`` (``guide.pdf:3``),
    ``source``, ``start_index`` and, if known, ``title``, ``page`` and ``line``. Pages and lines
    are counted from 1. Changes to the index are visible to the next search.

    >>> RagaccelRetriever(index="documents/", k=3).invoke("Who keeps the lamp?")
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    index: Any
    """An index file or the folder that contains it, or any object with ``search(query, k)``, such
    as a ``ragaccel.retrieval.CompressingRetriever``."""

    k: int = Field(default=6, ge=1)
    """Number of passages; ``invoke(query, k=...)`` overrides it."""

    mode: Literal["fused", "dense", "text"] | None = None
    """``"dense"`` searches by vector (score: cosine), ``"text"`` by words (BM25), ``"fused"`` by
    both; None means ``"fused"``."""

    embeddings: RagaccelEmbeddings = Field(default_factory=RagaccelEmbeddings)
    """The embedding model of the index; only for an index file or folder."""

    _search: Any = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_arguments(cls.__name__, values, cls.model_fields, _REPLACEMENTS)
        return values

    def model_post_init(self, context: Any, /) -> None:
        """Open the index.

        Raises:
            EmptyIndexError: There is no index.
            IndexUnusableError: The index was made with another embedding model.
            ConfigurationError: ``index`` cannot be searched, or not in this mode.
        """
        super().model_post_init(context)
        if isinstance(self.index, str | Path):
            self.index = Path(self.index).expanduser().absolute()
        self._search = open_search(self.index, self.embeddings.load, self.mode)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options and share the index."""
        memo = {} if memo is None else memo
        memo.update({id(one): one for one in (self._search, self.index, self.embeddings)})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state to pickle, without the open index."""
        state = super().__getstate__()
        private = {**(state["__pydantic_private__"] or {}), "_search": None}
        return {**state, "__pydantic_private__": private}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore the state and open the index; raise the same errors as the constructor."""
        super().__setstate__(state)
        self._search = open_search(self.index, self.embeddings.load, self.mode)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        index: str | Path | None = None,
        embeddings: RagaccelEmbeddings | None = None,
        index_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> RagaccelRetriever:
        """Index a folder and return a retriever over it; embed only new and changed files.

        Args:
            folder: The folder with the documents.
            index: The index file; by default inside the folder.
            embeddings: The embedding model for documents and questions.
            index_kwargs: Further arguments of ``ragaccel.index_folder``, such as
                ``{"include": ["*.txt"]}``.
            **fields: Fields of the retriever, such as ``k``.
        """
        embeddings = embeddings or RagaccelEmbeddings()
        path = index_documents(folder, index, embeddings.load(), index_kwargs)
        return cls(index=path, embeddings=embeddings, **fields)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,  # noqa: ARG002
        k: int | None = None,
    ) -> list[Document]:
        found = self._search(query, self.k if k is None else k)
        return [as_document(passage, passage_metadata(passage)) for passage in found]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun | None = None,  # noqa: ARG002
        k: int | None = None,
    ) -> list[Document]:
        return await asyncio.to_thread(self._get_relevant_documents, query, k=k)

    def _get_ls_params(self, **_: Any) -> LangSmithRetrieverParams:
        """Return the retriever's and the embedding model's name for traces."""
        params = LangSmithRetrieverParams(
            ls_retriever_name="ragaccel", ls_vector_store_provider="ragaccel"
        )
        if isinstance(self.index, str | Path):
            params["ls_embedding_provider"] = "ragaccel"
            params["ls_embedding_model"] = self.embeddings.name
        return params
