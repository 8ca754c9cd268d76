"""Triton attention: kernels for trees of rows over a KV pool. This module needs triton.

Shapes: N rows of a pass with its padding, H query heads, K KV heads, G = H / K heads that share
one, D head size, S slots of the KV pool, T row blocks.

As in Flash-Decoding, splits of a sequence are attended to in parallel and combined afterwards.
Splits and key blocks have fixed sizes, counted from a sequence's first token, and masked tokens add
exact zeros. So a row's result does not depend, to the last bit, on the other rows, on the slots of
its sequence or on the number of splits of the pass.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ragaccel.engine.row_blocks import COLUMNS, LONGER, SHORT_SPLITS, SPLIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ragaccel.engine.row_blocks import RowBlocks


MAX_LANES = 128  # rows of a block times heads of a group
CHUNK = 32  # splits combined at a time: all of a sequence of 20,000 tokens
_SHORT, _LONGER = tl.constexpr(SHORT_SPLITS), tl.constexpr(LONGER)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


class TritonKernel:
    """Triton attention for passes of any size, with scratch for the partial results of splits.

    All layers and all passes share the scratch, as they run one after another. It grows with the
    largest pass; a captured graph needs the one it was captured with (``buffers``).

    Args:
        split: tokens per split at the start of a sequence; a multiple of the keys that are read at
            a time.
    """

    def __init__(self, split: int = SPLIT) -> None:
        self._split = split
        self._scratch: Tensor | None = None

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The memory that the last pass wrote to; captured, it must be kept."""
        return () if self._scratch is None else (self._scratch,)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: RowBlocks,
        *,
        scaling: float,
        num_splits: int,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend with the rows of a pass, without waiting for the device.

        Args:
            q: queries [N, H, D].
            keys: one layer of the KV pool, [K, S, D], with the rows' keys already written.
            values: like ``keys``.
            blocks: which rows attend to which tokens, on the same device.
            scaling: factor of the scores.
            num_splits: number of splits to compute for every block of rows; at least as many as
                the longest sequence has, together with its rows in this pass.
            window: size of the sliding window in positions, the row's included; ``None`` for all.
            softcap: bound that scores approach through a tanh, as in Gemma 2; ``None`` for none.

        Returns:
            The attention output, [N, H, D]; zeros for padding.

        Raises:
            ValueError: sizes do not match.
        """
        _check(q, keys, values, blocks)
        (num_rows, heads, head_size), group = q.shape, q.shape[1] // keys.shape[0]
        lanes, block_d = (_power(size) for size in (blocks.block_rows * group, head_size))
        block_keys, warps, stages = _tile(block_d, q.element_size())
        if self._split % block_keys:
            raise ValueError(f"a split of {self._split} tokens is not a multiple of {block_keys}")
        stats, partials = self._scratch_for(q, num_splits)
        _attend_split[(len(blocks.table), keys.shape[0], num_splits)](
            *(q, keys, values, blocks.table, blocks.positions, blocks.sees),
            *(stats, partials, num_rows, *q.stride()[:2]),
            *(*keys.stride()[:2], *values.stride()[:2], blocks.sees.shape[1], scaling),
            window=window, softcap=softcap, split=self._split, columns=COLUMNS, group=group,
            lanes=lanes, head_size=head_size, block_d=block_d, block_keys=block_keys,
            num_warps=warps, num_stages=stages, enable_fp_fusion=False,
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        _combine[(num_rows, heads)](
            *(out, stats, partials, blocks.positions, blocks.stops, num_rows),
            window=window, split=self._split, head_size=head_size, block_d=block_d, chunk=CHUNK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    def move(self, states: Tensor, sources: Tensor, targets: Tensor, count: Tensor) -> None:
        """Copy the states of slots to others, in order; see ``AttentionKernel``."""
        planes, heads, _, size = states.shape
        _move_slots[(planes, heads)](
            states, sources, targets, count, *states.stride()[:3],
            size=size, block=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip

    def _scratch_for(self, q: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
        """Return two buffers: the peak and the sum of each split's weights, its weighted values."""
        shape = (num_splits, *q.shape)
        partials = num_splits * q.numel()
        stats = -(-2 * partials // q.shape[2] // 4) * 4  # the other begins at 16 bytes
        if self._scratch is None or self._scratch.numel() < stats + partials:
            self._scratch = torch.empty(stats + partials, dtype=torch.float32, device=q.device)
        used = 2 * partials // q.shape[2]
        return (
            self._scratch[:used].view(*shape[:-1], 2),
            self._scratch[stats : stats + partials].view(shape),
        )


def _check(q: Tensor, keys: Tensor, values: Tensor, blocks: RowBlocks) -> None:
    num_rows, heads, head_size = q.shape
    if heads % keys.shape[0]:
        raise ValueError(f"{heads} query heads are not a multiple of {keys.shape[0]} KV heads")
    if keys.shape != values.shape or keys.shape[2] != head_size or head_size > 256:
        raise ValueError(
            "keys and values must have the same shape and the queries' head size, at most 256"
        )
    if not q.stride(2) == keys.stride(2) == values.stride(2) == 1:
        raise ValueError("the elements of a head must be contiguous")
    if not q.dtype == keys.dtype == values.dtype:
        raise ValueError(
            "queries, keys and values must have one dtype, "
            f"not {q.dtype}, {keys.dtype} and {values.dtype}"
        )
    if blocks.block_rows * heads // keys.shape[0] > MAX_LANES:
        raise ValueError(f"blocks of {blocks.block_rows} rows are too large: use rows_per_block")
    if len(blocks.positions) != num_rows:
        raise ValueError(f"the tables have {len(blocks.positions)} rows, the queries {num_rows}")


def _tile(block_d: int, element_size: int) -> tuple[int, int, int]:
    """Return a kernel's keys per block, warps and pipeline stages.

    They change the rounding of results, so they must not depend on the contents of a pass. For
    tiles of 64 rows, kernels take 30 to 100 KB of shared memory. In 16 bits, those
    for heads of up to 128 are among the fastest of seven tried on an H200.
    """
    if element_size == 4:
        return (16, 8, 2) if block_d <= 128 else (16, 16, 1)
    if block_d <= 128:
        return (64, 4, 3) if block_d <= 64 else (32, 4, 4)
    return 32, 8, 2


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())  # matrix units need at least 16


def _kernel(function: Callable[..., object]) -> Any:
    # Sizes of passes would otherwise compile a kernel of their own if they are 1 or odd.
    names = ("max_rows", "words")
    used = [name for name in names if name in inspect.signature(function).parameters]
    return triton.jit(function, do_not_specialize=used)


@_kernel
def _attend_split(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, positions: tl.tensor,
    sees: tl.tensor, stats: tl.tensor, partials: tl.tensor, max_rows: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, k_head: tl.tensor, k_slot: tl.tensor, v_head: tl.tensor,
    v_slot: tl.tensor, words: tl.tensor, scaling: tl.tensor,
    window: tl.constexpr, softcap: tl.constexpr, split: tl.constexpr, columns: tl.constexpr,
    group: tl.constexpr, lanes: tl.constexpr, head_size: tl.constexpr, block_d: tl.constexpr,
    block_keys: tl.constexpr,
) -> None:  # fmt: skip
    """Attend to one split with the rows of a block, in all query heads of one KV head."""
    entry = table + tl.program_id(0) * columns
    first, count, base = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    start, segment, causal = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    kv_head, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    lane, key, size = tl.arange(0, lanes), tl.arange(0, block_keys), tl.arange(0, block_d)
    row, head, real = first + lane // group, kv_head * group + lane % group, lane < count * group
    by_bits = lane < count * group * (1 - causal)  # the other rows attend causally
    position = tl.load(positions + row, real, 2**30)
    begin, end = _begin_of(piece, split), _begin_of(piece + 1, split)
    if window is not None:  # a token's position is at most its place in the sequence
        begin = tl.maximum(begin, (tl.min(position, 0) - window + 1) // block_keys * block_keys)
    stop = tl.minimum(end, start + first - segment + count)
    if begin >= stop:
        return
    wide = (size < head_size)[None, :]
    q_at = q + row[:, None] * q_row + head[:, None] * q_head + size[None, :]
    queries = tl.load(q_at, real[:, None] & wide, 0.0)
    k_at = keys + kv_head * k_head + (base.to(tl.int64) + key)[:, None] * k_slot + size[None, :]
    v_at = values + kv_head * v_head + (base.to(tl.int64) + key)[:, None] * v_slot + size[None, :]
    peak, total = tl.full([lanes], float("-inf"), tl.float32), tl.full([lanes], 0.0, tl.float32)
    mixed = tl.full([lanes, block_d], 0.0, tl.float32)
    own = tl.minimum(start // block_keys * block_keys, stop)  # all tokens before it are cached
    for at in range(begin, own, block_keys):
        skip = tl.cast(at, tl.int64)
        scores = _score(queries, tl.load(k_at + skip * k_slot, wide, 0.0), scaling, softcap)
        if window is not None:
            near = position[:, None] - (at + key)[None, :] < window
            scores = tl.where(near, scores, float("-inf"))
        v = tl.load(v_at + skip * v_slot, wide, 0.0)
        peak, total, mixed = _accumulate(peak, total, mixed, scores, v)
    for at in range(tl.maximum(begin, own), stop, block_keys):
        skip = tl.cast(at, tl.int64)
        there = (at + key < stop)[:, None] & wide
        scores = _score(queries, tl.load(k_at + skip * k_slot, there, 0.0), scaling, softcap)
        visible = _visible(at - start, key, row - segment, sees + row * words, by_bits)
        if window is not None:
            key_positions = _token_positions(at + key, start, stop, positions + segment)
            visible &= position[:, None] - key_positions[None, :] < window
        v = tl.load(v_at + skip * v_slot, there, 0.0)
        scores = tl.where(visible, scores, float("-inf"))
        peak, total, mixed = _accumulate(peak, total, mixed, scores, v)
    offset = (piece.to(tl.int64) * max_rows + row) * (tl.num_programs(1) * group) + head
    tl.store(stats + offset * 2, peak, real)
    tl.store(stats + offset * 2 + 1, total, real)
    tl.store(partials + offset[:, None] * head_size + size[None, :], mixed, real[:, None] & wide)


@_kernel
def _begin_of(piece: tl.tensor, split: tl.constexpr) -> tl.tensor:
    """Return the first token of a split; see ``row_blocks.LONGER``."""
    return tl.where(piece <= _SHORT, piece, _SHORT + (piece - _SHORT) * _LONGER) * split


@_kernel
def _split_of(token: tl.tensor, split: tl.constexpr) -> tl.tensor:
    """Return the split that holds a token."""
    units = token // split
    return tl.where(units <= _SHORT, units, _SHORT + (units - _SHORT) // _LONGER)


@_kernel
def _score(
    queries: tl.tensor, k: tl.tensor, scaling: tl.tensor, softcap: tl.constexpr
) -> tl.tensor:
    """Return the scores of keys times log2(e), as the softmax uses exp2 in place of exp."""
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scaling
    if softcap is not None:  # tanh by exp, which every backend has
        scores = softcap - 2.0 * softcap / (tl.exp(scores * (2.0 / softcap)) + 1.0)
    return scores * LOG2_E


@_kernel
def _visible(
    begin: tl.tensor, key: tl.tensor, index: tl.tensor, words: tl.tensor, by_bits: tl.tensor
) -> tl.tensor:
    """Return which rows attend to the keys from index ``begin`` of their sequence's rows on."""
    rank, word = begin + key, tl.maximum(begin, 0) // 64  # a block needs two words of bits at most
    low = tl.load(words + word, by_bits & (index >= word * 64), -1)
    high = tl.load(words + word + 1, by_bits & (index >= word * 64 + 64), -1)
    bits = tl.where((rank < word * 64 + 64)[None, :], low[:, None], high[:, None])
    own = (rank[None, :] >= 0) & (rank[None, :] <= index[:, None])
    return (rank[None, :] < 0) | (own & ((bits >> (rank & 63)[None, :]) & 1 == 1))


@_kernel
def _token_positions(
    token: tl.tensor, start: tl.tensor, stop: tl.tensor, own: tl.tensor
) -> tl.tensor:
    """Return the positions of tokens; those from ``start`` on are rows of the pass."""
    offset = tl.load(own + token - start, (token >= start) & (token < stop), 0)
    return tl.where(token < start, token, offset)


@_kernel
def _accumulate(
    peak: tl.tensor, total: tl.tensor, mixed: tl.tensor, scores: tl.tensor, v: tl.tensor
) -> tl.tensor:
    """Add a block of keys to a running softmax; a row that sees none of them does not change."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # fully masked rows would become NaN
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(peak - level)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), mixed


@_kernel
def _combine(
    out: tl.tensor, stats: tl.tensor, partials: tl.tensor,
    positions: tl.tensor, stops: tl.tensor, max_rows: tl.tensor,
    window: tl.constexpr, split: tl.constexpr, head_size: tl.constexpr, block_d: tl.constexpr,
    chunk: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the splits of one row and query head, ``chunk`` at a time, in ascending order."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    size = tl.arange(0, block_d)
    wide = size < head_size
    stop = tl.load(stops + row)
    begin, end = 0, tl.where(stop > 0, _split_of(tl.maximum(stop, 1) - 1, split) + 1, 0)
    if window is not None:
        begin = _split_of(tl.maximum(tl.load(positions + row) - window + 1, 0), split)
    peaks = tl.full([chunk], float("-inf"), tl.float32)
    for at in range(begin, end, chunk):
        piece = at + tl.arange(0, chunk)
        offset = (piece.to(tl.int64) * max_rows + row) * heads + head
        peaks = tl.maximum(peaks, tl.load(stats + offset * 2, piece < end, float("-inf")))
    peak = tl.max(peaks, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.full([chunk], 0.0, tl.float32)
    mixed = tl.full([block_d], 0.0, tl.float32)
    for at in range(begin, end, chunk):
        piece = at + tl.arange(0, chunk)
        offset = (piece.to(tl.int64) * max_rows + row) * heads + head
        there = piece < end
        scale = tl.exp2(tl.load(stats + offset * 2, there, float("-inf")) - level)
        total += scale * tl.load(stats + offset * 2 + 1, there, 0.0)
        part_at = partials + offset[:, None] * head_size + size[None, :]
        part = tl.load(part_at, there[:, None] & wide[None, :], 0.0)
        mixed += tl.sum(scale[:, None] * part, 0)
    whole = tl.sum(total, 0)
    mixed = mixed / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + (row * heads + head) * head_size + size, mixed.to(out.dtype.element_ty), wide)


@_kernel
def _move_slots(
    states: tl.tensor, sources: tl.tensor, targets: tl.tensor, count: tl.tensor,
    plane_stride: tl.tensor, head_stride: tl.tensor, slot_stride: tl.tensor,
    size: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Move slots of one head, one after another: the same threads read and write each element."""
    at, number = tl.arange(0, block), tl.load(count)
    there = at < size
    plane, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    base = states + plane * plane_stride + head * head_stride + at
    for move in range(0, number):
        moved = tl.load(base + tl.load(sources + move) * slot_stride, there)
        tl.store(base + tl.load(targets + move) * slot_stride, moved, there)
