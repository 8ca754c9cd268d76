"""Callers: the run that asks a model, by the callbacks that LangChain hands down from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.callbacks.base import BaseCallbackManager

from langchain_ragaccel.collecting import callbacks_here, run_collectors

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from uuid import UUID

    from langchain_core.runnables import RunnableConfig
    from ragaccel import ReferenceScope

Piece = TypeVar("Piece")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks a model: what its root run retrieved, and the run right above the model's own."""

    scopes: tuple[ReferenceScope, ...] = ()
    run: UUID | None = None


_PRESENT: ContextVar[Caller] = ContextVar("ragaccel_caller", default=Caller())  # noqa: B039

_ASKING: ContextVar[Mapping[str, Sequence[Caller]]] = ContextVar(
    "ragaccel_asking",
    default={},  # noqa: B039 - it stays empty
)


def caller_of(callbacks: Any) -> Caller:
    """Return whoever handed callbacks down: a run manager, a manager, a list of handlers or None.

    LangChain's own context tells of the run above, too: a call with callbacks of its own, in the
    middle of a chain or a graph, is handed none of those of the run that makes it.
    """
    here = callbacks_here()
    callbacks = here if callbacks is None else callbacks
    found = (one.scope for each in (callbacks, here) for one in run_collectors(each))
    scopes = dict.fromkeys(scope for scope in found if scope is not None)
    return Caller(tuple(scopes), getattr(callbacks, "parent_run_id", None))


def caller_by(config: RunnableConfig | None) -> Caller:
    """Return whoever calls with a config."""
    return caller_of((config or {}).get("callbacks"))


def callbacks_in(args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    """The callbacks among a call's arguments, where they may be the first or have their name."""
    return args[0] if args else given.get("callbacks")


@contextmanager
def called_by_each(prompts: Sequence[str], callbacks: Any) -> Iterator[None]:
    """Let :func:`callers_of` know who asks each of several prompts.

    Args:
        prompts: all of one call.
        callbacks: those of all prompts, or a list with those of each.
    """
    is_list = isinstance(callbacks, list) and bool(callbacks)
    if is_list and (callbacks[0] is None or isinstance(callbacks[0], list | BaseCallbackManager)):
        callers = [caller_of(each) for each in callbacks]
    else:
        callers = [caller_of(callbacks)] * len(prompts)
    asking: dict[str, list[Caller]] = {}
    for prompt, caller in zip(prompts, callers, strict=False):
        asking.setdefault(prompt, []).append(caller)
    scopes = tuple(dict.fromkeys(scope for caller in callers for scope in caller.scopes))
    before = _ASKING.set(asking)
    try:
        with called_by(Caller(scopes)):
            yield
    finally:
        _ASKING.reset(before)


def callers_of(prompts: Sequence[str]) -> list[Caller]:
    """Return whoever asks each of these prompts, which are all of a call or those not cached.

    Where it is not sure who asks, it is nobody.
    """
    asking, left = _ASKING.get(), Counter(prompts)
    callers = {
        prompt: iter(asking.get(prompt, ()))
        if len(asking.get(prompt, ())) == count or len(set(asking.get(prompt, ()))) == 1
        else iter(())
        for prompt, count in left.items()
    }
    return [next(callers[prompt], Caller()) for prompt in prompts]


def present_caller() -> Caller:
    """Return whoever asks now, inside of :func:`called_by`."""
    return _PRESENT.get()


@contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    """Let ``present_caller`` be this one."""
    before = _PRESENT.set(caller)
    try:
        yield
    finally:
        _PRESENT.reset(before)


def pieces_for(caller: Caller, pieces: Iterator[Piece]) -> Generator[Piece, None, None]:
    """Iterate pieces, each made for a caller; between two of them nothing of this is seen."""
    with closing(pieces):  # type: ignore[type-var]
        while True:
            with called_by(caller):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece


class PiecesFor(AsyncGenerator[Piece, Any]):
    """Pieces for asyncio, each made for a caller as :func:`pieces_for` does.

    It is no generator function's, since an event loop that shuts down closes all of those at once,
    and complains of one that the one around it is closing already.
    """

    def __init__(self, caller: Caller, pieces: AsyncGenerator[Piece, Any]) -> None:
        self._caller, self._pieces = caller, pieces

    async def asend(self, value: Any) -> Piece:
        """Go on to the next piece."""
        with called_by(self._caller):
            return await self._pieces.asend(value)

    async def athrow(self, *error: Any) -> Piece:
        """Raise an error where the pieces are made."""
        with called_by(self._caller):
            return await self._pieces.athrow(*error)

    async def aclose(self) -> None:
        """End it."""
        await self._pieces.aclose()
