"""Caching: what LangChain's caches find an answer by."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain_core.globals import get_llm_cache
from ragaccel import RagaccelError

from langchain_ragaccel.callers import present_caller
from langchain_ragaccel.calls import (
    QUIET,
    as_stops,
    canonical,
    looks_up_references,
    registry_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel import ReferenceRegistry

    from langchain_ragaccel.options import ModelOptions

_NAMES: WeakKeyDictionary[ReferenceRegistry, str] = WeakKeyDictionary()


def cache_key(
    identifying: Mapping[str, Any], stop: Sequence[str] | str | None, given: Mapping[str, Any]
) -> str:
    """What an answer is cached under: all that it depends on, and nothing of how it is guessed."""
    own = canonical(given, "a call")
    kept = {name: value for name, value in own.items() if name not in QUIET and value is not None}
    if kept.keys() & {"logits_processors", "stopping_criteria"}:
        kept["once"] = uuid4().hex  # nothing says what these do, so nothing is found again
    if stop is not None:
        kept["stop"] = as_stops(stop)
    return str(sorted({**identifying, **kept}.items()))


def is_cached(options: ModelOptions) -> bool:
    """Whether answers are looked up in a cache: the object's own, or LangChain's global one."""
    if options.cache is None or options.cache is True:
        return get_llm_cache() is not None
    return options.cache is not False


def what_is_read(options: ModelOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the prompts of a model that reads apart: what it is given and can look up.

    Empty for others, whose prompts are what they are given. No weights are loaded for this. Keys
    are of this process, since another one's registry holds other texts.
    """
    try:
        if not options.shared.reads_apart:
            return {}
    except RagaccelError:  # the answer will tell
        return {}
    own = canonical(given, type(options).__name__)
    given_too = {"references": repr(own.get("references") or [])}
    if not looks_up_references(options, own):
        return given_too
    from ragaccel import visible_references

    namespace = own.get("namespace")
    namespace = options.namespace if namespace is None else namespace
    visible = visible_references(
        registry_of(options, own), namespace, scopes=present_caller().scopes
    )
    registry, told = visible.registry, visible.scopes_digest
    if registry is not None:
        told += f" {_NAMES.setdefault(registry, uuid4().hex)} {registry.version}"
    return {**given_too, "registry": f"{os.getpid()} {told}", "namespace": namespace}
