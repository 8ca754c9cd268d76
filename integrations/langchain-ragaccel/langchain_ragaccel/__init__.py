"""ragaccel for LangChain: chat models, LLMs, retrievers and vector stores.

>>> from langchain_ragaccel import ChatRagaccel
>>> ChatRagaccel().invoke("…")

Classes are imported at first use. Importing the package registers one callback handler, which
collects the documents of every retriever so that answers can copy and cite them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from langchain_ragaccel.callbacks import install as _install

__version__ = "0.1.0"

_MODULE_OF = {
    "ChatRagaccel": "chat_models",
    "RagaccelLLM": "llms",
    "RagaccelRetriever": "retrievers",
    "RagaccelVectorStore": "vectorstores",
    "RagaccelEmbeddings": "embeddings",
    "ReferenceCollector": "callbacks",
    "collecting_into": "callbacks",
}

if TYPE_CHECKING:
    from langchain_ragaccel.callbacks import ReferenceCollector, collecting_into
    from langchain_ragaccel.chat_models import ChatRagaccel
    from langchain_ragaccel.embeddings import RagaccelEmbeddings
    from langchain_ragaccel.llms import RagaccelLLM
    from langchain_ragaccel.retrievers import RagaccelRetriever
    from langchain_ragaccel.vectorstores import RagaccelVectorStore

__all__ = [
    "ChatRagaccel",
    "RagaccelEmbeddings",
    "RagaccelLLM",
    "RagaccelRetriever",
    "RagaccelVectorStore",
    "ReferenceCollector",
    "__version__",
    "collecting_into",
]

_install()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
