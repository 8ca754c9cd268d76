"""Collecting: a callback handler that registers what retrievers find, as references."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks.base import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from langchain_core.documents import Document
    from ragaccel import ReferenceRegistry

logger = logging.getLogger(__name__)


class ReferenceCollector(BaseCallbackHandler):
    """Registers the documents of every retriever that it is told of.

    One is attached to everything by the import of ``langchain_ragaccel``; a tenant with a registry
    of its own passes another: ``chain.invoke(x, {"callbacks": [ReferenceCollector(registry)]})``.

    Args:
        registry: where to; the process's own by default.
        namespace: whose the documents are.
    """

    # Inline handlers would keep others from being told of completions that are awaited.
    run_inline = False
    ignore_chain = True
    ignore_llm = True
    ignore_chat_model = True
    ignore_agent = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self, registry: ReferenceRegistry | None = None, namespace: str = "") -> None:
        super().__init__()
        self.registry, self.namespace = registry, namespace

    def on_retriever_end(
        self,
        documents: Sequence[Document],
        *,
        run_id: UUID,  # noqa: ARG002
        parent_run_id: UUID | None = None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Register documents. What goes wrong is logged: no chain shall fail for this."""
        try:
            self._register(documents)
        except Exception:
            logger.warning("retrieved documents were not registered", exc_info=True)

    def _register(self, documents: Sequence[Document]) -> None:
        from ragaccel import auto_references_enabled, default_registry

        from langchain_ragaccel.documents import as_passage

        if not auto_references_enabled():
            return
        registry = default_registry() if self.registry is None else self.registry
        registry.register([as_passage(document) for document in documents], self.namespace)


_COLLECTOR: ContextVar[BaseCallbackHandler | None] = ContextVar(
    "ragaccel_references",
    default=ReferenceCollector(),  # noqa: B039 - the one handler of the process, which has no state
)


def install() -> None:
    """Attach one collector to every run of the process; done by importing ``langchain_ragaccel``.

    Modules are imported once, and so this is done once.
    """
    register_configure_hook(_COLLECTOR, inheritable=True)
