"""Passage sources: any common form of retriever as an object with ``search(query, k)``.

Like ``ragaccel.retrieval.compression``, this module imports neither numpy nor SQLite.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from ragaccel.errors import ConfigurationError, brief, is_async
from ragaccel.passage import Passage, as_passage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_NAMES_OF_K = ("k", "top_k", "n", "limit", "n_results")


class PassageSource(Protocol):
    """An object that finds passages for a question: a ``Retriever``, or your own.

    It may also have ``document_passages(path)``, which returns all passages of a document: the
    built-in model looks there for the numbers of a question (``Retriever.document_passages``).
    """

    def search(self, query: str, k: int = ...) -> Sequence[Any]:
        """Return at most ``k`` passages, best first, each in a form that ``as_passage`` takes."""
        ...


class _FunctionSource:
    """A function of (query, k) as a ``PassageSource``; what it returns beyond k is cut off."""

    def __init__(self, find: Callable[[str, int], Any]) -> None:
        self._find = find

    def search(self, query: str, k: int = 6) -> Any:
        return self._find(query, k)


def as_source(retriever: Any) -> PassageSource:
    """Return any common form of retriever as a ``PassageSource``.

    Args:
        retriever: an object with ``search(query, k)``; a function of (query) or (query, k); or a
            retriever or vector store of LangChain, or a retriever of LlamaIndex. ``aask`` and
            callers with threads call it from several threads at a time.

    Raises:
        ConfigurationError: it is none of these; the message shows the right form.
    """
    # a vector store of LangChain has `search` as well, with other arguments
    forms = ("similarity_search", "search", "invoke", "retrieve")
    found = next((name for name in forms if callable(getattr(retriever, name, None))), "")
    function = getattr(retriever, found) if found else retriever
    if inspect.isclass(retriever) or not callable(function):
        raise ConfigurationError(_no_retriever(retriever))
    if is_async(function):
        raise ConfigurationError(
            f"the retriever {brief(retriever)} is asynchronous: give a plain function; RAG.aask "
            "and RAG.astream call it in a thread"
        )
    if found == "search" and _takes(function, k=1):
        source: PassageSource = retriever
        return source
    return _FunctionSource(_with_k(function))


def find_passages(source: PassageSource, query: str, k: int) -> list[Passage]:
    """Return at most k passages for a query, without blank ones.

    Raises:
        ConfigurationError: the source returns anything but texts.
    """
    found: Any = source.search(query, k=k)
    if isinstance(found, str | Mapping | Passage):
        found = [found]
    if not isinstance(found, Iterable):
        raise ConfigurationError(
            "a retriever must return a list of strings, dictionaries with a 'text', passages "
            f"or documents, and this one returned {brief(found)}"
        )
    passages = (as_passage(item, f"passage-{n}") for n, item in enumerate(found, 1))
    return [passage for passage in islice(passages, k) if passage.text.strip()]


def _with_k(function: Callable[..., Any]) -> Callable[[str, int], Any]:
    """Return a function of a query, or of a query and a number of passages, as one of both."""
    if not _takes(function) and _takes(function, 1):
        return function
    with suppress(TypeError, ValueError):
        others = list(inspect.signature(function).parameters)[1:]
        chosen = getattr(function, "keywords", {})  # of a partial
        name = next((one for one in _NAMES_OF_K if one in others and one not in chosen), "")
        if name and _takes(function, **{name: 1}):
            return lambda query, k: function(query, **{name: k})
    if not _takes(function):
        raise ConfigurationError(
            f"{brief(function)} is not a retriever: its arguments are not a query, or a query and k"
        )
    return lambda query, _: function(query)


def _takes(function: Callable[..., Any], *values: Any, **named: Any) -> bool:
    """Return whether a function takes a query and these values, as far as can be known."""
    try:
        inspect.signature(function).bind("", *values, **named)
    except TypeError:
        return False
    except ValueError:  # a builtin, whose arguments are unknown
        return not (values or named)
    return True


def _no_retriever(given: Any) -> str:
    if isinstance(given, str | os.PathLike):
        right = f"for the documents of a folder, RAG.from_folder({os.fspath(given)!r})"
    elif isinstance(given, list | tuple):
        right = "for texts, RAG.from_texts(texts)"
    elif type(given).__name__ in ("Store", "Collection"):
        right = f"for a {type(given).__name__.lower()}, Retriever(store, embedder)"
    else:
        right = "give a function of a query, or an object with a method search(query, k)"
    return f"{brief(given)} is not a retriever: {right}"
