"""Measuring: what verify passes of so many rows take, interleaved and without a drafter."""

from __future__ import annotations

from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ragaccel.decoding.request import Request, Sampling
from ragaccel.decoding.tree import DraftTree, attach_probes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ragaccel.engine.engine import Engine

_MOST_NUMBERS = 5
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "filtered": Sampling(temperature=1.0, top_p=0.9),
}
"""Ways of choosing a token that cost differently: greedily, by chance, by filtered chance."""


def measure_passes(
    engine: Engine,
    *,
    context: int = 512,
    repeats: int = 5,
    rows: Sequence[int] = ROWS,
    sampling: Sampling | None = None,
    probe_ids: Sequence[int] = (),
    advance: Callable[[], None] = lambda: None,
    typical: Callable[[Sequence[float]], float] = median,
) -> Mapping[int, float]:
    """Measure the median seconds of a pass by its rows, over ``context`` cached tokens.

    Sizes are interleaved, so that a busy moment of the machine hits all alike; chains only, of
    fixed tokens, the last of them the mask tokens ``probe_ids``. ``advance`` is called after each
    pass, ``(repeats + 1) * len(rows)`` times: the first turn warms up.

    Raises:
        CapacityError: the model does not read so many tokens.
    """
    rows = [number for number in rows if len(probe_ids) < number <= engine.max_rows]
    tokens = [(7919 * i + 13) % engine.model.vocab_size for i in range(context + 1)]
    request = Request(tuple(tokens), max_new_tokens=1, sampling=sampling or Sampling())
    seconds: dict[int, list[float]] = {number: [] for number in rows}
    verifier = engine.open(request)
    try:
        verifier.prefill(request)
        for turn in range(repeats + 1):
            for number in rows:
                count = number - len(probe_ids)
                tree = DraftTree.chain((tokens * (count // len(tokens) + 1))[:count])
                tree = attach_probes(tree, probe_ids, [0])
                started = perf_counter()
                verifier.verify(tree)  # returns ids of the host: the device has finished
                elapsed = perf_counter() - started
                verifier.commit(())
                if turn:
                    seconds[number].append(elapsed)
                advance()
    finally:
        verifier.close()
    return {number: typical(values) for number, values in seconds.items()}


def warm_passes(engine: Engine, *, context: int) -> None:
    """Run passes of all widths, over so many cached tokens or as many as the model reads.

    Those with mask tokens as well, where the model has some: they are captured apart.
    """
    limit = engine.max_tokens
    rows = list(ROWS)
    if limit is not None:  # some models have masks of as many rows as they read, and no more
        rows = [number for number in rows if engine.padded(number) <= max(1, limit // 2)]
        context = min(context, limit - engine.padded(max(rows, default=1)))
    if not rows or context < 1:
        return
    measure_passes(engine, context=context, repeats=1, rows=rows)
    if engine.model.num_masks and not engine.exact:
        probe_ids = [engine.model.vocab_size]
        measure_passes(engine, context=context, repeats=1, rows=rows, probe_ids=probe_ids)


def measure_threads(engine: Engine, *, context: int = 512, repeats: int = 3) -> dict[int, float]:
    """Measure passes of one and of eight rows by a processor's threads; the mean of the two.

    From all that torch uses down to one, halving, at most five numbers. Leaves the engine as it
    was; ``engine.costs.threads`` is what it uses.

    Returns:
        Seconds by threads; empty where the model is not on a CPU.
    """
    if engine.model.device.type != "cpu":
        return {}
    before, number = engine.costs.threads, torch.get_num_threads()
    seconds: dict[int, float] = {}
    try:
        while number >= 1 and len(seconds) < _MOST_NUMBERS:
            engine.costs.threads = number
            passes = measure_passes(
                engine, context=context, repeats=repeats, rows=(1, 8), typical=min
            )
            seconds[number] = fmean(passes.values())
            number //= 2
    finally:
        engine.costs.threads = before
    return seconds
