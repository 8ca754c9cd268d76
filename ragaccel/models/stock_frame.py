"""Stock frame: the arguments of transformers' generate that a decoding loop is not handed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ragaccel.errors import ConfigurationError

_OWN = "custom_generate=ragaccel.custom_generate"
_STREAMING = (
    f"{_OWN} does not stream: transformers hands a custom loop no streamer, and never ends one by "
    "itself; leave out custom_generate here, or stream with ragaccel.LLM(model, tokenizer).stream"
)


def refuse_hidden(depth: int = 2) -> None:
    """Refuse what ``generate`` was given and does not pass on; called from the loop itself.

    A loop is called without the streamer, which nobody would ever end: whoever reads it in another
    thread waits for ever, or for a time limit. What a caller's frame holds can be seen in CPython
    alone, and only a refusal depends on it.

    Raises:
        ConfigurationError: there is a streamer, which is ended, an assistant model, or a cache.
    """
    given = _arguments(depth)
    streamer = given.get("streamer")
    if streamer is not None:
        _end(streamer)
        raise ConfigurationError(_STREAMING)
    if given.get("assistant_model") is not None:
        raise ConfigurationError(f"{_OWN} drafts by itself: leave out assistant_model")
    if given.get("synced_gpus"):
        raise ConfigurationError(f"{_OWN} does not run in step with other processes")
    users = given.get("kwargs")
    if isinstance(users, Mapping) and users.get("past_key_values") is not None:
        raise ConfigurationError(
            f"{_OWN} keeps states by itself, of what earlier prompts began with too: leave out "
            "past_key_values, and give whole prompts"
        )


class _Refusal(str):
    """What is put into a streamer's queue: who reads it, and asks whether it is the end, fails."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise ConfigurationError(_STREAMING)


def _end(streamer: Any) -> None:
    if hasattr(streamer, "text_queue") and hasattr(streamer, "on_finalized_text"):
        streamer.on_finalized_text(_Refusal())
    streamer.end()


def _arguments(depth: int) -> Mapping[str, Any]:
    try:
        frame = sys._getframe(depth + 1)
    except (AttributeError, ValueError):
        return {}
    return frame.f_locals if frame.f_code.co_name == "generate" else {}
