"""ragaccel's embedding models for LangChain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ragaccel import ConfigurationError
from ragaccel.errors import check_arguments
from ragaccel.frameworks import get_shared_embedder

if TYPE_CHECKING:
    from ragaccel import Embedder


_REPLACEMENTS = {
    "cache_folder": "pass a folder as model=, or download the model to the local cache first",
    "encode_kwargs": "vectors always have length 1, and the batch size is automatic",
    "model_kwargs": "pass a ragaccel.Embedder with these options as embedder=",
    "model_name": "use model=",
    "query_instruction": "leave it out: the model's own prompts are used",
}


class RagaccelEmbeddings(BaseModel, Embeddings):
    """A local embedding model; all-MiniLM-L6-v2 by default.

    The model is loaded at first use and shared by all objects in the process that name it.
    Questions and documents are embedded with the model's own prompts for each. Thread-safe.

    >>> RagaccelEmbeddings().embed_query("Who keeps the lamp?")
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", protected_namespaces=(), frozen=True
    )

    model: str | Path | None = None
    """A sentence-transformers model: its folder, or its name in the local cache."""

    embedder: Any = Field(default=None, exclude=True, repr=False)
    """A loaded ``ragaccel.Embedder`` to use instead of ``model``."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_arguments(cls.__name__, values, cls.model_fields, _REPLACEMENTS)
        return values

    def model_post_init(self, context: Any, /) -> None:
        """Check that not both ``model`` and ``embedder`` are given.

        Raises:
            ConfigurationError: Both are given.
        """
        if self.embedder is not None and self.model is not None:
            raise ConfigurationError("model= and embedder= are both given: pass one of them")
        super().model_post_init(context)

    @property
    def fingerprint(self) -> str:
        """Return a string that identifies the model; different models have different ones."""
        return self.load().fingerprint

    @property
    def name(self) -> str:
        """Return the model's name."""
        if self.embedder is not None:
            return type(self.embedder).__name__
        return str(self.model or "all-MiniLM-L6-v2")

    def load(self) -> Embedder:
        """Return the ``ragaccel.Embedder``, and load it if necessary.

        Raises:
            ModelNotFoundError: The model does not exist.
        """
        embedder: Embedder | None = self.embedder
        return get_shared_embedder(self.model) if embedder is None else embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents; the vectors have length 1."""
        vectors: list[list[float]] = self.load().embed_documents(list(texts)).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Embed a question; the vector has length 1."""
        vector: list[float] = self.load().embed_query(text).tolist()
        return vector
