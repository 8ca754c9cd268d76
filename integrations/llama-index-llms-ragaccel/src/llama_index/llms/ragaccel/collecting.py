"""Collecting: what retrievers find is registered, so that it is known in the prompts it reaches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from llama_index.llms.ragaccel.nodes import as_passage

if TYPE_CHECKING:
    from llama_index.core.instrumentation.events import BaseEvent
    from llama_index.core.schema import NodeWithScore

logger = logging.getLogger(__name__)

NAMESPACE_TAG = "ragaccel_namespace"


class RetrievalCollector(BaseEventHandler):
    """Registers the nodes that retrievers return.

    One is attached to everything by the import of ``llama_index.llms.ragaccel``. It registers in
    the namespace that ``instrument_tags({"ragaccel_namespace": ...})`` names round the retrieval,
    and without that in the common one.

    Attributes:
        registry: a ``ragaccel.ReferenceRegistry``; the process's own by default.
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
            self._register(event.nodes, event.tags.get(NAMESPACE_TAG, ""))
        except Exception:
            logger.warning("retrieved nodes were not registered", exc_info=True)

    def _register(self, nodes: list[NodeWithScore], namespace: str) -> None:
        from ragaccel import auto_references_enabled, default_registry

        if not auto_references_enabled():
            return
        registry = default_registry() if self.registry is None else self.registry
        registry.register([as_passage(node) for node in nodes], namespace)
