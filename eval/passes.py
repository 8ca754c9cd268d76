"""Passes: what a model's forward passes took, seen from outside and alike for every decoder."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel


@dataclass(slots=True)
class Passes:
    """Counts and seconds of the passes made while watching.

    ``rows_of_each`` has the rows of every pass, in order. ``first_end`` is the moment the first
    pass was done. ``seconds`` are wall time on a CPU; on a GPU, where only launching is seen, they
    mean little and are left out of results.
    """

    count: int = 0
    rows: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_end: float = 0.0
    rows_of_each: list[int] = field(default_factory=list)


@contextmanager
def watching(networks: Sequence[PreTrainedModel]) -> Iterator[Passes]:
    """Watch a model's passes while the context is open; through whichever network they run.

    Waits for the device after the first pass alone, so that prefill can be told from decoding.
    """
    passes = Passes()
    started = 0.0
    device = networks[0].device

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal started
        ids = args[0] if args else kwargs["input_ids"]
        passes.count += 1
        passes.rows += ids.shape[1]
        passes.rows_of_each.append(ids.shape[1])
        started = perf_counter()

    def after(*_unused: Any) -> None:
        if passes.count == 1:
            synchronize(device)
        ended = perf_counter()
        passes.seconds += ended - started
        if passes.count == 1:
            passes.first_seconds, passes.first_end = ended - started, ended

    handles = [
        handle
        for network in networks
        for handle in (
            network.register_forward_pre_hook(before, with_kwargs=True),
            network.register_forward_hook(after),
        )
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
