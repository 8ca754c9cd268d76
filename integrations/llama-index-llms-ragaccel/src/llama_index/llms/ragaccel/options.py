"""Options: what a model is made with and what a call may set, under the names that people bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ragaccel import ConfigurationError, Settings, check_arguments, says_nothing

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTINGS = frozenset(Settings.__annotations__)
_OTHER_NAMES = {"max_tokens": "max_new_tokens"}
_INSTEAD = {
    "api_key": "the model runs in this process",
    "format": "as_structured_llm(Schema) or structured_predict",
    "is_chat_model": "a model with a chat template is one",
    "load_in_4bit": 'model_kwargs={"quantization_config": ...}',
    "load_in_8bit": 'model_kwargs={"quantization_config": ...}',
    "n": "call it once for each answer, with another seed",
    "num_output": "max_new_tokens",
    "num_return_sequences": "call it once for each answer, with another seed",
    "reasoning": "the model's chat template decides",
    "request_timeout": "asyncio.wait_for(llm.achat(...), seconds)",
    "response_format": "as_structured_llm(Schema) or structured_predict",
    "stop_sequences": 'stop=["..."]',
    "streamer": "stream_complete and stream_chat give the pieces",
    "timeout": "asyncio.wait_for(llm.achat(...), seconds)",
    "tokenizer_kwargs": "a tokenizer of your own is given as model=..., tokenizer=...",
    "tokenizer_name": "a tokenizer of your own is given as model=..., tokenizer=...",
    "tokenizer_outputs_to_remove": "only token ids are taken from a tokenizer",
    "tool_choice": "chat, chat_with_tools and FunctionAgent take tools, and a choice of them",
    "tools": "chat, chat_with_tools and FunctionAgent take tools",
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
    own = {
        name: value
        for name, value in given.items()
        if value is not None and not says_nothing(name, value)
    }
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
    of_answers = dict.fromkeys(
        (*SETTINGS, *_OTHER_NAMES), "it is a setting of answers: generate_kwargs={...}, or a call"
    )
    misplaced = [name for name in options if name in of_answers and name != "drafter"]
    check_arguments("model_kwargs", misplaced, (), of_answers)
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    options.update((name, value) for name, value in given.items() if value is not None)
    return options


def check_names(who: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownArgumentError for a name that there is not, with what to use instead."""
    check_arguments(who, given, known, _INSTEAD)


def _require_mapping(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{name} is a dict, not {type(given).__name__}")
