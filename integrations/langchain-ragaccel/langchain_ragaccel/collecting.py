"""Collecting: a callback handler that registers what retrievers find, as references."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from langchain_core.callbacks.base import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from uuid import UUID

    from langchain_core.documents import Document
    from ragaccel import ReferenceRegistry

logger = logging.getLogger(__name__)


class ReferenceCollector(BaseCallbackHandler):
    """Registers the documents of every retriever that it is told of.

    One is attached to everything by the import of ``langchain_ragaccel``; a tenant with a registry
    of its own puts another in its place with :func:`collecting_into`. One that is passed to a
    chain, ``chain.invoke(x, {"callbacks": [ReferenceCollector(registry)]})``, works beside those.

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
        from ragaccel import auto_references_enabled

        if self.is_in_charge and auto_references_enabled():
            for document in documents:
                self._register(document)

    def _register(self, document: Document) -> None:
        from langchain_ragaccel.documents import as_passage

        try:
            self.destination.register(as_passage(document), self.namespace)
        except Exception:
            logger.warning("a retrieved document was not registered", exc_info=True)

    @property
    def is_in_charge(self) -> bool:
        """Whether it is to register anything now."""
        return True

    @property
    def destination(self) -> ReferenceRegistry:
        """Where documents are registered."""
        from ragaccel import default_registry

        return default_registry() if self.registry is None else self.registry


class _ContextCollector(ReferenceCollector):
    """The collector of a context: the process's own, until another takes its place.

    Runs that began before still have the earlier one among their handlers.
    """

    @property
    def is_in_charge(self) -> bool:
        """Whether no other collector has taken its place."""
        return _COLLECTOR.get() in (self, _OF_PROCESS)

    def _register(self, document: Document) -> None:
        if _apart.get(id(document)) is not document:
            super()._register(document)


_apart: WeakValueDictionary[int, Document] = WeakValueDictionary()
_OF_PROCESS = _ContextCollector()
_COLLECTOR: ContextVar[BaseCallbackHandler | None] = ContextVar(
    "ragaccel_references",
    default=_OF_PROCESS,
)


def keep_from_collectors(documents: Iterable[Document]) -> None:
    """Let no context's collector register documents: their store has, where nobody else looks.

    They are known as the objects they are, through chains and retrievers that hand them on.
    """
    _apart.update((id(document), document) for document in documents)


@contextmanager
def collecting_into(
    registry: ReferenceRegistry | None = None, namespace: str = ""
) -> Iterator[ReferenceCollector]:
    """Register what is retrieved inside of ``with`` here, and in no other place.

    >>> with collecting_into(registry, "tenant 7"):
    ...     chain.invoke(question)  # with ChatRagaccel(registry=registry, namespace="tenant 7")

    It holds for the context it is entered in: for what is called from there, for tasks and for
    LangChain's threads that begin there; not for threads of your own, which enter it themselves.

    Args:
        registry: where to; the process's own by default.
        namespace: whose the documents are.
    """
    collector = _ContextCollector(registry, namespace)
    before = _COLLECTOR.set(collector)
    try:
        yield collector
    finally:
        _COLLECTOR.reset(before)


def current_collector() -> ReferenceCollector:
    """The collector of the present context."""
    collector = _COLLECTOR.get()
    return collector if isinstance(collector, ReferenceCollector) else _OF_PROCESS


def install() -> None:
    """Attach one collector to every run of the process; done by importing ``langchain_ragaccel``.

    Modules are imported once, and so this is done once.
    """
    register_configure_hook(_COLLECTOR, inheritable=True)
