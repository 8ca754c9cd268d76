"""The embedding: the library's embedding models for LlamaIndex."""

from __future__ import annotations

import asyncio
import pickle
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import (
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from ragaccel import ConfigurationError
from ragaccel.errors import check_arguments

if TYPE_CHECKING:
    from ragaccel import Embedder


_REPLACEMENTS = {
    "cache_folder": "name a folder as model_name=, or fill the local cache first",
    "max_length": "the model's own limit counts",
    "query_instruction": "the prompts that the model names for itself are used",
    "text_instruction": "the prompts that the model names for itself are used",
}


class RagaccelEmbedding(BaseEmbedding):
    """A local embedding model, loaded at its first use.

    Questions and texts are embedded with the prompts that the model names for them. All of a
    process that name the same model share it. Safe to call from several threads.

    >>> RagaccelEmbedding().get_query_embedding("Who keeps the lamp?")
    """

    model_config = ConfigDict(extra="forbid")  # another's names would be without effect, unseen

    model_name: str = Field(
        default="all-MiniLM-L6-v2",
        description="A sentence-transformers model: its folder, or its name in the local cache.",
    )
    embed_batch_size: int = Field(default=128, gt=0, description="Texts embedded at once.")
    embedder: Any = Field(
        default=None,
        repr=False,
        description="A ready ragaccel.Embedder, used in place of what model_name names.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_arguments(cls.__name__, values, cls.model_fields, _REPLACEMENTS)
        return values

    @classmethod
    def class_name(cls) -> str:
        """The name that the framework knows it by."""
        return "RagaccelEmbedding"

    @property
    def fingerprint(self) -> str:
        """Tells the vectors of this model from those of any other."""
        return self.load().fingerprint

    def load(self) -> Embedder:
        """The embedder itself, as the library takes it.

        Raises:
            ModelNotFoundError: There is no such model.
        """
        embedder: Embedder = (
            _load_shared(self.model_name) if self.embedder is None else self.embedder
        )
        return embedder

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RagaccelEmbedding:
        """Copy the options; a ready model is shared."""
        memo = {} if memo is None else memo
        memo[id(self.embedder)] = self.embedder
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to leave behind a ready model: its name, that of another, would stand for it."""
        try:  # the framework leaves out what cannot be pickled, and from this object as well
            pickle.dumps(self.embedder)
        except Exception as error:
            raise TypeError(
                "a RagaccelEmbedding made with this embedder cannot be pickled: name the model "
                "instead, and each process loads its own"
            ) from error
        return super().__getstate__()

    @field_serializer("embedder")
    def _serialize_ready(self, embedder: Any) -> str | None:
        """Tells it from every other: caches of what is embedded have this in their keys."""
        return None if embedder is None else f"a ready embedder, {embedder.fingerprint}"

    @field_validator("embedder")
    @classmethod
    def _refuse_saved_name(cls, embedder: Any) -> Any:
        if isinstance(embedder, str):
            raise ConfigurationError(
                "this was saved with a ready embedder, which a file cannot hold: give it again, "
                "RagaccelEmbedding.from_dict(data, embedder=...)"
            )
        return embedder

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self.load().embed_query(query).tolist()
        return vector

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.load().embed_documents(list(texts)).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


@lru_cache(maxsize=8)
def _load_shared(model_name: str) -> Embedder:
    from ragaccel import load_embedder

    return load_embedder(model_name)
