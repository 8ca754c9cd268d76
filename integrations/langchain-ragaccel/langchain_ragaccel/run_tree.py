"""Run tree: what was retrieved on the way to an answer, whether or not its prompt shows it.

Where a chain compresses or summarises what it found, the prompt no longer holds the documents. The
runs of which a chain consists still tell: an answer and its retrieval have an ancestor in common.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks.base import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from langchain_ragaccel.documents import content_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from langchain_core.documents import Document

logger = logging.getLogger(__name__)

_MOST_TREES = 1024  # at one time: the oldest are given up, since some are left before their end
_MOST_DOCUMENTS = 64  # of one run, the newest


@dataclass(slots=True)
class _Tree:
    """The runs below one root, and what was retrieved below each."""

    parents: dict[UUID, UUID | None] = field(default_factory=dict)
    documents: dict[UUID, OrderedDict[str, Document]] = field(default_factory=dict)

    def upwards(self, run: UUID | None) -> Iterator[UUID]:
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

    def begin(self, run: UUID, parent: UUID | None) -> None:
        """Note a run that others may be below."""
        with self._lock:
            root = run if parent is None else self._root_of.get(parent, run)
            tree = self._trees.setdefault(root, _Tree())
            tree.parents[run] = None if run == root else parent
            self._root_of[run] = root
            if len(self._trees) > _MOST_TREES:
                self._forget(next(iter(self._trees)))

    def retrieved(self, run: UUID, documents: Sequence[Document]) -> None:
        """Note what a run retrieved, for every run above it."""
        with self._lock:
            tree = self._trees.get(self._root_of.get(run, run), _Tree())
            for ancestor in tree.upwards(tree.parents.get(run)):
                known = tree.documents.setdefault(ancestor, OrderedDict())
                for document in documents:
                    known[content_id(document.page_content)] = document
                    known.move_to_end(content_id(document.page_content))
                while len(known) > _MOST_DOCUMENTS:
                    known.popitem(last=False)

    def end(self, run: UUID) -> None:
        """Note that a run ended; with a root all that is known below it is forgotten."""
        with self._lock:
            root = self._root_of.get(run)
            if root is None:
                return
            if run == root:
                self._forget(root)

    def documents_for(self, run: UUID | None) -> list[Document]:
        """What was retrieved below a run, or the nearest one above it, newest first.

        Args:
            run: the one right above an answer's own.
        """
        if run is None:
            return []
        with self._lock:
            tree = self._trees.get(self._root_of.get(run, run), _Tree())
            for ancestor in tree.upwards(run):
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
        self._noting(lambda: self.tree.begin(event["run_id"], event.get("parent_run_id")))

    on_tool_start = on_retriever_start = on_chain_start

    def on_retriever_end(self, *given: Any, **event: Any) -> None:
        """Note what was retrieved, and the run's end."""
        self._noting(lambda: self.tree.retrieved(event["run_id"], given[0]))
        self.on_chain_end(**event)

    def on_chain_end(self, *_: Any, **event: Any) -> None:
        """Note a run's end, good or bad."""
        self._noting(lambda: self.tree.end(event["run_id"]))

    on_chain_error = on_tool_end = on_tool_error = on_retriever_error = on_chain_end

    def _noting(self, note: Callable[[], None]) -> None:
        try:
            note()
        except Exception:
            logger.warning("a run was not noted", exc_info=True)


_TREE = RunTree()
_HANDLER: ContextVar[BaseCallbackHandler | None] = ContextVar(
    "ragaccel_run_tree",
    default=RunTreeHandler(_TREE),  # noqa: B039 - the one of the process
)


@cache
def install() -> None:
    """Follow every run of the process from now on; once, however often it is asked for."""
    register_configure_hook(_HANDLER, inheritable=True)


def retrieved_for(run: UUID | None) -> list[Document]:
    """What was retrieved on the way to an answer, whose caller's run is this one, if it has one."""
    return _TREE.documents_for(run)
