"""Weights of linear layers in 8 bits, as ``bfloat16_products`` multiplies them.

A weight is a whole number from -127 to 127 times its output's scale, which is a 127th of the
output's largest weight.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragaccel.engine.bfloat16 import BLOCK_OUTPUTS

LINE = 64
"""Bytes of a row of packed weights: a pair of inputs of each output of a block."""
SCALE_LINES = BLOCK_OUTPUTS * 4 // LINE
"""Rows of a block before its weights: its outputs' scales, in float32."""
_LARGEST = 127
_ROUNDED_OUTPUTS = 4096  # at a time: the numbers between take several times as much memory
# Outputs of a block lie so that unpacking two vectors of bytes within 128 bits restores the order.
_ORDER = (0, 4, 2, 1, 3, 5)


def pack(weight: Tensor) -> Tensor:
    """Return weights [O, I] that ``bfloat16.can_pack`` as bytes, [O / 32, 2 + I / 2, 64]."""
    num_outputs, num_inputs = weight.shape
    num_blocks, num_pairs = num_outputs // BLOCK_OUTPUTS, num_inputs // 2
    packed = torch.empty(num_blocks, SCALE_LINES + num_pairs, LINE, dtype=torch.uint8)
    for start in range(0, num_outputs, _ROUNDED_OUTPUTS):
        whole, scales = _rounded(weight[start : start + _ROUNDED_OUTPUTS])
        blocks = packed[start // BLOCK_OUTPUTS :][: len(scales) // BLOCK_OUTPUTS]
        signed = whole.to(torch.int8).view(torch.uint8)
        lines = signed.view(-1, 2, 4, 4, num_pairs, 2).permute(_ORDER)
        blocks[:, SCALE_LINES:] = lines.reshape(-1, num_pairs, LINE)
        blocks[:, :SCALE_LINES] = scales.view(torch.uint8).view(-1, SCALE_LINES, LINE)
    return packed


def unpack(packed: Tensor) -> Tensor:
    """Return packed weights in bfloat16, [O, I]."""
    parts = []
    step = _ROUNDED_OUTPUTS // BLOCK_OUTPUTS
    for start in range(0, len(packed), step):
        blocks = packed[start : start + step]
        scales = blocks[:, :SCALE_LINES].contiguous().view(torch.float32).view(-1, 1)
        lines = blocks[:, SCALE_LINES:].view(len(blocks), -1, 4, 2, 4, 2)
        signed = lines.permute(0, 3, 2, 4, 1, 5).reshape(len(scales), -1)
        parts.append(signed.view(torch.int8).float().mul_(scales).bfloat16())
    return torch.cat(parts)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole numbers of weights [O, I], and their scales [O]."""
    wide = weight.detach().float()
    scales = wide.abs().amax(1) / _LARGEST
    smallest = torch.finfo(torch.float32).tiny  # of outputs whose weights are all zero
    return wide.div_(scales.clamp(min=smallest)[:, None]).round_(), scales


def is_packed(packed: Tensor) -> bool:
    """Return whether packed weights are those of ``pack``."""
    return packed.dtype == torch.uint8
