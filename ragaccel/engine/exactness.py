"""Exactness: whether what a row computes is the same, to the last bit, wherever it stands."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ragaccel.engine.layout import run_rows
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from ragaccel.engine.target import TargetModel

_STEP = 5
_STEPS = 4


def check_modes(*, exact: bool, near_ties: bool) -> None:
    """Refuse modes that exclude each other, before a model is loaded for them.

    Raises:
        ConfigurationError: both are asked for.
    """
    if exact and near_ties:
        raise ConfigurationError(
            "exact=True leaves no near ties to choose again: what guesses are verified with "
            "changes nothing in that mode. Leave near_ties out, or exact"
        )


@torch.inference_mode()
def check_exact(model: TargetModel, num_rows: int) -> None:
    """Verify that tokens computed in several passes, at other places, have the same logits.

    Args:
        model: attends with the engine's attention.
        num_rows: rows of an exact pass.

    Raises:
        ConfigurationError: they have not.
    """
    passes: list[Tensor] = []
    cache = model.new_cache(None, None)
    tokens = [(7919 * i + i * i + 1) % model.vocab_size for i in range(_STEPS * _STEP + num_rows)]
    if model.max_positions is not None and model.max_positions < len(tokens):
        return
    for start in range(0, _STEPS * _STEP, _STEP):
        rows = run_rows(tokens[start : start + num_rows], cache)
        passes.append(model.forward(replace(rows, exact=True), num_rows).clone())
        cache.keep(range(_STEP))
    for before, after in pairwise(passes):
        if not torch.equal(before[_STEP:], after[:-_STEP]):
            raise ConfigurationError(
                "exact mode does not go with this model: what it computes for a token depends on "
                "the others of a pass. If it is a mixture of experts, load it with "
                "experts_implementation='batched_mm'"
            )
