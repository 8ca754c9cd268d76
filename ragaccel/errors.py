"""Errors, and the checks of arguments that raise them.

A check is a function of (name, value) that returns the value in the form the package works with, or
raises ``ConfigurationError`` with the name. A table maps the names of fields to their checks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import isasyncgenfunction, iscoroutinefunction
from operator import index
from typing import Any


class RagaccelError(Exception):
    """Base class of all errors of this package that a user can act on."""


class ConfigurationError(RagaccelError, ValueError):
    """A setting or an argument is invalid, or this process cannot use a model.

    Raised before a request starts. A process cannot use a model if it was forked after its parent
    had used one: load models after the fork.
    """


class CapacityError(ConfigurationError):
    """The prompt and its answer do not fit the model's context."""


class MissingExtraError(RagaccelError, ImportError):
    """An optional dependency is not installed.

    Args:
        what: the package that is missing.
        extra: the extra of ragaccel that brings it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed: pip install 'ragaccel[{extra}]'")
        self.what = what
        self.extra = extra


class ModelNotFoundError(RagaccelError):
    """The name is neither a folder, nor a model in the local cache, nor one on the hub."""


class UnsupportedModelError(RagaccelError):
    """The model is damaged or cannot be decoded losslessly; the message names the cause."""


class DocumentError(RagaccelError):
    """A file cannot be read as a document."""


class EmptyIndexError(RagaccelError):
    """No passage was found to answer from."""


class IndexUnusableError(RagaccelError):
    """An index is damaged or was made with other settings; the message says how to rebuild it."""


class IndexBusyError(RagaccelError):
    """Another process is writing to the index."""


class StorageError(RagaccelError):
    """A file cannot be written: the disk is full or permission is missing.

    What was saved before is still whole.
    """


Check = Callable[[str, Any], Any]

MAX_TOKEN_ID = 2**63 - 1
_MAX_WHOLE = 2**64 - 1
_MAX_REPR = 60  # characters of a value in a message
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_fields(given: Mapping[str, Any], table: Mapping[str, Check]) -> dict[str, Any]:
    """Return the given fields, each as its check returns it; a field that is None is left out.

    Raises:
        ConfigurationError: a value is invalid; the message names its field.
    """
    return {name: table[name](name, value) for name, value in given.items() if value is not None}


def whole(name: str, value: Any) -> int:
    """Return the value as an integer of at most 64 bits, or raise ConfigurationError."""
    try:
        number = index(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers is not a number
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a whole number, not {brief(value)}")
    if abs(number) > _MAX_WHOLE:
        raise ConfigurationError(f"{name} must be a number of at most 64 bits, not {brief(value)}")
    return number


def positive(name: str, value: Any, *, minimum: int = 1) -> int:
    """Return the value as an integer of 1 or more, or raise ConfigurationError."""
    wanted = whole(name, value)
    if wanted < minimum:
        raise ConfigurationError(f"{name} must be {minimum} or more, not {wanted}")
    return wanted


def not_negative(name: str, value: Any) -> int:
    """Return the value as an integer of 0 or more, or raise ConfigurationError."""
    return positive(name, value, minimum=0)


def number(name: str, value: Any) -> float:
    """Return the value as a finite float, or raise ConfigurationError."""
    try:
        wanted = None if isinstance(value, bool | str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        wanted = None
    if wanted is None:
        raise ConfigurationError(f"{name} must be a number, not {brief(value)}")
    if not math.isfinite(wanted):
        raise ConfigurationError(f"{name} must be a finite number, not {wanted}")
    return wanted


def flag(name: str, value: Any) -> bool:
    """Return a bool, or 0 or 1, as a bool, or raise ConfigurationError."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ConfigurationError(f"{name} must be True or False, not {brief(value)}")


def truth(name: str, value: Any) -> bool:
    """Return ``bool(value)``, or raise ConfigurationError if that fails."""
    try:
        return bool(value)
    except Exception as error:  # an array of several numbers raises
        raise ConfigurationError(f"{name} must be True or False, not {brief(value)}") from error


def text(name: str, value: Any) -> str:
    """Return the value if it is a string without lone surrogates, or raise ConfigurationError."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be a string, not {brief(value)}")
    require_unicode(name, value)
    return value


def require_unicode(name: str, value: str) -> None:
    """Raise ConfigurationError for a string with lone surrogates, which cannot be encoded."""
    if found := _LONE_SURROGATE.search(value):
        raise ConfigurationError(
            f"{name} holds {found[0]!r}, a lone surrogate, as broken PDFs do: replace it, e.g. by "
            "text.encode(errors='replace').decode()"
        )


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return one or several non-empty strings as a tuple, or raise ConfigurationError."""
    wanted = "a string or a list of strings"
    given = (value,) if isinstance(value, str) else _listed(name, value, wanted)
    if not all(isinstance(one, str) and one for one in given):
        raise ConfigurationError(f"{name} must be {wanted}, none of them empty")
    return given


def stop_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return one or several stop strings as a tuple, or raise ConfigurationError.

    A stop string must not be empty or hold a lone surrogate.
    """
    return tuple(text(name, one) for one in texts(name, value))


def callables(name: str, value: Any) -> tuple[Any, ...]:
    """Return a list of functions as a tuple, or raise ConfigurationError."""
    if callable(value) and not isinstance(value, Iterable):
        raise ConfigurationError(f"{name} must be a list: put this function in brackets")
    given = _listed(name, value, "a list of functions")
    for place, one in enumerate(given):
        if not callable(one) or isinstance(one, type):
            raise ConfigurationError(f"{name}[{place}] cannot be called: {brief(one)}")
    return given


def path_or(attribute: str) -> Check:
    """Return a check that accepts a path, or an object with the given attribute."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return text(name, value)
        if not isinstance(value, os.PathLike) and not hasattr(value, attribute):
            raise ConfigurationError(
                f"{name} must be a path, or an object with {attribute}, not {brief(value)}"
            )
        return value

    return check


def space(name: str, value: Any) -> Any:
    """Return the value if it is a SPACE adapter, its path or a bool; see ``LLM``.

    Raises:
        ConfigurationError: the value is something else.
    """
    return value if isinstance(value, bool) else path_or("num_masks")(name, value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple of integers from 0 to ``MAX_TOKEN_ID``.

    Raises:
        ConfigurationError: the value is something else.
    """
    ids = value
    if not isinstance(value, tuple) or not set(map(type, value)) <= {int}:
        if isinstance(value, str | bytes | Mapping):
            raise ConfigurationError(f"{name} must be token ids, not {brief(value)}")
        try:
            ids = tuple(map(index, value))
        except (TypeError, ValueError, RuntimeError):
            raise ConfigurationError(f"{name} must be whole numbers, not {brief(value)}") from None
    if ids and min(ids) < 0:
        raise ConfigurationError(f"{name} must be 0 or more, not {min(ids)}")
    if ids and max(ids) > MAX_TOKEN_ID:
        raise ConfigurationError(f"{name} must be token ids, not {brief(max(ids))}")
    checked: tuple[int, ...] = ids
    return checked


def brief(value: Any) -> str:
    """Return the value's repr for a message, cut to 60 characters."""
    try:
        written = repr(value)
    except Exception:  # a message must not fail over the value it names
        return f"a {type(value).__name__}"
    return written if len(written) <= _MAX_REPR else f"{written[: _MAX_REPR - 1]}…"


def is_async(function: Any) -> bool:
    """Return whether a function, or an object that can be called, is asynchronous."""
    called = (function, getattr(function, "__call__", None))  # noqa: B004
    return any(map(iscoroutinefunction, called)) or any(map(isasyncgenfunction, called))


def _listed(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{name} must be {wanted}, not {brief(value)}")
    try:
        return tuple(value)
    except Exception as error:  # the caller's iterable raises
        raise ConfigurationError(f"{name} cannot be read as a list: {error}") from error


_HERE = "the model runs in this process, and nothing is sent anywhere"
_PENALTY = "repetition_penalty=1.1 or no_repeat_ngram_size=3 discourage repetition"
_LOGPROBS = (
    "answers hold token ids without probabilities; score an answer with one forward pass of the "
    "transformers model"
)
_LOADING = "it is an option of loading, which goes to model_kwargs={...}"

ELSEWHERE: Mapping[str, str] = {
    "base_url": _HERE,
    "best_of": "call once for each answer, with another seed",
    "do_sample": "temperature=0 takes the likeliest token, more samples",
    "early_stopping": "one answer is decoded, exactly as greedy or sampled decoding would",
    "eos_token_id": 'the model\'s own end tokens count, and stop=["..."]',
    "frequency_penalty": _PENALTY,
    "keep_alive": "the model stays loaded as long as an object holds it",
    "length_penalty": "one answer is decoded, exactly as greedy or sampled decoding would",
    "logit_bias": "logits_processors=[...] of a call, such as SequenceBiasLogitsProcessor",
    "logprobs": _LOGPROBS,
    "max_length": "max_new_tokens counts the answer alone",
    "num_beams": "one answer is decoded, exactly as greedy or sampled decoding would",
    "organization": _HERE,
    "pipeline_kwargs": "give its settings by their own names, such as max_tokens=64",
    "presence_penalty": _PENALTY,
    "reasoning": 'chat_template_kwargs={"enable_thinking": ...}, if the template reads that',
    "stopping_ids": 'stop=["..."], or stopping_criteria=[...] in a call',
    "streamer": "the methods that stream give the pieces",
    "top_logprobs": _LOGPROBS,
    **dict.fromkeys(
        ("attn_implementation", "cache_dir", "load_in_4bit", "load_in_8bit", "local_files_only",
         "quantization_config", "revision", "trust_remote_code"),
        _LOADING,
    ),
}  # fmt: skip
"""Arguments of other classes and libraries, and what to use in their place."""

_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "num_beams": (None, 1),
    "presence_penalty": (None, 0),
    "top_logprobs": (None, 0),
}


def has_no_effect(name: str, value: object) -> bool:
    """Return whether a value switches another library's argument off, as a penalty of 0 does."""
    return name in _WITHOUT_EFFECT and value in _WITHOUT_EFFECT[name]


def check_arguments(
    who: str,
    given: Iterable[str],
    known: Iterable[str],
    instead: Mapping[str, str] | None = None,
) -> None:
    """Raise TypeError if an argument name is unknown.

    Args:
        who: what takes the arguments, for the message: a class name, or "a call".
        given: the names that were passed.
        known: the names that exist.
        instead: advice for names of other libraries; it overrides ``ELSEWHERE``.

    Raises:
        TypeError: a name is unknown; the message says what to use instead.
    """
    names = sorted(known)
    unknown = sorted(set(given).difference(names))
    if unknown:
        advice = {**ELSEWHERE, **(instead or {})}
        told = [f"{name}: {advice[name]}" for name in unknown if name in advice]
        others = [_corrected(name, names) for name in unknown if name not in advice]
        listed = [f"its arguments are {', '.join(names)}"] if others else []
        raise TypeError(f"{who} takes no {'; '.join([*told, *others, *listed])}")


def _corrected(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"{name}: did you mean {close[0]}?" if close else name
