"""ragaccel's collections in LlamaIndex."""

from llama_index.vector_stores.ragaccel.base import RagaccelVectorStore

__all__ = ["RagaccelVectorStore"]
