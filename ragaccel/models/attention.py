"""Attention of the pass at hand: how transformers' models reach the engine's.

One function is registered with transformers under a name of ours. Within one of our passes it
attends over the caches of that pass; for any other call it is transformers' own SDPA attention.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ragaccel.engine.attention import PassAttention

NAME = "ragaccel"
_UNKNOWN = ("s_aux", "position_bias")  # change the scores in ways that ours does not


class _Running(threading.local):
    attention: PassAttention | None = None
    windows: Sequence[int | None] = ()
    layer = -1  # the last one to have stored its keys and values


_RUNNING = _Running()


@contextmanager
def attending(attention: PassAttention, windows: Sequence[int | None]) -> Iterator[None]:
    """Let this thread's model attend over the caches of one pass; ``windows`` are the layers'."""
    _RUNNING.attention, _RUNNING.windows, _RUNNING.layer = attention, windows, -1
    try:
        yield
    finally:
        _RUNNING.attention = None


def is_exact() -> bool:
    """Whether this thread runs an exact pass."""
    return _RUNNING.attention is not None and _RUNNING.attention.exact


def enter_layer(layer: int) -> None:
    """Note which layer's keys and values come next."""
    _RUNNING.layer = layer


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers calls it: query [1, H, N, D], key and value [1, K, N, D].

    Raises:
        NotImplementedError: the model changes its scores in a way that is not known here.
    """
    attention = _RUNNING.attention
    if attention is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            softcap=softcap,
            **kwargs,
        )
    unknown = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    layer = _RUNNING.layer
    found = attention.attend(
        layer,
        (query, key, value),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_RUNNING.windows[layer],
        softcap=softcap,
    )
    return found, None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
