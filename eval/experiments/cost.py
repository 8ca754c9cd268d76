"""Measure forward passes by their number of rows and against the memory bandwidth."""

from __future__ import annotations

import gc
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from eval import cli
from eval.measure import (
    ForcingCost,
    allocated_bytes,
    count_passes,
    peak_bytes,
    synchronize,
    teacher_forced,
)
from eval.models import Target, chosen_target, describe_target, with_graphs
from eval.report.tables import show
from eval.runner import ResultsLog, note, result
from ragaccel.decoding import Reference, Request, Session
from ragaccel.drafting import TrieDrafter
from ragaccel.engine import ROWS, Engine, measure_passes, read_bandwidth, warm_up_passes
from ragaccel.models import HuggingFaceModel
from ragaccel.models.support import cache_keyword

_SPANS = (4, 24)  # minimum and maximum length of a copied run, in tokens
_OWN = 3  # new tokens between two runs


class DeviceTime:
    """A timer of a device's passes: events on a GPU, the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Time the work that is launched while the context is open."""
        if self._device.type != "cuda":
            started = perf_counter()
            yield
            self._seconds += perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    @property
    def seconds(self) -> float:
        """Return the seconds of all passes; the device must have finished them."""
        return self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3


def measure_step(
    engine: Engine, ours: HuggingFaceModel, context: int, num_tokens: int
) -> dict[str, float] | None:
    """Decode an answer that copies from its prompt twice; return means per step of the second run.

    ``beside_device`` is the share of a step in which the device does not compute the pass:
    drafting, building the pass, sampling and reading the samples, but not forcing. Return None
    without CUDA graphs, since the device then also waits inside a pass.
    """
    if ours.graphs is None:
        return None
    if engine.max_tokens is not None:
        context = min(context, engine.max_tokens - num_tokens - engine.max_rows)
    warm_up_passes(engine, context=context + num_tokens)  # else a step may capture a new size
    prompt, answer = copied_answer(context, num_tokens, engine.model.vocab_size)
    request = Request(prompt, references=(Reference(prompt),), max_new_tokens=len(answer))
    drafter = TrieDrafter()
    for _ in range(2):
        session = Session(engine.open(request), drafter, request)
        with teacher_forced(ours.network, prompt, answer, ours.runner) as forcing:
            step = _timed(engine, ours, session, forcing)
    return step


def _timed(
    engine: Engine, ours: HuggingFaceModel, session: Session, forcing: ForcingCost
) -> dict[str, float]:
    graphs, device = ours.graphs, engine.model.device
    timer = DeviceTime(device)
    try:
        session.prefill()
        synchronize(device)
        if graphs is not None:
            usual, graphs.running = graphs.running, timer
        with count_passes(ours.network, ours.runner) as passes:
            started, forced = perf_counter(), forcing.seconds
            for _ in session:
                pass
            synchronize(device)
            seconds = perf_counter() - started - (forcing.seconds - forced)
    finally:
        if graphs is not None:
            graphs.running = usual
        session.verifier.close()  # type: ignore[attr-defined]
    steps = session.stats.verify_passes
    return {
        "steps": steps,
        "tokens": len(session.answer_ids),
        "rows": passes.rows / steps,
        "seconds": seconds / steps,
        "draft_seconds": session.stats.draft_seconds / steps,
        "device_seconds": timer.seconds / steps,
        "beside_device": 1 - timer.seconds / seconds,
    }


def copied_answer(
    context: int, num_tokens: int, vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a random prompt, and an answer of copied runs of it with new tokens in between."""
    rng = random.Random(0)
    prompt = tuple(rng.randrange(vocab_size) for _ in range(context))
    answer: list[int] = []
    while len(answer) < num_tokens:
        first, length = rng.randrange(context), rng.randint(*_SPANS)
        answer += [*prompt[first : first + length], *rng.choices(range(vocab_size), k=_OWN)]
    return prompt, tuple(answer[:num_tokens])


CONTEXTS = "2048,32768"
_CHUNK = 512


@cli.experiment(
    *cli.TARGET, cli.DTYPE,
    cli.option("--contexts", default=CONTEXTS, help="cached tokens"),
    cli.option("--rows", default=",".join(map(str, ROWS)), help="of a pass"),
    cli.option("--ways", help="compiled, graphs, launched, transformers (default: all there are)"),
    cli.integer("--repeats", 15, "passes of each size"),
    cli.integer("--steps", 256, "tokens of the drafted decoding"),
    table=show, shown=("contexts",), model="random:llama-135m",
)  # fmt: skip
def run_roofline(options: Namespace) -> dict[str, Any]:
    """Roofline: the time of passes against the limit that memory bandwidth sets.

        python -m eval roofline --device cuda --model random:llama-3.1-8b --data DATA

    A pass of one row must read the weights and the keys and values of its context; at the measured
    read bandwidth that takes a minimum time. Passes of several rows are measured in four ways:
    replayed as CUDA graphs, compiled or not; launched operation by operation; and through
    transformers' own model and cache. On a CPU only the last two exist. With CUDA graphs a decoding
    with drafts also shows the share of a step in which the device does not compute: drafting,
    building the pass, reading the samples.
    """
    target = chosen_target(options, options.dtype)
    limit = target.ours.max_positions
    contexts, options.rows = cli.numbers_of(options.contexts), cli.numbers_of(options.rows)
    contexts = [one for one in contexts if limit is None or one + max(options.rows) + 2 <= limit]
    if not contexts:
        raise ValueError(f"{options.model} reads {limit} tokens: choose shorter --contexts")
    bandwidth = read_bandwidth(target.ours.device)
    weights = target.ours.weight_bytes
    target.ours.disable_graphs()  # frees its KV pool
    return result(
        "roofline",
        {**describe_target(options), "repeats": options.repeats},
        device=options.device,
        bandwidth_bytes_per_second=bandwidth,
        weight_bytes=weights,
        contexts={
            str(one): measure_context(target, one, options, bandwidth, weights) for one in contexts
        },
    )


def measure_context(
    target: Target, context: int, options: Namespace, bandwidth: float, weights: int
) -> dict[str, Any]:
    """Measure every way over one context; an error replaces the figures of its way.

    An error in a way that was asked for by name is raised.
    """
    states = context * bytes_of_a_token(target.model)
    limit = (weights + states) / bandwidth
    on_gpu = target.ours.device.type == "cuda"
    ways: Sequence[str] = ("launched", "transformers")
    if options.ways:
        ways = cli.names_of(options.ways)
    elif on_gpu:
        ways = ("compiled", "graphs", *ways)
    found: dict[str, Any] = {}
    for way in ways:
        note(f"{context} tokens of context: {way}")
        try:
            found[way] = measure_way(target, way, context, options)
        except Exception as error:  # an error must not lose the other ways
            if options.ways:
                raise
            note(f"{way}: {error!r}")
            found[way] = {"error": type(error).__name__}
            continue
        times = found[way]["milliseconds"]
        found[way]["share_of_limit"] = 1e3 * limit / times["1"]
        found[way]["widest_over_one"] = times[str(max(options.rows))] / times["1"]
    return {"state_bytes": states, "limit_seconds": limit, "ways": found}


def measure_way(target: Target, way: str, context: int, options: Namespace) -> dict[str, Any]:
    """Measure passes of several rows in one way, and the peak of allocated device memory."""
    gc.collect()
    if target.ours.device.type == "cuda":
        torch.cuda.empty_cache()
    before = allocated_bytes(target.ours.device)
    if way == "transformers":
        seconds = stock_passes(target.model, context, options.repeats, options.rows)
        found: dict[str, Any] = {}
    else:
        ours = make_ours(target.model, way)
        before = allocated_bytes(target.ours.device)  # without KV pools that were freed
        engine = Engine(ours, max_rows=max(options.rows), kept_prefixes=0)
        seconds = dict(
            measure_passes(engine, context=context, repeats=options.repeats, rows=options.rows)
        )
        if way != "launched":
            with_graphs(ours)
        if way == "compiled" and not ours.is_compiled:
            raise ValueError("torch does not compile this model")
        found = {"step": measure_step(engine, ours, context, options.steps)}
    return {
        "milliseconds": {str(rows): 1e3 * value for rows, value in seconds.items()},
        "peak_bytes": None if before is None else peak_bytes(target.ours.device),
        **found,
    }


def make_ours(model: PreTrainedModel, way: str) -> HuggingFaceModel:
    """Return our model over the same weights that runs its passes in one way."""
    ours = HuggingFaceModel(model, self_check=False)
    if way == "launched":
        ours.disable_graphs()
    elif ours.graphs is None:
        raise ValueError(f"passes of this model are not replayed here: {ours.graphs_status}")
    if way == "compiled":
        ours.compile()
    return ours


def stock_passes(
    model: Any, context: int, repeats: int, widths: Sequence[int] = ROWS
) -> dict[int, float]:
    """Return the median seconds of transformers' passes with its own cache, by number of rows."""
    from transformers import DynamicCache

    cache, device = DynamicCache(config=model.config), model.device
    given = {cache_keyword(model): cache}
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(context + max(widths), device=device) * 7919 + 13) % vocab_size
    seconds: dict[int, list[float]] = {rows: [] for rows in widths}
    with torch.inference_mode():
        for part in ids[:context].split(_CHUNK):
            model(input_ids=part[None], **given, use_cache=True, logits_to_keep=1)
        for turn in range(repeats + 1):
            for rows in widths:
                started = perf_counter()
                some = ids[None, context : context + rows]
                output = model(input_ids=some, **given, use_cache=True)
                output.logits[0].argmax(-1).tolist()
                elapsed = perf_counter() - started
                cache.crop(-rows)
                if turn:
                    seconds[rows].append(elapsed)
    return {rows: sorted(values)[len(values) // 2] for rows, values in seconds.items()}


def bytes_of_a_token(model: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    from transformers import DynamicCache

    cache, num_tokens = DynamicCache(), 2
    with torch.inference_mode():
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
        model(input_ids=ids, **{cache_keyword(model): cache}, use_cache=True)
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    return sum(state.numel() * state.element_size() for state in states) // num_tokens


ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)


def measure_rows(
    target: Target, context: int, repeats: int, sizes: Sequence[int] = ROW_COUNTS
) -> dict[int, float]:
    """Return the median seconds of a pass by its rows, over ``context`` cached tokens."""
    engine = Engine(target.ours, max_rows=max(sizes))
    return dict(measure_passes(engine, context=context, repeats=repeats, rows=sizes))


def known_costs(
    target: Target, results_log: ResultsLog, context: int, repeats: int
) -> dict[int, float]:
    """Return the seconds of a pass by its rows; measure and log them if the log has none."""
    if not (costs := median_costs(results_log)):
        note(f"measuring passes over {context} cached tokens")
        results_log.add(cost_row(measure_rows(target, context, repeats)))
        costs = median_costs(results_log)
    return costs


def cost_row(costs: Mapping[int, float]) -> dict[str, Any]:
    """Return the row of the results log for measured seconds of passes."""
    return {"pass_seconds": {str(rows): seconds for rows, seconds in costs.items()}}


def median_costs(results_log: ResultsLog) -> dict[int, float]:
    """Return the median seconds of a pass by its rows over the results log; empty without any."""
    noted = [row["pass_seconds"] for row in results_log.rows if "pass_seconds" in row]
    sizes = noted[0] if noted else ()
    return {int(rows): median(each[rows] for each in noted) for rows in sizes}


def seconds_of(rows_of_each: Sequence[int], costs: Mapping[int, float]) -> list[float]:
    """Return the seconds of each pass from a cost table, interpolated linearly."""
    sizes = sorted(costs)
    seconds: list[float] = np.interp(rows_of_each, sizes, [costs[size] for size in sizes]).tolist()
    return seconds
