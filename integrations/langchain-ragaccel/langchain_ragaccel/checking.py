"""Checking: what options cannot be together, told when an object is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_ragaccel.options import ModelOptions

DEFAULT_MAX_TOKENS = 256  # of an answer, by ``LLM.generate``


def check_options(options: ModelOptions) -> None:
    """Check what an object was made with, besides single numbers.

    Raises:
        ConfigurationError: something is of another kind, or goes with nothing else given.
    """
    check_stops(options.stop)
    check_registry(options.registry)
    most, least = options.max_tokens or DEFAULT_MAX_TOKENS, options.min_tokens or 0
    if least > most:
        raise ConfigurationError(f"min_tokens ({least}) is more than max_tokens ({most})")
    if options.llm is not None:
        _check_ready(options)


def check_stops(stop: Sequence[str] | str | None) -> None:
    """Refuse an empty stop string, at which an answer would end before it begins."""
    if stop is not None and (stop == "" or ("" in stop and not isinstance(stop, str))):
        raise ConfigurationError("stop holds an empty string: leave it out")


def check_registry(registry: Any) -> None:
    """Refuse what is no registry."""
    if registry is None:
        return
    from ragaccel import ReferenceRegistry

    if not isinstance(registry, ReferenceRegistry):
        raise ConfigurationError(
            f"registry is a ragaccel.ReferenceRegistry, not {type(registry).__name__}"
        )


def _check_ready(options: ModelOptions) -> None:
    from ragaccel import LLM

    from langchain_ragaccel.options import LOADING

    if not isinstance(options.llm, LLM):
        raise ConfigurationError(
            f"llm is a ready ragaccel.LLM, not {type(options.llm).__name__}: a name goes to model="
        )
    named = (*LOADING, "model_kwargs")
    given = [name for name in named if getattr(options, name) not in (None, {})]
    if given:
        raise ConfigurationError(
            f"llm= is loaded already and takes no {', '.join(given)}: give them to LLM.load, or a "
            "model= instead of llm="
        )
