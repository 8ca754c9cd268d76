"""Roofline: what passes take against the time in which memory can be read, and beside it.

    python -m eval.roofline --device cuda --model random:llama-3.1-8b --data DATA

A pass of one row reads the weights and the states of its context: at the measured bandwidth of
reads that is the least it can take. Passes of some rows run replayed as CUDA graphs, compiled or
not, launched operation by operation, and through transformers' own model over its own cache; on a
CPU only the last two. Where passes are replayed, a drafted decoding tells which share of a step
the device does not compute: drafting, building the pass, reading the choices. The last line of
stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from eval.passes import allocated_bytes, peak_bytes
from eval.roofline_steps import measure_step
from eval.script import measured, new_parser, note, result
from eval.tables import roofline_table
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from ragaccel.engine.engine import ROWS, Engine, measure_passes
from ragaccel.engine.latency import read_bandwidth
from ragaccel.models.hf_model import HuggingFaceModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from eval.targets import Target

CONTEXTS = "2048,32768"
_CHUNK = 512


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("roofline", measure, parse(arguments))
    print(roofline_table(document))
    print(json.dumps(document["contexts"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("roofline", __doc__)
    add_target_options(parser, "random:llama-135m")
    add_dtype_option(parser)
    add = parser.add_argument
    add("--contexts", default=CONTEXTS, help="cached tokens (default: %(default)s)")
    add("--repeats", type=int, default=15, help="passes of each size")
    add("--steps", type=int, default=256, help="tokens of the drafted decoding")
    add("--out", type=Path, help="result file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every way of running passes over every context the model reads.

    Raises:
        ValueError: it reads none of them.
    """
    target = chosen_target(options, options.dtype)
    limit = target.ours.max_positions
    contexts = [int(context) for context in options.contexts.split(",")]
    contexts = [one for one in contexts if limit is None or one + max(ROWS) + 2 <= limit]
    if not contexts:
        raise ValueError(f"{options.model} reads {limit} tokens: choose shorter --contexts")
    bandwidth = read_bandwidth(target.ours.device)
    weights = target.ours.weight_bytes
    target.ours.disable_graphs()  # its KV pool is not to lie beside what is measured
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
    target: Target, context: int, options: argparse.Namespace, bandwidth: float, weights: int
) -> dict[str, Any]:
    """Measure every way over one context; what one raises stands in its place."""
    states = context * bytes_of_a_token(target.model)
    limit = (weights + states) / bandwidth
    on_gpu = target.ours.device.type == "cuda"
    ways = (
        ("compiled", "graphs", "launched", "transformers")
        if on_gpu
        else ("launched", "transformers")
    )
    found: dict[str, Any] = {}
    for way in ways:
        note(f"{context} tokens of context: {way}")
        try:
            found[way] = measure_way(target, way, context, options)
        except Exception as error:  # one of them must not lose the others
            note(f"{way}: {error!r}")
            found[way] = {"error": type(error).__name__}
            continue
        times = found[way]["milliseconds"]
        found[way]["share_of_limit"] = 1e3 * limit / times["1"]
        found[way]["most_rows_over_one"] = times[str(max(ROWS))] / times["1"]
    return {"state_bytes": states, "limit_seconds": limit, "ways": found}


def measure_way(
    target: Target, way: str, context: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure passes of some rows run one way, and what lay on the device at most."""
    gc.collect()
    if target.ours.device.type == "cuda":
        torch.cuda.empty_cache()
    before = allocated_bytes(target.ours.device)
    if way == "transformers":
        seconds = stock_passes(target.model, context, options.repeats)
        found: dict[str, Any] = {}
    else:
        ours = make_ours(target.model, way)
        before = allocated_bytes(target.ours.device)  # a KV pool that was dropped does not count
        engine = Engine(ours, max_rows=max(ROWS), kept_prefixes=0)
        seconds = dict(measure_passes(engine, context=context, repeats=options.repeats))
        if way == "compiled" and not ours.is_compiled:
            raise ValueError("torch does not compile this model")
        found = {"step": measure_step(engine, ours, context, options.steps)}
    return {
        "milliseconds": {str(rows): 1e3 * value for rows, value in seconds.items()},
        "peak_bytes": None if before is None else peak_bytes(target.ours.device),
        **found,
    }


def make_ours(model: PreTrainedModel, way: str) -> HuggingFaceModel:
    """Make a target of ours over the same weights that runs its passes one way.

    Raises:
        ValueError: the model's passes cannot be replayed.
    """
    ours = HuggingFaceModel(model, self_check=False)
    if way == "launched":
        ours.disable_graphs()
    elif ours.graphs is None:
        raise ValueError("passes of this model are not replayed here")
    if way == "compiled":
        ours.compile()
    return ours


def stock_passes(model: Any, context: int, repeats: int) -> dict[int, float]:
    """Time transformers' own passes over its own growing cache, interleaved: medians by rows."""
    from transformers import DynamicCache

    cache, device = DynamicCache(config=model.config), model.device
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(context + max(ROWS), device=device) * 7919 + 13) % vocab_size
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    with torch.inference_mode():
        for part in ids[:context].split(_CHUNK):
            model(input_ids=part[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for turn in range(repeats + 1):
            for rows in ROWS:
                started = perf_counter()
                some = ids[None, context : context + rows]
                output = model(input_ids=some, past_key_values=cache, use_cache=True)
                output.logits[0].argmax(-1).tolist()
                elapsed = perf_counter() - started
                cache.crop(-rows)
                if turn:
                    seconds[rows].append(elapsed)
    return {rows: sorted(values)[len(values) // 2] for rows, values in seconds.items()}


def bytes_of_a_token(model: PreTrainedModel) -> int:
    """What the keys and values of one token take in all layers."""
    from transformers import DynamicCache

    cache, num_tokens = DynamicCache(), 2
    with torch.inference_mode():
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    return sum(state.numel() * state.element_size() for state in states) // num_tokens


if __name__ == "__main__":
    main()
