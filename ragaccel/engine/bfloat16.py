"""Which code computes bfloat16 rows on a CPU, torch's or that of ``bfloat16_*``; packed weights.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import importlib
import logging
import sys
from functools import cache
from threading import RLock, Timer
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.jit import is_jit_disabled
from ragaccel.paths import PerProcess

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_OUTPUTS = 32
"""Outputs whose weights lie side by side in packed weights."""

_NOTICE = "ragaccel: compiling {} for this processor: about ten seconds\n"
_PATIENCE = 1.5  # seconds; what is compiled already loads in less

logger = logging.getLogger("ragaccel")
_LOCK = PerProcess(RLock)
_FOUND: dict[str, Any] = {}


@cache
def is_supported() -> bool:
    """Return whether this processor has compiled functions for bfloat16; compiles none."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX") or is_jit_disabled():
        return False
    with _LOCK.get():
        try:
            from ragaccel.engine import bfloat16_code  # imports numba, so as late as possible
        except Exception as error:
            logger.warning("bfloat16 is left to torch, which takes longer: %s", error)
            return False
        return bfloat16_code.is_supported()


def kernels(name: str) -> Any:
    """Return the module ``bfloat16_{name}`` where it is faster than torch, else None.

    A process always gets the same, since the two round differently. The first call compiles it,
    which takes some seconds on a machine's first run, and says so on stderr.

    Args:
        name: ``attention``, ``products`` or ``layers``, which need both.
    """
    if name not in _FOUND:
        with _LOCK.get():
            if name not in _FOUND:
                _FOUND[name] = _load(name)
    return _FOUND[name]


def _load(name: str) -> Any:
    if not is_supported():
        return None
    notice = Timer(_PATIENCE, _say, [_NOTICE.format(name)])
    notice.daemon = True
    notice.start()
    try:
        module = importlib.import_module(f"ragaccel.engine.bfloat16_{name}")
        module.check()
    except Exception as error:
        logger.warning("bfloat16 %s are left to torch, which takes longer: %s", name, error)
        return None
    finally:
        notice.cancel()
    return module


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)


def can_pack(weight: Tensor) -> bool:
    """Return whether weights [O, I] can be packed for ``bfloat16_products``."""
    if weight.dim() != 2:
        return False
    num_outputs, num_inputs = weight.shape
    is_here = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return is_here and num_outputs % BLOCK_OUTPUTS == 0 and num_inputs % 2 == 0


def pack(weight: Tensor) -> Tensor:
    """Return weights [O, I] that ``can_pack`` in pairs of inputs, [O / 32, I / 2, 64]."""
    pairs = weight.detach().contiguous().view(torch.int32)
    blocks = pairs.view(-1, BLOCK_OUTPUTS, pairs.shape[1]).transpose(1, 2).contiguous()
    return blocks.view(torch.bfloat16)


def unpack(packed: Tensor) -> Tensor:
    """Return packed weights as they were, [O, I]."""
    pairs = packed.view(torch.int32).transpose(1, 2).contiguous()
    return pairs.view(-1, packed.shape[1]).view(torch.bfloat16)
