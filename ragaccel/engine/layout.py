"""From a draft tree to the tensors of one verify pass: ids, positions and attention masks.

Shapes: n rows, P cached tokens before them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.decode.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of a forward pass over n rows that follow ``start`` cached tokens.

    ``sees`` tells which rows each row attends to besides the cached tokens, itself included;
    ``None`` means all before it: a plain run of tokens.
    """

    token_ids: Tensor  # [1, n] int64
    positions: Tensor  # [1, n] int64
    start: int
    depth: int  # the deepest row's distance from the first
    sees: Tensor | None = None  # [n, n] bool
    is_probe: Tensor | None = None  # [n] bool, True where a row is a mask token

    @property
    def num_rows(self) -> int:
        """How many rows the pass computes."""
        return self.token_ids.shape[1]


def run_rows(token_ids: Sequence[int], start: int, device: torch.device) -> Rows:
    """Lay out a plain run of tokens after ``start`` cached ones, each seeing all before it."""
    n = len(token_ids)
    inputs = torch.tensor([list(token_ids), list(range(start, start + n))], device=device)
    return Rows(inputs[:1], inputs[1:], start, n - 1)


def tree_rows(
    tree: DraftTree, start: int, device: torch.device, max_positions: int | None = None
) -> Rows:
    """Lay out a draft tree after ``start`` cached tokens; row i is node i.

    Nodes that a model without that many positions could never emit are given its last one: a
    request is checked to end before them, so what they compute is never read.
    """
    if tree.is_chain and tree.num_probes == 0:
        rows = run_rows(tree.token_ids, start, device)
        if max_positions is None or start + len(tree) <= max_positions:
            return rows
        return Rows(rows.token_ids, rows.positions.clamp(max=max_positions - 1), start, rows.depth)
    depths = tree.depths()
    positions = [start + depth for depth in depths]
    if max_positions is not None:
        positions = [min(position, max_positions - 1) for position in positions]
    inputs = torch.tensor([list(tree.token_ids), positions], device=device)
    is_probe = None
    if tree.num_probes:
        is_probe = torch.arange(len(tree), device=device) >= len(tree) - tree.num_probes
    sees = torch.from_numpy(ancestor_matrix(tree.parents)).to(device)
    return Rows(inputs[:1], inputs[1:], start, max(depths), sees, is_probe)


def impossible_tokens_replaced(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Let a model read any guess at all: one it has no embedding for becomes token 0.

    Such a token is never the model's own choice, so what is computed after it is never read.
    """
    if max(tree.token_ids[1:], default=0) < vocab_size:
        return tree
    guesses = (token if token < vocab_size else 0 for token in tree.token_ids[1:])
    return replace(tree, token_ids=(tree.token_ids[0], *guesses))


def ancestor_matrix(parents: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Tell for each node which nodes lie on its path from the root, itself included: [n, n]."""
    n = len(parents)
    width = (n + 7) // 8
    paths: list[int] = []
    for node, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else 0) | 1 << node)
    packed = b"".join(path.to_bytes(width, "little") for path in paths)
    bits = np.frombuffer(packed, dtype=np.uint8).reshape(n, width)
    return np.unpackbits(bits, axis=1, bitorder="little")[:, :n].astype(np.bool_)


class Masks:
    """Additive attention masks of one dtype on one device; made anew each pass, cheaply."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._triangle = torch.zeros(0, 0)

    def make(self, rows: Rows, window: int | None = None) -> Tensor:
        """Build the mask of one pass: 0 where a row may look, -inf elsewhere. [1, 1, n, P + n].

        Args:
            rows: what the pass computes.
            window: positions a row looks back over, itself included; ``None`` for all.
        """
        n, start = rows.num_rows, rows.start
        mask = torch.zeros(n, start + n, dtype=self.dtype, device=self.device)
        if rows.sees is None:
            mask[:, start:] = self._causal(n)
        else:
            mask[:, start:].masked_fill_(~rows.sees, float("-inf"))
        if window is not None and reaches_past(rows, window):
            cached = torch.arange(start, device=self.device)
            seen = torch.cat((cached, rows.positions[0]))
            mask.masked_fill_(rows.positions[0, :, None] - seen >= window, float("-inf"))
        return mask[None, None]

    def _causal(self, n: int) -> Tensor:
        if self._triangle.shape[0] < n:
            full = torch.full((n, n), float("-inf"), dtype=self.dtype, device=self.device)
            self._triangle = full.triu_(1)
        return self._triangle[:n, :n]


def reaches_past(rows: Rows, window: int | None) -> bool:
    """Tell whether some row has tokens before it that lie outside its window."""
    return window is not None and rows.start + rows.depth >= window


def is_plain(rows: Rows, window: int | None = None) -> bool:
    """Tell whether plain causal attention gives the right answer without any mask.

    True for one row, which sees all that is cached, and for a run with nothing before it.
    """
    if reaches_past(rows, window):
        return False
    return rows.num_rows == 1 or (rows.start == 0 and rows.sees is None)
