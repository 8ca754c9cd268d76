"""Exactness: whether what a row computes is the same, to the last bit, wherever it stands."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ragaccel.engine import attention
from ragaccel.engine.layout import run_rows
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from ragaccel.engine.target import TargetModel

_STEP = 5
_STEPS = 4
_FILL = 64  # rows of the passes before; experts computed apart take much memory for many
_REFUSAL = (
    "exact mode does not go with this model: what it computes for a token depends on the others of "
    "a pass. If it is a mixture of experts, load it with experts_implementation='batched_mm'"
)


@torch.inference_mode()
def check_exact(model: TargetModel, num_rows: int) -> None:
    """Verify that tokens computed in several passes, at other places, have the same logits.

    At the beginning of a sequence and, if the model reads so far, around the first edge between
    the chunks that attention is reduced over.

    Args:
        model: attends with the engine's attention.
        num_rows: rows of an exact pass.

    Raises:
        ConfigurationError: they have not.
    """
    moved = _STEPS * _STEP
    edge = max(0, attention.CHUNK + 1 - num_rows)
    for first in dict.fromkeys((0, edge)):
        if model.max_positions is None or first + moved + num_rows <= model.max_positions:
            passes = _passes_from(first, model, num_rows)
            if not all(torch.equal(one[_STEP:], next_[:-_STEP]) for one, next_ in pairwise(passes)):
                raise ConfigurationError(_REFUSAL)


def _passes_from(first: int, model: TargetModel, num_rows: int) -> list[Tensor]:
    """Logits of passes that begin a few tokens after one another, behind ``first`` others."""
    length = first + _STEPS * _STEP + num_rows
    tokens = [(7919 * i + i * i + 1) % model.vocab_size for i in range(length)]
    cache = model.new_cache(None, None)
    for start in range(0, first, _FILL):
        rows = run_rows(tokens[start : min(start + _FILL, first)], cache)
        model.forward(replace(rows, exact=True), 1)
        cache.keep(range(rows.num_rows))
    passes = []
    for start in range(first, first + _STEPS * _STEP, _STEP):
        rows = replace(run_rows(tokens[start : start + num_rows], cache), exact=True)
        passes.append(model.forward(rows, num_rows).clone())
        cache.keep(range(_STEP))
    return passes
