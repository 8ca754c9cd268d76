"""Model input: the rows of a pass with their positions, attention masks and cache slots.

A row is one token of a forward pass.

Shapes: n rows of one sequence, P cached tokens before them, N rows of all sequences of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from ragaccel.decoding.tree import DraftTree, attach_masks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.engine.kv_cache import KVCache


HOST = torch.device("cpu")


@dataclass(frozen=True)
class RowSpan:
    """The rows of one sequence in a pass: n consecutive rows from row ``first`` on.

    ``paths`` is each row's attention to the others, itself included, as an integer in which bit j
    is set if it attends to row j; ``None`` means causal attention. Every row also attends to the
    cached tokens. ``depth`` is the largest distance of a row from the first one in the draft tree.
    """

    cache: KVCache
    first: int
    num_rows: int
    start: int
    depth: int
    paths: Sequence[int] | None = None  # [n]
    device: torch.device = HOST  # of ``sees``

    @cached_property
    def sees(self) -> Tensor | None:
        """Each row's attention to the others, [n, n] bool; None means causal attention."""
        if self.paths is None:
            return None
        return torch.from_numpy(_path_matrix(self.paths)).to(self.device)

    @property
    def rows(self) -> slice:
        """The rows of this sequence, as a slice of the rows of the pass."""
        return slice(self.first, self.first + self.num_rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of a forward pass over the N rows of one or more sequences, concatenated.

    Linear layers process all rows together; attention runs span by span, each with its own cache.
    """

    inputs: Tensor  # [2, N] int64: token ids and positions
    spans: tuple[RowSpan, ...]
    is_mask: Tensor | None = None  # [N] bool, True where a row is a mask token
    deterministic: bool = False  # attend so that a row's result does not depend on the others

    @property
    def token_ids(self) -> Tensor:
        """The rows' token ids, [1, N] int64."""
        return self.inputs[:1]

    @property
    def positions(self) -> Tensor:
        """The rows' positions, [1, N] int64."""
        return self.inputs[1:]

    @property
    def num_rows(self) -> int:
        """N, the number of rows."""
        return self.inputs.shape[1]

    @property
    def attended(self) -> int:
        """Cached tokens plus rows of the longest sequence."""
        return max(span.start + span.num_rows for span in self.spans)

    def to(self, device: torch.device) -> Rows:
        """Return the inputs on a device; return this object if they are already there."""
        if self.inputs.device == device:
            return self
        mask = None if self.is_mask is None else self.is_mask.to(device)
        spans = tuple(
            span if span.paths is None else replace(span, device=device) for span in self.spans
        )
        return replace(self, inputs=self.inputs.to(device), spans=spans, is_mask=mask)

    def sees(self) -> Tensor:
        """Return which rows each row attends to, itself included. [N, N] bool."""
        n = self.num_rows
        whole = torch.zeros(n, n, dtype=torch.bool, device=self.inputs.device)
        for span in self.spans:
            block = whole[span.rows, span.rows]
            block.copy_(torch.ones_like(block).tril_() if span.sees is None else span.sees)
        return whole


def causal_rows(
    token_ids: Sequence[int],
    cache: KVCache,
    device: torch.device = HOST,
    max_positions: int | None = None,
) -> Rows:
    """Make the rows of consecutive tokens with causal attention, after a cache's tokens.

    Begins the pass on the cache. Tokens beyond ``max_positions`` get the last position: the request
    ends before them, so their results are never read.

    Raises:
        CapacityError: the tokens do not fit.
    """
    n, start = len(token_ids), cache.begin(len(token_ids))
    inputs = _inputs(token_ids, range(start, start + n), device, max_positions)
    return Rows(inputs, (RowSpan(cache, 0, n, start, n - 1),))


def _inputs(
    token_ids: Sequence[int],
    positions: Sequence[int],
    device: torch.device,
    max_positions: int | None,
) -> Tensor:
    """Return token ids and positions below ``max_positions``, [2, n] int64."""
    inputs = np.empty((2, len(token_ids)), np.int64)  # several times faster than ``torch.tensor``
    inputs[0], inputs[1] = token_ids, positions
    if max_positions is not None and max(positions) >= max_positions:
        np.minimum(inputs[1], max_positions - 1, out=inputs[1])
    return torch.from_numpy(inputs).to(device)


def tree_rows(
    tree: DraftTree,
    cache: KVCache,
    device: torch.device = HOST,
    max_positions: int | None = None,
) -> Rows:
    """Make the rows of a draft tree after a cache's tokens; row i is node i.

    Otherwise as ``causal_rows``.

    Raises:
        CapacityError: the nodes do not fit.
    """
    n = len(tree)
    is_mask = None
    if tree.num_masks:
        is_mask = torch.arange(n, device=device) >= n - tree.num_masks
    if tree.is_chain:
        return replace(causal_rows(tree.token_ids, cache, device, max_positions), is_mask=is_mask)
    depths, start = tree.depths(), cache.begin(n)
    positions = [start + depth for depth in depths]
    inputs = _inputs(tree.token_ids, positions, device, max_positions)
    spans = (RowSpan(cache, 0, n, start, max(depths), ancestor_paths(tree.parents), device),)
    return Rows(inputs, spans, is_mask)


def prompt_rows(
    chunk: Sequence[int],
    cache: KVCache,
    mask_ids: Sequence[int] = (),
    max_positions: int | None = None,
) -> Rows:
    """Make the rows of a prompt chunk, followed by mask tokens. Begins the pass on the cache.

    Raises:
        CapacityError: the rows do not fit.
    """
    if not mask_ids:
        return causal_rows(chunk, cache)
    tree = attach_masks(DraftTree.chain(chunk), mask_ids, [len(chunk) - 1])
    return tree_rows(tree, cache, max_positions=max_positions)


def deterministic_rows(
    tree: DraftTree, cache: KVCache, num_rows: int, max_positions: int | None = None
) -> Rows:
    """Make the rows of a chain of draft tokens, padded to the rows of a deterministic pass.

    Raises:
        CapacityError: the rows do not fit.
        ValueError: the tree branches or has mask tokens.
    """
    if not tree.is_chain or tree.num_masks:
        raise ValueError(
            "exact=True verifies chains of draft tokens only: "
            "the draft must neither branch nor hold mask tokens"
        )
    filled = (*tree.token_ids, *tree.token_ids[:1] * (num_rows - len(tree)))
    rows = tree_rows(DraftTree.chain(filled), cache, max_positions=max_positions)
    return replace(rows, deterministic=True)


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of several sequences into one pass, in order."""
    if len(parts) == 1:
        return parts[0]
    spans, first = [], 0
    for part in parts:
        spans += [replace(span, first=first + span.first) for span in part.spans]
        first += part.num_rows
    is_mask = None
    if any(part.is_mask is not None for part in parts):
        is_mask = torch.cat([_mask_flags(part) for part in parts])
    inputs = torch.cat([part.inputs for part in parts], dim=1)
    return Rows(inputs, tuple(spans), is_mask, parts[0].deterministic)


def _mask_flags(part: Rows) -> Tensor:
    if part.is_mask is not None:
        return part.is_mask
    return torch.zeros(part.num_rows, dtype=torch.bool, device=part.inputs.device)


def replace_unreadable_tokens(tree: DraftTree, vocab_size: int, num_masks: int = 0) -> DraftTree:
    """Replace draft tokens for which the model has no embedding with token 0.

    The model never samples such a token, so results after it are never read. Mask tokens may have
    the ``num_masks`` ids above the vocabulary; one with another id is replaced, and predicts worse.
    """
    if max(tree.token_ids[1:], default=0) < vocab_size:
        return tree
    end = 1 + tree.num_drafts
    drafts = (token if token < vocab_size else 0 for token in tree.token_ids[1:end])
    limit = vocab_size + num_masks
    masks = (token if token < limit else 0 for token in tree.token_ids[end:])
    return replace(tree, token_ids=(tree.token_ids[0], *drafts, *masks))


def ancestor_paths(parents: Sequence[int]) -> list[int]:
    """Return the nodes on each node's path from the root, itself included, as bits of integers."""
    paths: list[int] = []
    bit = 1
    for parent in parents:
        paths.append(paths[parent] | bit if parent >= 0 else bit)
        bit <<= 1
    return paths


def _path_matrix(paths: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return the bits of integers as a matrix, [n, n] bool."""
    n = len(paths)
    width = (n + 7) // 8
    packed = b"".join(path.to_bytes(width, "little") for path in paths)
    bits = np.frombuffer(packed, dtype=np.uint8).reshape(n, width)
    return np.unpackbits(bits, axis=1, bitorder="little")[:, :n].astype(np.bool_)


class AttentionMasks:
    """A maker of additive attention masks of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._triangle = torch.zeros(0, 0)

    def make(self, rows: Rows, span: RowSpan, window: int | None = None) -> Tensor:
        """Make the mask of one sequence: 0 where a row attends, -inf elsewhere. [n, P + n].

        Args:
            rows: the rows of the pass.
            span: the sequence's rows.
            window: size of the sliding window in positions, the row's included; ``None`` for all.
        """
        n, start = span.num_rows, span.start
        mask = torch.zeros(n, start + n, dtype=self.dtype, device=self.device)
        if span.sees is None:
            mask[:, start:] = self._causal(n)
        else:
            mask[:, start:].masked_fill_(~span.sees, float("-inf"))
        if window is not None and reaches_past(span, window):
            positions = rows.positions[0, span.rows]
            seen = torch.cat((torch.arange(start, device=self.device), positions))
            mask.masked_fill_(positions[:, None] - seen >= window, float("-inf"))
        return mask

    def _causal(self, n: int) -> Tensor:
        if self._triangle.shape[0] < n:
            full = torch.full((n, n), float("-inf"), dtype=self.dtype, device=self.device)
            self._triangle = full.triu_(1)
        return self._triangle[:n, :n]


def reaches_past(span: RowSpan, window: int | None) -> bool:
    """Return whether a row has earlier tokens outside its sliding window."""
    return window is not None and span.start + span.depth >= window


def is_causal(span: RowSpan, window: int | None = None) -> bool:
    """Return whether every row attends to all tokens before it, and to no row after it."""
    return span.paths is None and not reaches_past(span, window)


def is_plain(span: RowSpan, window: int | None = None) -> bool:
    """Return whether causal attention without a mask is correct.

    True for a single row, which attends to all cached tokens, and for consecutive tokens at the
    start of a sequence.
    """
    if reaches_past(span, window):
        return False
    return span.num_rows == 1 or (span.start == 0 and span.paths is None)
