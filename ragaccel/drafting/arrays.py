"""Arrays: large ones that grow, and checks of arrays from files.

Every request replaces the arrays of a memory by slightly larger ones. On the heap that would leave
gaps too small to be used again, so large arrays have memory pages of their own.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray


MIN_MMAP_BYTES = 1 << 16  # bytes; below this, rounding up to whole pages wastes too much


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a writable, contiguous array of zeros."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < MIN_MMAP_BYTES:
        return np.zeros(shape, dtype)
    # Private, so that a forked process does not write into its parent's pages.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, num_bytes, **flags), dtype).reshape(shape)


def concatenate(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays of one type concatenated along the first axis."""
    size = sum(len(part) for part in parts)
    return np.concatenate(parts, out=zeros((size, *parts[0].shape[1:]), parts[0].dtype))


def insert(array: NDArray[Any], at: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """Return a one-dimensional array with numbers inserted before the ascending indices ``at``."""
    made = zeros((len(array) + len(new),), array.dtype)
    positions = at + np.arange(len(at))
    made[positions] = new
    is_old = np.ones(len(made), bool)
    is_old[positions] = False
    made[is_old] = array
    return made


Table = npt.NDArray[np.float64]
State = dict[str, npt.NDArray[Any]]
"""The contents of a history or calibration, as named arrays."""
MAX_VOCAB_SIZE = 1 << 24
"""Limit of token ids if no vocabulary size is given: some arrays are as long as the largest id."""


class Field(NamedTuple):
    """What an array of a state must be.

    Sizes of ``shape`` are numbers or names; arrays with the same name of a size are equally long
    there. NaN is out of every range.
    """

    dtype: type
    shape: tuple[int | str, ...]
    low: float = -np.inf
    high: float = np.inf


def check_state(state: State, fields: Mapping[str, Field]) -> list[npt.NDArray[Any]]:
    """Return copies of the arrays of a state, in the order of ``fields``.

    Raises:
        ValueError: an array is missing, or of another type, shape or range.
    """
    sizes: dict[int | str, int] = {}
    arrays = []
    for name, (dtype, shape, low, high) in fields.items():
        if name not in state:
            raise ValueError(f"the array {name} is missing")
        found = state[name]
        if found.dtype != np.dtype(dtype):
            raise ValueError(f"{name} holds {found.dtype}, not {np.dtype(dtype)}")
        wanted = tuple(
            size if isinstance(size, int) else sizes.setdefault(size, known)
            for size, known in zip(shape, found.shape, strict=False)
        )
        if found.shape != wanted or len(wanted) != len(shape):
            raise ValueError(f"{name} has the shape {found.shape}, not {shape}")
        if not np.all((found >= low) & (found <= high)):
            raise ValueError(f"{name} holds numbers outside {low} to {high}")
        arrays.append(np.array(found, order="C"))
    return arrays
