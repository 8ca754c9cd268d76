"""Norms and rotations of bfloat16 rows on a CPU, compiled by numba. This module needs numba.

Of few rows, torch's operations take longer to start than to compute: sixty norms took an eighth of
a step. Results are those of ``fused_decoder``'s operations in torch to the last bit: every product
and sum is rounded to bfloat16 as there, and a norm's sum of squares, in float64, is exact enough
that its order changes nothing. So passes may use these functions as soon as they are compiled.

Tensors are given by their addresses: arguments of numba that are arrays take longer to unpack than
a norm takes. They are contiguous unless strides are given.

Shapes: N rows, E hidden size, H query heads, K heads of keys and values, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ragaccel.engine.bfloat16_code import narrow, shorts_at, widen
from ragaccel.jit import compiled, inlined


@inlined
def _square(bits: int) -> Any:
    wide = np.float64(widen(bits))
    return wide * wide


@inlined
def _scale_of(row: Any, size: int, epsilon: float) -> Any:
    """Return the factor that normalizes a row by its root mean square."""
    first = second = third = fourth = 0.0  # one sum would wait for each addition
    stop = size - size % 4
    for i in range(0, stop, 4):
        first += _square(row[i])
        second += _square(row[i + 1])
        third += _square(row[i + 2])
        fourth += _square(row[i + 3])
    for i in range(stop, size):
        first += _square(row[i])
    return np.float32(1.0 / np.sqrt((first + second + third + fourth) / size + epsilon))


@inlined
def normalize_row(states: int, weight: int, out: int, size: int, epsilon: float) -> None:
    """Write the RMS norm of a row, rounded before its product with the weights and after."""
    row, weights = carray(shorts_at(states), (size,)), carray(shorts_at(weight), (size,))
    normed = carray(shorts_at(out), (size,))
    scale = _scale_of(row, size, epsilon)
    for i in range(size):
        normed[i] = narrow(widen(narrow(widen(row[i]) * scale)) * widen(weights[i]))


@compiled
def normalize(states: int, weight: int, out: int, num_rows: int, size: int, epsilon: float) -> None:
    """Write the RMS norms of rows [N, E], times weights [E], to ``out``."""
    for row in range(0, 2 * size * num_rows, 2 * size):
        normalize_row(states + row, weight, out + row, size, epsilon)


@compiled
def rotate_and_store(
    states: int,
    angles: tuple[int, int],
    norms: tuple[int, int, float],
    queries: int,
    stored: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int],
) -> None:
    """Rotate queries and keys by their positions, and write keys and values to a cache.

    Args:
        states: queries, keys and values of rows [N, (H + 2 K) D].
        angles: cosines and sines [N, D], the sines of the first half negated.
        norms: weights [D] of the norms of query and key heads, 0 for none, and their epsilon.
        queries: where to write the rotated queries, [H, N, D].
        stored: where the first head's keys and values begin in the cache, and how many elements
            later the next head's keys and values do.
        sizes: N, H, K, D.
    """
    num_rows, num_heads, num_kv_heads, size = sizes
    normed = np.empty(size, np.uint16)
    for row in range(num_rows):
        place = row * size * 2
        rotate_row(
            states + row * (num_heads + 2 * num_kv_heads) * size * 2,
            (angles[0] + place, angles[1] + place),
            norms,
            (queries + place, num_rows * size),
            (stored[0] + place, stored[1] + place, stored[2], stored[3]),
            (num_heads, num_kv_heads, size),
            normed.ctypes.data,
        )


@inlined
def rotate_row(
    states: int,
    angles: tuple[int, int],
    norms: tuple[int, int, float],
    queries: tuple[int, int],
    stored: tuple[int, int, int, int],
    sizes: tuple[int, int, int],
    normed: int,
) -> None:
    """Rotate queries and keys of one row, and write its keys and values to a cache.

    ``queries`` is where to write the first head, and how many elements later to write the next;
    ``sizes`` are H, K, D, and ``normed`` has room for a head.
    """
    num_heads, num_kv_heads, size = sizes
    head, step = states, 2 * size
    for number in range(num_heads + num_kv_heads):
        if number < num_heads:
            weight, target = norms[0], queries[0] + number * queries[1] * 2
        else:
            weight, target = norms[1], stored[0] + (number - num_heads) * stored[2] * 2
        source = head
        if weight != 0:
            normalize_row(head, weight, normed, size, norms[2])
            source = normed
        _turn(source, angles, target, size)
        head += step
    for number in range(num_kv_heads):
        _copy(head, stored[1] + number * stored[3] * 2, size)
        head += step


@inlined
def _turn(head: int, angles: tuple[int, int], target: int, size: int) -> None:
    """Write a head rotated by its angles; every product is rounded, then the sum."""
    half = size // 2
    # Halves of their own, so that LLVM computes vectors: of more arrays it does not.
    for part in range(2):
        own, other = head + part * size, head + (1 - part) * size
        first, second = carray(shorts_at(own), (half,)), carray(shorts_at(other), (half,))
        cosines = carray(shorts_at(angles[0] + part * size), (half,))
        sines = carray(shorts_at(angles[1] + part * size), (half,))
        out = carray(shorts_at(target + part * size), (half,))
        for i in range(half):
            kept = narrow(widen(first[i]) * widen(cosines[i]))
            crossed = narrow(widen(second[i]) * widen(sines[i]))
            out[i] = narrow(widen(kept) + widen(crossed))


@inlined
def _copy(source: int, target: int, size: int) -> None:
    given, out = carray(shorts_at(source), (size,)), carray(shorts_at(target), (size,))
    for i in range(size):
        out[i] = given[i]
