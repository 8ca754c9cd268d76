"""Row by row: activations of exact passes, the same to the last bit wherever a row stands.

A processor's vectors and its scalar code round a curve differently, and what is left over for the
latter lies where a tensor, or a thread's part of it, ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

_CURVES = {
    functional.silu,
    functional.gelu,
    functional.mish,
    functional.softplus,
    functional.elu,
    functional.selu,
    functional.celu,
    functional.logsigmoid,
    torch.sigmoid,
    torch.Tensor.sigmoid,
}


class RowByRow(TorchFunctionMode):
    """Within it, activations of several rows are computed one row at a time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or call it for each row of its first argument."""
        del types
        kwargs = kwargs or {}
        if func not in _CURVES or not args:
            return func(*args, **kwargs)
        inputs: Tensor = args[0]
        if inputs.dim() < 2 or inputs.numel() == 0 or inputs.device.type != "cpu":
            return func(*args, **kwargs)
        rows = [func(row, *args[1:], **kwargs) for row in inputs.flatten(0, -2)]
        return torch.stack(rows).view(inputs.shape)
