"""Measure passes: by their rows and by the number of CPU threads; and warm them up."""

from __future__ import annotations

from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ragaccel.decoding.request import Request, Sampling
from ragaccel.decoding.tree import DraftTree, attach_masks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ragaccel.engine.engine import Engine

_MAX_THREAD_COUNTS = 5
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
SAMPLING_MODES = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "filtered": Sampling(temperature=1.0, top_p=0.9),
}
"""Sampling modes of different cost: greedy, sampled, and sampled with a top-p filter."""


def measure_passes(
    engine: Engine,
    *,
    context: int = 512,
    repeats: int = 5,
    rows: Sequence[int] = ROWS,
    sampling: Sampling | None = None,
    mask_ids: Sequence[int] = (),
    advance: Callable[[], None] = lambda: None,
    typical: Callable[[Sequence[float]], float] = median,
) -> Mapping[int, float]:
    """Measure the seconds of a pass by its number of rows, over ``context`` cached tokens.

    Sizes are interleaved, so that a busy moment of the machine affects all alike. The trees are
    chains of fixed tokens, with the mask tokens ``mask_ids`` at the root.

    Args:
        engine: the engine to measure.
        context: cached tokens before each pass.
        repeats: measured passes of each size, after one that warms up.
        rows: sizes to measure; those above ``engine.max_rows`` are skipped.
        sampling: how to sample; greedy by default.
        mask_ids: mask tokens in every tree.
        advance: called after each pass, to show progress: ``(repeats + 1) * len(rows)`` times.
        typical: summarizes the measured seconds of one size.

    Raises:
        CapacityError: the model does not read so many tokens.
    """
    engine.model.finish_compiling()
    rows = [number for number in rows if len(mask_ids) < number <= engine.max_rows]
    tokens = [(7919 * i + 13) % engine.model.vocab_size for i in range(context + 1)]
    request = Request(tuple(tokens), max_new_tokens=1, sampling=sampling or Sampling())
    seconds: dict[int, list[float]] = {number: [] for number in rows}
    verifier = engine.open(request)
    try:
        verifier.prefill(request)
        for repeat in range(repeats + 1):
            for number in rows:
                count = number - len(mask_ids)
                tree = DraftTree.chain((tokens * (count // len(tokens) + 1))[:count])
                tree = attach_masks(tree, mask_ids, [0])
                started = perf_counter()
                verifier.verify(tree)  # the ids are on the host, so the device has finished
                elapsed = perf_counter() - started
                verifier.commit(())
                if repeat:
                    seconds[number].append(elapsed)
                advance()
    finally:
        verifier.close()
    return {number: typical(values) for number, values in seconds.items()}


def warm_up_passes(engine: Engine, *, context: int, num_sequences: int = 1) -> None:
    """Capture CUDA graphs of all sizes up to a context, and run passes, so that all is compiled.

    If the model has mask tokens, do so with and without them: their graphs differ.

    Args:
        engine: the engine to warm up.
        context: most cached tokens before a pass, reduced to what the model reads.
        num_sequences: most sequences that share a pass.
    """
    limit = engine.max_tokens
    rows = list(ROWS)
    if limit is not None:  # some models' causal masks end at their longest sequence
        rows = [number for number in rows if engine.padded_rows(number) <= max(1, limit // 2)]
        context = min(context, limit - engine.padded_rows(max(rows, default=1)))
    if not rows or context < 1:
        return
    if not engine.deterministic:
        engine.capture_passes(context, num_sequences)
    measure_passes(engine, context=context, repeats=1, rows=rows)
    if engine.model.num_masks and not engine.deterministic:
        mask_ids = [engine.model.vocab_size]
        measure_passes(engine, context=context, repeats=1, rows=rows, mask_ids=mask_ids)


def measure_threads(engine: Engine, *, context: int = 512, repeats: int = 3) -> dict[int, float]:
    """Measure how long passes take on a CPU by the number of threads.

    Start with the threads that torch uses and halve, for at most five numbers. Afterwards restore
    the number in use, ``engine.latency_profile.threads``.

    Returns:
        Mean seconds of passes of one and eight rows, by threads; empty for other devices.
    """
    if engine.model.device.type != "cpu":
        return {}
    before, number = engine.latency_profile.threads, torch.get_num_threads()
    seconds: dict[int, float] = {}
    try:
        while number >= 1 and len(seconds) < _MAX_THREAD_COUNTS:
            engine.latency_profile.threads = number
            passes = measure_passes(
                engine, context=context, repeats=repeats, rows=(1, 8), typical=min
            )
            seconds[number] = fmean(passes.values())
            number //= 2
    finally:
        engine.latency_profile.threads = before
    return seconds
