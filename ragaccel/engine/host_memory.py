"""Host memory: what this process may use of a machine's, where a container gets less than all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/")
_MOUNT = "sys/fs/cgroup"


def total_bytes(root: Path = _ROOT) -> int | None:
    """How much memory this process may use, in bytes; None where that cannot be told.

    Args:
        root: where the system's files lie.
    """
    limits = [limit for limit, _ in _groups(root)]
    machine = _pages("SC_PHYS_PAGES")
    return min(limits if machine is None else [machine, *limits], default=None)


def free_bytes(root: Path = _ROOT) -> int:
    """How much of it is free, in bytes; 0 where that cannot be told.

    Files that a container has read and no longer uses count as free: they give way.
    """
    machine = _pages("SC_AVPHYS_PAGES")
    if machine is None:
        return 0
    return max(0, min([machine, *(limit - used for limit, used in _groups(root))]))


def _pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that bounds this process, its own and those above."""
    mount, own = root / _MOUNT, _own_group(root)
    if own is None:
        return
    parts = [] if ".." in own.parts else own.parts[1:]
    # Within a container its own group may be mounted in place of the topmost one.
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit = _number(folder / "memory.max")
        if limit is not None:
            used = _number(folder / "memory.current") or 0
            yield limit, max(0, used - _entry(folder / "memory.stat", "inactive_file"))


def _own_group(root: Path) -> Path | None:
    """The control group of this process; those of version 1 are not looked at."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return next((Path(line[3:]) for line in lines if line.startswith("0::")), None)


def _number(file: Path) -> int | None:
    """Read a number of bytes; None where there is none, or no limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _entry(file: Path, name: str) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0
