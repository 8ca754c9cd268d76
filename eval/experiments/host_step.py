"""Measure the host's work of a step whose pass a GPU would compute, without a GPU."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from statistics import median
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eval import cli
from eval.experiments.cost import copied_answer
from eval.models import build_random_model
from eval.runner import note, result
from ragaccel.decoding import Reference, Request, Sampling, Session
from ragaccel.drafting import JIT_WARMUP, TrieDrafter
from ragaccel.engine import Engine, PassOutput, StaticPass, StepGraphs
from ragaccel.models import HuggingFaceModel

VOCABULARIES = {"words": 32_000, "letters": 97}
"""Names of texts, and how many different tokens they have: few match, or very many."""
CONTEXT = 2000
NUM_TOKENS = 400
PASS_SECONDS, ROW_SHARE = 0.003, 0.003  # of a pass of one row; of that, for each further row
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
}


@cli.experiment(
    cli.integer("--repeats", 25, "answers timed"),
    table=lambda document: "\n".join(
        f"{name}: {one['us_per_step']} us, least {one['us_per_step_least']}; "
        f"{one['drafts_per_step']} draft tokens a step"
        for name, one in document["steps"].items()
    ),
    shown=("steps",),
)
def run_host_step(options: Namespace) -> dict[str, Any]:
    """Host's work of a step: drafting, filling a captured pass, reading it, accepting tokens.

        OMP_NUM_THREADS=1 python -m eval host_step

    One request with the default drafter and up to 64 draft tokens, over a prompt of 2,000 tokens
    from which the answer is copied in pieces. Passes run as on a GPU, over static buffers, but the
    device's part is simulated: its results follow the answer, and cost 3 ms by a clock of their
    own. The figure is the thread's processor time without that part. Calls of CUDA's driver, about
    60 us a step, are not in it. The machine's other load makes it longer: compare the least.
    """
    JIT_WARMUP.wait()
    found = {}
    for text, vocab_size in VOCABULARIES.items():
        for mode, sampling in (("greedy", Sampling()), ("sampled", Sampling(1.0, seed=1))):
            if mode == "sampled" and text == "words":
                continue  # noise of a large vocabulary is the device's work, but computed here
            note(f"timing {mode} steps over {text}")
            found[f"{mode}, {text}"] = time_steps(vocab_size, sampling, options.repeats)
    return result("host_step", {"repeats": options.repeats}, steps=found)


class SimulatedGraphs(StepGraphs):
    """Static passes whose results follow a text; ``seconds`` is the thread time of that."""

    seconds = clock = 0.0

    def follow(self, text: Sequence[int], vocab_size: int) -> None:
        """Let each row's next token be that of a text, at the row's position."""
        self._text = torch.tensor([*text, 0, 0])
        self._logits = torch.zeros(256, vocab_size)

    def now(self) -> float:
        """Return the seconds that the device has computed."""
        return self.clock

    def _with_greedy_ids(self, static: StaticPass) -> PassOutput:
        started = thread_time()
        ids = self._text[(static.positions[0] + 1).clamp_max(len(self._text) - 1)]
        logits = self._forced(ids)
        self.clock += PASS_SECONDS * (1 + ROW_SHARE * (len(ids) - 1))
        self.seconds += thread_time() - started
        return PassOutput(logits, ids[:, None])

    def _forced(self, ids: Tensor) -> Tensor:
        logits = self._logits[: len(ids)]
        if logits.shape[1] <= VOCABULARIES["letters"]:
            logits.zero_().scatter_(1, ids[:, None], 1e4)
        return logits


class NoKernel:
    """An attention kernel of a device that is not there."""

    buffers: tuple[Tensor, ...] = ()

    def move(self, *_given: Tensor) -> None:
        """Move nothing."""

    def __call__(self, q: Tensor, *_given: Any, **_options: Any) -> Tensor:
        """Return anything."""
        return torch.empty_like(q)


def time_steps(vocab_size: int, sampling: Sampling, repeats: int) -> dict[str, Any]:
    """Return the microseconds of thread time that a step takes without the device's part."""
    model = build_random_model(
        {**_CONFIG, "vocab_size": vocab_size}, torch.bfloat16, torch.device("cpu")
    )
    ours = HuggingFaceModel(model, self_check=False, pack=False)
    ours.enable_graphs(NoKernel, capture=False)
    if ours.kv_pool is None:
        raise ValueError("this model has no static passes")
    graphs = SimulatedGraphs(
        lambda _: model.lm_head.weight, ours.kv_pool, NoKernel, group=2, capture=False
    )
    ours.graphs = graphs
    prompt, answer = copied_answer(CONTEXT, NUM_TOKENS, vocab_size)
    graphs.follow([*prompt, *answer], vocab_size)
    engine = Engine(ours, kept_prefixes=0)
    request = Request(
        prompt, references=(Reference(prompt),), max_new_tokens=len(answer), sampling=sampling
    )
    with _device_clock(graphs):
        timed = [_time_answer(engine, graphs, request, answer) for _ in range(repeats + 3)][3:]
    micros, drafts = zip(*timed, strict=True)
    return {
        "us_per_step": round(median(micros), 1),
        "us_per_step_least": round(min(micros), 1),
        "drafts_per_step": round(median(drafts), 1),
    }


@contextmanager
def _device_clock(graphs: SimulatedGraphs) -> Iterator[None]:
    """Let the engine measure passes by the simulated device, so that drafts pay as on a GPU."""
    with patch("ragaccel.engine.engine.perf_counter", graphs.now):
        yield


def _time_answer(
    engine: Engine, graphs: SimulatedGraphs, request: Request, answer: Sequence[int]
) -> tuple[float, float]:
    """Return the microseconds and the draft tokens of a step, over one answer."""
    with closing(engine.open(request)) as verifier:
        session = Session(verifier, TrieDrafter(), request)
        session.prefill()
        started, apart = thread_time(), graphs.seconds
        for _ in session:
            pass
        seconds = thread_time() - started - (graphs.seconds - apart)
    if tuple(session.answer_ids) != tuple(answer):
        raise ValueError("the simulated answer is another one: the timing would mean nothing")
    steps = session.stats.verify_passes
    return 1e6 * seconds / steps, session.stats.draft_tokens / steps
