"""Arrays: compiled functions over them, large ones that grow, those read from files.

What is remembered is made anew with every request, a little larger than before, and the former is
dropped. On the heap nothing quite fits into the gaps that this leaves.
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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ragaccel.paths import PerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray


Function = TypeVar("Function", bound="Callable[..., Any]")

_NUMBA_SETTINGS = ".numba_config.yaml"
# By what a compiled function asks in Python: for the types of new arguments, and for code for them.
_DISPATCHER_METHODS = ("typeof_pyval", "_compile_for_args")


def compiled(function: Function) -> Function:
    """Compile a function of numbers and arrays; without numba it runs as it is written.

    What was compiled is kept beside the source, so that it is done once for each version of this
    folder. The plain function stays at hand as ``py_func``: tests hold the two against each other.
    """
    return _compiled(function, "never")


def inlined(function: Function) -> Function:
    """Compile a function into those that call it: for the innermost ones, where it was measured.

    What a call costs there is mostly the counting of references to the arrays it is given.
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
    except RuntimeError:  # no place where anything could be kept
        made = numba.njit(nogil=True, inline=inline)(function)
    if numba.config.DISABLE_JIT:
        made.py_func = function
    else:
        if not _invalidate_with_sources(made):
            made = numba.njit(nogil=True, inline=inline)(function)
        _serialize_loading(made)
    kept: Function = made
    return kept


_COMPILE_LOCK = PerProcess(RLock)  # held where functions are compiled, or loaded


def _serialize_loading(made: Any) -> None:
    """Have one thread at a time find a function's types and load its code.

    The first function that a process calls adds types to numba's table of them, while other
    threads may be going through it. Calls whose code is loaded take no lock: they ask neither.
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
    """Import numba so that it reads no settings file of the current folder, now or later.

    That folder may be a stranger's, and the file says, among other things, where compiled functions
    are kept: they are unpickled from there. A program that imported numba before has chosen itself.
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
    """Whether functions run as they are written here, slowly."""
    try:
        numba = _import_numba()
    except ImportError:
        return True
    return bool(numba.config.DISABLE_JIT)


def is_uncompiled(function: Any) -> bool:
    """Whether a function has yet to be compiled and could then be kept for other processes."""
    try:
        return not function._cache._cache_file._load_index()
    except (AttributeError, OSError):  # no place where anything could be kept
        return False


def _invalidate_with_sources(made: Any) -> bool:
    """Let what is kept of a function count for all sources as they are now, not for its own only.

    numba forgets it when the file of the function changes, but not when a file changes whose
    functions it calls: it would go on calling the old ones. False where that cannot be told it.
    """
    try:
        kept = made._cache._cache_file  # a NullCache has none
        kept._source_stamp = (kept._source_stamp, _sources())
    except AttributeError:
        return False
    return True


@cache
def _sources() -> str:
    """What tells one state of this folder's sources from another."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


MIN_MMAP_BYTES = 1 << 16  # bytes from which the pages' rounding, half a page, is next to nothing


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of zeros, writable and contiguous."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < MIN_MMAP_BYTES:
        return np.zeros(shape, dtype)
    # A forked process must not write into its parent's.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, num_bytes, **flags), dtype).reshape(shape)


def concatenate(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One array of several of one type, one after another along the first axis."""
    size = sum(len(part) for part in parts)
    return np.concatenate(parts, out=zeros((size, *parts[0].shape[1:]), parts[0].dtype))


def insert(array: NDArray[Any], at: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """A row of numbers with others put in before those at ``at``, ascending, as numpy inserts."""
    made = zeros((len(array) + len(new),), array.dtype)
    positions = at + np.arange(len(at))
    made[positions] = new
    is_old = np.ones(len(made), bool)
    is_old[positions] = False
    made[is_old] = array
    return made


Table = npt.NDArray[np.float64]
State = dict[str, npt.NDArray[Any]]
"""What a learner knows, as named arrays."""
MAX_VOCAB_SIZE = 1 << 24
"""Token ids are below this where no vocabulary is given: arrays by token id stay of a sane size."""


def checked_array(
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
