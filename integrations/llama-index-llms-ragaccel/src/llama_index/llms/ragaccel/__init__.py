"""ragaccel in LlamaIndex: a local model that copies from what was retrieved, and says from where.

Importing this registers, once, a handler of retrieval events and one of spans: what a retriever
finds is known by its text to the calls of its own root span, and copied from where it stands in a
prompt of theirs.
"""

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]

from llama_index.llms.ragaccel.base import Ragaccel
from llama_index.llms.ragaccel.citations import RetrievalCollector, RootSpanHandler, citations_of

__all__ = ["Ragaccel", "RetrievalCollector", "citations_of"]

get_dispatcher().add_event_handler(RetrievalCollector())
get_dispatcher().add_span_handler(RootSpanHandler())
