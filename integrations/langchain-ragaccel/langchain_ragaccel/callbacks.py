"""Collecting: a callback handler that registers what retrievers find, as references."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from langchain_core.callbacks.base import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from langchain_ragaccel.documents import content_id

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableConfig
    from ragaccel import Passage
    from ragaccel.frameworks import ReferenceRegistry, ReferenceScope


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
        from ragaccel.frameworks import auto_references_enabled

        if self.is_active and auto_references_enabled():
            for document in documents:
                self._register(document, is_root=parent_run_id is None)

    def _register(self, document: Document, *, is_root: bool) -> None:
        from langchain_ragaccel.documents import as_passage

        try:
            self._register_passage(as_passage(document), is_root=is_root)
        except Exception:
            logger.warning("a retrieved document was not registered", exc_info=True)

    @property
    def is_active(self) -> bool:
        """Whether it is to register anything now."""
        return True

    def _register_passage(self, passage: Passage, *, is_root: bool) -> None:
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

    def _register_passage(self, passage: Passage, *, is_root: bool) -> None:  # noqa: ARG002
        self.destination.register(passage, self.namespace)

    @property
    def destination(self) -> ReferenceRegistry:
        """Where documents are registered."""
        from ragaccel.frameworks import default_registry

        return default_registry() if self.registry is None else self.registry


class _ContextCollector(ReferenceCollector):
    """The collector of a context, in place of what the runs in it would do.

    Runs that began before still have the earlier one among their handlers.
    """

    @property
    def is_active(self) -> bool:
        """Whether no other collector has taken its place."""
        return _COLLECTOR.get() in (self, None)

    def _register(self, document: Document, *, is_root: bool) -> None:
        if not _is_excluded(document):
            super()._register(document, is_root=is_root)


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
        self._has_started = self._is_shared = False

    @property
    def scope(self) -> ReferenceScope | None:
        """What was retrieved, if anything was."""
        return self._scope

    @property
    def is_active(self) -> bool:
        """Whether this is a run's own collector, and no collector of a context is in its place."""
        return not self._is_shared and _COLLECTOR.get() is None

    @property
    def is_shared(self) -> bool:
        """Whether it came with a manager that several root runs may be called with."""
        return self._is_shared

    def belongs_to_run(self) -> bool:
        """Return whether a run has begun with this collector; else note that it is shared."""
        self._is_shared |= not self._has_started
        return not self._is_shared

    def _ignore_event(self) -> bool:
        # LangChain asks before it sends any event: the first time, the root run begins. To take the
        # events themselves would cost asyncio a thread for each.
        self._has_started = True
        return True

    def _ignore_retriever(self) -> bool:
        return not self._ignore_event()

    ignore_chain = ignore_llm = ignore_chat_model = ignore_agent = property(_ignore_event)
    ignore_retriever = property(_ignore_retriever)

    def _register(self, document: Document, *, is_root: bool) -> None:
        if not _is_excluded(document):
            super()._register(document, is_root=is_root)

    def _register_passage(self, passage: Passage, *, is_root: bool) -> None:
        from ragaccel.frameworks import ReferenceScope, current_scope, default_registry

        if (here := current_scope()) is not None:
            here.register(passage)
            return
        # A retriever may be a root only since it was called with callbacks of its own.
        owner = next(run_collectors(current_callbacks()), None) if is_root else self
        if owner is None:  # it is asked by hand: it is not known who will ask next
            default_registry().register(passage)
            return
        with _SCOPE_LOCK:
            owner._scope = owner._scope or ReferenceScope()
        owner._scope.register(passage)


class _PerRootRunCollector:
    """Stands where LangChain has the context variable of a handler: a new one for each root run.

    LangChain adds what it gets from here where no handler is a :class:`_StartedCollector`.
    """

    def get(self) -> RunCollector:
        return RunCollector()


class _StartedCollectorMeta(type):
    def __instancecheck__(cls, handler: object) -> bool:
        return isinstance(handler, RunCollector) and handler.belongs_to_run()


class _StartedCollector(BaseCallbackHandler, metaclass=_StartedCollectorMeta):
    """The class of the collectors that belong to a run that has begun."""


_excluded_documents: WeakValueDictionary[int, Document] = WeakValueDictionary()
_COLLECTOR: ContextVar[BaseCallbackHandler | None] = ContextVar("ragaccel_references", default=None)
_SCOPE_LOCK = Lock()


def exclude_from_collectors(documents: Iterable[Document]) -> None:
    """Let neither runs nor contexts register documents: their store has, where nobody else looks.

    They are known as the objects they are, through chains and retrievers that hand them on.
    """
    _excluded_documents.update((id(document), document) for document in documents)


def _is_excluded(document: Document) -> bool:
    return _excluded_documents.get(id(document)) is document


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


def register_search_results(
    passages: Sequence[Passage], callbacks: Any, namespace: str = ""
) -> None:
    """Register what a store found without an event: where its context or its run collects.

    Args:
        passages: what was found.
        callbacks: those of the run that asks, if any does.
        namespace: the store's own, if it has one.
    """
    from ragaccel.frameworks import default_registry

    collector = _COLLECTOR.get()
    if isinstance(collector, ReferenceCollector):
        collector.destination.register(passages, namespace or collector.namespace)
        return
    if namespace:
        default_registry().register(passages, namespace)
        return
    above = next(run_collectors(callbacks), None)
    for passage in passages:
        (above or RunCollector())._register_passage(passage, is_root=above is None)


def current_callbacks() -> Any:
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
    each: Any = _PerRootRunCollector()
    register_configure_hook(each, inheritable=True, handle_class=_StartedCollector)


Piece = TypeVar("Piece")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks a model: what its root run retrieved, and the run right above the model's own."""

    scopes: tuple[ReferenceScope, ...] = ()
    run: UUID | None = None


_CURRENT_CALLER: ContextVar[Caller] = ContextVar("ragaccel_caller", default=Caller())  # noqa: B039

_PROMPT_CALLERS: ContextVar[Mapping[str, Sequence[Caller]]] = ContextVar(
    "ragaccel_asking",
    default={},  # noqa: B039 - it stays empty
)


def caller_from_callbacks(callbacks: Any) -> Caller:
    """Return whoever handed callbacks down: a run manager, a manager, a list of handlers or None.

    LangChain's own context tells of the run above, too: a call with callbacks of its own, in the
    middle of a chain or a graph, is handed none of those of the run that makes it.
    """
    here = current_callbacks()
    callbacks = here if callbacks is None else callbacks
    found = (one.scope for each in (callbacks, here) for one in run_collectors(each))
    scopes = dict.fromkeys(scope for scope in found if scope is not None)
    return Caller(tuple(scopes), getattr(callbacks, "parent_run_id", None))


def caller_from_config(config: RunnableConfig | None) -> Caller:
    """Return whoever calls with a config."""
    return caller_from_callbacks((config or {}).get("callbacks"))


def callbacks_from_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The callbacks among a call's arguments, where they may be the first or have their name."""
    return args[0] if args else kwargs.get("callbacks")


@contextmanager
def use_prompt_callers(prompts: Sequence[str], callbacks: Any) -> Iterator[None]:
    """Let :func:`callers_for_prompts` know who asks each of several prompts.

    Args:
        prompts: all of one call.
        callbacks: those of all prompts, or a list with those of each.
    """
    is_list = isinstance(callbacks, list) and bool(callbacks)
    if is_list and (callbacks[0] is None or isinstance(callbacks[0], list | BaseCallbackManager)):
        callers = [caller_from_callbacks(each) for each in callbacks]
    else:
        callers = [caller_from_callbacks(callbacks)] * len(prompts)
    by_prompt: dict[str, list[Caller]] = {}
    for prompt, caller in zip(prompts, callers, strict=False):
        by_prompt.setdefault(prompt, []).append(caller)
    scopes = tuple(dict.fromkeys(scope for caller in callers for scope in caller.scopes))
    before = _PROMPT_CALLERS.set(by_prompt)
    try:
        with use_caller(Caller(scopes)):
            yield
    finally:
        _PROMPT_CALLERS.reset(before)


def callers_for_prompts(prompts: Sequence[str]) -> list[Caller]:
    """Return whoever asks each of these prompts, which are all of a call or those not cached.

    Where it is not sure who asks, it is nobody.
    """
    by_prompt, remaining = _PROMPT_CALLERS.get(), Counter(prompts)
    callers = {
        prompt: iter(by_prompt.get(prompt, ()))
        if len(by_prompt.get(prompt, ())) == count or len(set(by_prompt.get(prompt, ()))) == 1
        else iter(())
        for prompt, count in remaining.items()
    }
    return [next(callers[prompt], Caller()) for prompt in prompts]


def current_caller() -> Caller:
    """Return whoever asks now, inside of :func:`use_caller`."""
    return _CURRENT_CALLER.get()


@contextmanager
def use_caller(caller: Caller) -> Iterator[None]:
    """Let ``current_caller`` be this one."""
    before = _CURRENT_CALLER.set(caller)
    try:
        yield
    finally:
        _CURRENT_CALLER.reset(before)


def iterate_as_caller(caller: Caller, pieces: Iterator[Piece]) -> Generator[Piece, None, None]:
    """Iterate pieces, each made for a caller; between two of them nothing of this is seen."""
    with closing(pieces):  # type: ignore[type-var]
        while True:
            with use_caller(caller):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece


class CallerGenerator(AsyncGenerator[Piece, Any]):
    """KGrams for asyncio, each made for a caller as :func:`iterate_as_caller` does.

    It is no generator function's, since an event loop that shuts down closes all of those at once,
    and complains of one that the one around it is closing already.
    """

    def __init__(self, caller: Caller, pieces: AsyncGenerator[Piece, Any]) -> None:
        self._caller, self._pieces = caller, pieces

    async def asend(self, value: Any) -> Piece:
        """Go on to the next piece."""
        with use_caller(self._caller):
            return await self._pieces.asend(value)

    async def athrow(self, *error: Any) -> Piece:
        """Raise an error where the pieces are made."""
        with use_caller(self._caller):
            return await self._pieces.athrow(*error)

    async def aclose(self) -> None:
        """End it."""
        await self._pieces.aclose()


_MAX_TREES = 1024  # at one time: the oldest are given up, since some are left before their end
_MAX_DOCUMENTS = 64  # of one run, the newest


@dataclass(slots=True)
class _Tree:
    """The runs below one root, and what was retrieved below each."""

    parents: dict[UUID, UUID | None] = field(default_factory=dict)
    documents: dict[UUID, OrderedDict[str, Document]] = field(default_factory=dict)

    def ancestors(self, run: UUID | None) -> Iterator[UUID]:
        """A run and those above it, nearest first."""
        while run is not None:
            yield run
            run = self.parents.get(run)


class RunTree:
    """Runs that have begun and whose root has not ended. Bounded, and safe from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._trees: OrderedDict[UUID, _Tree] = OrderedDict()
        self._root_of: dict[UUID, UUID] = {}

    def __len__(self) -> int:
        """Count the runs that are known."""
        return len(self._root_of)

    def start(self, run: UUID, parent: UUID | None) -> None:
        """Note a run that others may be below."""
        with self._lock:
            root = run if parent is None else self._root_of.get(parent, run)
            tree = self._trees.setdefault(root, _Tree())
            tree.parents[run] = None if run == root else parent
            self._root_of[run] = root
            if len(self._trees) > _MAX_TREES:
                self._forget(next(iter(self._trees)))

    def add_documents(self, run: UUID, documents: Sequence[Document]) -> None:
        """Note what a run retrieved, for every run above it."""
        with self._lock:
            tree = self._trees.get(self._root_of.get(run, run), _Tree())
            for ancestor in tree.ancestors(tree.parents.get(run)):
                known = tree.documents.setdefault(ancestor, OrderedDict())
                for document in documents:
                    known[content_id(document.page_content)] = document
                    known.move_to_end(content_id(document.page_content))
                while len(known) > _MAX_DOCUMENTS:
                    known.popitem(last=False)

    def end(self, run: UUID) -> None:
        """Note that a run ended; with a root all that is known below it is forgotten."""
        with self._lock:
            root = self._root_of.get(run)
            if root is None:
                return
            if run == root:
                self._forget(root)

    def retrieved_below(self, run: UUID | None) -> list[Document]:
        """What was retrieved below a run, or the nearest one above it, newest first.

        Args:
            run: the one right above an answer's own.
        """
        if run is None:
            return []
        with self._lock:
            tree = self._trees.get(self._root_of.get(run, run), _Tree())
            for ancestor in tree.ancestors(run):
                if found := tree.documents.get(ancestor):
                    return list(reversed(found.values()))
            return []

    def _forget(self, root: UUID) -> None:
        for run in self._trees.pop(root).parents:
            del self._root_of[run]


class RunTreeHandler(BaseCallbackHandler):
    """Notes every run in a ``RunTree``. What goes wrong is logged: no chain shall fail for this."""

    # Inline handlers would keep others from being told of completions that are awaited. Agents are
    # not ignored, since that would hide tools as well.
    run_inline = False
    ignore_llm = True
    ignore_chat_model = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self, tree: RunTree) -> None:
        super().__init__()
        self.tree = tree

    def on_chain_start(self, *_: Any, **event: Any) -> None:
        """Note a run that others may be below."""
        self._log_errors(lambda: self.tree.start(event["run_id"], event.get("parent_run_id")))

    on_tool_start = on_retriever_start = on_chain_start

    def on_retriever_end(self, *args: Any, **event: Any) -> None:
        """Note what was retrieved, and the run's end."""
        self._log_errors(lambda: self.tree.add_documents(event["run_id"], args[0]))
        self.on_chain_end(**event)

    def on_chain_end(self, *_: Any, **event: Any) -> None:
        """Note a run's end, good or bad."""
        self._log_errors(lambda: self.tree.end(event["run_id"]))

    on_chain_error = on_tool_end = on_tool_error = on_retriever_error = on_chain_end

    def _log_errors(self, record: Callable[[], None]) -> None:
        try:
            record()
        except Exception:
            logger.warning("a run was not noted", exc_info=True)


_TREE = RunTree()
_HANDLER: ContextVar[BaseCallbackHandler | None] = ContextVar(
    "ragaccel_run_tree",
    default=RunTreeHandler(_TREE),  # noqa: B039 - the one of the process
)


@cache
def install_run_tree() -> None:
    """Follow every run of the process from now on; once, however often it is asked for."""
    register_configure_hook(_HANDLER, inheritable=True)


def retrieved_documents(run: UUID | None) -> list[Document]:
    """What was retrieved on the way to an answer, whose caller's run is this one, if it has one."""
    return _TREE.retrieved_below(run)
