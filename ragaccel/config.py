"""The options of an LLM, and the settings of a request: types, defaults and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, cast

from ragaccel import errors as checks
from ragaccel.decoding.session import Drafter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike
    from pathlib import Path
    from typing import TypeAlias

    from transformers import GenerationConfig

    from ragaccel.drafting.memory import Memory
    from ragaccel.models.space_adapter import SpaceAdapter

    Space: TypeAlias = SpaceAdapter | str | Path | bool


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
"""The check of each option of ``EngineConfig``; the model's loader checks the others."""


class EngineOptions(TypedDict, total=False):
    """The fields of ``EngineConfig`` as keywords, all optional."""

    drafter: Drafter | None
    memory: Memory | str | PathLike[str] | None
    remember: bool
    capacity: int | None
    token_budget: int | None
    save_measurements: bool
    exact: bool
    max_batch: int
    space: Space | None
    generation_config: GenerationConfig | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an ``LLM``, checked. A value of None stands for the default.

    Attributes:
        drafter: the source of draft tokens, in place of the token trees; the memory is not used.
        memory: a ``Memory``, or the file that it is read from and, when Python exits, written to.
        remember: if False, requests neither use the memory nor add to it.
        capacity: the maximum number of tokens of prompt and answer; by default the model's limit.
        token_budget: the maximum number of draft tokens per step, 0 for plain decoding; by default
            it is chosen at every step by expected gain and measured latency.
        save_measurements: save the latency profile of this device and the checked models and
            architectures for the next run, in small files of the data directory
            (``RAGACCEL_HOME``). They hold no text.
        exact: deterministic mode: the same tokens as plain decoding in this mode, to the last bit,
            in any precision. Slower: passes have a fixed width, drafts do not branch, and requests
            are not batched. It costs nothing where rows have the same bits in any pass: for
            Llama-like models in bfloat16 on Linux and an x86 processor with AVX2, if sizes of
            layers and heads are multiples of 32. Answers may differ from those of the default
            mode, and from ``generate``, where two tokens are nearly tied.
        max_batch: the maximum number of requests in one pass.
        space: a SPACE adapter, its folder or hub name, or True for the one in the model's folder.
            Drafts also come from its mask tokens; answers stay the same. With ``exact``,
            only where that costs nothing.
        generation_config: fields that override the model's own ``generation_config``, named as in
            transformers: ``{"repetition_penalty": 1.0}``. The settings of a request override both.
            ``{"do_sample": True}`` samples requests that do not set ``temperature``; a model's own
            ``do_sample`` has no effect.

    Raises:
        ConfigurationError: a value is invalid; the message names the option.
    """

    drafter: Drafter | None = None
    memory: Memory | str | PathLike[str] | None = None
    remember: bool = True
    capacity: int | None = None
    token_budget: int | None = None
    save_measurements: bool = True
    exact: bool = False
    max_batch: int = 16
    space: Space | None = None
    generation_config: GenerationConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None:
                object.__setattr__(self, option.name, option.default)
            elif option.name in OPTION_CHECKS:
                checked = OPTION_CHECKS[option.name](option.name, value)
                object.__setattr__(self, option.name, checked)


OPTIONS = frozenset(option.name for option in fields(EngineConfig))
"""The names of the options."""

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

_OTHER_NAMES = {
    **dict.fromkeys(
        ("max_tokens", "max_output_tokens", "n_predict", "num_predict"),
        "max_new_tokens",
    ),
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
"""What other libraries call a setting: {their name: ours}."""


def check_settings(settings: Mapping[str, Any]) -> Settings:
    """Check every setting of a request and drop those that are None.

    Raises:
        ConfigurationError: a value is invalid; the message names the setting.
        TypeError: a setting is unknown.
    """
    unknown = sorted(settings.keys() - CHECKS.keys())
    if unknown:
        other = [name for name in unknown if name in _OTHER_NAMES]
        if other:
            raise TypeError(f"{other[0]} is called {_OTHER_NAMES[other[0]]} here")
        raise TypeError(f"unknown setting {', '.join(unknown)}: known are {', '.join(CHECKS)}")
    return cast("Settings", checks.check_fields(settings, CHECKS))
