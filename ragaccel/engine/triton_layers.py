"""Triton kernels for a decoder layer but its attention. This module needs triton.

transformers' modules compute norms, rotary embeddings, gates and residual sums in some thirty
kernels a layer. A replayed graph spends about two microseconds on each, however small. Here they
are three: a norm with the residual sum before it (twice), and rotation with the writing of keys and
values.

A pass of few rows reads every weight once and computes little, so a product is as fast as its
weights arrive. A library for products picks another kernel, and so another order of summation, for
every number of rows. Here a row's sums have one order: its result depends on no other row. Products
of the same rows are one kernel, and so are a gate, its activation and what it is multiplied by.

Results are rounded where the modules round them, so that an element differs from theirs by the
order of a sum and by the last bit of an exponential at most.

Shapes: N rows, E size of a row, O size of a result, H query heads, K KV heads, D head size, S slots
of the KV pool.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ragaccel.engine.cuda_graphs import LayerNorm, Weights

MAX_SIZE = 16_384  # elements of a row that one program normalizes
GATE_BLOCK = 1024  # elements of one program
MAX_ROWS = 64
"""Most rows of a product; those of more are no longer bound by reading the weights."""
PRODUCT_DTYPES = (torch.bfloat16, torch.float16)
TILE_SIZE, TILE_DEPTH = 64, 64
"""Rows of a matrix that a program multiplies, and their elements that it reads at a time."""
_MIN_SPAN = 512
_MAX_PRODUCTS = 3
_STAGES = 8
_MIN_SHARED, _RESERVED_BYTES = 62 << 10, 2 << 10  # of a program


class Tile(NamedTuple):
    """What one program computes: sums for some rows, over a part of their elements."""

    rows: int
    span: int  # elements of a row
    parts: int
    stages: int


class TritonLayers:
    """The kernels of a decoder layer; see ``cuda_graphs.LayerKernels``.

    Args:
        num_processors: multiprocessors to make work for; by default those of the rows' device.
    """

    def __init__(self, num_processors: int | None = None) -> None:
        self._num_processors = num_processors

    def normalize(self, states: Tensor, norm: LayerNorm) -> Tensor:
        """Return the RMS norm of rows [N, E]."""
        return self._normalize(states, None, norm)[0]

    def add_and_normalize(
        self, states: Tensor, residual: Tensor, norm: LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """Add rows to the residual stream [N, E]; return the norm of the sum, and the sum.

        The rows are [N, E], or their sums in parts, [P, N, E] in float32.
        """
        return self._normalize(states, residual, norm)

    def _normalize(
        self, states: Tensor, residual: Tensor | None, norm: LayerNorm
    ) -> tuple[Tensor, Tensor]:
        parts = len(states) if states.dim() == 3 else 0
        if residual is None:
            (states,) = _as_rows(states)
        elif parts:
            states, residual = states.contiguous(), residual.contiguous()
        else:
            states, residual = _as_rows(states, residual)
        num_rows, size = states.shape[-2:]
        if size > MAX_SIZE:
            raise ValueError(f"rows of {size} elements are too large to normalize")
        out = torch.empty_like(states if residual is None else residual)
        total = states if residual is None else torch.empty_like(residual)
        block = triton.next_power_of_2(size)
        _normalize_rows[(num_rows,)](
            *(states, states if residual is None else residual, norm.weight, out, total),
            *(norm.epsilon, num_rows), parts=parts, adds=residual is not None, size=size,
            block=block, num_warps=min(16, max(1, block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
        return out, total

    def rotate_and_store(
        self,
        states: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        slots: Tensor,
        norms: tuple[LayerNorm, LayerNorm] | None = None,
    ) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to the KV pool.

        Args:
            states: queries [N, H * D], keys and values [N, K * D].
            angles: cosines and sines of the positions, [N, D].
            pool: the layer's keys and values, [K, S, D].
            slots: the rows' slots, [N].
            norms: the norms of query and key heads before they are rotated; None for no norms.

        Returns:
            The rotated queries, [N, H, D].
        """
        all_keys, all_values = pool
        queries, keys, values = _as_rows(*states, dtype=all_keys.dtype)
        num_rows, kv_heads, size = len(queries), all_keys.shape[0], all_keys.shape[2]
        heads = queries.shape[1] // size
        out = torch.empty(num_rows, heads, size, dtype=queries.dtype, device=queries.device)
        query_norm, key_norm = norms or (None, None)
        _rotate_heads[(num_rows, heads + kv_heads)](
            *(queries, keys, values, *angles, out, all_keys, all_values, slots),
            *(queries if one is None else one.weight for one in (query_norm, key_norm)),
            0.0 if query_norm is None else query_norm.epsilon,
            *(*all_keys.stride()[:2], *all_values.stride()[:2]),
            normed=norms is not None, heads=heads, kv_heads=kv_heads, size=size,
            block=triton.next_power_of_2(size // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    def gate(self, gates: Tensor, values: Tensor) -> Tensor:
        """Return values times the SiLU of gates, [N, ..]."""
        gates, values = _as_rows(gates, values)
        out = torch.empty_like(values)
        _gate_elements[(triton.cdiv(out.numel(), GATE_BLOCK),)](
            gates, values, out, out.numel(), block=GATE_BLOCK, num_warps=4, enable_fp_fusion=False
        )
        return out

    def supports(self, states: Tensor, weights: Sequence[Weights]) -> bool:
        """Return whether ``multiply`` computes these products of rows."""
        return len(states) <= MAX_ROWS and all(
            states.dtype == one.matrix.dtype
            and one.matrix.dtype in PRODUCT_DTYPES
            and one.matrix.device == states.device
            and one.matrix.is_contiguous()
            and one.matrix.shape[1] % TILE_DEPTH == 0
            and (one.bias is None) == (weights[0].bias is None)
            for one in weights
        )

    def multiply(self, states: Tensor, weights: Sequence[Weights]) -> list[Tensor]:
        """Multiply rows [N, E] by up to three matrices; return the products, [N, O] each."""
        sizes = [len(one.matrix) for one in weights]
        outs = [states.new_empty(len(states), size) for size in sizes]
        _launch(states, [*weights], outs, sizes, _tile(states, parts=1))
        return outs

    def multiply_in_parts(self, states: Tensor, weights: Weights) -> Tensor:
        """Multiply rows [N, E] by a matrix; return float32 sums over parts of E, [P, N, O].

        Matrices of few rows are read by enough programs only if several share a row. How many parts
        there are depends on the matrix and the device alone.
        """
        size = len(weights.matrix)
        processors = self._num_processors or _processors_of(states.device)
        tile = _tile(states, num_parts(size, states.shape[1], processors))
        shape = (tile.parts, len(states), size)
        out = torch.empty(shape, dtype=torch.float32, device=states.device)
        _launch(states, [weights], [out], [size], tile)
        return out

    def multiply_gated(self, states: Tensor, gate: Weights, values: Weights) -> Tensor:
        """Multiply rows [N, E] by two matrices; return the SiLU of one times the other, [N, O]."""
        size = len(gate.matrix)
        out = states.new_empty(len(states), size)
        tile = _tile(states, parts=1, gated=True)
        _launch(states, [gate, values], [out], [size], tile, gated=True)
        return out


def _as_rows(*states: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return contiguous tensors: linear layers of any kind compute them.

    Raises:
        ValueError: they have several dtypes, which torch would promote; or another one than wanted.
    """
    dtypes = {one.dtype for one in states} | ({dtype} if dtype is not None else set())
    if len(dtypes) > 1:
        raise ValueError(f"states have several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return [one.contiguous() for one in states]


def _launch(
    states: Tensor,
    weights: list[Weights],
    outs: list[Tensor],
    sizes: list[int],
    tile: Tile,
    *,
    gated: bool = False,
) -> None:
    """Multiply rows by matrices of ``sizes`` rows; with a gate, by two of the same size."""
    num_rows, depth = states.shape
    padded = [*weights, *([weights[0]] * (_MAX_PRODUCTS - len(weights)))]
    unused = _MAX_PRODUCTS - len(outs)
    _multiply_rows[(sum(triton.cdiv(size, TILE_SIZE) for size in sizes), tile.parts)](
        *(states.contiguous(), *(one.matrix for one in padded)),
        *(one.matrix if one.bias is None else one.bias for one in padded),
        *(*outs, *([outs[0]] * unused), num_rows, *sizes, *([0] * unused), depth, tile.span),
        biased=weights[0].bias is not None, gated=gated,
        rows=tile.rows, height=TILE_SIZE, step=TILE_DEPTH, num_warps=4, num_stages=tile.stages,
    )  # fmt: skip


def _tile(states: Tensor, parts: int, *, gated: bool = False) -> Tile:
    num_rows, depth = states.shape
    rows = max(16, 1 << (num_rows - 1).bit_length())
    span = triton.cdiv(depth // TILE_DEPTH, parts) * TILE_DEPTH
    read = 2 * (TILE_SIZE * (1 + gated) + rows) * TILE_DEPTH
    stages = min(_STAGES, _shared_bytes(states.device) // read)
    return Tile(rows, span, triton.cdiv(depth, span), stages)


def num_parts(size: int, depth: int, num_processors: int) -> int:
    """Return how many programs share a row of a matrix [size, depth].

    There should be as many programs as multiprocessors, and each should read for a while.
    """
    parts, tiles = 1, triton.cdiv(size, TILE_SIZE)
    while 2 * parts * tiles <= num_processors and depth >= 2 * parts * _MIN_SPAN:
        parts *= 2
    return parts


@cache
def _processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return _MIN_SHARED
    properties = torch.cuda.get_device_properties(device)
    # Older versions of torch do not tell it, nor do those for AMD's devices.
    known = getattr(properties, "shared_memory_per_block_optin", _RESERVED_BYTES + _MIN_SHARED)
    return int(known) - _RESERVED_BYTES


def _kernel(function: Callable[..., object]) -> Any:
    # A size of pass would otherwise compile a kernel of its own if it is 1 or odd.
    used = [name for name in ("num_rows",) if name in inspect.signature(function).parameters]
    return triton.jit(function, do_not_specialize=used)


@_kernel
def _normalize_rows(
    states: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, total: tl.tensor,
    epsilon: tl.tensor, num_rows: tl.tensor, parts: tl.constexpr, adds: tl.constexpr,
    size: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Normalize one row, after adding its parts and the residual stream to it."""
    at = tl.arange(0, block)
    there, row = at < size, tl.program_id(0).to(tl.int64) * size
    x = tl.load(states + row + at, there, 0.0)
    for part in tl.static_range(1, parts):
        x += tl.load(states + tl.cast(part, tl.int64) * num_rows * size + row + at, there, 0.0)
    x = x.to(out.dtype.element_ty)
    if adds:
        x = _add(x, tl.load(residual + row + at, there, 0.0))
        tl.store(total + row + at, x, there)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    normed = (wide * scale).to(x.dtype)
    tl.store(out + row + at, _multiply(tl.load(weight + at, there, 0.0), normed), there)


@_kernel
def _rotate_heads(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, cosines: tl.tensor, sines: tl.tensor,
    out: tl.tensor, all_keys: tl.tensor, all_values: tl.tensor, slots: tl.tensor,
    query_norm: tl.tensor, key_norm: tl.tensor, epsilon: tl.tensor, k_head: tl.tensor,
    k_slot: tl.tensor, v_head: tl.tensor, v_slot: tl.tensor, normed: tl.constexpr,
    heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate one head of one row; of a KV head, write its key and its value to the pool."""
    row, head, half = tl.program_id(0).to(tl.int64), tl.program_id(1), size // 2
    at = tl.arange(0, block)
    there = at < half
    if head < heads:
        source = queries + (row * heads + head) * size
        target = out + (row * heads + head) * size
        _rotate(source, target, cosines + row * size, sines + row * size, query_norm, epsilon,
                at, there, normed, size)  # fmt: skip
    else:
        kv_head = (head - heads).to(tl.int64)
        slot = tl.load(slots + row)
        source = keys + (row * kv_heads + kv_head) * size
        target = all_keys + kv_head * k_head + slot * k_slot
        _rotate(source, target, cosines + row * size, sines + row * size, key_norm, epsilon,
                at, there, normed, size)  # fmt: skip
        read = values + (row * kv_heads + kv_head) * size + at
        written = all_values + kv_head * v_head + slot * v_slot + at
        tl.store(written, tl.load(read, there), there)
        tl.store(written + half, tl.load(read + half, there), there)


@_kernel
def _rotate(
    source: tl.tensor, target: tl.tensor, cosines: tl.tensor, sines: tl.tensor, weight: tl.tensor,
    epsilon: tl.tensor, at: tl.tensor, there: tl.tensor, normed: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate one head: each element of its first half with the same one of its second half."""
    half = size // 2
    low, high = tl.load(source + at, there, 0.0), tl.load(source + half + at, there, 0.0)
    if normed:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(wide_low * wide_low, 0) + tl.sum(wide_high * wide_high, 0)
        scale = tl.rsqrt(squares / size + epsilon)
        low = _multiply(tl.load(weight + at, there, 0.0), (wide_low * scale).to(low.dtype))
        high = _multiply(tl.load(weight + half + at, there, 0.0), (wide_high * scale).to(low.dtype))
    cos_low, cos_high = tl.load(cosines + at, there, 0.0), tl.load(cosines + half + at, there, 0.0)
    sin_low, sin_high = tl.load(sines + at, there, 0.0), tl.load(sines + half + at, there, 0.0)
    turned_low = _subtract(_multiply(low, cos_low), _multiply(high, sin_low))
    turned_high = _add(_multiply(high, cos_high), _multiply(low, sin_high))
    tl.store(target + at, turned_low, there)
    tl.store(target + half + at, turned_high, there)


@_kernel
def _gate_elements(
    gates: tl.tensor, values: tl.tensor, out: tl.tensor, number: tl.tensor, block: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < number
    activated = _silu(tl.load(gates + at, there, 0.0))
    tl.store(out + at, _multiply(activated, tl.load(values + at, there, 0.0)), there)


@_kernel
def _multiply_rows(
    states: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor,
    first_bias: tl.tensor, second_bias: tl.tensor, third_bias: tl.tensor,
    first_out: tl.tensor, second_out: tl.tensor, third_out: tl.tensor,
    num_rows: tl.tensor, first_size: tl.tensor, second_size: tl.tensor, third_size: tl.tensor,
    depth: tl.tensor, span: tl.tensor, biased: tl.constexpr, gated: tl.constexpr,
    rows: tl.constexpr, height: tl.constexpr, step: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a part of all rows by that of ``height`` rows of a matrix, or of the gate's two."""
    tile, part = tl.program_id(0), tl.program_id(1)
    of_first, of_second = tl.cdiv(first_size, height), tl.cdiv(second_size, height)
    matrix, bias, out, size = first, first_bias, first_out, first_size
    if tile >= of_first + of_second:
        matrix, bias, out, size = third, third_bias, third_out, third_size
        tile -= of_first + of_second
    elif tile >= of_first:
        matrix, bias, out, size = second, second_bias, second_out, second_size
        tile -= of_first
    at, row, inner = tile * height + tl.arange(0, height), tl.arange(0, rows), tl.arange(0, step)
    in_matrix, in_rows = (at < size)[:, None], (row < num_rows)[None, :]
    weights = at[:, None].to(tl.int64) * depth + inner[None, :]
    given = states + row[None, :] * depth + inner[:, None]
    sums = tl.full([height, rows], 0.0, tl.float32)
    others = tl.full([height, rows], 0.0, tl.float32)
    for start in range(part * span, tl.minimum(depth, (part + 1) * span), step):
        x = tl.load(given + start, in_rows, 0.0)
        w = tl.load(matrix + weights + start, in_matrix, 0.0, eviction_policy="evict_first")
        sums = tl.dot(w, x, sums)
        if gated:
            w = tl.load(second + weights + start, in_matrix, 0.0, eviction_policy="evict_first")
            others = tl.dot(w, x, others)
    if biased:
        once = (at < size) & (part == 0)
        sums += tl.load(bias + at, once, 0.0).to(tl.float32)[:, None]
        if gated:
            others += tl.load(second_bias + at, once, 0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    product = sums.to(dtype)
    if gated:
        product = _multiply(_silu(product), others.to(dtype))
    target = out + (part.to(tl.int64) * num_rows + row[None, :]) * size + at[:, None]
    tl.store(target, product, in_matrix & in_rows)


@_kernel
def _silu(gate: tl.tensor) -> tl.tensor:
    """Return the SiLU, rounded to the operand's type."""
    x = gate.to(tl.float32)
    return tl.div_rn(x, 1.0 + tl.exp(-x)).to(gate.dtype)


@_kernel
def _add(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Add as torch does: in float32, rounded to the operands' type."""
    return (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)


@_kernel
def _subtract(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    return (one.to(tl.float32) - other.to(tl.float32)).to(one.dtype)


@_kernel
def _multiply(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Multiply as torch does: in float32, rounded to the operands' type."""
    return (one.to(tl.float32) * other.to(tl.float32)).to(one.dtype)
