"""Options: what a model is made with and what a call may set, under the names that people bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTINGS = frozenset(Settings.__annotations__)
_OTHER_NAMES = {"max_tokens": "max_new_tokens"}
_HINTS = {
    "api_key": "the model runs in this process",
    "do_sample": "temperature=0 takes the likeliest token, more samples",
    "eos_token_id": 'the model\'s own end tokens count, and stop=["..."]',
    "is_chat_model": "a model with a chat template is one",
    "load_in_4bit": 'model_kwargs={"quantization_config": ...}',
    "load_in_8bit": 'model_kwargs={"quantization_config": ...}',
    "max_length": "max_new_tokens counts the answer alone",
    "num_beams": "one answer is decoded, exactly as greedy or sampled decoding would",
    "num_output": "max_new_tokens",
    "num_return_sequences": "call it once for each answer",
    "quantization_config": 'model_kwargs={"quantization_config": ...}',
    "stopping_ids": 'stop=["..."], or stopping_criteria=[...] in a call',
    "stop_sequences": 'stop=["..."]',
    "streamer": "stream_complete and stream_chat give the pieces",
    "tokenizer_kwargs": "a tokenizer of your own is given as model=..., tokenizer=...",
    "tokenizer_name": "a tokenizer of your own is given as model=..., tokenizer=...",
    "tokenizer_outputs_to_remove": "only token ids are taken from a tokenizer",
    "tool_choice": "tools are called through ReActAgent",
    "tools": "tools are called through ReActAgent",
    "torch_dtype": "dtype",
}


def call_settings(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one call over those of the model; what is None says nothing.

    Raises:
        TypeError: a setting that there is not, or one given under two names.
        ConfigurationError: no settings at all, or answers of no length.
    """
    settings = dict(defaults)
    _require_mapping("generate_kwargs", given)
    own = {name: value for name, value in given.items() if value is not None}
    for other, name in _OTHER_NAMES.items():
        if other in own and name in own:
            raise TypeError(f"{other} and {name} are one setting: give one of them")
    settings.update((_OTHER_NAMES.get(name, name), value) for name, value in own.items())
    check_names("a call", settings, SETTINGS)
    length = settings.get("max_new_tokens", 1)
    if not hasattr(length, "__index__"):
        raise ConfigurationError(f"max_new_tokens must be a whole number, not {length!r}")
    return settings


def loading_options(**given: Any) -> dict[str, Any]:
    """Options of ``LLM.load``, those that are given, under the names that it has for them."""
    more = given.pop("model_kwargs") or {}
    _require_mapping("model_kwargs", more)
    options: dict[str, Any] = dict(more)
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    options.update((name, value) for name, value in given.items() if value is not None)
    return options


def check_names(who: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a name that there is not; the message says what to use instead."""
    known = sorted(known)
    for name in given:
        if name in known:
            continue
        if name in _HINTS:
            raise TypeError(f"{who} takes no {name}: {_HINTS[name]}")
        raise TypeError(f"{who} takes no {name}: there are {', '.join(known)}")


def _require_mapping(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{name} is a dict, not {type(given).__name__}")
