"""A LlamaIndex vector store in one SQLite file."""

from llama_index.vector_stores.ragaccel.base import RagaccelVectorStore

__all__ = ["RagaccelVectorStore"]
