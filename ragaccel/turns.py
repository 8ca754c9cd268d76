"""Turns: a conversation in the order and the roles that a chat template accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Turn = dict[str, Any]


def acceptable_turns(turns: list[Turn], lay_out: Callable[[list[Turn]], Any]) -> list[Turn]:
    """Return the turns as they are; fewer, where the chat template wants its roles to alternate.

    Templates say what they do not take by raising an error. Neighbouring turns of one role are
    put together then, and after that what the system says is put before what the user says. Turns
    that call tools, tell a result or hold other than text stay by themselves.

    Args:
        turns: messages as chat templates read them, ``{"role": ..., "content": ...}``.
        lay_out: writes turns out, such as ``llm.tokenizer.chat_text``.

    Raises:
        ConfigurationError: the template rejects them in every way; the error is that of the first.
    """
    first: ConfigurationError | None = None
    for changed in (turns, _merged(turns), _merged(_without_system(turns))):
        error = _refusal(lay_out, changed)
        if error is None:
            return changed
        first = first or error
    assert first is not None
    raise first


def _refusal(lay_out: Callable[[list[Turn]], Any], turns: list[Turn]) -> ConfigurationError | None:
    try:
        lay_out(turns)
    except ConfigurationError as error:
        return error
    return None


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    """Turns of one role after another put together."""
    made: list[Turn] = []
    for turn in turns:
        if made and _is_plain(turn) and _is_plain(made[-1]) and made[-1]["role"] == turn["role"]:
            texts = (made[-1]["content"], turn["content"])
            made[-1] = {**made[-1], "content": "\n\n".join(filter(None, texts))}
        else:
            made.append(turn)
    return made


def _without_system(turns: Sequence[Turn]) -> list[Turn]:
    return [{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns]


def _is_plain(turn: Mapping[str, Any]) -> bool:
    said = turn.get("content")
    return turn["role"] != "tool" and not turn.get("tool_calls") and isinstance(said, str)
