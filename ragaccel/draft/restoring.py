"""Restoring: arrays that come from a file, checked before compiled functions index with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

State = dict[str, npt.NDArray[Any]]
"""What a learner knows, as named arrays."""
MAX_IDS = 1 << 24
"""Token ids are below this where no vocabulary is given: arrays by token id stay of a sane size."""


def checked(
    state: State, name: str, dtype: type, shape: tuple[int | None, ...], *, low: float, high: float
) -> npt.NDArray[Any]:
    """Return a copy of one array of a state, in which every number is from ``low`` to ``high``.

    None in ``shape`` stands for any length. Not-a-number is out of every range.

    Raises:
        ValueError: no such array, or one of another type, shape or range.
    """
    if name not in state:
        raise ValueError(f"it lacks the array {name}")
    found = state[name]
    if found.dtype != np.dtype(dtype):
        raise ValueError(f"{name} holds {found.dtype}, not {np.dtype(dtype)}")
    fits = len(found.shape) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(found.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} is of shape {found.shape}")
    if not np.all((found >= low) & (found <= high)):
        raise ValueError(f"{name} holds numbers that are not from {low} to {high}")
    return np.array(found, order="C")
