"""Large arrays: in pages of their own, so that each one's memory is free once it is dropped.

What is remembered is made anew with every request, a little larger than before, and the former is
dropped. On the heap nothing quite fits into the gaps that this leaves.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

LARGE = 1 << 16  # bytes from which the pages' rounding, half a page, is next to nothing


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of zeros, writable and contiguous."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < LARGE:
        return np.zeros(shape, dtype)
    # A forked process must not write into its parent's.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, num_bytes, **flags), dtype).reshape(shape)


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One array of several of one type, one after another along the first axis."""
    size = sum(len(part) for part in parts)
    return np.concatenate(parts, out=zeros((size, *parts[0].shape[1:]), parts[0].dtype))


def inserted(array: NDArray[Any], at: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """A row of numbers with others put in before those at ``at``, ascending, as numpy inserts."""
    made = zeros((len(array) + len(new),), array.dtype)
    places = at + np.arange(len(at))
    made[places] = new
    is_old = np.ones(len(made), bool)
    is_old[places] = False
    made[is_old] = array
    return made
