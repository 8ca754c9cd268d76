"""A LlamaIndex retriever over an index of local documents."""

from llama_index.retrievers.ragaccel.base import RagaccelRetriever

__all__ = ["RagaccelRetriever"]
