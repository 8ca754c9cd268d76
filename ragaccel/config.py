"""Settings of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from ragaccel import errors as checks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ragaccel.decoding.session import Drafter


SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Those that say how tokens are chosen."""


class Settings(TypedDict, total=False):
    """What a single request may set; everything has a default.

    What it leaves open ``generation_config`` of ``LLM`` sets, then that of the model, as in
    ``generate``, then the default named here. Sampling is off unless ``temperature`` asks for it:
    a model's ``do_sample`` does not, its ``top_k``, ``top_p`` and ``min_p`` fill in once it is on.

    Attributes:
        max_new_tokens: most tokens of an answer, 256 by default.
        min_new_tokens: no end token counts before so many.
        temperature: 0 (the default) takes the likeliest token, more samples.
        top_k: sample from so many likeliest tokens; 0 is off.
        top_p: sample from the likeliest tokens that hold this much probability; 1 is off.
        min_p: leave out tokens below this share of the likeliest one's probability; 0 is off.
        seed: the same seed gives the same text, with or without drafting.
        repetition_penalty: as in transformers; 1 is off.
        no_repeat_ngram_size: never repeat an n-gram of this size; 0 is off.
        stop: strings at the first of which the answer ends; never part of the answer. They are
            looked for in its text alone: unlike ``generate(stop_strings=...)``, one that begins in
            the prompt does not count, and tokens without text do not part one.
        logits_processors: transformers' LogitsProcessors, pure functions of (ids, scores); one
            with a true attribute ``stateful`` is fine too, and turns drafting off.
        stopping_criteria: transformers' StoppingCriteria, asked after every token.
        prediction: what the answer may turn out to be, one text or several: the text that is to be
            changed, answers to similar questions. They never change the answer.
        drafter: where guesses come from, in place of the LLM's own.
        namespace: keeps what is learned from one tenant's requests apart.
        remember: False neither uses what earlier requests of the namespace taught nor adds to it.
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


OPTION_CHECKS: dict[str, checks.Check] = {
    "drafter": checks.drafter,
    "memory": checks.path_or("namespaces"),
    "remember": checks.flag,
    "capacity": checks.positive,
    "token_budget": checks.not_negative,
    "keep_costs": checks.flag,
    "exact": checks.flag,
    "max_batch": checks.positive,
    "space": checks.space,
}
"""What each option of ``LLM`` may be."""

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
    "drafter": checks.drafter,
    "namespace": checks.text,
    "remember": checks.truth,
}
"""What each may be; ranges are those of ``Request`` and ``Sampling``."""


def check_settings(settings: Mapping[str, Any]) -> Settings:
    """Check every setting of a request before its prompt is read; leave out those that are None.

    Raises:
        ConfigurationError: a value that cannot work, named with its setting.
        TypeError: a setting that there is not.
    """
    check_names(settings)
    return cast("Settings", checks.check_fields(settings, CHECKS))


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of an ``LLM`` before anything is loaded; leave out those that are None.

    Raises:
        ConfigurationError: a value that cannot work, named with its option.
    """
    return checks.check_fields(options, OPTION_CHECKS)


def remembers(settings: Mapping[str, Any]) -> bool:
    """Whether a request takes part in what is remembered; it does unless it says otherwise."""
    value = settings.get("remember")
    return True if value is None else bool(value)


def check_names(settings: Mapping[str, Any]) -> None:
    """Raise TypeError for a setting that there is not; the message names those there are."""
    unknown = sorted(settings.keys() - Settings.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown setting {', '.join(unknown)}: there are {', '.join(Settings.__annotations__)}"
        )
