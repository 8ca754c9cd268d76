"""Collecting: a callback handler that registers what retrievers find, as references."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from langchain_core.callbacks.base import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from uuid import UUID

    from langchain_core.documents import Document
    from ragaccel import Passage, ReferenceRegistry, ReferenceScope

logger = logging.getLogger(__name__)


class _Collector(BaseCallbackHandler):
    """Is told of what retrievers find, and of nothing else."""

    # Inline handlers would keep others from being told of completions that are awaited.
    run_inline = False
    ignore_chain = True
    ignore_llm = True
    ignore_chat_model = True
    ignore_agent = True
    ignore_retry = True
    ignore_custom_event = True

    def on_retriever_end(
        self,
        documents: Sequence[Document],
        *,
        run_id: UUID,  # noqa: ARG002
        parent_run_id: UUID | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Register documents. What goes wrong is logged: no chain shall fail for this."""
        from ragaccel import auto_references_enabled

        if self.is_in_charge and auto_references_enabled():
            for document in documents:
                self._register(document, is_alone=parent_run_id is None)

    def _register(self, document: Document, *, is_alone: bool) -> None:
        from langchain_ragaccel.documents import as_passage

        try:
            self._keep(as_passage(document), is_alone=is_alone)
        except Exception:
            logger.warning("a retrieved document was not registered", exc_info=True)

    @property
    def is_in_charge(self) -> bool:
        """Whether it is to register anything now."""
        return True

    def _keep(self, passage: Passage, *, is_alone: bool) -> None:
        raise NotImplementedError


class ReferenceCollector(_Collector):
    """Registers the documents of every retriever that it is told of.

    A tenant with a registry of its own collects into it with :func:`collecting_into`. One that is
    passed to a chain, ``chain.invoke(x, {"callbacks": [ReferenceCollector(registry)]})``, works
    beside what every chain does for itself.

    Args:
        registry: where to; the process's own by default.
        namespace: whose the documents are.
    """

    def __init__(self, registry: ReferenceRegistry | None = None, namespace: str = "") -> None:
        super().__init__()
        self.registry, self.namespace = registry, namespace

    def _keep(self, passage: Passage, *, is_alone: bool) -> None:  # noqa: ARG002
        self.destination.register(passage, self.namespace)

    @property
    def destination(self) -> ReferenceRegistry:
        """Where documents are registered."""
        from ragaccel import default_registry

        return default_registry() if self.registry is None else self.registry


class _ContextCollector(ReferenceCollector):
    """The collector of a context, in place of what the runs in it would do.

    Runs that began before still have the earlier one among their handlers.
    """

    @property
    def is_in_charge(self) -> bool:
        """Whether no other collector has taken its place."""
        return _COLLECTOR.get() in (self, None)

    def _register(self, document: Document, *, is_alone: bool) -> None:
        if not _is_apart(document):
            super()._register(document, is_alone=is_alone)


class RunCollector(_Collector):
    """Keeps what is retrieved below one root run, for the models below it.

    LangChain hands the handlers of a root run down to all runs below it, through threads, tasks
    and graphs, and to no other: whoever has this one among its handlers is of the same root. With
    the last of those runs it is gone, and what was retrieved with it.

    The exception is a callback manager that a program configures itself: LangChain hands its
    handlers to every root run that is called with it. A collector of such a manager is found among
    a run's handlers before any event was sent to it; it is *shared* from then on and keeps nothing,
    and every root run gets one of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scope: ReferenceScope | None = None  # most runs retrieve nothing
        self._has_begun = self._is_shared = False

    @property
    def scope(self) -> ReferenceScope | None:
        """What was retrieved, if anything was."""
        return self._scope

    @property
    def is_in_charge(self) -> bool:
        """Whether this is a run's own collector, and no collector of a context is in its place."""
        return not self._is_shared and _COLLECTOR.get() is None

    @property
    def is_shared(self) -> bool:
        """Whether it came with a manager that several root runs may be called with."""
        return self._is_shared

    def belongs_to_run(self) -> bool:
        """Return whether a run has begun with this collector; else note that it is shared."""
        self._is_shared |= not self._has_begun
        return not self._is_shared

    def _ignore(self) -> bool:
        # LangChain asks before it sends any event: the first time, the root run begins. To take the
        # events themselves would cost asyncio a thread for each.
        self._has_begun = True
        return True

    def _listen(self) -> bool:
        return not self._ignore()

    ignore_chain = ignore_llm = ignore_chat_model = ignore_agent = property(_ignore)
    ignore_retriever = property(_listen)

    def _register(self, document: Document, *, is_alone: bool) -> None:
        if not _is_apart(document):
            super()._register(document, is_alone=is_alone)

    def _keep(self, passage: Passage, *, is_alone: bool) -> None:
        from ragaccel import ReferenceScope, current_scope, default_registry

        if (here := current_scope()) is not None:
            here.register(passage)
            return
        # A retriever may be a root only since it was called with callbacks of its own.
        home = next(run_collectors(callbacks_here()), None) if is_alone else self
        if home is None:  # it is asked by hand: it is not known who will ask next
            default_registry().register(passage)
            return
        with _MAKING:
            home._scope = home._scope or ReferenceScope()
        home._scope.register(passage)


class _OfEachRoot:
    """Stands where LangChain has the context variable of a handler: a new one for each root run.

    LangChain adds what it gets from here where no handler is a :class:`_RunsOwn`.
    """

    def get(self) -> RunCollector:
        return RunCollector()


class _IsRunsOwn(type):
    def __instancecheck__(cls, handler: object) -> bool:
        return isinstance(handler, RunCollector) and handler.belongs_to_run()


class _RunsOwn(BaseCallbackHandler, metaclass=_IsRunsOwn):
    """The class of the collectors that belong to a run that has begun."""


_apart: WeakValueDictionary[int, Document] = WeakValueDictionary()
_COLLECTOR: ContextVar[BaseCallbackHandler | None] = ContextVar("ragaccel_references", default=None)
_MAKING = Lock()


def keep_from_collectors(documents: Iterable[Document]) -> None:
    """Let neither runs nor contexts register documents: their store has, where nobody else looks.

    They are known as the objects they are, through chains and retrievers that hand them on.
    """
    _apart.update((id(document), document) for document in documents)


def _is_apart(document: Document) -> bool:
    return _apart.get(id(document)) is document


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


def keep_found_by_hand(passages: Sequence[Passage], callbacks: Any, namespace: str = "") -> None:
    """Register what a store found without an event: where its context or its run collects.

    Args:
        passages: what was found.
        callbacks: those of the run that asks, if any does.
        namespace: the store's own, if it has one.
    """
    from ragaccel import default_registry

    collector = _COLLECTOR.get()
    if isinstance(collector, ReferenceCollector):
        collector.destination.register(passages, namespace or collector.namespace)
        return
    if namespace:
        default_registry().register(passages, namespace)
        return
    above = next(run_collectors(callbacks), None)
    for passage in passages:
        (above or RunCollector())._keep(passage, is_alone=above is None)


def callbacks_here() -> Any:
    """The callbacks of the run that this is called in, where LangChain's context tells."""
    return (var_child_runnable_config.get() or {}).get("callbacks")


def run_collectors(callbacks: Any) -> Iterator[RunCollector]:
    """The collectors of the root run that handed callbacks down: a manager, or its handlers."""
    for handler in getattr(callbacks, "handlers", callbacks) or ():
        if isinstance(handler, RunCollector) and not handler.is_shared:
            yield handler


def install() -> None:
    """Attach a collector to every root run; done by importing ``langchain_ragaccel``.

    Modules are imported once, and so this is done once.
    """
    register_configure_hook(_COLLECTOR, inheritable=True)
    each: Any = _OfEachRoot()
    register_configure_hook(each, inheritable=True, handle_class=_RunsOwn)
