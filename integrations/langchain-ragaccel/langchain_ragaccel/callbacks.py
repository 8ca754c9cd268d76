"""Callback handlers that register retrieved documents as references."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from langchain_core.callbacks.base import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from ragaccel.frameworks import use_context

from langchain_ragaccel.convert import as_passage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from uuid import UUID

    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableConfig
    from ragaccel import Passage
    from ragaccel.frameworks import ReferenceRegistry, ReferenceScope


logger = logging.getLogger(__name__)


class _Collector(BaseCallbackHandler):
    """A callback handler that registers retrieved documents and ignores all other events."""

    # An inline handler would delay the other handlers of awaited completions.
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
        """Register documents; log errors, so that no chain fails because of them."""
        from ragaccel.frameworks import auto_references_enabled

        if auto_references_enabled():
            for document in documents:
                self._try_to_collect(document, is_root=parent_run_id is None)

    def _try_to_collect(self, document: Document, *, is_root: bool) -> None:
        try:
            self._collect(document, is_root=is_root)
        except Exception:
            logger.warning(
                "a retrieved document was not registered as a reference; answers stay the same, "
                "but copying from it is not faster",
                exc_info=True,
            )

    def _collect(self, document: Document, *, is_root: bool) -> None:
        raise NotImplementedError


class ReferenceCollector(_Collector):
    """A callback handler that registers the documents of all retrievers it receives events from.

    To isolate a tenant, use :func:`collecting_into`. A handler passed to a chain,
    ``chain.invoke(x, {"callbacks": [ReferenceCollector(registry)]})``, registers documents in
    addition to what each run collects for itself.

    Args:
        registry: The registry; by default that of the process.
        namespace: The tenant whose documents these are.
    """

    def __init__(self, registry: ReferenceRegistry | None = None, namespace: str = "") -> None:
        super().__init__()
        self.registry, self.namespace = registry, namespace

    def _collect(self, document: Document, *, is_root: bool) -> None:  # noqa: ARG002
        self.destination.register(as_passage(document), self.namespace)

    @property
    def destination(self) -> ReferenceRegistry:
        """Return the registry that documents go to."""
        from ragaccel.frameworks import default_registry

        return default_registry() if self.registry is None else self.registry


class _ContextCollector(ReferenceCollector):
    """The collector of a :func:`collecting_into` block, which replaces those of the runs inside.

    Runs that started before the block still have the earlier collector among their handlers.
    """

    def _collect(self, document: Document, *, is_root: bool) -> None:
        if _COLLECTOR.get() in (self, None) and not _is_excluded(document):
            super()._collect(document, is_root=is_root)


class RunCollector(_Collector):
    """A collector of the documents retrieved below one root run, for the models below it.

    LangChain passes the handlers of a root run to all runs below it, through threads, tasks and
    graphs, and to no other run. Runs that have this collector among their handlers therefore have
    the same root. It is freed with the last of them, together with the documents.

    A callback manager that a program configures itself is the exception: LangChain passes its
    handlers to every root run that uses it. Such a collector is among a run's handlers before it
    has received any event. It is then marked as shared and collects nothing, and every root run
    gets a new one.

    Attributes:
        scope: What was retrieved for this run alone, or None if nothing was.
        is_shared: Whether it belongs to a callback manager that several root runs may use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scope: ReferenceScope | None = None  # created on demand: most runs retrieve nothing
        self.is_shared = self._has_started = False

    def belongs_to_run(self) -> bool:
        """Return whether a run has started with this collector; if not, mark it as shared."""
        self.is_shared |= not self._has_started
        return not self.is_shared

    def register(self, passages: Sequence[Passage]) -> None:
        """Register passages for this run."""
        from ragaccel.frameworks import ReferenceScope

        with _SCOPE_LOCK:
            self.scope = self.scope or ReferenceScope()
        self.scope.register(passages)

    def _ignore_event(self) -> bool:
        # LangChain reads this before it sends an event, the first time when the root run starts.
        # Handling the events themselves would cost a thread for each under asyncio.
        self._has_started = True
        return True

    def _ignore_retriever(self) -> bool:
        return not self._ignore_event()

    ignore_chain = ignore_llm = ignore_chat_model = ignore_agent = property(_ignore_event)
    ignore_retriever = property(_ignore_retriever)

    def _collect(self, document: Document, *, is_root: bool) -> None:
        if self.is_shared:
            return
        # A retriever called with its own callbacks is a root run inside of another run.
        owner = next(run_collectors(current_callbacks()), None) if is_root else self
        if _COLLECTOR.get() is None and not _is_excluded(document):
            _register_for_run([as_passage(document)], owner)


def _register_for_run(passages: Sequence[Passage], owner: RunCollector | None) -> None:
    """Register passages in the current scope, else for a run, else for the process."""
    from ragaccel.frameworks import current_scope, default_registry

    if (here := current_scope()) is not None:
        here.register(passages)
    elif owner is not None:
        owner.register(passages)
    else:
        default_registry().register(passages)


class _PerRootRunCollector:
    """A substitute for a handler's context variable that gives each root run a new collector.

    LangChain adds the collector to a run that has no handler of :class:`_StartedCollector`.
    """

    def get(self) -> RunCollector:
        return RunCollector()


class _StartedCollectorMeta(type):
    def __instancecheck__(cls, handler: object) -> bool:
        return isinstance(handler, RunCollector) and handler.belongs_to_run()


class _StartedCollector(BaseCallbackHandler, metaclass=_StartedCollectorMeta):
    """A class whose ``isinstance`` is true for collectors that belong to a started run."""


_excluded_documents: WeakValueDictionary[int, Document] = WeakValueDictionary()
_COLLECTOR: ContextVar[BaseCallbackHandler | None] = ContextVar("ragaccel_references", default=None)
_SCOPE_LOCK = Lock()


def exclude_from_collectors(documents: Iterable[Document]) -> None:
    """Exclude documents from collection by runs and contexts: their store registered them itself.

    Documents are recognized by identity when chains and retrievers pass them on.
    """
    _excluded_documents.update((id(document), document) for document in documents)


def _is_excluded(document: Document) -> bool:
    return _excluded_documents.get(id(document)) is document


@contextmanager
def collecting_into(
    registry: ReferenceRegistry | None = None, namespace: str = ""
) -> Iterator[ReferenceCollector]:
    """Register documents retrieved inside a ``with`` block in this registry only.

    >>> with collecting_into(registry, "tenant 7"):
    ...     chain.invoke(question)  # with ChatRagaccel(registry=registry, namespace="tenant 7")

    The block covers the context in which it is entered: code called there, and tasks and
    LangChain's threads started there. Other threads must enter a block of their own.

    Args:
        registry: The registry; by default that of the process.
        namespace: The tenant whose documents these are.

    Yields:
        The collector.
    """
    collector = _ContextCollector(registry, namespace)
    with use_context(_COLLECTOR, collector):
        yield collector


def register_search_results(
    passages: Sequence[Passage], callbacks: Any, namespace: str = ""
) -> None:
    """Register the results of a direct search, in the current context's or run's registry.

    Args:
        passages: The search results.
        callbacks: The callbacks of the current run, or None.
        namespace: The store's namespace, or an empty text.
    """
    from ragaccel.frameworks import default_registry

    collector = _COLLECTOR.get()
    if isinstance(collector, ReferenceCollector):
        collector.destination.register(passages, namespace or collector.namespace)
        return
    if namespace:
        default_registry().register(passages, namespace)
        return
    _register_for_run(passages, next(run_collectors(callbacks), None))


def current_callbacks() -> Any:
    """Return the callbacks of the current run, from LangChain's context."""
    return (var_child_runnable_config.get() or {}).get("callbacks")


def run_collectors(callbacks: Any) -> Iterator[RunCollector]:
    """Yield the root run's collectors among callbacks: a manager, or a list of handlers."""
    for handler in getattr(callbacks, "handlers", callbacks) or ():
        if isinstance(handler, RunCollector) and not handler.is_shared:
            yield handler


def install() -> None:
    """Attach a collector to every root run; importing ``langchain_ragaccel`` does this once."""
    register_configure_hook(_COLLECTOR, inheritable=True)
    each: Any = _PerRootRunCollector()
    register_configure_hook(each, inheritable=True, handle_class=_StartedCollector)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a model: the collectors of its root run."""

    collectors: tuple[RunCollector, ...] = ()

    @property
    def scopes(self) -> tuple[ReferenceScope, ...]:
        """Return what the root run retrieved, to be searched in prompts."""
        return tuple(one.scope for one in self.collectors if one.scope is not None)


CURRENT_CALLER: ContextVar[Caller] = ContextVar("ragaccel_caller", default=Caller())  # noqa: B039

_PROMPT_CALLERS: ContextVar[Mapping[str, Sequence[Caller]]] = ContextVar(
    "ragaccel_asking",
    default={},  # noqa: B039 - it stays empty
)


def caller_from_callbacks(callbacks: Any) -> Caller:
    """Return the caller that passed callbacks.

    Use LangChain's context as well: a call with its own callbacks inside a chain or a graph does
    not get those of the calling run.

    Args:
        callbacks: A run manager, a callback manager, a list of handlers or None.
    """
    here = current_callbacks()
    found = (one for each in (callbacks, here) for one in run_collectors(each))
    return Caller(tuple(dict.fromkeys(found)))


def caller_from_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Caller:
    """Return the caller that passed a call's arguments: callbacks are the first, or named."""
    return caller_from_callbacks(_callbacks_among(args, kwargs))


def _callbacks_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("callbacks")


def as_caller(config: RunnableConfig | None) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that enters the context in which a config's caller is the current one."""
    caller = caller_from_callbacks((config or {}).get("callbacks"))
    return partial(use_context, CURRENT_CALLER, caller)


@contextmanager
def use_prompt_callers(
    prompts: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Set the callers that :func:`callers_for_prompts` returns inside the block.

    Args:
        prompts: All prompts of one call.
        args: Its further arguments, with the callbacks of all prompts or a list of those of each.
        kwargs: Its named arguments.
    """
    callbacks = _callbacks_among(args, kwargs)
    is_list = isinstance(callbacks, list) and bool(callbacks)
    if is_list and (callbacks[0] is None or isinstance(callbacks[0], list | BaseCallbackManager)):
        callers = [caller_from_callbacks(each) for each in callbacks]
    else:
        callers = [caller_from_callbacks(callbacks)] * len(prompts)
    by_prompt: dict[str, list[Caller]] = {}
    for prompt, caller in zip(prompts, callers, strict=False):
        by_prompt.setdefault(prompt, []).append(caller)
    everyone = Caller(tuple(dict.fromkeys(one for each in callers for one in each.collectors)))
    with use_context(_PROMPT_CALLERS, by_prompt), use_context(CURRENT_CALLER, everyone):
        yield


def callers_for_prompts(prompts: Sequence[str]) -> list[Caller]:
    """Return the caller of each prompt; the prompts are those of a call that are not cached.

    Return an empty caller if several callers have the same prompt and some are cached.
    """
    by_prompt, remaining = _PROMPT_CALLERS.get(), Counter(prompts)
    callers = {
        prompt: iter(by_prompt.get(prompt, ()))
        if len(by_prompt.get(prompt, ())) == count or len(set(by_prompt.get(prompt, ()))) == 1
        else iter(())
        for prompt, count in remaining.items()
    }
    return [next(callers[prompt], Caller()) for prompt in prompts]
