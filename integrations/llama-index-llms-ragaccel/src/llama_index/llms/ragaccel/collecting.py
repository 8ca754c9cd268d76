"""Collecting: what retrievers find is registered, so that it is known in the prompts it reaches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from llama_index.llms.ragaccel.callers import current_root
from llama_index.llms.ragaccel.nodes import as_passage

if TYPE_CHECKING:
    from llama_index.core.instrumentation.events import BaseEvent

logger = logging.getLogger(__name__)

NAMESPACE_TAG = "ragaccel_namespace"


class RetrievalCollector(BaseEventHandler):
    """Registers the nodes that retrievers return.

    One is attached to everything by the import of ``llama_index.llms.ragaccel``. It registers in
    the namespace that ``instrument_tags({"ragaccel_namespace": ...})`` names round the retrieval;
    without that in the ``ragaccel.reference_scope`` round it, or for the root span that it is a
    part of. What is retrieved by hand, outside of all these, goes to the process's registry, which
    is looked into by those only that are given it.

    Attributes:
        registry: a ``ragaccel.ReferenceRegistry``, in place of all of these.
    """

    registry: Any = None

    @classmethod
    def class_name(cls) -> str:
        """The name that the framework knows it by."""
        return "RetrievalCollector"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Register what a retrieval found; other events are not looked at."""
        if not isinstance(event, RetrievalEndEvent):
            return
        try:  # a dispatcher drops whatever is raised here
            self._register(event)
        except Exception:
            logger.warning("retrieved nodes were not registered", exc_info=True)

    def _register(self, event: RetrievalEndEvent) -> None:
        from ragaccel import auto_references_enabled, current_scope, default_registry

        if not auto_references_enabled():
            return
        passages = [as_passage(node) for node in event.nodes]
        namespace = event.tags.get(NAMESPACE_TAG, "")
        if self.registry is not None or namespace:
            registry = default_registry() if self.registry is None else self.registry
            registry.register(passages, namespace)
            return
        here, root = current_scope(), current_root()
        if here is not None:
            here.register(passages)
        elif root is None or root.span_id == event.span_id:  # the retriever's own: by hand
            default_registry().register(passages)
        else:
            root.scope.register(passages)
