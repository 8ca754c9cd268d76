"""Memory limits: what a device has, and what is done when it has no more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import torch

from ragaccel.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

_UNKNOWN_BYTES = 20 << 30  # taken where the memory cannot be told

Result = TypeVar("Result")


def memory_share(device: torch.device, share: float) -> int:
    """How many bytes a share of a device's memory is."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * share)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        memory = _UNKNOWN_BYTES
    return int(memory * share)


def within_memory(
    compute: Callable[[], Result],
    what: str,
    device: torch.device,
    free: Callable[[], None],
) -> Result:
    """Compute; if the device has no memory left, once more after ``free``.

    Raises:
        CapacityError: ``what`` does not fit even so.
    """
    try:
        return compute()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
    free()
    try:
        return compute()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        free()
        raise CapacityError(
            f"no memory left on {device} for {what}: shorten the prompt, answer "
            "fewer requests at once, or load with a smaller prefill_chunk"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    told = ("can't allocate memory", "not enough memory", "out of memory")  # on a CPU, on others
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error) for part in told)
