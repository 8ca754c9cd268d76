"""Memory limits: what a device has, and what is done when it has no more."""

from __future__ import annotations

from traceback import clear_frames
from typing import TYPE_CHECKING, TypeVar

import torch

from ragaccel.engine.host_memory import total_bytes
from ragaccel.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TOLD = ("can't allocate memory", "not enough memory", "out of memory")  # on a CPU, on others
_UNKNOWN_BYTES = 20 << 30  # taken where the memory cannot be told

Result = TypeVar("Result")


def memory_share(device: torch.device, share: float) -> int:
    """How many bytes a share of a device's memory is."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * share)
    memory = total_bytes()
    return int((_UNKNOWN_BYTES if memory is None else memory) * share)


def check_room(num_prompt: int, num_new: int, max_tokens: int | None, limit: int | None) -> None:
    """Refuse a prompt that does not fit together with its longest answer, and say what to do.

    Args:
        num_prompt: tokens of the prompt.
        num_new: most tokens of the answer.
        max_tokens: what a request may hold; ``None`` for no limit.
        limit: what the model reads.

    Raises:
        CapacityError: they do not fit.
    """
    needed = num_prompt + num_new
    if max_tokens is None or needed <= max_tokens:
        return
    advice = (
        f"load with capacity={needed:,} or more"
        if limit is None or needed <= limit
        else f"the model reads at most {limit:,}: shorten the prompt or ask for fewer tokens"
    )
    raise CapacityError(
        f"prompt ({num_prompt:,}) + max_new_tokens ({num_new:,}) exceed the capacity of "
        f"{max_tokens:,} tokens: {advice}"
    )


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
        if not is_out_of_memory(error):
            raise
    _freed(free, device)
    try:
        return compute()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        for one in _causes(error):  # what their frames hold would stay as long as the error does
            clear_frames(one.__traceback__)
        _freed(free, device)
        raise CapacityError(
            f"no memory left on {device} for {what}: shorten the prompt, or answer "
            "fewer requests at once (max_batch)"
        ) from error


def _freed(free: Callable[[], None], device: torch.device) -> None:
    """Free what may be, and let the device have it back."""
    free()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device's memory is full, or came of one that does."""
    return any(
        isinstance(one, torch.OutOfMemoryError) or any(part in str(one) for part in _TOLD)
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came of, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
