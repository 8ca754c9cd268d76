"""Kernels: the Triton attention as static passes call it, with memory for its splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.engine.triton_attention import Scratch, attend

if TYPE_CHECKING:
    from torch import Tensor

    from ragaccel.engine.row_blocks import RowBlocks


class TritonKernel:
    """Attention by ``triton_attention`` for the passes of one size, with scratch for its splits.

    A captured graph writes to the scratch it was captured with, so none is ever replaced.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, ...], Scratch] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that it keeps, in bytes."""
        return sum(scratch.num_bytes for scratch in self._scratch.values())

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: RowBlocks,
        *,
        scaling: float,
        num_splits: int,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend with rows [N, H, D] to one layer's states [K, S, D]; return [N, H, D]."""
        rows, heads, size = q.shape
        key = (rows, heads, size, num_splits)
        if key not in self._scratch:
            self._scratch[key] = Scratch(rows, heads, size, num_splits, q.device)
        return attend(
            q,
            keys,
            values,
            blocks,
            scaling=scaling,
            num_splits=num_splits,
            scratch=self._scratch[key],
            window=window,
            softcap=softcap,
        )
