"""Muon, the optimizer of matrices, in the precision of the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), with updates as large as AdamW's (Liu et al., arXiv 2502.16982).

    ``torch.optim.Muon`` orthogonalizes in bfloat16, one matrix at a time; this one in the weights'
    precision and all matrices of a shape at once, which is faster where bfloat16 is emulated.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float = 0.05) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all matrices by their gradients."""
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                of_shape[weight.shape].append(weight)
            for (rows, columns), weights in of_shape.items():
                updates = []
                for weight in weights:
                    state = self.state[weight]
                    momentum = state.setdefault("momentum", torch.zeros_like(weight))
                    momentum.lerp_(weight.grad, 0.05)
                    updates.append(weight.grad.lerp(momentum, 0.95))
                scale = group["lr"] * 0.2 * max(rows, columns) ** 0.5
                for weight, update in zip(weights, orthogonal(torch.stack(updates)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest orthogonal matrices [N, R, C], roughly, by Newton and Schulz."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
