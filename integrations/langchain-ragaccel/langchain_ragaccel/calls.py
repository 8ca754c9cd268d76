"""Calls: what a single call may set, by whatever name other classes have taught for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError

from langchain_ragaccel.checking import check_registry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel import ReferenceRegistry

    from langchain_ragaccel.options import ModelOptions

OTHER_NAMES = {
    "model_name": "model",
    "model_id": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "num_ctx": "capacity",
    "request_timeout": "timeout",
    "torch_dtype": "dtype",
}
"""Names of other classes and libraries for what is named otherwise here."""

ANSWERING = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "logits_processors", "stopping_criteria",
})  # fmt: skip
"""Settings of a call that choose its answer."""

QUIET = frozenset({
    "references", "prediction", "drafter", "namespace", "remember", "registry", "auto_references",
    "neighbours", "max_reference_tokens", "timeout", "stream",
    "ls_structured_output_format", "structured_output_format",
})  # fmt: skip
"""Settings of a call that never change an answer to the same prompt.

A model that reads apart has its prompt from some of them: ``what_is_read`` tells caches of that.
"""

_SETTING_OF = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_PASSED_ON = (ANSWERING | {"prediction", "drafter", "namespace", "remember"}) - _SETTING_OF.keys()
_OF_OBJECT = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "namespace", "remember",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call: settings for the LLM, and where its references come from."""

    settings: dict[str, Any]
    references: tuple[Any, ...]
    registry: Any
    namespace: str
    neighbours: bool
    max_reference_tokens: int
    timeout: float | None
    follows_runs: bool
    began: float = field(default_factory=monotonic)


def canonical(given: Mapping[str, Any], who: str) -> dict[str, Any]:
    """The same under the names used here.

    Raises:
        TypeError: one thing is given under two names.
    """
    named: dict[str, Any] = {}
    for name, value in given.items():
        own = OTHER_NAMES.get(name, name)
        if own in named or (own != name and own in given):
            raise TypeError(f"{who} got {own} twice: as {name} as well")
        named[own] = value
    return named


def check_names(given: Mapping[str, Any], who: str, allowed: frozenset[str]) -> None:
    """Raise TypeError for something that no call can set; the message says what one can."""
    unknown = sorted(canonical(given, who).keys() - allowed)
    if unknown:
        raise TypeError(
            f"{who} takes no {', '.join(unknown)} in a call: there are {', '.join(sorted(allowed))}"
        )


def make_call(
    options: ModelOptions, stop: Sequence[str] | str | None, given: Mapping[str, Any]
) -> Call:
    """Put together what one call asks for, from its own settings and the object's.

    Raises:
        ConfigurationError: another model than the object's, or references that are no list.
    """
    own = canonical(given, type(options).__name__)
    _check_model(options, own.pop("model", None))

    def setting(name: str) -> Any:
        value = own.get(name)
        return getattr(options, name) if value is None else value

    settings = {name: own[name] for name in _PASSED_ON & own.keys()}
    for name in _OF_OBJECT:
        settings[_SETTING_OF.get(name, name)] = setting(name)
    settings["stop"] = as_stops(options.stop if stop is None else stop)
    registry = registry_of(options, own)
    return Call(
        settings={name: value for name, value in settings.items() if value is not None},
        references=as_list(own.get("references"), "references"),
        registry=registry,
        namespace=setting("namespace"),
        neighbours=setting("neighbours"),
        max_reference_tokens=_room(setting("max_reference_tokens")),
        timeout=_time(setting("timeout")),
        follows_runs=registry is not None and options.track == "run-tree",
    )


def _check_model(options: ModelOptions, asked: Any) -> None:
    if asked not in (None, options.model, options.model_name):
        raise ConfigurationError(
            f"this object answers with {options.model_name!r} and cannot switch to {asked!r} in a "
            f"call: make another, {type(options).__name__}(model={asked!r})"
        )


def _time(seconds: float | None) -> float | None:
    if seconds is not None and not seconds > 0:
        raise ConfigurationError(
            f"timeout must be above 0 seconds, not {seconds}: None is no limit"
        )
    return seconds


def _room(tokens: int) -> int:
    if tokens < 0:
        raise ConfigurationError(f"max_reference_tokens must be 0 or more, not {tokens}")
    return tokens


def registry_of(options: ModelOptions, own: Mapping[str, Any]) -> ReferenceRegistry | None:
    """Where a call's references are looked up, if they are."""
    from ragaccel import auto_references_enabled, default_registry

    asked = own.get("auto_references")
    if not (options.auto_references if asked is None else asked) or not auto_references_enabled():
        return None
    registry: ReferenceRegistry | None = own.get("registry")
    check_registry(registry)
    registry = options.registry if registry is None else registry
    return default_registry() if registry is None else registry


def as_stops(stop: Sequence[str] | str | None) -> list[str] | None:
    """Stop strings as a list, where one alone is meant as well: not its letters."""
    return [stop] if isinstance(stop, str) else None if stop is None else list(stop)


def as_list(given: Any, name: str) -> tuple[Any, ...]:
    """What was given under a name as a list: a text would be taken letter by letter."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise ConfigurationError(
            f"{name} is a list of texts, documents or passages, not {type(given).__name__}: put it "
            "into one"
        )
    return tuple(given)
