"""Compiling: numba where it is installed, plain Python where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")


def compiled(function: Function) -> Function:
    """Compile a function of numbers and arrays; without numba it runs as it is written.

    What was compiled is kept beside the source, so that it is done once. The plain function stays
    at hand as ``py_func``: tests hold the two against each other.
    """
    try:
        import numba
    except ImportError:
        function.py_func = function  # type: ignore[attr-defined]
        return function
    made: Function = numba.njit(cache=True, nogil=True)(function)
    return made
