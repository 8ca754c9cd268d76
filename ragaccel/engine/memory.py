"""Memory: what a device and a container leave free, and passes repeated when it runs out."""

from __future__ import annotations

import os
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, TypeVar

import torch

from ragaccel.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_ROOT = Path("/")
_MOUNT = "sys/fs/cgroup"


def total_bytes(root: Path = _ROOT) -> int | None:
    """How much memory this process may use, in bytes; None where that cannot be told.

    Args:
        root: where the system's files lie.
    """
    limits = [limit for limit, _ in _cgroup_limits(root)]
    machine = _read_pages("SC_PHYS_PAGES")
    return min(limits if machine is None else [machine, *limits], default=None)


def free_bytes(root: Path = _ROOT) -> int:
    """How much of it is free, in bytes; 0 where that cannot be told.

    Files that a container has read and no longer uses count as free: they give way.
    """
    machine = _read_pages("SC_AVPHYS_PAGES")
    if machine is None:
        return 0
    return max(0, min([machine, *(limit - used for limit, used in _cgroup_limits(root))]))


def _read_pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that bounds this process, its own and those above."""
    mount, own = root / _MOUNT, _own_cgroup(root)
    if own is None:
        return
    parts = [] if ".." in own.parts else own.parts[1:]
    # Within a container its own group may be mounted in place of the topmost one.
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit = _read_number(folder / "memory.max")
        if limit is not None:
            used = _read_number(folder / "memory.current") or 0
            yield limit, max(0, used - _read_entry(folder / "memory.stat", "inactive_file"))


def _own_cgroup(root: Path) -> Path | None:
    """The control group of this process; those of version 1 are not looked at."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return next((Path(line[3:]) for line in lines if line.startswith("0::")), None)


def _read_number(file: Path) -> int | None:
    """Read a number of bytes; None where there is none, or no limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _read_entry(file: Path, name: str) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0


_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)  # on a CPU, on others
_UNKNOWN_BYTES = 20 << 30  # taken where the memory cannot be told

Result = TypeVar("Result")


def memory_share(device: torch.device, share: float) -> int:
    """How many bytes a share of a device's memory is."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * share)
    memory = total_bytes()
    return int((_UNKNOWN_BYTES if memory is None else memory) * share)


def check_capacity(
    num_prompt: int, num_new: int, max_tokens: int | None, limit: int | None
) -> None:
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


def with_memory_retry(
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
    _free_device_memory(free, device)
    try:
        return compute()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        for one in _error_chain(
            error
        ):  # what their frames hold would stay as long as the error does
            clear_frames(one.__traceback__)
        _free_device_memory(free, device)
        raise CapacityError(
            f"no memory left on {device} for {what}: shorten the prompt, or answer "
            "fewer requests at once (max_batch)"
        ) from error


def _free_device_memory(free: Callable[[], None], device: torch.device) -> None:
    """Free what may be, and let the device have it back."""
    free()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device's memory is full, or came of one that does."""
    return any(
        isinstance(one, torch.OutOfMemoryError)
        or any(part in str(one) for part in _OUT_OF_MEMORY_MESSAGES)
        for one in _error_chain(error)
    )


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came of, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
