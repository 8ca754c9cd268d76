"""The twin: a module tree of our own over a model's tensors, so that the model stays as it is."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ragaccel.models.attention import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


logger = logging.getLogger("ragaccel")


def make_twin(model: Any, attention: str = NAME) -> Any:
    """Copy a model's modules and configuration, not its weights, and give the copy our attention.

    Returns None for models whose attention cannot be exchanged.
    """
    can_exchange = getattr(model, "_can_set_attn_implementation", None)
    if can_exchange is None or not can_exchange():
        return None
    try:
        twin = deepcopy(model, _shared(model))
        twin.set_attn_implementation(attention)
    except Exception as error:  # hooks or weights that cannot be copied
        logger.info("passes run through the model itself, one request each: %s", error)
        return None
    taken = twin.config.get_text_config(decoder=True)._attn_implementation
    return twin if taken == attention else None


def _shared(model: nn.Module) -> dict[int, Any]:
    """What a copy has in common with its original, as ``deepcopy`` wants to be told."""
    tensors = [*model.parameters(), *model.buffers()]
    return {id(thing): thing for thing in (*tensors, *_offloaded(model))}


def _offloaded(model: nn.Module) -> Iterator[Any]:
    """What accelerate's hooks keep of weights that are elsewhere until they are used."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            for name in ("weights_map", "tied_params_map"):
                kept = getattr(part, name, None)
                if kept is not None:
                    yield kept
