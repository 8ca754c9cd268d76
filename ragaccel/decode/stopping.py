"""Stopping: where a block of accepted tokens ends the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decode.request import Request
    from ragaccel.decode.result import FinishReason


def ending(
    request: Request, token_ids: Sequence[int], start: int
) -> tuple[int, FinishReason | None]:
    """Say how many of the answer's tokens to keep, and why it ends there; None if it goes on.

    ``token_ids`` are the new tokens, those from ``start`` on not judged yet. Length and end
    tokens cut first and every stop rule sees only what the rules before it left, so that no rule
    is ever shown a token that decoding one at a time would not have reached. Where several reasons
    fall on one token, "stop" goes before "length".
    """
    keep = min(len(token_ids), request.max_new_tokens)
    reason: FinishReason | None = "length" if keep == request.max_new_tokens else None
    for i in range(start, keep):
        if token_ids[i] in request.eos_ids:
            keep, reason = i + 1, "stop"
            break
    for rule in request.stop_rules:
        if keep == start:
            break
        end = rule.cut(token_ids[:keep], start)
        if end is not None:
            keep, reason = min(keep, max(end, start + 1)), "stop"
    return keep, reason
