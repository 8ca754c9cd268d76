"""Scopes: who retrieved a passage, so that whoever did not is never handed it.

A scope holds what one caller retrieved: a ``with`` block, or a run of a framework. It lives as long
as something of that caller's does, and whatever was registered in it goes with it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from ragaccel.memory.process_registry import default_registry
from ragaccel.memory.registry import NEIGHBOUR_CHARACTERS, ReferenceRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ragaccel.memory.registry import Match
    from ragaccel.passage import Passage

_MAX_BYTES = 8 << 20  # of one scope: what some hundred retrievals find
_MAKING = Lock()


class ReferenceScope:
    """What one caller retrieved; known to nobody else, and forgotten with this object."""

    __slots__ = ("__weakref__", "_registry")

    def __init__(self) -> None:
        self._registry: ReferenceRegistry | None = None  # most callers retrieve nothing

    def register(self, passages: Passage | Iterable[Passage]) -> None:
        """Keep passages, as ``ReferenceRegistry.register`` does; errors are those of that."""
        with _MAKING:
            if self._registry is None:
                self._registry = ReferenceRegistry(max_bytes=_MAX_BYTES)
        self._registry.register(passages)

    @property
    def registry(self) -> ReferenceRegistry | None:
        """Where they are kept; None if there are none."""
        return self._registry


class Lookup(Protocol):
    """Where a prompt's references are looked up: a registry, or several as one."""

    def match(self, text: str, namespace: str = "") -> list[Match]:
        """Find the passages that stand in a text; see ``ReferenceRegistry.match``."""
        ...

    def neighbours(
        self,
        passages: Iterable[Passage],
        namespace: str = "",
        *,
        max_characters: int = NEIGHBOUR_CHARACTERS,
    ) -> list[Passage]:
        """Find passages of the same documents; see ``ReferenceRegistry.neighbours``."""
        ...


class VisibleReferences:
    """All that one request may be given: what its own scopes hold, and a registry's namespace.

    Of what several of them know, the one that comes first is believed. A document's neighbours
    come from where its own passage came from.

    Args:
        scopes: the request's own, the nearest first; known whatever its namespace is.
        registry: for its namespace; None for the scopes alone.
    """

    def __init__(
        self, scopes: Sequence[ReferenceScope] = (), registry: ReferenceRegistry | None = None
    ) -> None:
        known = [scope.registry for scope in dict.fromkeys(scopes)]
        self._of_scopes = [one for one in known if one is not None]
        self._registry = registry
        self._found: list[tuple[ReferenceRegistry, Passage]] = []

    @property
    def registry(self) -> ReferenceRegistry | None:
        """The one whose namespace it looks into besides its scopes."""
        return self._registry

    @property
    def scopes_digest(self) -> str:
        """The same where the scopes hold the same passages."""
        return " ".join(registry.digest for registry in self._of_scopes)

    def match(self, text: str, namespace: str = "") -> list[Match]:
        """Find the passages that stand in a text, in the order in which they do."""
        kept: list[Match] = []
        for registry, name in self._places(namespace):
            found = registry.match(text, name)
            self._found += ((registry, match.passage) for match in found)
            if kept:
                apart = [
                    m for m in found if all(m.end <= k.start or k.end <= m.start for k in kept)
                ]
                kept = sorted([*kept, *apart], key=lambda match: match.start)
            else:
                kept = found
        return kept

    def neighbours(
        self,
        passages: Iterable[Passage],
        namespace: str = "",
        *,
        max_characters: int = NEIGHBOUR_CHARACTERS,
    ) -> list[Passage]:
        """Find the passages of the same documents as some that ``match`` found."""
        wanted, found = set(map(id, passages)), []
        for registry, name in self._places(namespace):
            own = [one for place, one in self._found if place is registry and id(one) in wanted]
            for one in registry.neighbours(own, name, max_characters=max_characters):
                max_characters -= len(one.text)
                found.append(one)
        return found

    def _places(self, namespace: str) -> Iterator[tuple[ReferenceRegistry, str]]:
        yield from ((registry, "") for registry in self._of_scopes)
        if self._registry is not None:
            yield self._registry, namespace


def visible_references(
    registry: ReferenceRegistry | None = None,
    namespace: str = "",
    *,
    scopes: Sequence[ReferenceScope] = (),
) -> VisibleReferences:
    """Return what a request may be given: what is known here, where it is made, and nothing else.

    That is what ``reference_scope`` round it holds, further scopes of its own, what was registered
    in its namespace, and in a registry that it was given. What others registered in the process's
    registry without a namespace is left out, unless that registry is given.

    Args:
        registry: one that the request was given.
        namespace: the request's; with a name, and without a registry, the process's one is used.
        scopes: those of the framework's run that asks.
    """
    here = current_scope()
    if registry is None and namespace:
        registry = default_registry()
    return VisibleReferences(scopes if here is None else (here, *scopes), registry)


_CURRENT: ContextVar[ReferenceScope | None] = ContextVar("ragaccel_scope", default=None)


@contextmanager
def reference_scope(scope: ReferenceScope | None = None) -> Iterator[ReferenceScope]:
    """Let what is retrieved inside of ``with`` be known to the models called inside of it.

    >>> with reference_scope():
    ...     documents = retriever.invoke(question)
    ...     answer = model.invoke(prompt_of(documents, question))

    Nobody outside finds it, and it is forgotten with the block. It holds for what is called from
    there, for tasks and for threads that are started with a copy of the context, as those of
    ``asyncio.to_thread`` and of both frameworks are. A thread of your own enters the same scope:
    ``with reference_scope(scope)``. The innermost one counts.

    Args:
        scope: one to enter again; a new one by default.
    """
    entered = ReferenceScope() if scope is None else scope
    before = _CURRENT.set(entered)
    try:
        yield entered
    finally:
        _CURRENT.reset(before)


def current_scope() -> ReferenceScope | None:
    """Return the scope of the ``with`` block that this is called in, if there is one."""
    return _CURRENT.get()
