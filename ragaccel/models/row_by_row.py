"""Row by row: activations of exact passes, the same to the last bit wherever a row stands.

A processor's vectors and its scalar code round a curve differently, and what is left over for the
latter lies where a tensor, or a thread's part of it, ends.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers.activations import ACT2CLS

from ragaccel.models.attention import is_exact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_STOCK = (nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Mish, nn.Softplus, nn.ELU)
_NAMED = (kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
_KINDS = (*_STOCK, *cast("Iterator[type[nn.Module]]", _NAMED))


def activate_row_by_row(network: nn.Module) -> None:
    """Let a module tree's activations take one row after another in exact passes."""
    for module in network.modules():
        if isinstance(module, _KINDS):
            vars(module)["forward"] = partial(_activate, module.forward)


def _activate(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if not is_exact() or inputs.dim() < 2 or inputs.numel() == 0 or inputs.device.type != "cpu":
        return forward(inputs)
    rows = [forward(row) for row in inputs.flatten(0, -2)]
    return torch.stack(rows).view(inputs.shape)
