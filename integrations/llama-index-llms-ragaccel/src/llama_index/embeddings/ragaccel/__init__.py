"""ragaccel's embedding models for LlamaIndex."""

from llama_index.embeddings.ragaccel.base import RagaccelEmbedding

__all__ = ["RagaccelEmbedding"]
