"""Measure the memory growth of a process that answers requests, and decoders' peak memory."""

from __future__ import annotations

import gc
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from typing import Any, TypeVar

import torch

from eval import cli
from eval.data import Example, as_recorded, jobs_for, shortened
from eval.decoders import make_decoder
from eval.experiments.speed import run_once
from eval.measure import allocated_bytes, forget_peak, peak_bytes, process_bytes
from eval.models import Side, chosen_target, describe_target
from eval.report.tables import show
from eval.runner import (
    note,
    open_results_log,
    result,
    settings_of,
)
from eval.tasks import load_task
from ragaccel.config import Settings
from ragaccel.drafting import JIT_WARMUP
from ragaccel.llm import LLM
from ragaccel.prompt import Prompt, build_prompt

T = TypeVar("T")
Document = dict[str, Any]

MEMORY_SETTINGS: dict[str, Settings] = {"default": {}, "remember=False": {"remember": False}}
MAX_OTHERS = 2


@cli.experiment(
    *cli.TARGET, cli.DTYPE, cli.TASK, cli.integer("--requests", 1000, "of each process"),
    cli.integer("--every", 100, "requests between two readings; the first counts"),
    cli.integer("--max-new-tokens", 20), table=show, shown=("processes",),
)  # fmt: skip
def run_memory(options: Namespace) -> dict[str, Any]:
    """Memory: how much does a process grow from its hundredth request to its thousandth?

        python -m eval memory --model reader --out eval/results/memory.json
        python -m eval memory --model random:llama-135m --data DATA

    Two new processes in turn answer the same requests through ``LLM.generate``: one with the
    defaults, one with ``remember=False``. Prompts vary: a random question of a task with its first
    passage and up to two passages of others, shuffled; answers are cut at twenty tokens. Every
    hundred requests the resident memory is read, and the bytes that the library counts itself:
    remembered requests and prefix cache. Anything that is allocated once is there by the hundredth
    request.
    """
    if not 0 < 2 * options.every <= options.requests:
        raise ValueError("--requests must be at least twice --every, to be read twice")
    settings = describe_target(options) | settings_of(
        options, "task", "requests", "every", "max_new_tokens"
    )
    processes = in_processes(grow, options, settings, "process", MEMORY_SETTINGS)
    return result("memory", settings, device=options.device, processes=processes)


def in_processes(
    measure: Callable[..., Document],
    options: Namespace,
    settings: Document,
    key: str,
    names: Iterable[str],
) -> dict[str, Document]:
    """Measure each name that the results log lacks in a process of its own; return the rows."""
    results_log = open_results_log(options.out, settings)
    done = {row[key] for row in results_log.rows}
    for name in names:
        if name not in done:
            results_log.add({key: name, **in_own_process(measure, options, name)})
    return {row.pop(key): row for row in map(dict, results_log.rows)}


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, without earlier allocations, and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def grow(options: Namespace, name: str) -> dict[str, Any]:
    """Answer all requests with one setting; return the readings of memory in between."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    target = chosen_target(options, options.dtype)
    llm = LLM(target.ours, target.tokenizer)
    JIT_WARMUP.wait()  # before it, drafting differs and nothing is remembered
    examples = load_task(options.task, None, options.data)
    settings: Settings = {"max_new_tokens": options.max_new_tokens, **MEMORY_SETTINGS[name]}
    readings, tokens, started = [], 0, perf_counter()
    for number, prompt in enumerate(prompts(examples, llm, options), start=1):
        answer = llm.generate(prompt, **settings)
        tokens += answer.stats.new_tokens
        if number % options.every == 0:
            readings.append({"requests": number, **reading(llm)})
            resident = readings[-1]["resident_bytes"] / 1e6
            note(f"{name} {number}: {resident:.1f} MB")
    first, last = readings[0], readings[-1]
    return {
        "growth_bytes": last["resident_bytes"] - first["resident_bytes"],
        "remembered_growth_bytes": last["remembered_bytes"] - first["remembered_bytes"],
        "kept_growth_bytes": last["kept_bytes"] - first["kept_bytes"],
        "answer_tokens_mean": tokens / options.requests,
        "seconds": perf_counter() - started,
        "readings": readings,
    }


def prompts(examples: Sequence[Example], llm: LLM, options: Namespace) -> Iterator[Prompt]:
    """Yield prompts of random questions and passages, with a fixed seed."""
    rng = random.Random(0)
    asked = [example for example in examples if example.passages]
    others = [passage for example in asked for passage in example.passages]
    room = llm.context_length and llm.context_length - options.max_new_tokens
    for _ in range(options.requests):
        example = rng.choice(asked)
        drawn = [example.passages[0], *rng.sample(others, rng.randint(0, MAX_OTHERS))]
        rng.shuffle(drawn)
        yield build_prompt(llm.tokenizer, example.question, drawn, max_tokens=room)


def reading(llm: LLM) -> dict[str, int]:
    """Return the resident bytes and those of the LLM's memory and prefix cache."""
    gc.collect()
    return {
        "resident_bytes": process_bytes("VmRSS"),
        "remembered_bytes": llm.memory.num_bytes,
        "kept_bytes": llm.engine.prefix_cache.num_bytes,
    }


PEAK_DECODERS = "generate,generate_lookup,ours_plain,ours_paper,ours_tree,ours_full"
_SHORT = 8  # tokens


@cli.experiment(
    *cli.TARGET, cli.DTYPE, cli.TASK,
    cli.option("--limit", type=int, help="examples of which the longest is taken (default: all)"),
    cli.option("--decoders", default=PEAK_DECODERS, help="comma-separated"),
    cli.integer("--max-new-tokens", 64), table=show, shown=("decoders",),
)  # fmt: skip
def run_peak_memory(options: Namespace) -> dict[str, Any]:
    """Peak memory: the peak of each decoder, each in a process of its own.

        python -m eval peak_memory --model random:llama-135m --task llma --data DATA

    The process loads the model as its decoder needs it (on a CPU our decoders replace the loaded
    weights by packed ones), follows the longest example's recorded answer once, and reports the
    resident memory before and its peak during the run.
    """
    settings = describe_target(options) | settings_of(options, "task", "limit", "max_new_tokens")
    names = cli.names_of(options.decoders)
    decoders = in_processes(peak_of, options, settings, "decoder", names)
    return result("peak_memory", settings, device=options.device, decoders=decoders)


def peak_of(options: Namespace, name: str) -> dict[str, int]:
    """Decode the longest example; return the resident bytes before and their peak."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    side: Side = "ours" if name.startswith("ours") else "theirs"
    target = chosen_target(options, options.dtype, side)
    examples = load_task(options.task, options.limit, options.data)
    jobs = jobs_for(target, examples, options.max_new_tokens)
    if target.is_random:
        jobs = [as_recorded(job) for job in jobs if job.answer_ids]
    if not jobs:
        raise ValueError(f"task {options.task} has no recorded answers that {name} could follow")
    job = max(jobs, key=lambda one: len(one.prompt_ids))
    decoder = make_decoder(name, target)
    # The first run compiles functions and makes libraries load their lazy parts.
    run_once(decoder, shortened(job, _SHORT), forced=target.is_random)
    decoder.forget()
    before = allocated_bytes(target.ours.device)
    forget_peak()
    loaded = process_bytes("VmRSS") if before is None else before
    run_once(decoder, job, forced=target.is_random)
    peak = process_bytes("VmHWM") if before is None else peak_bytes(target.ours.device)
    note(f"{name}: {peak / 1e6:.0f} MB at most")
    return {"prompt_tokens": len(job.prompt_ids), "loaded_bytes": loaded, "peak_bytes": peak}
