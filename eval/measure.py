"""Measure forward passes, follow recorded answers, and compute ratios with intervals.

This generalizes LLMA's goal-oriented decoding (Yang et al., 2023, Algorithm 2). The question "how
fast would this decoder be on this answer?" needs a model that gives this answer, and perhaps no
model of that size does. Here the model computes every pass in full. Then the recorded next token's
logit is raised above all others in the rows whose tokens, from the prompt on, equal the recording.
Every other row keeps the model's own choice, so a drafter that learns from the model's output after
wrong draft tokens learns nothing about the recording.

A forward hook does this for every decoder, on the stock model or on our copy of it: our decoders
(chains and trees, read from their attention mask), ``model.generate`` and its prompt lookup go
through the same few tensor operations, which need no synchronization with the device. Passes of
fused layers and replayed CUDA graphs call no module, so their run itself is wrapped. A hook would
break a compiled module, so ``generate`` over a static cache uses a logits processor. The time that
forcing takes is counted.
"""

from __future__ import annotations

import random
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ragaccel.engine import Rows


class Runner(Protocol):
    """What runs a model's passes without calling its modules: ``HuggingFaceModel.runner``."""

    run: Callable[..., Tensor]


@dataclass(slots=True)
class Passes:
    """Counts and seconds of the forward passes inside :func:`count_passes`.

    ``rows_of_each`` has the rows of every pass, in order, and ``starts`` the length of
    transformers' cache before each. ``first_end`` is the time at which the first pass ended.
    ``seconds`` is wall time on a CPU; on a GPU it covers only launches, so results leave it out.
    """

    count: int = 0
    rows: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_end: float = 0.0
    rows_of_each: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@contextmanager
def count_passes(network: PreTrainedModel, runner: Runner | None = None) -> Iterator[Passes]:
    """Count and time a network's forward passes while the context is open.

    Passes of a ``runner`` call no module, so its runs are counted instead. The device is
    synchronized after the first pass only, which separates prefill from decoding.
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
        past = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(past, Cache):
            passes.starts.append(int(past.get_seq_length()))
        given = args[0] if args else kwargs.get("input_ids")
        begin((kwargs["inputs_embeds"] if given is None else given).shape[1])  # masks

    def after(*_unused: Any) -> None:
        if passes.count == 1:
            synchronize(device)
        ended = perf_counter()
        passes.seconds += ended - started
        if passes.count == 1:
            passes.first_seconds, passes.first_end = ended - started, ended

    def ran(run: Callable[..., Tensor], rows: Rows, *keep: int) -> Tensor:
        begin(rows.num_rows)
        logits = run(rows, *keep)
        after()
        return logits

    handles = (
        network.register_forward_pre_hook(before, with_kwargs=True),
        network.register_forward_hook(after),
    )
    try:
        with around(runner, ran):
            yield passes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def around(runner: Runner | None, wrapper: Callable[..., Tensor]) -> Iterator[None]:
    """Replace ``runner.run`` by ``wrapper(run, …)`` inside the context; do nothing for None."""
    if runner is None:
        yield
        return
    run: Any = runner.run
    runner.run = partial(wrapper, run)
    try:
        yield
    finally:
        runner.run = run


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes allocated on a GPU and reset its peak; return None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of allocated bytes on a GPU since the last call of ``allocated_bytes``."""
    return torch.cuda.max_memory_allocated(device)


def process_bytes(name: str, pid: int | str = "self") -> int:
    """Return a process's memory in bytes, VmRSS or its peak VmHWM, from ``/proc``.

    Return 0 for a process that has ended. Elsewhere than on Linux both are this process's peak.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        if Path("/proc/self/status").exists():
            return 0
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
    _, _, after = status.partition(f"{name}:")
    return 1024 * int(after.split(None, 1)[0]) if after else 0


def forget_peak(pid: int | str = "self") -> bool:
    """Reset the peak memory of a process; return whether the system supports that."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


FORCED_LOGIT = 1e4
"""Above any logit of a language model, and finite in float16 after a penalty or a temperature."""


@dataclass(slots=True)
class ForcingCost:
    """The cost of forcing: number of passes and host seconds (on a GPU launches only)."""

    passes: int = 0
    seconds: float = 0.0


@contextmanager
def teacher_forced(
    network: PreTrainedModel,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    runner: Runner | None = None,
) -> Iterator[ForcingCost]:
    """Make a model answer ``prompt_ids`` with exactly ``answer_ids`` while the context is open.

    ``network`` is the module that the passes call: for our decoders the weight-sharing copy, since
    an LLM refuses a stock model with hooks. ``runner`` runs passes without calling it.
    ``answer_ids`` should end with an end token of the decoder or be as long as its maximum, since
    the model chooses the tokens after the recording. Only one sequence can be forced at a time, and
    the tokens that the decoder commits must be the recording's, as in greedy decoding.
    """
    tokens = [*prompt_ids, *answer_ids]
    if not prompt_ids or not answer_ids:
        raise ValueError("a recording needs a prompt and an answer of at least one token each")
    vocab_size = int(network.config.get_text_config(decoder=True).vocab_size)
    if max(tokens) >= vocab_size:
        raise ValueError(
            f"token {max(tokens)} of the recording is outside the model's vocabulary of "
            f"{vocab_size}: use a tokenizer that fits the model"
        )
    # A model may be spread over devices: the recording must be on the device of the token ids.
    embedding: Any = network.get_input_embeddings()
    recording = torch.tensor(tokens, device=embedding.weight.device)
    forcing = ForcingCost()

    def force(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        started = perf_counter()
        given = args[0] if args else kwargs.get("input_ids")
        if given is None:
            raise ValueError("a pass with mask tokens follows no recording: take --real")
        _force(recording, given, kwargs, output)
        forcing.passes += 1
        forcing.seconds += perf_counter() - started

    def ran(run: Callable[..., Tensor], rows: Rows, *keep: int) -> Tensor:
        started = perf_counter()
        # While the device is idle.
        places = to_device(_places(tokens, rows, *keep), recording.device)
        computed = perf_counter()
        logits = run(rows, *keep)
        returned = perf_counter()
        forced = torch.full((), FORCED_LOGIT, dtype=logits.dtype, device=logits.device)
        logits.index_put_((places[0], places[1]), forced)  # a number would be waited for
        forcing.passes += 1
        forcing.seconds += perf_counter() - returned + computed - started
        return logits[:]  # another tensor: its greedy tokens are no longer those of the pass

    handle = network.register_forward_hook(force, with_kwargs=True)
    try:
        with around(runner, ran):
            yield forcing
    finally:
        handle.remove()


def _force(recording: Tensor, input_ids: Tensor, kwargs: Mapping[str, Any], output: Any) -> None:
    """Raise the recorded next token in the logits [1, m, V] of the rows that follow the recording.

    The m rows with logits are the last ones of the pass, or those ``logits_to_keep`` lists.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"a recording is one sequence, not a batch of {input_ids.shape[0]}")
    positions = _positions(input_ids, kwargs)
    last = recording.shape[0] - 1
    matches = (recording[positions.clamp(max=last)] == input_ids[0]) & (positions <= last)
    on_path = _whole_path(matches, kwargs.get("attention_mask")) & (positions < last)
    next_ids = recording[(positions + 1).clamp(max=last)]
    logits: Tensor = output.logits
    keep = kwargs.get("logits_to_keep", 0)
    kept = keep if isinstance(keep, torch.Tensor) else slice(len(positions) - logits.shape[1], None)
    on_path, index = on_path[kept].to(logits.device), next_ids[kept].to(logits.device)
    index = index[None, :, None]
    own = logits.gather(-1, index)
    logits.scatter_(-1, index, own.masked_fill(on_path[None, :, None], FORCED_LOGIT))


def to_device(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy integers to a device without waiting for its pending work."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _places(tokens: Sequence[int], rows: Rows, keep: int | None = None) -> list[list[int]]:
    """Return the rows with logits that follow the recording, and the next token for each.

    The last ``keep`` rows have logits; ``None`` means all.
    """
    if len(rows.spans) != 1:
        raise ValueError(f"a recording is one sequence, not a batch of {len(rows.spans)}")
    positions, ids = rows.positions[0].tolist(), rows.token_ids[0].tolist()
    known = [tokens[at : at + 1] == [token] for at, token in zip(positions, ids, strict=True)]
    on_path = (~(rows.sees() & ~torch.tensor(known)).any(1)).tolist()
    first = 0 if keep is None else rows.num_rows - keep
    found = [
        row
        for row, on in enumerate(on_path)
        if on and row >= first and positions[row] + 1 < len(tokens)
    ]
    return [[row - first for row in found], [tokens[positions[row] + 1] for row in found]]


def _positions(input_ids: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Return each row's position in the sequence: [n]."""
    positions: Tensor | None = kwargs.get("position_ids")
    if positions is not None:
        return positions[0].to(input_ids.device)
    n, past = input_ids.shape[1], kwargs.get("cache", kwargs.get("past_key_values"))
    start = past.get_seq_length() - n if past is not None else 0  # the cache includes this pass
    return torch.arange(start, start + n, device=input_ids.device)


def _whole_path(matches: Tensor, mask: Any) -> Tensor:
    """Return for each row whether it and all its ancestors in this pass match: [n]."""
    n = matches.shape[0]
    if isinstance(mask, dict):
        mask = next((m for m in mask.values() if m is not None), None)
    if mask is None or mask.dim() != 4:
        return matches.cumprod(0).bool()
    sees: Tensor = mask[0, 0, :, -n:].to(matches.device)
    sees = sees if sees.dtype == torch.bool else sees == 0
    return ~(sees & ~matches).any(1)


_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median ratio over ``examples`` examples, its 95 % interval, and the smallest ratio."""

    value: float
    low: float
    high: float
    worst: float
    examples: int


def paired_ratio(
    ours: Mapping[tuple[str, int], float], theirs: Mapping[tuple[str, int], float]
) -> Ratio:
    """Compare two speeds, keyed by example and round: the median over examples of ours / theirs.

    Speeds are divided within a round, where they were measured one after the other; the rounds of
    an example are reduced to their median. The interval is a percentile bootstrap over examples: it
    shows how far another draw of examples could move the median, not how other machines differ.
    """
    rounds: defaultdict[str, list[float]] = defaultdict(list)
    for key in ours.keys() & theirs.keys():
        rounds[key[0]].append(ours[key] / theirs[key])
    if not rounds:
        raise ValueError("no example was measured on both sides")
    ratios = sorted(median(values) for values in rounds.values())
    low, high = bootstrap_interval(ratios)
    return Ratio(median(ratios), low, high, ratios[0], len(ratios))


def ratios_by_kind(
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, Callable[[Any], float]],
) -> dict[str, Any]:
    """Return how many times as fast ours is, rounded for a result: medians of pairs, intervals.

    The rows of both have ``example`` and ``round``; ``kinds`` has the function that returns a row's
    seconds, by the beginning of the figures' names.
    """
    found: dict[str, Any] = {}
    for kind, seconds in kinds.items():
        one, other = (
            {(row["example"], row["round"]): 1 / seconds(row) for row in rows}
            for rows in (ours, theirs)
        )
        ratio = paired_ratio(one, other)
        found[f"{kind}median"] = round(ratio.value, 4)
        found[f"{kind}interval"] = [round(ratio.low, 4), round(ratio.high, 4)]
    return found


def bootstrap_interval(values: Sequence[float], resamples: int = _RESAMPLES) -> tuple[float, float]:
    """Return the 95 % percentile-bootstrap interval of the median; the same every time."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def resampled_means(
    values: Sequence[float], groups: Sequence[Hashable], *, seed: int = 0
) -> NDArray[np.float64]:
    """Return bootstrap means: groups are drawn with replacement, with a fixed seed.

    Values of one group (questions on one article) are drawn together. They resemble each other, so
    drawing them one by one would make an interval too narrow.

    Args:
        values: One value for every question: a figure, or the difference of two paired figures.
        groups: The group of each value.
        seed: Seed of the draws; use another seed for means that are averaged with these.
    """
    if not values:
        raise ValueError("there is nothing to average")
    numbers: dict[Hashable, int] = {}
    group_of = [numbers.setdefault(group, len(numbers)) for group in groups]
    sums = np.bincount(group_of, weights=np.asarray(values, dtype=np.float64))
    sizes = np.bincount(group_of)
    count = len(numbers)
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    means: NDArray[np.float64] = (draws @ sums) / (draws @ sizes)
    return means


def middle_95(means: NDArray[np.float64]) -> tuple[float, float]:
    """Return the bounds between which 95 % of resampled means lie."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def spread(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Return the mean of values and the bounds of its 95 % interval, rounded for a result."""
    low, high = middle_95(resampled_means(values, groups))
    return [round(number, 4) for number in (sum(values) / len(values), low, high)]
