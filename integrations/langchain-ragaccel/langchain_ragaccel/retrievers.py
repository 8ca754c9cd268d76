"""The retriever: an index of your documents, searched by meaning and by words."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from langchain_core.runnables.config import run_in_executor
from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from ragaccel import ConfigurationError
from ragaccel.errors import check_arguments

from langchain_ragaccel.documents import as_document, passage_metadata
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
    "search_kwargs": "give its fields by their own names, such as k=3",
    "search_type": 'mode="dense", "text" or "fused"',
    "vectorstore": "RagaccelVectorStore(...).as_retriever() makes one of a store",
}


class RagaccelRetriever(BaseRetriever):
    """Finds passages in an index that ``ragaccel index`` or :meth:`from_folder` made.

    Each comes with its ``id``, and in its metadata ``score``, ``citation`` (``guide.pdf:3``),
    ``source``, ``start_index``, and ``title``, ``page`` and ``line`` where it has them; pages and
    lines are counted from 1. The index is followed: what is indexed again is found at once.

    >>> RagaccelRetriever(index="documents/", k=3).invoke("Who keeps the lamp?")
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    index: Any
    """An index file, or the folder it is in; or anything that has ``search(query, k)``, such as a
    ``ragaccel.retrieval.CompressingRetriever``."""

    k: int = Field(default=6, ge=1)
    """How many passages; ``invoke(query, k=...)`` asks for another number."""

    mode: Literal["fused", "dense", "text"] | None = None
    """``"dense"``: by meaning (score: cosine); ``"text"``: by words (BM25); ``"fused"``: by both,
    which is meant by None."""

    embeddings: RagaccelEmbeddings = Field(default_factory=RagaccelEmbeddings)
    """What the index was made with; for an index file only."""

    _source: Any = PrivateAttr()
    _index_path: Path | None = PrivateAttr(default=None)
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_arguments(cls.__name__, values, cls.model_fields, _REPLACEMENTS)
        return values

    def model_post_init(self, context: Any, /) -> None:
        """Open the index.

        Raises:
            EmptyIndexError: There is none.
            IndexUnusableError: It was made with another embedding model.
            ConfigurationError: It is nothing that can be searched, or not in that mode.
        """
        super().model_post_init(context)
        if isinstance(self.index, str | Path):
            self._index_path = Path(self.index).absolute()
            self._source = _open_index(self._index_path, self.embeddings)
        elif callable(getattr(self.index, "search", None)):
            self._source = self.index
        else:
            raise ConfigurationError(
                f"index is {self.index!r}: give an index file, its folder, or what has"
                " search(query, k)"
            )
        if self.mode is not None:
            if "mode" not in inspect.signature(self._source.search).parameters:
                raise ConfigurationError(
                    f"{type(self._source).__name__} has no modes: leave it out"
                )
            self._options = {"mode": self.mode}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options; what is searched is shared."""
        memo = {} if memo is None else memo
        shared = (self._source, self.index, self.embeddings)
        memo.update({id(one): one for one in shared})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out an open index: it is opened again from its path."""
        state = super().__getstate__()
        if self._index_path is not None:
            private = dict(state["__pydantic_private__"] or {})
            private.pop("_source", None)
            state = {**state, "__pydantic_private__": private}
        return state

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Open the index again; errors are those of making a retriever."""
        super().__setstate__(state)
        if self._index_path is not None:
            self._source = _open_index(self._index_path, self.embeddings)

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
        """Bring the index of a folder up to date, then search it; only what is new is embedded.

        Args:
            folder: Where the documents are.
            index: The index file; without one it is kept in the folder.
            embeddings: What embeds the documents, and the questions later.
            index_kwargs: Further arguments of ``ragaccel.index_folder``, such as
                ``{"include": ["*.txt"]}``.
            **fields: Those of the retriever, e.g. ``k``.
        """
        from ragaccel import Store, index_folder
        from ragaccel.retrieval import default_index_path

        embeddings = embeddings or RagaccelEmbeddings()
        path = default_index_path(folder) if index is None else Path(index)
        with Store(path) as store:
            index_folder(store, embeddings.load(), folder, **dict(index_kwargs or {}))
        return cls(index=path, embeddings=embeddings, **fields)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,  # noqa: ARG002
        k: int | None = None,
    ) -> list[Document]:
        found = self._source.search(query, self.k if k is None else k, **self._options)
        return [as_document(passage, passage_metadata(passage)) for passage in found]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun | None = None,  # noqa: ARG002
        k: int | None = None,
    ) -> list[Document]:
        return await run_in_executor(None, self._get_relevant_documents, query, k=k)

    def _get_ls_params(self, **_: Any) -> LangSmithRetrieverParams:
        """What traces call it."""
        params = LangSmithRetrieverParams(
            ls_retriever_name="ragaccel", ls_vector_store_provider="ragaccel"
        )
        if isinstance(self.index, str | Path):
            params["ls_embedding_provider"] = "ragaccel"
            params["ls_embedding_model"] = self.embeddings.name
        return params


def _open_index(path: Path, embeddings: RagaccelEmbeddings) -> Any:
    from ragaccel import open_retriever
    from ragaccel.retrieval import default_index_path

    place = default_index_path(path) if path.is_dir() else path
    return open_retriever(place, embeddings.load())
