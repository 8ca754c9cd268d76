"""Runs: the tokens of one generation, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: its new tokens and where the time went.

    ``decode_seconds`` is all after prefill. Prefill is the prompt's pass: with ``generate`` it
    yields the first token as well, with ours the first verify pass does. ``stages`` splits the
    decoding: ``draft``, ``verify`` and ``model`` (inside the model's passes), as far as seen.
    ``rows_of_each`` has the rows of every pass after prefill; ``tokens_of_each`` has what each pass
    emitted, the prompt's included where it yields a token; empty where that was not seen.
    ``first_token_seconds`` is from the start to the first token.
    """

    token_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    passes: int
    rows: int
    draft_tokens: int = 0
    accepted_tokens: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    rows_of_each: tuple[int, ...] = ()
    tokens_of_each: tuple[int, ...] = ()
    first_token_seconds: float = 0.0


def model_stage(device: torch.device, seconds: float) -> dict[str, float]:
    return {"model": seconds} if device.type == "cpu" else {}
