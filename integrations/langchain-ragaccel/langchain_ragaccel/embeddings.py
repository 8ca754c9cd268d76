"""Embeddings: the library's embedding models for LangChain."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ragaccel.errors import check_arguments

if TYPE_CHECKING:
    from ragaccel import Embedder


_REPLACEMENTS = {
    "cache_folder": "name a folder as model=, or fill the local cache first",
    "encode_kwargs": "vectors are of length 1, and batches are chosen here",
    "model_kwargs": "a ready ragaccel.Embedder, of any options, is given as embedder=",
    "model_name": "it is named model here",
    "query_instruction": "the prompts that the model names for itself are used",
}


class RagaccelEmbeddings(BaseModel, Embeddings):
    """A local embedding model, loaded at its first use; all-MiniLM-L6-v2 without a name.

    Questions and documents are embedded with the prompts that the model names for them. All of a
    process that name the same model share it. Safe to call from several threads.

    >>> RagaccelEmbeddings().embed_query("Who keeps the lamp?")
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", protected_namespaces=(), frozen=True
    )

    model: str | Path | None = None
    """A sentence-transformers model: its folder, or its name in the local cache."""

    embedder: Any = Field(default=None, exclude=True, repr=False)
    """A ready ``ragaccel.Embedder``, used in place of ``model``."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_arguments(cls.__name__, values, cls.model_fields, _REPLACEMENTS)
        return values

    def model_post_init(self, context: Any, /) -> None:
        """Refuse two answers to one question.

        Raises:
            ConfigurationError: Both a model and an embedder are given.
        """
        if self.embedder is not None and self.model is not None:
            from ragaccel import ConfigurationError

            raise ConfigurationError("give a model or a ready embedder, not both")
        super().model_post_init(context)

    @property
    def fingerprint(self) -> str:
        """Tells the vectors of this model from those of any other."""
        return self.load().fingerprint

    @property
    def name(self) -> str:
        """What the model is called."""
        if self.embedder is not None:
            return type(self.embedder).__name__
        return str(self.model or "all-MiniLM-L6-v2")

    def load(self) -> Embedder:
        """The embedder itself, as the library takes it.

        Raises:
            ModelNotFoundError: There is no such model.
        """
        embedder: Embedder = _load_shared(self.model) if self.embedder is None else self.embedder
        return embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts to be found; vectors of length 1."""
        vectors: list[list[float]] = self.load().embed_documents(list(texts)).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Embed a text to find by; a vector of length 1."""
        vector: list[float] = self.load().embed_query(text).tolist()
        return vector


@lru_cache(maxsize=8)
def _load_shared(model: str | Path | None) -> Embedder:
    from ragaccel import load_embedder

    return load_embedder(model)
