"""Shared models: one LLM per process for each model name and options."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

from ragaccel.paths import claim_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ragaccel.llm import LLM
    from ragaccel.models.load import ModelInfo
    from ragaccel.models.tokenizer import Tokenizer


READER_NAME = "ragaccel-reader"
_UNNAMED = "ragaccel"
_NAMED_OPTIONS = ("dtype", "device")


class SharedModel:
    """A model's name and options, and its LLM, which is loaded on first use.

    Create it with ``get_shared_model``. Context length and chat template can be read before the
    weights are loaded, from the config and the tokenizer. That imports transformers, which blocks
    an event loop for seconds; await ``aload`` first to avoid that. A copy is the same object, and a
    pickle holds the name.

    Attributes:
        name: a folder or a name on the hub; None for the bundled reader or a ready LLM.
        options: the options of ``LLM.load``.
        identity: a string that is unique to this model in the process, for cache keys.
        ready: the LLM that was passed in, or None.
    """

    def __init__(
        self,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        ready: LLM | None = None,
    ) -> None:
        self.name, self.options = name, dict(options or {})
        self.ready = ready
        self.identity = _key(name, self.options) if ready is None else _identity_of(ready)
        self._llm = ready
        self._lock = Lock()
        self._loading: Future[LLM] | None = None

    def load(self) -> LLM:
        """Return the LLM; load it if needed. Errors are those of ``LLM.load``."""
        claim_torch()
        with self._lock:
            if self._llm is None:
                from ragaccel.llm import LLM

                # Keep the last model loaded even if callers make an object for every request; drop
                # the one before it first, since two may not fit in memory.
                _LAST_LOADED[:] = [self]
                self._llm = LLM.load(self.name, **self.options)
            return self._llm

    async def aload(self) -> LLM:
        """Return the LLM without blocking the event loop; errors are those of ``LLM.load``.

        One thread loads a model for all that await it, so that the threads of other models stay
        free. If an awaiting task is cancelled, loading continues.
        """
        claim_torch()
        if self._llm is not None:
            return self._llm
        return await asyncio.shield(asyncio.wrap_future(self._start_loading()))

    def _start_loading(self) -> Future[LLM]:
        with _LOCK:
            if self._loading is None or self._loading.done():
                thread = ThreadPoolExecutor(1, thread_name_prefix="ragaccel-loading")
                self._loading = thread.submit(self.load)
                thread.shutdown(wait=False)
            return self._loading

    @property
    def loaded(self) -> LLM | None:
        """Return the LLM, or None if it is not loaded yet."""
        return self._llm

    @property
    def label(self) -> str:
        """Return a readable name of the model, also for the bundled reader or a ready LLM."""
        if self.name is not None or self.ready is None:
            return self.name or READER_NAME
        config = getattr(getattr(getattr(self.ready, "model", None), "model", None), "config", None)
        return str(getattr(config, "_name_or_path", "") or _UNNAMED)

    @property
    def context_length(self) -> int | None:
        """Return the maximum number of tokens of prompt and answer; None if unlimited.

        This may read the model's config; errors are those of ``read_model_info``.
        """
        if self._llm is not None:
            return self._llm.context_length
        limits = (self.options.get("capacity"), self._info.context_length)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, read with transformers; errors are those of ``read_model_info``."""
        return self._info.tokenizer if self._llm is None else self._llm.tokenizer

    @property
    def is_chat_model(self) -> bool:
        """Return whether the model has a chat template; errors are those of ``read_model_info``."""
        return self.tokenizer.has_chat_template

    @cached_property
    def takes_tools(self) -> bool:
        """Return whether the chat template renders tools; errors as for ``read_model_info``."""
        return self.tokenizer.takes_tools

    @cached_property
    def is_documents_only(self) -> bool:
        """Return whether the chat template renders only documents and the last message."""
        from ragaccel.frameworks.prompt_parsing import is_documents_only

        return is_documents_only(self.tokenizer)

    @cached_property
    def _info(self) -> ModelInfo:
        from ragaccel.models.load import read_model_info

        return read_model_info(self.name, **self.options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SharedModel):
            return NotImplemented
        return (self.name, self.identity) == (other.name, other.identity)

    def __hash__(self) -> int:
        return hash(self.identity)

    def __copy__(self) -> SharedModel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedModel:
        return self

    def __reduce__(self) -> tuple[Callable[[], SharedModel], tuple[()]]:
        if self.ready is not None:
            raise TypeError(
                "a ready LLM cannot be pickled: pass the model's name instead, and each process "
                "loads its own"
            )
        return partial(get_shared_model, self.name, **self.options), ()


_SHARED: WeakValueDictionary[str, SharedModel] = WeakValueDictionary()
_LAST_LOADED: list[SharedModel] = []
_LOCK = Lock()
_IDENTITIES: WeakKeyDictionary[LLM, str] = WeakKeyDictionary()


def get_shared_model(name_or_path: str | Path | None = None, /, **options: Any) -> SharedModel:
    """Return the shared model of a name and options, the same object as long as it is in use.

    This loads nothing. The model loaded last stays in memory even if it is not in use, so that
    objects made for a single call do not load it again.

    Args:
        name_or_path: a folder, or a name on the hub; None for the bundled reader.
        **options: the options of ``LLM.load``. A dtype or device of torch equals its name.
    """
    name = None if name_or_path is None else str(name_or_path)
    for option in _NAMED_OPTIONS:
        if options.get(option) is not None:
            options[option] = str(options[option]).removeprefix("torch.")
    with _LOCK:
        key = _key(name, options)
        known = _SHARED.get(key)
        if known is None:
            known = _SHARED[key] = SharedModel(name, options)
        return known


def _key(name: str | None, options: Mapping[str, Any]) -> str:
    return f"{name!r} {sorted((option, repr(value)) for option, value in options.items())}"


def _identity_of(llm: LLM) -> str:
    """Return the random identity of a ready LLM: its weights may differ from all others'."""
    with _LOCK:
        return _IDENTITIES.setdefault(llm, uuid4().hex)
