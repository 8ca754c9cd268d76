"""ragaccel in LlamaIndex: a local model that copies from what was retrieved, and says from where.

Importing this registers, once, a handler of retrieval events: what any retriever of the process
finds is known by its text, and copied from where it stands in a prompt.
"""

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]

from llama_index.llms.ragaccel.base import Ragaccel
from llama_index.llms.ragaccel.citing import citations_of
from llama_index.llms.ragaccel.collecting import RetrievalCollector

__all__ = ["Ragaccel", "RetrievalCollector", "citations_of"]

get_dispatcher().add_event_handler(RetrievalCollector())
