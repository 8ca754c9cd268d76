"""An engine of vLLM that gives recorded answers, and drafters in turns inside it. Needs vLLM 0.32.

The model computes every pass in full; then the recorded next token's logit is raised above all
others, in every row of the pass. One engine serves all contenders: its proposer passes each step
on to the one that is switched on, so that all have the same weights, memory and threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.sampling_params import RequestOutputKind

from eval.measure import FORCED_LOGIT

MAX_LEN, MAX_REQUESTS = 4096, 16
MAX_DRAFT = 24
"""As many tokens as any contender drafts in a step: suffix decoding's default."""
_PART = 128  # positions are written in two parts that are exact in bfloat16

Propose = Callable[..., list[list[int]]]
_now = SimpleNamespace(runner=None, config=None, propose=None, seconds=[], drafted=[])
_recordings = torch.full((MAX_REQUESTS, MAX_LEN + MAX_DRAFT + 2), -1)
"""[slots, positions]: the token that is recorded at a position of an answer, or -1."""


class _Forced:
    """A model that answers what is recorded for a request, at the cost of its own passes.

    Each hidden state's first columns tell its position and the slot of its request's recording,
    so that ``compute_logits`` knows them whatever rows it is given.
    """

    def forward(
        self,
        input_ids: Any,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> torch.Tensor:
        """Return the hidden states, with position and slot in their first three columns."""
        hidden: torch.Tensor = super().forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds
        )
        slots = _slots_of_rows()
        hidden[:, 0] = (positions // _PART).to(hidden.dtype)
        hidden[:, 1] = (positions % _PART).to(hidden.dtype)
        hidden[: len(slots), 2] = slots.to(hidden.dtype)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] with the recorded token's above all others."""
        logits: torch.Tensor = super().compute_logits(hidden_states)  # type: ignore[misc]
        if _now.runner is not None:
            high, low, slots = hidden_states[:, :3].long().unbind(1)
            recorded = _recordings[slots, high * _PART + low + 1]
            rows = torch.nonzero(recorded >= 0).flatten()
            logits[rows, recorded[rows]] = FORCED_LOGIT
        return logits


class ForcedLlama(_Forced, LlamaForCausalLM):  # type: ignore[misc]
    """A Llama."""


class ForcedQwen2(_Forced, Qwen2ForCausalLM):  # type: ignore[misc]
    """A Qwen2."""


FORCED = {"llama": ForcedLlama, "qwen2": ForcedQwen2}


def _slots_of_rows() -> torch.Tensor:
    """Return the slot of the recording that each row of this pass belongs to."""
    if _now.runner is None:  # the passes with which an engine starts
        return torch.zeros(0, dtype=torch.long)
    batch = _now.runner.input_batch
    requests = [_now.runner.requests[name] for name in batch.req_ids]
    slots = torch.tensor([one.sampling_params.extra_args["slot"] for one in requests])
    starts = torch.from_numpy(_now.runner.query_start_loc.np[: len(requests) + 1])
    return slots.repeat_interleave(torch.diff(starts))


class SwitchingProposer:
    """The proposer that vLLM loads: it asks the contender that is on, and takes the time."""

    def __init__(self, vllm_config: Any) -> None:
        _now.config = vllm_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,  # noqa: ARG002
    ) -> list[list[int]]:
        """Return the draft tokens of the contender that is on; none for plain decoding."""
        started = perf_counter()
        drafts = (
            [[] for _ in sampled_token_ids]
            if _now.propose is None
            else _now.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        )
        _now.seconds.append(perf_counter() - started)
        _now.drafted.append(sum(map(len, drafts)))
        return drafts


def plain() -> None:
    """Draft nothing."""


def ngram(low: int, high: int, num_tokens: int) -> Propose:
    """Return vLLM's ngram."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    own = NgramProposer(
        _config(prompt_lookup_min=low, prompt_lookup_max=high, num_speculative_tokens=num_tokens)
    )
    return lambda *given: own.propose(num_tokens, *given)


def suffix(*, history: bool) -> Propose:
    """Return vLLM's suffix decoding at its defaults, with earlier answers or without."""
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    own = SuffixDecodingProposer(
        _config(
            num_speculative_tokens=MAX_DRAFT,
            suffix_decoding_max_tree_depth=MAX_DRAFT,
            suffix_decoding_max_cached_requests=10_000 if history else 0,
            suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_min_token_prob=0.1,
        )
    )
    return lambda new, *_rest: own.propose(MAX_DRAFT, _now.runner.input_batch, new)


def ours(num_tokens: int, *, history: bool) -> Propose:
    """Return our proposer."""
    from vllm_ragaccel import RagaccelProposer

    config = _config(num_speculative_tokens=num_tokens)
    config.additional_config = {"ragaccel": {"history": history}}
    own = RagaccelProposer(config)
    own.load_model()
    return own.propose


def _config(**settings: Any) -> Any:
    """Return the engine's configuration with other settings of its drafts."""
    drafts = copy(_now.config.speculative_config)
    for name, value in settings.items():
        object.__setattr__(drafts, name, value)
    config = copy(_now.config)
    object.__setattr__(config, "speculative_config", drafts)
    return config


@dataclass(slots=True)
class Timed:
    """What decoding a group of requests took.

    ``seconds`` begin when all have their first token; steps and drafts are counted from there.
    A step counts once for each request that it gives tokens to.
    """

    first_seconds: float = 0.0
    first_propose_seconds: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    request_steps: int = 0
    drafted: int = 0
    propose_seconds: list[float] = field(default_factory=list)


class ForcedEngine:
    """One engine over a model in a folder; contenders are switched on in it."""

    def __init__(self, folder: Path, *, proposes: bool = True) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        forced = FORCED[config["model_type"]]
        ModelRegistry.register_model(forced.__name__, forced)
        drafts = {
            "method": "custom_class",
            "model": "eval.vllm_engine.SwitchingProposer",
            "num_speculative_tokens": MAX_DRAFT,
        }
        self._llm = LLM(
            str(folder),
            dtype="bfloat16",
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_REQUESTS,
            skip_tokenizer_init=True,
            async_scheduling=False,
            seed=0,
            hf_overrides={"architectures": [forced.__name__]},
            **({"speculative_config": drafts} if proposes else {}),
        )
        core: Any = self._llm.llm_engine.engine_core
        _now.runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self._num_requests = 0

    def forget_prompts(self) -> None:
        """Empty the prefix cache, so that the next prompts are read in full."""
        self._llm.reset_prefix_cache()

    def decode(
        self, propose: Propose | None, prompts: Sequence[Sequence[int]], answers: Sequence[Any]
    ) -> Timed:
        """Give each prompt its answer, all at once; raise RuntimeError if an answer differs."""
        _now.propose, _now.seconds, _now.drafted = propose, [], []
        engine, timed = self._llm.llm_engine, Timed()
        said: dict[str, list[int]] = {}
        for slot, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            _record(slot, len(prompt), answer)
            self._num_requests += 1
            said[name := str(self._num_requests)] = []
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, _params(slot, answer))
        started = perf_counter()
        first, calls = 0.0, 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            new = {out.request_id: list(out.outputs[0].token_ids) for out in outputs}
            for name, ids in new.items():
                said[name] += ids
            if first:
                timed.steps += 1
                timed.request_steps += len(new)
                timed.tokens += sum(map(len, new.values()))
            elif all(said.values()):
                first = perf_counter()
                calls = len(_now.seconds)
        timed.first_seconds, timed.seconds = first - started, perf_counter() - first
        timed.first_propose_seconds = sum(_now.seconds[:calls])
        timed.drafted = sum(_now.drafted[max(0, calls - 1) : -1])
        timed.propose_seconds = _now.seconds[calls:-1]
        if list(said.values()) != [list(answer) for answer in answers]:
            raise RuntimeError("the engine gave another answer than the recorded one")
        return timed


def _record(slot: int, start: int, answer: Sequence[int]) -> None:
    _recordings[slot] = -1
    _recordings[slot, start : start + len(answer)] = torch.tensor(answer)


def _params(slot: int, answer: Sequence[int]) -> Any:
    return SamplingParams(
        temperature=0,
        max_tokens=len(answer),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"slot": slot},
    )
