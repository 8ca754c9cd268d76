"""Arrays: compiled functions over them, large arrays that grow, checks of arrays from files.

Every request replaces the arrays of a memory by slightly larger ones. On the heap that would leave
gaps too small to be used again, so large arrays have memory pages of their own.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from functools import cache, wraps
from math import prod
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ragaccel.paths import PerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray


Function = TypeVar("Function", bound="Callable[..., Any]")

_NUMBA_SETTINGS = ".numba_config.yaml"
# Methods of numba's dispatcher that resolve the types of new arguments and compile for them.
_DISPATCHER_METHODS = ("typeof_pyval", "_compile_for_args")


def compiled(function: Function) -> Function:
    """Return a compiled function of numbers and arrays; without numba, the plain function.

    The compiled code is cached beside the source, once per version of this folder. The plain
    function stays available as ``py_func``, so that tests can compare the two.
    """
    return _compiled(function, "never")


def inlined(function: Function) -> Function:
    """Return a compiled function that is inlined into its callers.

    Use it for inner loops if it is measurably faster: the cost of a call is mostly reference
    counting of its array arguments.
    """
    return _compiled(function, "always")


def _compiled(function: Function, inline: str) -> Function:
    try:
        numba = _import_numba()
    except ImportError:
        function.py_func = function  # type: ignore[attr-defined]
        return function
    try:
        made: Any = numba.njit(cache=True, nogil=True, inline=inline)(function)
    except RuntimeError:  # there is no writable cache folder
        made = numba.njit(nogil=True, inline=inline)(function)
    if numba.config.DISABLE_JIT:
        made.py_func = function
    else:
        if not _invalidate_with_sources(made):
            made = numba.njit(nogil=True, inline=inline)(function)
        _serialize_loading(made)
    kept: Function = made
    return kept


_COMPILE_LOCK = PerProcess(RLock)  # held while functions are compiled or loaded


def _serialize_loading(made: Any) -> None:
    """Let one thread at a time resolve a function's types and load its code.

    The first function that a process calls adds types to numba's table, which other threads may be
    reading. Calls whose code is loaded take no lock, because they call neither method.
    """

    def in_turn(asked: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(asked)
        def wait(*args: Any, **kwargs: Any) -> Any:
            with _COMPILE_LOCK.get():
                return asked(*args, **kwargs)

        return wait

    for name in _DISPATCHER_METHODS:
        setattr(made, name, in_turn(getattr(made, name)))


def _import_numba() -> Any:
    """Import numba so that it never reads a settings file of the current folder.

    That folder may belong to someone else, and the file can set where compiled functions are cached
    and unpickled from. A program that has imported numba before is left as it is.
    """
    with _COMPILE_LOCK.get():
        if "numba" not in sys.modules:
            exists = os.path.exists
            os.path.exists = lambda path: path != _NUMBA_SETTINGS and exists(path)
            try:
                from numba.core import config

                config._config_fname = ""
            finally:
                os.path.exists = exists
        import numba

        return numba


def is_jit_disabled() -> bool:
    """Return whether functions run as plain, slow Python."""
    try:
        numba = _import_numba()
    except ImportError:
        return True
    return bool(numba.config.DISABLE_JIT)


def is_uncompiled(function: Any) -> bool:
    """Return whether a function is not compiled yet, and its code can be cached on this machine."""
    try:
        return not function._cache._cache_file._load_index()
    except (AttributeError, OSError):  # there is no writable cache folder
        return False


def _invalidate_with_sources(made: Any) -> bool:
    """Tie the cached code of a function to all sources of this folder; return whether that worked.

    numba drops cached code if the file of the function changes, but not if the file of a function
    that it calls does: it would continue to call the old one.
    """
    try:
        kept = made._cache._cache_file  # a NullCache has no such attribute
        kept._source_stamp = (kept._source_stamp, _sources())
    except AttributeError:
        return False
    return True


@cache
def _sources() -> str:
    """Return a digest of this folder's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
