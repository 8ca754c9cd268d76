"""Norms and rotations of few bfloat16 rows on a CPU, compiled by numba. This module needs numba.

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
def _normed(bits: int, scale: Any, weight: int) -> Any:
    """Return a normalized element times its weight, rounded before and after."""
    return narrow(widen(narrow(widen(bits) * scale)) * widen(weight))


@compiled
def normalize(states: int, weight: int, out: int, num_rows: int, size: int, epsilon: float) -> None:
    """Write the RMS norms of rows [N, E], times weights [E], to ``out``."""
    shape = (num_rows, size)
    rows, normed = carray(shorts_at(states), shape), carray(shorts_at(out), shape)
    weights = carray(shorts_at(weight), (size,))
    for row in range(num_rows):
        scale = _scale_of(rows[row], size, epsilon)
        for i in range(size):
            normed[row, i] = _normed(rows[row, i], scale, weights[i])


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
    num_given, half = num_heads + 2 * num_kv_heads, size // 2
    heads = carray(shorts_at(states), (num_rows, num_given, size))
    cosines = carray(shorts_at(angles[0]), (num_rows, size))
    sines = carray(shorts_at(angles[1]), (num_rows, size))
    asked = carray(shorts_at(queries), (num_heads * num_rows * size,))
    last = num_kv_heads - 1
    keys = carray(shorts_at(stored[0]), (last * stored[2] + num_rows * size,))
    values = carray(shorts_at(stored[1]), (last * stored[3] + num_rows * size,))
    normed = np.empty(size, np.uint16)
    for row in range(num_rows):
        for number in range(num_heads + num_kv_heads):
            is_query = number < num_heads
            if is_query:
                target, start = asked, (number * num_rows + row) * size
            else:
                target, start = keys, (number - num_heads) * stored[2] + row * size
            head = heads[row, number]
            if norms[0] != 0:
                weights = carray(shorts_at(norms[0] if is_query else norms[1]), (size,))
                scale = _scale_of(head, size, norms[2])
                for i in range(size):
                    normed[i] = _normed(head[i], scale, weights[i])
                head = normed
            for i in range(half):
                low, high = widen(head[i]), widen(head[half + i])
                target[start + i] = narrow(
                    widen(narrow(low * widen(cosines[row, i])))
                    + widen(narrow(high * widen(sines[row, i])))
                )
                target[start + half + i] = narrow(
                    widen(narrow(high * widen(cosines[row, half + i])))
                    + widen(narrow(low * widen(sines[row, half + i])))
                )
        for number in range(num_kv_heads):
            start = number * stored[3] + row * size
            for i in range(size):
                values[start + i] = heads[row, num_heads + num_kv_heads + number, i]
