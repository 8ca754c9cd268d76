"""The process's own registry: what all of a process retrieved, unless it is told not to look."""

from __future__ import annotations

import os

from ragaccel.forking import PerProcess
from ragaccel.memory.registry import ReferenceRegistry

_OWN = PerProcess(ReferenceRegistry)


def default_registry() -> ReferenceRegistry:
    """Return the registry that all of a process shares, made when first used."""
    return _OWN.get()


def auto_references_enabled() -> bool:
    """Whether references are looked for unasked: ``RAGACCEL_AUTO_REFERENCES`` is not 0 or off."""
    said = os.environ.get("RAGACCEL_AUTO_REFERENCES", "")
    return said.strip().lower() not in {"0", "false", "off", "no"}
