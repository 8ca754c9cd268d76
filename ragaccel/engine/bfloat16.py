"""Which code computes bfloat16 rows on a CPU: torch's, or the compiled modules ``bfloat16_*``."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch

from ragaccel.jit import is_jit_disabled

logger = logging.getLogger("ragaccel")


@cache
def compiled(name: str) -> Any:
    """Return the module ``bfloat16_{name}`` where it is faster than torch, else None.

    A process always gets the same, since the two round differently. The first call compiles it: two
    or three seconds on a machine's first run.

    Args:
        name: ``attention`` or ``products``.
    """
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or is_jit_disabled():
        return None
    try:
        from ragaccel.engine import bfloat16_code  # imports numba, so as late as possible

        if not bfloat16_code.is_supported():
            return None
        module = importlib.import_module(f"ragaccel.engine.bfloat16_{name}")
        module.check()
    except Exception as error:
        logger.warning("bfloat16 %s are left to torch, which takes longer: %s", name, error)
        return None
    return module
