"""Windows: how much of a model's context a prompt and its answer may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragaccel import CapacityError, Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ragaccel import LLM


def room_of(llm: LLM, settings: Mapping[str, Any], window: int | None) -> int | None:
    """How many tokens a prompt may take beside its answer; None without a limit."""
    limits = [limit for limit in (llm.context_length, window) if limit is not None]
    answer: int = settings["max_new_tokens"]
    return min(limits) - answer if limits else None


def check_window(prompt: Any, llm: LLM, settings: Mapping[str, Any], window: int | None) -> None:
    """Raise CapacityError for more than ``window`` holds; what the model reads, it checks itself.

    Args:
        prompt: a text, messages, token ids or a ``Prompt``.
        llm: the model that it is for.
        settings: those of the call.
        window: most tokens of a prompt with its answer, if fewer than the model reads.
    """
    limit, answer = llm.context_length, settings["max_new_tokens"]
    if window is None or (limit is not None and window >= limit):
        return
    taken = _num_tokens(prompt, llm)
    if taken + answer > window:
        raise CapacityError(
            f"prompt ({taken:,}) + max_new_tokens ({answer:,}) exceed context_window={window:,}: "
            "shorten the prompt, ask for fewer tokens, or give a larger window"
        )


def _num_tokens(prompt: Any, llm: LLM) -> int:
    if isinstance(prompt, Prompt):
        return len(prompt.token_ids)
    if isinstance(prompt, str):
        return len(llm.tokenizer.encode(prompt, add_special_tokens=True))
    if prompt and isinstance(prompt[0], int):
        return len(prompt)
    return len(llm.tokenizer.chat(prompt))
