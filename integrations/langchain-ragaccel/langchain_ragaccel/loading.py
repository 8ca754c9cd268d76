"""Loading: one LLM a process for each model and its options, loaded at its first use."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ragaccel import LLM

READER_NAME = "ragaccel-reader"
"""What the bundled reader is called in metadata; no model of that name can be loaded."""

_LOADED: dict[str, LLM] = {}
_LOADING: dict[str, Lock] = {}
_IDENTITIES: WeakKeyDictionary[LLM, str] = WeakKeyDictionary()


def shared_llm(model: str | None, options: dict[str, Any]) -> LLM:
    """The LLM of a name or folder; all that ask with the same options share it, and its memory.

    It stays until the process ends. Errors are those of ``LLM.load``.
    """
    key = _key(model, options)
    with _LOADING.setdefault(key, Lock()):
        if key not in _LOADED:
            from ragaccel import LLM

            _LOADED[key] = LLM.load(model, **options)
        return _LOADED[key]


def loaded_llm(model: str | None, options: dict[str, Any]) -> LLM | None:
    """The LLM of a name or folder if it is loaded already."""
    return _LOADED.get(_key(model, options))


def name_of(llm: LLM) -> str:
    """What a ready LLM calls itself; empty where it has no name."""
    config = getattr(llm.model.model, "config", None)
    return str(getattr(config, "_name_or_path", "") or "")


def identity_of(llm: LLM) -> str:
    """Tells a ready LLM from every other: nothing else says what its weights are."""
    return _IDENTITIES.setdefault(llm, uuid4().hex)


def _key(model: str | None, options: dict[str, Any]) -> str:
    return f"{model!r} {sorted((name, repr(value)) for name, value in options.items())}"
