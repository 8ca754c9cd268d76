"""Calls: what a single call may set, by whatever name other classes have taught for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError, check_arguments, says_nothing

from langchain_ragaccel.callers import Caller, caller_of, present_caller
from langchain_ragaccel.checking import check_registry
from langchain_ragaccel.structured import ResponseFormat, response_format_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel import ReferenceRegistry, VisibleReferences

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
    "format": "response_format",
    "num_return_sequences": "n",
}
"""Names of other classes and libraries for what is named otherwise here."""

INSTEAD = {
    "max_length": "max_tokens counts the answer alone",
    "response_format": "it is for calls of a chat model: bind(response_format=...), or "
    "with_structured_output(schema)",
    "model_kwargs": "it is for the constructor: options of loading",
}
"""What to use in place of names that are known in another place."""

ANSWERING = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "logits_processors", "stopping_criteria", "n",
})  # fmt: skip
"""Settings of a call that choose its answer."""

QUIET = frozenset({
    "references", "prediction", "drafter", "namespace", "remember", "registry", "auto_references",
    "neighbours", "max_reference_tokens", "timeout", "stream", "stream_usage",
    "ls_structured_output_format", "structured_output_format",
})  # fmt: skip
"""Settings of a call that never change an answer to the same prompt.

A model that reads apart has its prompt from some of them: ``what_is_read`` tells caches of that.
"""

_SETTING_OF = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_PASSED_ON = (
    (ANSWERING | {"prediction", "drafter", "namespace", "remember"}) - _SETTING_OF.keys() - {"n"}
)
_OF_OBJECT = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "namespace", "remember",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call: settings for the LLM, and where its references come from."""

    settings: dict[str, Any]
    references: tuple[Any, ...]
    registry: ReferenceRegistry | None
    """One that was given."""
    looks_up: bool
    """Whether references are looked for unasked."""
    namespace: str
    neighbours: bool
    max_reference_tokens: int
    timeout: float | None
    follows_runs: bool
    count: int = 1
    """How many answers there shall be."""
    tells_usage: bool = True
    """Whether streams tell token counts."""
    response_format: ResponseFormat | None = None
    """What the text of the answer has to be."""
    began: float = field(default_factory=monotonic)
    caller: Caller = field(default_factory=Caller)

    def of(self, run_manager: Any, caller: Caller | None = None) -> Call:
        """Return this call as one run's, by its manager or by whoever is known to ask."""
        if caller is None:
            caller = present_caller() if run_manager is None else caller_of(run_manager)
        return replace(self, caller=caller)

    @property
    def visible(self) -> VisibleReferences | None:
        """The registered references it may use; None where they are not looked for."""
        if not self.looks_up:
            return None
        from ragaccel import visible_references

        scopes = self.caller.scopes
        return visible_references(self.registry, self.namespace, scopes=scopes)


def canonical(given: Mapping[str, Any], who: str) -> dict[str, Any]:
    """The same under the names used here, without what asks for nothing, such as a penalty of 0.

    Raises:
        TypeError: one thing is given under two names.
    """
    named: dict[str, Any] = {}
    for name, value in given.items():
        if says_nothing(name, value):
            continue
        own = OTHER_NAMES.get(name, name)
        if own in named or (own != name and own in given):
            raise TypeError(f"{who} got {own} twice: as {name} as well")
        named[own] = value
    return named


def check_names(given: Mapping[str, Any], who: str, allowed: frozenset[str]) -> None:
    """Raise UnknownArgumentError for what no call can set; the message says what to use instead."""
    check_arguments(f"a call of {who}", canonical(given, who), allowed, INSTEAD)


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

    tells_usage = setting("stream_usage")
    settings = {name: own[name] for name in _PASSED_ON & own.keys()}
    for name in _OF_OBJECT:
        settings[_SETTING_OF.get(name, name)] = setting(name)
    settings["stop"] = as_stops(options.stop if stop is None else stop)
    looks_up = looks_up_references(options, own)
    return Call(
        settings={name: value for name, value in settings.items() if value is not None},
        references=as_list(own.get("references"), "references"),
        registry=registry_of(options, own),
        looks_up=looks_up,
        namespace=setting("namespace"),
        neighbours=setting("neighbours"),
        max_reference_tokens=_room(setting("max_reference_tokens")),
        timeout=_time(setting("timeout")),
        follows_runs=looks_up and options.track == "run-tree",
        count=_count(setting("n"), settings),
        tells_usage=tells_usage is not False,
        response_format=response_format_of(own.get("response_format")),
    )


def _count(answers: Any, settings: Mapping[str, Any]) -> int:
    if answers in (None, 1):
        return 1
    if not isinstance(answers, int) or answers < 1:
        raise ConfigurationError(f"n is a whole number of answers, 1 or more, not {answers!r}")
    if not settings.get("temperature"):
        raise ConfigurationError(
            f"n={answers} answers with temperature=0 would be the same: set a temperature above 0"
        )
    return answers


def check_streamed(call: Call) -> None:
    """Refuse several answers where their pieces would come one among another."""
    if call.count > 1:
        raise ConfigurationError(f"a stream is one answer, not n={call.count}: use generate")


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


def looks_up_references(options: ModelOptions, own: Mapping[str, Any]) -> bool:
    """Whether a call's references are looked for unasked."""
    from ragaccel import auto_references_enabled

    asked = own.get("auto_references")
    wanted = options.auto_references if asked is None else asked
    return bool(wanted) and auto_references_enabled()


def registry_of(options: ModelOptions, own: Mapping[str, Any]) -> ReferenceRegistry | None:
    """The registry that a call or its object was given."""
    registry: ReferenceRegistry | None = own.get("registry")
    check_registry(registry)
    return options.registry if registry is None else registry


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
