"""Memory: total and free memory of devices and containers, and retries if it runs out."""

from __future__ import annotations

import os
import re
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
    """Return how much memory this process may use, in bytes, or None if unknown.

    Args:
        root: root of the file system that holds /proc and /sys.
    """
    limits = [limit for limit, _ in _cgroup_limits(root)]
    machine = _read_pages("SC_PHYS_PAGES")
    return min(limits if machine is None else [machine, *limits], default=None)


def free_bytes(root: Path = _ROOT) -> int:
    """Return how much memory is free for this process, in bytes, or 0 if unknown.

    The file cache that the kernel reclaims counts as free.

    Args:
        root: root of the file system that holds /proc and /sys.
    """
    machine = _read_pages("SC_AVPHYS_PAGES")
    if machine is None:
        return 0
    available = re.search(r"^MemAvailable: +(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    machine = int(available[1]) << 10 if available else machine
    return max(0, min([machine, *(limit - used for limit, used in _cgroup_limits(root))]))


def _read_pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and usage of each control group of this process that has a limit.

    Only version 2 of control groups is read.
    """
    own = re.search(r"^0::/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    if own is None:
        return
    parts = [] if ".." in own[1].split("/") else own[1].split("/")
    # Inside a container, its own group may be mounted in place of the root group.
    for depth in range(len(parts), -1, -1):
        folder = (root / _MOUNT).joinpath(*parts[:depth])
        limit, used = (_read(folder / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdecimal():
            unused = re.search(
                r"^inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE
            )
            in_use = int(used) if used.isdecimal() else 0
            yield int(limit), max(0, in_use - int(unused[1]) if unused else in_use)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_OUT_OF_MEMORY_MESSAGES = (
    "ALLOC_FAILED",  # cuBLAS and cuDNN
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)  # on a CPU and on other devices
_UNKNOWN_BYTES = 20 << 30  # assumed if the memory is unknown

Result = TypeVar("Result")


def memory_share(device: torch.device, share: float) -> int:
    """Return a share of a device's memory, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * share)
    memory = total_bytes()
    return int((_UNKNOWN_BYTES if memory is None else memory) * share)


def check_capacity(
    num_prompt: int, num_new: int, max_tokens: int | None, limit: int | None
) -> None:
    """Check that a prompt and its longest answer fit.

    Args:
        num_prompt: tokens of the prompt.
        num_new: most tokens of the answer.
        max_tokens: most tokens of a request; ``None`` for no limit.
        limit: most tokens that the model reads; ``None`` for no limit.

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
    """Return ``compute()``; if memory runs out, call ``free`` and try once more.

    Raises:
        CapacityError: memory ran out again; ``what`` names the computation in the message.
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
        for one in _error_chain(error):  # tracebacks keep the tensors of their frames
            clear_frames(one.__traceback__)
        _free_device_memory(free, device)
        raise CapacityError(
            f"no memory left on {device} for {what}: shorten the prompt, or answer "
            "fewer requests at once (max_batch)"
        ) from error


def _free_device_memory(free: Callable[[], None], device: torch.device) -> None:
    """Call ``free`` and return torch's cached blocks to the device."""
    free()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, says that a device is out of memory."""
    return any(
        isinstance(one, torch.OutOfMemoryError)
        or any(part in str(one) for part in _OUT_OF_MEMORY_MESSAGES)
        for one in _error_chain(error)
    )


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
