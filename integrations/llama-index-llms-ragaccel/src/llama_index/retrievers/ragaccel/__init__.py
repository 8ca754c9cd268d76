"""ragaccel's indexes in LlamaIndex."""

from llama_index.retrievers.ragaccel.base import RagaccelRetriever

__all__ = ["RagaccelRetriever"]
