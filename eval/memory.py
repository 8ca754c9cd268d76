"""Memory: how much larger a process grows from its hundredth request to its thousandth.

    python -m eval.memory --model reader --out eval/results/memory.json
    python -m eval.memory --model random:llama-135m --data DATA

One process after another, each fresh, answers the same requests through ``LLM.generate``: once as
it comes, once with ``remember=False``. Prompts are varied: a question of a task drawn at random,
its first passage and none to two of others, shuffled; answers are cut at twenty tokens. What is
resident is read every hundred requests, next to what the library knows of: requests remembered and
states of prompts kept. What is made once, by the first requests, is there by the hundredth. The
last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from eval.examples import load_task
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.memory_tables import memory_table
from eval.script import measured, new_parser, note, result
from eval.targets import (
    add_dtype_option,
    add_target_options,
    chosen_target,
    describe_target,
)
from ragaccel.drafting.policy import JIT_WARMUP
from ragaccel.llm import LLM
from ragaccel.prompt import build_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eval.examples import Example
    from ragaccel.config import Settings
    from ragaccel.prompt import Prompt

    T = TypeVar("T")

SETTINGS: dict[str, Settings] = {"default": {}, "remember=False": {"remember": False}}
MOST_OTHERS = 2


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("memory", measure, parse(arguments))
    print(memory_table(document))
    print(json.dumps(document["processes"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("memory", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", default="demo", help="a file of eval/tasks, or a .jsonl file of your own")
    add("--requests", type=int, default=1000, help="of each process (default: %(default)s)")
    add("--every", type=int, default=100, help="requests between two readings; the first counts")
    add("--max-new-tokens", type=int, default=20)
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each setting that the ledger lacks in a process of its own.

    Raises:
        ValueError: fewer than two readings.
    """
    if not 0 < 2 * options.every <= options.requests:
        raise ValueError("--requests must be at least twice --every, to be read twice")
    settings = {
        **describe_target(options),
        "task": Path(options.task).name,
        "requests": options.requests,
        "every": options.every,
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }
    ledger = kept_beside(options.out, settings)
    done = {row["process"] for row in ledger.rows}
    for name in SETTINGS:
        if name not in done:
            ledger.add({"process": name, **in_own_process(grow, options, name)})
    processes = {row.pop("process"): row for row in map(dict, ledger.rows)}
    return result("memory", settings, device=options.device, processes=processes)


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a fresh process, in which nothing was allocated before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def grow(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Answer all requests under one setting, reading what is resident in between."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    target = chosen_target(options, options.dtype)
    llm = LLM(target.ours, target.tokenizer)
    JIT_WARMUP.wait()  # else the first answers are drafted otherwise, and remembered not at all
    examples = load_task(options.task, None, options.data)
    settings: Settings = {"max_new_tokens": options.max_new_tokens, **SETTINGS[name]}
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


def prompts(examples: Sequence[Example], llm: LLM, options: argparse.Namespace) -> Iterator[Prompt]:
    """Draw questions, and passages beside their own, the same every time."""
    rng = random.Random(0)
    asked = [example for example in examples if example.passages]
    others = [passage for example in asked for passage in example.passages]
    room = llm.context_length and llm.context_length - options.max_new_tokens
    for _ in range(options.requests):
        example = rng.choice(asked)
        drawn = [example.passages[0], *rng.sample(others, rng.randint(0, MOST_OTHERS))]
        rng.shuffle(drawn)
        yield build_prompt(llm.tokenizer, example.question, drawn, max_tokens=room)


def reading(llm: LLM) -> dict[str, int]:
    """What is resident now, and what of it the library knows of."""
    gc.collect()
    return {
        "resident_bytes": resident_bytes(),
        "remembered_bytes": llm.memory.num_bytes,
        "kept_bytes": llm.engine.prefix_cache.num_bytes,
    }


def resident_bytes() -> int:
    """What this process has in memory; where that cannot be told, the most it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    main()
