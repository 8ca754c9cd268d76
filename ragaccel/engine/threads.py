"""Threads: as many of a processor's as were measured to be fastest, for as long as a pass takes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def on_threads(number: int | None, device: torch.device) -> Iterator[None]:
    """Compute on so many threads meanwhile; None, and any device but a CPU, leave them alone."""
    usual = torch.get_num_threads()
    if number is None or number == usual or device.type != "cpu":
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
