"""Triton kernels for what lies between a decoder layer's matrix products. This module needs triton.

transformers' modules compute norms, rotary embeddings, gates and residual sums in some thirty
kernels a layer. A replayed graph spends about two microseconds on each, however small. Here they
are four: a norm with the residual sum before it (twice), rotation with the writing of keys and
values, and the gate.

Results are rounded where the modules round them, so that an element differs from theirs by the
order of a norm's sum and by the last bit of an exponential at most. A row's result depends on no
other row.

Shapes: N rows, E hidden size, H query heads, K KV heads, D head size, S slots of the KV pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ragaccel.engine.cuda_graphs import LayerNorm

MAX_SIZE = 16_384  # elements of a row that one program normalizes
GATED = 1024  # elements of one program


class TritonLayers:
    """The kernels of a decoder layer; see ``cuda_graphs.LayerKernels``."""

    def normalize(self, states: Tensor, norm: LayerNorm) -> Tensor:
        """Return the RMS norm of rows [N, E]."""
        return self._normalize(states, None, norm)[0]

    def add_and_normalize(
        self, states: Tensor, residual: Tensor, norm: LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """Add rows [N, E] to the residual stream; return the norm of the sum, and the sum."""
        return self._normalize(states, residual, norm)

    def _normalize(
        self, states: Tensor, residual: Tensor | None, norm: LayerNorm
    ) -> tuple[Tensor, Tensor]:
        states, *rest = _as_rows(states, *(() if residual is None else (residual,)))
        residual = rest[0] if rest else None
        num_rows, size = states.shape
        if size > MAX_SIZE:
            raise ValueError(f"rows of {size} elements are too large to normalize")
        out = torch.empty_like(states)
        total = states if residual is None else torch.empty_like(states)
        block = triton.next_power_of_2(size)
        _normalize_rows[(num_rows,)](
            *(states, states if residual is None else residual, norm.weight, out, total),
            norm.epsilon, adds=residual is not None, size=size, block=block,
            num_warps=min(16, max(1, block // 512)), enable_fp_fusion=False,
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
        _gate_elements[(triton.cdiv(out.numel(), GATED),)](
            gates, values, out, out.numel(), block=GATED, num_warps=4, enable_fp_fusion=False
        )
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


def _kernel(function: Callable[..., object]) -> Any:
    return triton.jit(function)


@_kernel
def _normalize_rows(
    states: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, total: tl.tensor,
    epsilon: tl.tensor, adds: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Normalize one row, after adding the residual stream to it."""
    at = tl.arange(0, block)
    there, row = at < size, tl.program_id(0).to(tl.int64) * size
    x = tl.load(states + row + at, there, 0.0)
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
    x = tl.load(gates + at, there, 0.0).to(tl.float32)
    opened = tl.div_rn(x, 1.0 + tl.exp(-x)).to(out.dtype.element_ty)
    tl.store(out + at, _multiply(opened, tl.load(values + at, there, 0.0)), there)


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
