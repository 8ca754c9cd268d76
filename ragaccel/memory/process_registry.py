"""The process's own registry: what all of a process retrieved, unless it is told not to look."""

from __future__ import annotations

import os
from functools import cache
from threading import Lock

from ragaccel.memory.registry import ReferenceRegistry


class _Own:
    """Made at its first use; a forked process has its own, since a lock may be held at a fork."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.made, self.making = cache(ReferenceRegistry), Lock()


_OWN = _Own()


def default_registry() -> ReferenceRegistry:
    """Return the registry that all of a process shares, made when first used."""
    with _OWN.making:
        return _OWN.made()


def auto_references_enabled() -> bool:
    """Whether references are looked for unasked: ``RAGACCEL_AUTO_REFERENCES`` is not 0 or off."""
    said = os.environ.get("RAGACCEL_AUTO_REFERENCES", "")
    return said.strip().lower() not in {"0", "false", "off", "no"}
