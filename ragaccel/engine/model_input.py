"""Model input: the rows of a pass, their positions, masks and places in the cache.

Shapes: n rows of one sequence, P cached tokens before them, N rows of all sequences of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ragaccel.decoding.tree import DraftTree, attach_masks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.engine.kv_cache import KVCache


HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The rows of one sequence in a pass: n of them from row ``first`` on.

    ``sees`` tells which of them each attends to besides the cached tokens, itself included;
    ``None`` means all before it: a plain run of tokens. ``depth`` is the deepest row's distance
    from the first.
    """

    cache: KVCache
    first: int
    num_rows: int
    start: int
    depth: int
    sees: Tensor | None = None  # [n, n] bool

    @property
    def rows(self) -> slice:
        """Where its rows stand in the pass."""
        return slice(self.first, self.first + self.num_rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of a forward pass over the N rows of one or more sequences, one after another.

    Linear layers see them as one long sequence; attention goes span by span, each over a cache of
    its own.
    """

    token_ids: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64
    spans: tuple[RowSpan, ...]
    is_mask: Tensor | None = None  # [N] bool, True where a row is a mask token
    deterministic: bool = False  # attend so that rows do not depend on one another

    @property
    def num_rows(self) -> int:
        """How many rows the pass computes."""
        return self.token_ids.shape[1]

    @property
    def attended(self) -> int:
        """How many cached tokens and rows its longest sequence has."""
        return max(span.start + span.num_rows for span in self.spans)

    def to(self, device: torch.device) -> Rows:
        """Put the inputs on a device; returns itself where they are there."""
        if self.token_ids.device == device:
            return self
        ids, positions = self.token_ids.to(device), self.positions.to(device)
        mask = None if self.is_mask is None else self.is_mask.to(device)
        spans = tuple(
            span if span.sees is None else replace(span, sees=span.sees.to(device))
            for span in self.spans
        )
        return replace(self, token_ids=ids, positions=positions, spans=spans, is_mask=mask)

    def sees(self) -> Tensor:
        """Tell which rows each row attends to, itself included. [N, N] bool."""
        n = self.num_rows
        whole = torch.zeros(n, n, dtype=torch.bool, device=self.token_ids.device)
        for span in self.spans:
            block = whole[span.rows, span.rows]
            block.copy_(torch.ones_like(block).tril_() if span.sees is None else span.sees)
        return whole


def causal_rows(token_ids: Sequence[int], cache: KVCache, device: torch.device = HOST) -> Rows:
    """Lay out a plain run of tokens behind a cache's, each seeing all before it.

    Begins the pass on the cache.

    Raises:
        CapacityError: they do not fit.
    """
    n, start = len(token_ids), cache.begin(len(token_ids))
    inputs = torch.tensor([list(token_ids), list(range(start, start + n))], device=device)
    return Rows(inputs[:1], inputs[1:], (RowSpan(cache, 0, n, start, n - 1),))


def tree_rows(
    tree: DraftTree,
    cache: KVCache,
    device: torch.device = HOST,
    max_positions: int | None = None,
) -> Rows:
    """Lay out a draft tree behind a cache's tokens; row i is node i. Begins the pass.

    Nodes that a model without that many positions could never emit are given its last one: a
    request is checked to end before them, so what they compute is never read.

    Raises:
        CapacityError: they do not fit.
    """
    n = len(tree)
    if tree.is_chain and tree.num_masks == 0:
        rows = causal_rows(tree.token_ids, cache, device)
        if max_positions is None or cache.stop <= max_positions:
            return rows
        return replace(rows, positions=rows.positions.clamp(max=max_positions - 1))
    start, depths = cache.begin(n), tree.depths()
    positions = [start + depth for depth in depths]
    if max_positions is not None:
        positions = [min(position, max_positions - 1) for position in positions]
    inputs = torch.tensor([list(tree.token_ids), positions], device=device)
    is_mask = None
    if tree.num_masks:
        is_mask = torch.arange(n, device=device) >= n - tree.num_masks
    sees = torch.from_numpy(ancestor_matrix(tree.parents)).to(device)
    spans = (RowSpan(cache, 0, n, start, max(depths), sees),)
    return Rows(inputs[:1], inputs[1:], spans, is_mask)


def prompt_rows(
    chunk: Sequence[int],
    cache: KVCache,
    mask_ids: Sequence[int] = (),
    max_positions: int | None = None,
) -> Rows:
    """Lay out a part of a prompt, and mask tokens behind its last token. Begins the pass.

    Raises:
        CapacityError: they do not fit.
    """
    if not mask_ids:
        return causal_rows(chunk, cache)
    tree = attach_masks(DraftTree.chain(chunk), mask_ids, [len(chunk) - 1])
    return tree_rows(tree, cache, max_positions=max_positions)


def deterministic_rows(
    tree: DraftTree, cache: KVCache, num_rows: int, max_positions: int | None = None
) -> Rows:
    """Lay out a chain of guesses as ``tree_rows`` does, filled up to the rows of an exact pass.

    Raises:
        CapacityError: they do not fit.
        ValueError: the tree branches or has probes.
    """
    if not tree.is_chain or tree.num_masks:
        raise ValueError("exact mode verifies chains of guesses only")
    filled = (*tree.token_ids, *tree.token_ids[:1] * (num_rows - len(tree)))
    rows = tree_rows(DraftTree.chain(filled), cache, max_positions=max_positions)
    return replace(rows, deterministic=True)


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Join the rows of several sequences to one pass, in order."""
    if len(parts) == 1:
        return parts[0]
    spans, first = [], 0
    for part in parts:
        spans += [replace(span, first=first + span.first) for span in part.spans]
        first += part.num_rows
    is_mask = None
    if any(part.is_mask is not None for part in parts):
        is_mask = torch.cat([_mask_flags(part) for part in parts])
    ids = torch.cat([part.token_ids for part in parts], dim=1)
    positions = torch.cat([part.positions for part in parts], dim=1)
    return Rows(ids, positions, tuple(spans), is_mask, parts[0].deterministic)


def _mask_flags(part: Rows) -> Tensor:
    if part.is_mask is not None:
        return part.is_mask
    return torch.zeros(part.num_rows, dtype=torch.bool, device=part.token_ids.device)


def replace_unreadable_tokens(tree: DraftTree, vocab_size: int, num_masks: int = 0) -> DraftTree:
    """Let a model read any guess at all: one it has no embedding for becomes token 0.

    Such a token is never the model's own choice, so what is computed after it is never read. Probes
    may be any of ``num_masks`` tokens more; what follows another one is a poor guess, no more.
    """
    if max(tree.token_ids[1:], default=0) < vocab_size:
        return tree
    end = 1 + tree.num_drafts
    drafts = (token if token < vocab_size else 0 for token in tree.token_ids[1:end])
    limit = vocab_size + num_masks
    masks = (token if token < limit else 0 for token in tree.token_ids[end:])
    return replace(tree, token_ids=(tree.token_ids[0], *drafts, *masks))


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


class AttentionMasks:
    """Additive attention masks of one dtype on one device; made anew each pass, cheaply."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._triangle = torch.zeros(0, 0)

    def make(self, rows: Rows, span: RowSpan, window: int | None = None) -> Tensor:
        """Build the mask of a sequence: 0 where a row may look, -inf elsewhere. [n, P + n].

        Args:
            rows: what the pass computes.
            span: the sequence's rows.
            window: positions a row looks back over, itself included; ``None`` for all.
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
    """Tell whether some row has tokens before it that lie outside its window."""
    return window is not None and span.start + span.depth >= window


def is_plain(span: RowSpan, window: int | None = None) -> bool:
    """Tell whether plain causal attention gives the right answer without any mask.

    True for one row, which sees all that is cached, and for a run with nothing before it.
    """
    if reaches_past(span, window):
        return False
    return span.num_rows == 1 or (span.start == 0 and span.sees is None)
