"""Callers: the root span that a call is made in, and what was retrieved in it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from threading import get_ident
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler

from ragaccel import ReferenceScope

if TYPE_CHECKING:
    import inspect
    from collections.abc import AsyncGenerator, Generator, Iterator


class Root:
    """A span with none above it, and what is retrieved in it.

    It lives as long as a context does in which it was entered, or one that was copied from such:
    those of its threads and tasks, and of what is left to be read of its stream.
    """

    def __init__(self, span_id: str, *, leaves_span: bool) -> None:
        self.span_id = span_id
        self.scope = ReferenceScope()
        self.has_ended = False
        self._home = _place()
        self._leaves_span = leaves_span

    def holds(self, parent_id: str) -> bool:
        """Whether a span that is entered here, below another, belongs to this root.

        A workflow is run in tasks. Its ``run`` returns at once and leaves its span behind as the
        active one, where whatever is called next is none of the workflow's.
        """
        if self.has_ended:
            return False
        return not (self._leaves_span and parent_id == self.span_id and _place() == self._home)

    def exit(self) -> None:
        """Note the span's end, if it left itself behind as the active one."""
        self.has_ended = self._leaves_span


_ROOT: ContextVar[Root | None] = ContextVar("ragaccel_root", default=None)
_FOLLOWED: ContextVar[Root | None] = ContextVar("ragaccel_followed", default=None)
_ROOTS: WeakValueDictionary[str, Root] = WeakValueDictionary()
_READ: WeakSet[Any] = WeakSet()  # streams that are read for a root


def current_root() -> Root | None:
    """Return the root span that this is called in, if there is one."""
    return None if active_span_id.get() is None else _ROOT.get()


class RootSpans(BaseSpanHandler[BaseSpan]):
    """Notes in each context which root span it is in; it keeps nothing else of spans."""

    @classmethod
    def class_name(cls) -> str:
        """The name that the framework knows it by."""
        return "RootSpans"

    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,  # noqa: ARG002
        instance: Any = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Note a root."""
        root = _ROOT.get()
        if parent_id is None and (followed := _FOLLOWED.get()) is not None:
            _ROOT.set(followed)
        elif parent_id is None or root is None or not root.holds(parent_id):
            root = Root(id_, leaves_span=_is_workflow(instance))
            _ROOTS[id_] = root
            _ROOT.set(root)

    def span_exit(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,  # noqa: ARG002
        instance: Any = None,  # noqa: ARG002
        result: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Note a root's end; what is left to be read of a stream is still the root's."""
        if isinstance(result, StreamingResponse | AsyncStreamingResponse):
            _follow(result)
        self._exit(id_)

    def span_drop(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,  # noqa: ARG002
        instance: Any = None,  # noqa: ARG002
        err: BaseException | None = None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Note a root's end."""
        self._exit(id_)

    def new_span(self, *_: Any, **__: Any) -> BaseSpan | None:
        """Make none."""
        return None

    def prepare_to_exit_span(self, *_: Any, **__: Any) -> BaseSpan | None:
        """Keep none."""
        return None

    def prepare_to_drop_span(self, *_: Any, **__: Any) -> BaseSpan | None:
        """Keep none."""
        return None

    def _exit(self, span_id: str) -> None:
        root = _ROOTS.pop(span_id, None)
        if root is None:
            return
        root.exit()
        if _ROOT.get() is root and active_span_id.get() == span_id:
            _ROOT.set(None)


def _follow(response: StreamingResponse | AsyncStreamingResponse) -> None:
    """Let a model that is called only when its answer is read be called by whoever asked for it."""
    root, pieces = _ROOT.get(), response.response_gen
    if root is None or pieces in _READ:
        return
    if isinstance(response, AsyncStreamingResponse):
        if isinstance(pieces, AsyncGeneratorType):
            response.response_gen = _aread_for(root, pieces)
    elif isinstance(pieces, GeneratorType):
        response.response_gen = _read_for(root, pieces)
    _READ.add(response.response_gen)


@contextmanager
def _followed(root: Root) -> Iterator[None]:
    followed, before = _FOLLOWED.set(root), _ROOT.set(root)
    try:
        yield
    finally:
        _ROOT.reset(before)
        _FOLLOWED.reset(followed)


def _read_for(root: Root, pieces: Generator[Any, None, Any]) -> Generator[Any, None, None]:
    with closing(pieces):
        while True:
            with _followed(root):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece


async def _aread_for(root: Root, pieces: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, None]:
    async with aclosing(pieces):
        while True:
            with _followed(root):
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece


def _place() -> tuple[int, int | None]:
    """The thread and the task that this is called in."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return get_ident(), None if task is None else id(task)


def _is_workflow(instance: Any) -> bool:
    return any(kind.__name__ == "Workflow" for kind in type(instance).__mro__)
