"""Passes: what a model's forward passes took, seen from outside and alike for every decoder."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from ragaccel.engine.cuda_graphs import StepGraphs
    from ragaccel.engine.model_input import Rows


@dataclass(slots=True)
class Passes:
    """Counts and seconds of the passes made while watching.

    ``rows_of_each`` has the rows of every pass, in order, ``starts`` what lay in transformers'
    cache before each. ``first_end`` is the moment the first pass was done. ``seconds`` are wall
    time on a CPU; on a GPU, where only launching is seen, they mean little and are left out of
    results.
    """

    count: int = 0
    rows: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_end: float = 0.0
    rows_of_each: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@contextmanager
def watching(network: PreTrainedModel, graphs: StepGraphs | None = None) -> Iterator[Passes]:
    """Watch a model's passes while the context is open; through whichever network they run.

    Passes that ``graphs`` replay call no module, so they are seen there.

    Waits for the device after the first pass alone, so that prefill can be told from decoding.
    """
    passes = Passes()
    started = 0.0
    device = network.device

    def begin(num_rows: int) -> None:
        nonlocal started
        passes.count += 1
        passes.rows += num_rows
        passes.rows_of_each.append(num_rows)
        started = perf_counter()

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        past = kwargs.get("past_key_values")
        if isinstance(past, Cache):
            passes.starts.append(int(past.get_seq_length()))
        given = args[0] if args else kwargs.get("input_ids")
        begin((kwargs["inputs_embeds"] if given is None else given).shape[1])  # of mask tokens

    def after(*_unused: Any) -> None:
        if passes.count == 1:
            synchronize(device)
        ended = perf_counter()
        passes.seconds += ended - started
        if passes.count == 1:
            passes.first_seconds, passes.first_end = ended - started, ended

    def replayed(run: Callable[[Rows], Tensor], rows: Rows) -> Tensor:
        begin(rows.num_rows)
        logits = run(rows)
        after()
        return logits

    handles = (
        network.register_forward_pre_hook(before, with_kwargs=True),
        network.register_forward_hook(after),
    )
    try:
        with around(graphs, replayed):
            yield passes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def around(
    graphs: StepGraphs | None, wrapper: Callable[[Callable[[Rows], Tensor], Rows], Tensor]
) -> Iterator[None]:
    """Have static passes go through a wrapper, which is given what runs them and their rows."""
    if graphs is None:
        yield
        return
    run: Any = graphs.run
    graphs.run = partial(wrapper, run)  # type: ignore[method-assign]
    try:
        yield
    finally:
        graphs.run = run  # type: ignore[method-assign]


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int | None:
    """What lies on a GPU now, from where its peak counts anew; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The most that lay on a GPU at once since ``allocated_bytes``."""
    return torch.cuda.max_memory_allocated(device)
