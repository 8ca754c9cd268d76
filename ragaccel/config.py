"""Settings of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from ragaccel import errors as checks
from ragaccel.decoding.session import Drafter

if TYPE_CHECKING:
    from collections.abc import Mapping


SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""The settings of a request that determine sampling."""


class Settings(TypedDict, total=False):
    """The settings of a request, all optional.

    The value of an absent setting comes from the ``generation_config`` of the ``LLM``, else from
    the model's, as in ``generate``; else it is the default named here. Only ``temperature``
    switches sampling on: the model's ``do_sample`` does not, but its ``top_k``, ``top_p`` and
    ``min_p`` apply once sampling is on.

    Attributes:
        max_new_tokens: the maximum number of tokens of an answer; 256 by default.
        min_new_tokens: the minimum number of tokens of an answer; no end token comes earlier.
        temperature: 0 (the default) takes the likeliest token, a larger value samples.
        top_k: sample from this many likeliest tokens; 0 is off.
        top_p: sample from the likeliest tokens that hold this much probability; 1 is off.
        min_p: exclude tokens below this fraction of the likeliest one's probability; 0 is off.
        seed: the same seed gives the same text, with or without drafting.
        repetition_penalty: as in transformers; 1 is off.
        no_repeat_ngram_size: never repeat an n-gram of this size; 0 is off.
        stop: strings that end the answer; the one found first is cut off. Only the answer's text
            is searched: unlike ``generate(stop_strings=...)``, a string that begins in the prompt
            does not match, and special tokens within it do not prevent a match.
        logits_processors: LogitsProcessors of transformers, pure functions of (ids, scores). One
            whose attribute ``stateful`` is true switches drafting off.
        stopping_criteria: StoppingCriteria of transformers, called after every token.
        prediction: the expected answer, one text or several: the text to be edited, or answers to
            similar questions. Predictions are drafted from and never change the answer.
        drafter: the source of draft tokens, in place of the LLM's own.
        namespace: the name of a memory of its own, so that tenants never share drafts.
        remember: if False, the request neither uses the memory of its namespace nor adds to it.
    """

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    stop: str | Sequence[str]
    logits_processors: Sequence[Any]
    stopping_criteria: Sequence[Any]
    prediction: str | Sequence[str]
    drafter: Drafter | None
    namespace: str
    remember: bool


def _check_drafter(name: str, value: Any) -> Drafter:
    """Return a drafter whose mask tokens are token ids, or raise ConfigurationError."""
    if not isinstance(value, Drafter):
        raise checks.ConfigurationError(
            f"{name} must be a Drafter, not {checks.brief(value)}: derive your class from "
            "ragaccel.Drafter"
        )
    checks.token_ids(f"{name}.mask_ids", value.mask_ids)
    return value


OPTION_CHECKS: dict[str, checks.Check] = {
    "drafter": _check_drafter,
    "memory": checks.path_or("namespaces"),
    "remember": checks.flag,
    "capacity": checks.positive,
    "token_budget": checks.not_negative,
    "save_measurements": checks.flag,
    "exact": checks.flag,
    "max_batch": checks.positive,
    "space": checks.space,
}
"""The check of each option of ``LLM``."""

CHECKS: dict[str, checks.Check] = {
    "max_new_tokens": checks.whole,
    "min_new_tokens": checks.whole,
    "temperature": checks.number,
    "top_k": checks.whole,
    "top_p": checks.number,
    "min_p": checks.number,
    "seed": checks.whole,
    "repetition_penalty": checks.number,
    "no_repeat_ngram_size": checks.whole,
    "stop": checks.stop_texts,
    "logits_processors": checks.callables,
    "stopping_criteria": checks.callables,
    "prediction": checks.texts,
    "drafter": _check_drafter,
    "namespace": checks.text,
    "remember": checks.truth,
}
"""The check of each setting's type; ``Request`` and ``Sampling`` check ranges."""


def check_settings(settings: Mapping[str, Any]) -> Settings:
    """Check every setting of a request and drop those that are None.

    Raises:
        ConfigurationError: a value is invalid; the message names the setting.
        TypeError: a setting is unknown.
    """
    check_names(settings)
    return cast("Settings", checks.check_fields(settings, CHECKS))


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of an ``LLM`` and drop those that are None.

    Raises:
        ConfigurationError: a value is invalid; the message names the option.
    """
    return checks.check_fields(options, OPTION_CHECKS)


def remembers(settings: Mapping[str, Any]) -> bool:
    """Return whether a request uses the memory and adds to it; True by default."""
    value = settings.get("remember")
    return True if value is None else bool(value)


def check_names(settings: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown setting; the message lists the known ones."""
    unknown = sorted(settings.keys() - Settings.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown setting {', '.join(unknown)}: known are {', '.join(Settings.__annotations__)}"
        )
