"""A plain step on a CPU beside llama.cpp's, by the rows of a pass, and where its time goes."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function

from eval import cli
from eval.decoders import make_decoder
from eval.experiments.cpu_peers import (
    SHAPES,
    drawn_job,
    peers,
    timed_here,
    timed_there,
)
from eval.models import load_target
from eval.report.tables import plain_table
from eval.runner import ROOT, note, result
from ragaccel.decoding import DraftTree, Request
from ragaccel.engine import Engine, bfloat16_attention, bfloat16_products, measure_passes
from ragaccel.engine.bfloat16_layers import CompiledLayers

CONTEXT = 1024
OPERATIONS = {
    "products": ("linear_pointwise", "aten::addmm", "aten::mm", "bfloat16_products"),
    "attention": ("scaled_dot_product", "bfloat16_attention"),
    "layers": ("bfloat16_layers",),
}
"""{part of a pass: parts of the names of torch's operations}; what no part has is ``others``."""
_DECODED = 32
_PEER = "llama_cpp/plain"
_TIMES = ("least_ms", "median_ms", "prompt_seconds")


@cli.experiment(
    cli.DATA,
    cli.option("--shapes", default=",".join(SHAPES), help="comma-separated"),
    cli.option("--dtypes", default="bfloat16,int8", help="of bfloat16, int8"),
    cli.option("--rows", default="1,8,32", help="of a pass"),
    cli.integer("--turns", 6, "decodings of each engine"),
    cli.integer("--threads", 2, "processor threads"),
    cli.option("--llama-cpp", type=Path, default=ROOT / ".venv-llama-cpp/bin/python"),
    file="cpu-step.json",
    table=lambda document: shown(document),
    shown=("shapes",),
)
def run_cpu_step(options: Namespace) -> dict[str, Any]:
    """A plain step of each shape behind 1,024 tokens, with weights of 16 and 8 bits, and its parts.

        python -m eval cpu_step --out eval/results

    Ours and llama.cpp (in its own environment; left out if it is missing; its 8 bits are Q8_0, and
    its 4 bits, which ours has not, Q4_0) decode 32 drawn tokens in turns; given are the least and
    the median milliseconds of a token, and the seconds of the prompt. Passes of several rows are
    timed between them, and one profile of torch's tells the shares: layers that are compiled as a
    whole, matrix products and attention one by one, other operations, and what lies outside
    (Python, the engine). A profile slows short operations down, so the last two are upper and lower
    bounds.
    """
    rows, dtypes = cli.numbers_of(options.rows), cli.names_of(options.dtypes)
    shapes = {name: measure(name, dtypes, rows, options) for name in cli.names_of(options.shapes)}
    return result("cpu_step", {"turns": options.turns, "context": CONTEXT}, shapes=shapes)


def measure(
    shape: str, dtypes: Sequence[str], rows: list[int], options: Namespace
) -> dict[str, Any]:
    """Measure one shape: decoding in turns, passes by their rows, and the parts of a pass."""
    model = f"random:{shape}"
    targets = {dtype: load_target(model, dtype=dtype, data=options.data) for dtype in dtypes}
    decoders = {dtype: make_decoder("ours_plain", target) for dtype, target in targets.items()}
    engines = {
        dtype: Engine(target.ours, max_rows=max(rows), kept_prefixes=0)
        for dtype, target in targets.items()
    }
    job = drawn_job(0, targets[dtypes[0]].ours.vocab_size)
    job = replace(job, answer_ids=job.answer_ids[:_DECODED], max_new_tokens=_DECODED)
    of_peer = [*dtypes, *(["int4"] if "int8" in dtypes else [])]
    times: dict[str, dict[str, list[Any]]] = {dtype: {} for dtype in of_peer}
    passes: dict[str, dict[int, list[float]]] = {dtype: {} for dtype in dtypes}
    with ExitStack() as stack:
        workers = {
            dtype: stack.enter_context(peers(model, dtype, [_PEER], options, proposes=False))
            for dtype in of_peer
        }
        for turn in range(options.turns + 1):
            note(f"{shape}: turn {turn} of {options.turns}")
            for dtype in of_peer:
                found = {}
                if dtype in dtypes:
                    found["ours"] = timed_here(decoders[dtype], job)
                    for number, least in pass_seconds(engines[dtype], rows).items():
                        passes[dtype].setdefault(number, []).append(least)
                if workers[dtype]:
                    found["llama_cpp"] = timed_there(workers[dtype], _PEER, job)
                for name, timed in found.items():
                    times[dtype].setdefault(name, []).append(timed)
        versions = {name: worker.about["version"] for name, worker in workers[dtypes[0]].items()}
    steps = {  # the first turn warms up
        dtype: {name: figures_of(timed[1:]) for name, timed in found.items()}
        for dtype, found in times.items()
    }
    return {
        "versions": versions,
        "decoding": steps,
        "passes": {
            dtype: {str(number): round(1e3 * min(each[1:]), 2) for number, each in found.items()}
            for dtype, found in passes.items()
        },
        "parts": {
            dtype: {str(number): parts_of_pass(engine, number) for number in rows}
            for dtype, engine in engines.items()
        },
        "is_fused": all(target.ours.is_fused for target in targets.values()),
        "over_llama_cpp": over_llama_cpp(steps),
    }


def over_llama_cpp(steps: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Return ours in each dtype over llama.cpp in each."""
    return {
        f"{own} over {other}": {
            name: round(steps[own]["ours"][name] / steps[other]["llama_cpp"][name], 3)
            for name in _TIMES
        }
        for own in steps
        for other in steps
        if "ours" in steps[own] and "llama_cpp" in steps[other]
    }


def pass_seconds(engine: Engine, rows: list[int]) -> Mapping[int, float]:
    """Return the least seconds of a pass by its rows."""
    return measure_passes(engine, context=CONTEXT, repeats=5, rows=rows, typical=min)


def figures_of(timed: list[Any]) -> dict[str, float]:
    """Return the least and the median time of a token, and the least of the prompt."""
    each = [1e3 * one.seconds / one.tokens for one in timed]
    return {
        "least_ms": round(min(each), 2),
        "median_ms": round(median(each), 2),
        "prompt_seconds": round(min(one.first_seconds for one in timed), 3),
    }


def parts_of_pass(engine: Engine, num_rows: int, repeats: int = 10) -> dict[str, float]:
    """Return the milliseconds of a profiled pass by its parts."""
    draw = random.Random(num_rows)
    tokens = tuple(draw.randrange(256, engine.model.vocab_size) for _ in range(CONTEXT + 1))
    request = Request(tokens, max_new_tokens=1)
    verifier = engine.open(request)
    tree = DraftTree.chain(tokens[:num_rows])
    attend = record_function("bfloat16_attention")(bfloat16_attention.attend)
    multiply = record_function("bfloat16_products")(bfloat16_products.multiply)
    run = CompiledLayers.run
    try:
        verifier.prefill(request)
        for _ in range(3):
            verifier.verify(tree)
            verifier.commit(())
        with (
            patch.object(bfloat16_attention, "attend", attend),
            patch.object(bfloat16_products, "multiply", multiply),
            patch.object(CompiledLayers, "run", record_function("bfloat16_layers")(run)),
            profile(activities=[ProfilerActivity.CPU]) as profiled,
        ):
            started = perf_counter()
            for _ in range(repeats):
                verifier.verify(tree)
                verifier.commit(())
            whole = 1e3 * (perf_counter() - started) / repeats
    finally:
        verifier.close()
    spent: Counter[str] = Counter()
    for event in profiled.key_averages():
        part = (part for part, names in OPERATIONS.items() if any(n in event.key for n in names))
        spent[next(part, "others")] += event.self_cpu_time_total / 1e3 / repeats
    spent["outside"] = whole - sum(spent.values())
    return {"whole": round(whole, 2), **{part: round(value, 2) for part, value in spent.items()}}


def shown(document: dict[str, Any]) -> str:
    """Return the tables of a result in Markdown."""
    decoding = [
        [shape, dtype, name, *(f"{step[key]:.1f}" for key in _TIMES)]
        for shape, found in document["shapes"].items()
        for dtype, steps in found["decoding"].items()
        for name, step in steps.items()
    ]
    parts = ("layers", "products", "attention", "others", "outside", "whole")
    of_passes = [
        [
            shape,
            dtype,
            rows,
            f"{least:.1f}",
            *(f"{spent[rows].get(part, 0.0):.1f}" for part in parts),
        ]
        for shape, found in document["shapes"].items()
        for dtype, spent in found["parts"].items()
        for rows, least in found["passes"][dtype].items()
    ]
    titles = ["shape", "weights", "rows", "least ms", *parts]
    engines = ["shape", "weights", "engine", "least ms", "median ms", "prompt s"]
    return "\n\n".join(
        (
            plain_table(engines, decoding),
            plain_table(titles, of_passes),
        )
    )
