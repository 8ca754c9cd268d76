"""ragaccel for LlamaIndex: a local LLM that copies from retrieved nodes and cites them.

Importing this package registers a handler of retrieval events and a handler of spans. They collect
the nodes that retrievers return, so that LLM calls in the same root span copy and cite those whose
text is in the prompt.
"""

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]

from llama_index.llms.ragaccel.base import Ragaccel
from llama_index.llms.ragaccel.citations import RetrievalCollector, RootSpanHandler, citations_of

__all__ = ["Ragaccel", "RetrievalCollector", "citations_of"]

get_dispatcher().add_event_handler(RetrievalCollector())
get_dispatcher().add_span_handler(RootSpanHandler())
