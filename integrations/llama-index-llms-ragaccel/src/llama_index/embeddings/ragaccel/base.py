"""ragaccel's embedding models for LlamaIndex."""

from __future__ import annotations

import pickle
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
from ragaccel.frameworks import get_shared_embedder, in_thread

if TYPE_CHECKING:
    from ragaccel import Embedder


_REPLACEMENTS = {
    "cache_folder": "pass a folder as model_name=, or download the model to the local cache first",
    "max_length": "leave it out: the model's own limit applies",
    "query_instruction": "leave it out: the model's own prompts are used",
    "text_instruction": "leave it out: the model's own prompts are used",
}


class RagaccelEmbedding(BaseEmbedding):
    """A local embedding model; all-MiniLM-L6-v2 by default.

    The model is loaded at first use and shared by all objects in the process that name it.
    Questions and texts are embedded with the model's own prompts for each. Thread-safe.

    >>> RagaccelEmbedding().get_query_embedding("Who keeps the lamp?")
    """

    model_config = ConfigDict(extra="forbid")  # unknown names must not be ignored

    model_name: str = Field(
        default="all-MiniLM-L6-v2",
        description="A sentence-transformers model: its folder, or its name in the local cache.",
    )
    embed_batch_size: int = Field(
        default=128, gt=0, description="Number of texts to embed at once."
    )
    embedder: Any = Field(
        default=None,
        repr=False,
        description="A loaded ragaccel.Embedder to use instead of model_name.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_arguments(cls.__name__, values, cls.model_fields, _REPLACEMENTS)
        return values

    @classmethod
    def class_name(cls) -> str:
        """Return the class name for serialization."""
        return "RagaccelEmbedding"

    @property
    def fingerprint(self) -> str:
        """Return a string that identifies the model; different models have different ones."""
        return self.load().fingerprint

    def load(self) -> Embedder:
        """Return the ``ragaccel.Embedder``, and load it if necessary.

        Raises:
            ModelNotFoundError: The model does not exist.
        """
        embedder: Embedder | None = self.embedder
        return get_shared_embedder(self.model_name) if embedder is None else embedder

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RagaccelEmbedding:
        """Copy the options and share ``embedder``."""
        memo = {} if memo is None else memo
        memo[id(self.embedder)] = self.embedder
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle; raise TypeError if ``embedder`` cannot be pickled.

        Without it, the copy would use the model that ``model_name`` names instead.
        """
        try:  # the base class would drop it silently, from this object too
            pickle.dumps(self.embedder)
        except Exception as error:
            raise TypeError(
                "a RagaccelEmbedding made with this embedder cannot be pickled: pass model_name "
                "instead, and each process loads its own"
            ) from error
        return super().__getstate__()

    @field_serializer("embedder")
    def _serialize_ready(self, embedder: Any) -> str | None:
        """Return a text that identifies this embedder, for the keys of embedding caches."""
        return None if embedder is None else f"a ready embedder, {embedder.fingerprint}"

    @field_validator("embedder")
    @classmethod
    def _refuse_saved_name(cls, embedder: Any) -> Any:
        if isinstance(embedder, str):
            raise ConfigurationError(
                "this was saved with embedder=, which cannot be stored: pass it again, "
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

    _aget_query_embedding = in_thread(_get_query_embedding)
    _aget_text_embedding = in_thread(_get_text_embedding)
    _aget_text_embeddings = in_thread(_get_text_embeddings)
