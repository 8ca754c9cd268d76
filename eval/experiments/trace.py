"""Trace the way of one request through the code, and time the host's part of a step."""

from __future__ import annotations

import os
import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from statistics import median
from time import sleep, thread_time
from types import FrameType
from typing import Any

import torch
from tokenizers import Tokenizer as TokenizersTokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import ragaccel
from eval import cli
from eval.models import build_random_model
from eval.runner import note, result
from ragaccel.drafting import JIT_WARMUP
from ragaccel.llm import LLM
from ragaccel.models import bundled_reader_path

PACKAGE = str(Path(ragaccel.__file__).parent) + os.sep
VALUE_TYPES = (tuple, str, int, BaseException)
QUESTION = [{"role": "user", "content": "Who trims the wick of the lamp, and when?"}]
PASS_SECONDS = 0.003
REFERENCE = "The keeper trims the wick of the lamp at dusk, and again at midnight."


@cli.experiment(
    cli.integer("--repeats", 15, "answers timed"),
    table=lambda document: "\n".join(
        f"{name}: {value}" for name, value in {**document["request"], **document["host"]}.items()
    ),
    shown=("host",),
)
def run_trace(options: Namespace) -> dict[str, Any]:
    """Trace a warm request: its files, calls and objects; and the host's time for a step.

        python -m eval trace --out eval/results/trace.json

    The request is a chat prompt with one reference, answered by the bundled reader with the
    default drafter, traced at the second call so that nothing is imported. An instance counts if
    its class is the package's own and no value type (a frozen dataclass, a tuple, an error).

    The host's time is this thread's CPU time for a step of a 2,000-token prompt, whose answer is
    copied from it in pieces, with a model that does nothing.
    """
    JIT_WARMUP.wait()
    note("tracing a request")
    traced = trace_request()
    note("timing the host's part of a step")
    host = time_host(options.repeats)
    return result("trace", {"repeats": options.repeats}, request=traced, host=host)


@dataclass
class Trace:
    """What was seen of a call: functions of the package, and the instances made of its classes."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    calls: int = 0
    crossings: Counter[tuple[str, str]] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)

    def see(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Record a call; a profile function, see ``sys.setprofile``."""
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "__init__":
            self._see_instance(frame)
        if not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        self.functions.add((file, f"{code.co_name}:{code.co_firstlineno}"))
        self.calls += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        before = "" if caller is None else caller.f_code.co_filename.removeprefix(PACKAGE)
        if before not in ("", file):
            self.crossings[before, file] += 1

    def _see_instance(self, frame: FrameType) -> None:
        made = next(iter(frame.f_locals.values()), None)
        kind = type(made)
        own_init = getattr(kind.__init__, "__code__", None)
        is_own = kind.__module__.startswith("ragaccel") and own_init is frame.f_code
        if is_own and not _is_value_type(kind):
            self.instances[kind.__name__] += 1

    def figures(self) -> dict[str, Any]:
        """Return the numbers ready for JSON."""
        files = sorted({file for file, _ in self.functions})
        return {
            "num_files": len(files),
            "num_instances": sum(self.instances.values()),
            "num_functions": len(self.functions),
            "num_calls": self.calls,
            "num_calls_across_files": sum(self.crossings.values()),
            "num_edges": len(self.crossings),
            "instances": dict(self.instances.most_common()),
            "files": files,
        }


def trace_request() -> dict[str, Any]:
    """Trace the second of two equal requests to the bundled reader."""
    llm = LLM.load(bundled_reader_path())
    trace = Trace()

    def ask() -> None:
        llm.generate(QUESTION, references=[REFERENCE], max_new_tokens=8)

    ask()
    sys.setprofile(trace.see)
    try:
        ask()
    finally:
        sys.setprofile(None)
    return trace.figures()


def _is_value_type(kind: type) -> bool:
    if issubclass(kind, VALUE_TYPES):
        return True
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


class ReplayedForward:
    """A model's forward pass that sleeps and makes the answer follow a text.

    It sleeps so that drafts pay as with a real model. Its own thread time adds to ``seconds``.
    """

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self.one_hot = torch.eye(vocab_size)[[*text[1:], 0]]
        self.seconds = 0.0

    def __call__(self, rows: Any, keep: int) -> Tensor:
        """Return the logits of the last ``keep`` rows, [keep, V]: one-hot at the text's token."""
        sleep(PASS_SECONDS)
        started = thread_time()
        positions = rows.positions[0, -keep:].clamp_max(len(self.one_hot) - 1)
        logits = self.one_hot[positions]
        self.seconds += thread_time() - started
        return logits


def time_host(repeats: int) -> dict[str, Any]:
    """Return the microseconds of thread time that a step takes without the model's pass."""
    tokenizer = _byte_tokenizer()
    vocab_size = len(tokenizer)
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    llm = LLM(
        build_random_model(config, torch.float32, torch.device("cpu")),
        tokenizer,
        remember=False,
        save_measurements=False,
    )
    prompt, answer = _copying_text(vocab_size)
    replayed = ReplayedForward([*prompt, *answer], vocab_size)
    llm.model.forward = replayed  # type: ignore[method-assign]
    timed = [_time_steps(llm, prompt, answer, replayed) for _ in range(repeats + 1)][1:]
    micros = [1e6 * seconds / steps for seconds, steps in timed]
    return {
        "us_per_step": round(median(micros), 1),
        "us_per_step_least": round(min(micros), 1),
        "steps": timed[0][1],
        "tokens": len(answer),
    }


def _time_steps(
    llm: LLM, prompt: list[int], answer: list[int], replayed: ReplayedForward
) -> tuple[float, int]:
    """Return the thread time after the first piece of text, and the steps made in it."""
    stream = llm.stream(prompt, references=[REFERENCE], max_new_tokens=len(answer))
    next(stream)
    started, apart = thread_time(), replayed.seconds
    for _ in stream:
        pass
    seconds = thread_time() - started - (replayed.seconds - apart)
    given = list(stream.answer.token_ids)
    if given != answer:
        raise ValueError("the replayed answer is another one: the timing would mean nothing")
    return seconds, stream.answer.stats.verify_passes - 1


def _copying_text(vocab_size: int) -> tuple[list[int], list[int]]:
    """Return a prompt of 2,000 tokens and an answer of 400 that copies pieces of it."""
    rng = random.Random(0)
    prompt = [rng.randrange(1, vocab_size) for _ in range(2000)]
    answer: list[int] = []
    while len(answer) < 400:
        first, length = rng.randrange(1900), rng.randint(4, 24)
        answer += [*prompt[first : first + length], *rng.choices(range(1, vocab_size), k=3)]
    return prompt, answer[:400]


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = TokenizersTokenizer(models.BPE(vocab=letters, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words)
