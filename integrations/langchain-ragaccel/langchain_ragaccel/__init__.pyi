# The names that this package offers, loaded when first used.

from .callbacks import (
    ReferenceCollector as ReferenceCollector,
    collecting_into as collecting_into,
)
from .chat_models import ChatRagaccel as ChatRagaccel
from .embeddings import RagaccelEmbeddings as RagaccelEmbeddings
from .llms import RagaccelLLM as RagaccelLLM
from .retrievers import RagaccelRetriever as RagaccelRetriever
from .vectorstores import RagaccelVectorStore as RagaccelVectorStore

__version__: str
