"""ragaccel's embedding models in LlamaIndex."""

from llama_index.embeddings.ragaccel.base import RagaccelEmbedding

__all__ = ["RagaccelEmbedding"]
