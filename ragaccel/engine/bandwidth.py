"""Bandwidth: how fast a device reads its memory, which bounds what a pass of few rows can take."""

from __future__ import annotations

from time import perf_counter

import torch

_BYTES = 1 << 28
_REPEATS = 7


def read_bandwidth(device: torch.device) -> float:
    """Measure how fast a device sums a quarter of a gigabyte, in bytes a second; the best of some.

    Far more than any cache holds, so that it is memory that is read.
    """
    numbers = torch.ones(_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        started = perf_counter()
        numbers.sum()
        _wait(device)
        best = min(best, perf_counter() - started)
    return _BYTES / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
