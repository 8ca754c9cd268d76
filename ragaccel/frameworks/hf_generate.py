"""Our decoding inside model.generate(custom_generate=...)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.decoding.request import Reference
from ragaccel.drafting.policy import DraftingPolicy
from ragaccel.engine.engine import Engine
from ragaccel.engine.scheduler import Scheduler
from ragaccel.errors import ConfigurationError
from ragaccel.llm import Job, Runner
from ragaccel.models.hf_processors import GenerateCall
from ragaccel.models.load import make_target
from ragaccel.models.packing import packing_cache_path
from ragaccel.models.self_check import check_folder
from ragaccel.models.tokenizer import Tokenizer
from ragaccel.paths import claim_torch, latency_file
from ragaccel.prompt import read_prompt, references_per_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ragaccel.decoding.request import Request
    from ragaccel.decoding.session import Drafter


_SLOT_ATTRIBUTE = "_ragaccel_engine"
_SLOT_LOCK = Lock()


class GenerateEngine:
    """An engine over a model of transformers, with its scheduler and its guesses."""

    def __init__(self, model: Any) -> None:
        target = make_target(model, packing_cache_path(keep=True), check_folder(keep=True))
        self.vocab_size = target.vocab_size
        self.scheduler = Scheduler(Engine(target, latency_file=latency_file(target.latency_key)))
        self.drafting = DraftingPolicy(None, None, None, target.vocab_size)


class _EngineSlot:
    """Where a model keeps its engine: an attribute, so that both end together.

    A table of weak references could not: the engine itself refers to the model. Copies of the
    model, and files of it, hold None there.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.engine: GenerateEngine | None = None
        self.structure: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def engine_for(model: Any) -> GenerateEngine:
    """Return the engine of a model; made at its first use, and anew once its modules are others.

    Raises:
        ConfigurationError: the model is in training mode, or called under autocast.
        UnsupportedModelError: it cannot be decoded exactly.
    """
    if model.training:
        raise ConfigurationError("the model is in training mode: call model.eval() first")
    device = model.device.type
    if torch.is_autocast_enabled(device):
        raise ConfigurationError(
            "passes of several callers are computed together, which autocast is not known to: "
            "leave its block, or load the model with the dtype that you want"
        )
    with _SLOT_LOCK:
        slot = model.__dict__.get(_SLOT_ATTRIBUTE)
        if slot is None:
            slot = model.__dict__[_SLOT_ATTRIBUTE] = _EngineSlot()
    with slot.lock:
        structure = tuple(_structure(model))
        if slot.engine is None or slot.structure != structure:
            slot.engine = None  # its packed weights go before others are made
            slot.engine, slot.structure = GenerateEngine(model), structure
        engine: GenerateEngine = slot.engine
        return engine


def _structure(model: Any) -> Iterator[Any]:
    """What an engine is made for: modules with their hooks and adapters, and where they compute."""
    yield model.device, model.dtype, model.config._attn_implementation
    for module in model.modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        adapters = getattr(module, "active_adapters", None)
        if callable(adapters):  # of a model without any it is a method that raises
            adapters = None
        off = getattr(module, "_disable_adapters", None), getattr(module, "merged_adapters", None)
        there = [id(p) for p in module._parameters.values() if p is not None and not p.is_meta]
        yield id(module), hooks, str(adapters), str(off), *there  # others come and go by hooks


@dataclass(frozen=True, slots=True)
class CustomGenerate:
    """``model.generate(..., custom_generate=ragaccel.custom_generate)``: the same, sooner.

    Greedily the tokens are those of ``generate``; sampled ones have its distribution, and depend
    on ``torch.manual_seed``. Every row of a batch is a request of its own, and calls of several
    threads share their passes. Nothing of a request is remembered by default.

    The first call for a model prepares it, which takes seconds: a self-check, and on a CPU packed
    copies of the weights if half of the free memory holds them. What was prepared lives as long
    as the model.

    Args:
        tokenizer: turns references given as texts into tokens.
        drafter: where guesses come from, in place of token trees.
        remember: let a model's answers teach the guesses for later ones.
        namespace: keeps what is remembered apart.
        token_budget: most guesses a verify pass takes; by default what pays at measured cost.
    """

    tokenizer: Any = None
    drafter: Drafter | None = None
    remember: bool = False
    namespace: str = ""
    token_budget: int | None = None

    def with_settings(self, **settings: Any) -> CustomGenerate:
        """Return one with other settings; raises TypeError for one that there is not."""
        return replace(self, **settings)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        references: Sequence[Any] = (),
        **model_kwargs: Any,
    ) -> Any:
        """Generate in the place of ``generate``'s loop, which prepared these arguments.

        ``references`` is an argument that ``generate`` takes now: texts the answers are likely to
        repeat, as lists of token ids or ``Reference``s, or, where ``tokenizer`` is set, strings
        and passages; for all rows, or a list of them for each prompt. ``generate`` passes a
        streamer or an assistant model on to no loop but its own: they have no effect.

        Raises:
            ConfigurationError: something that cannot be done exactly, or not at all: beams, scores,
                a cache that is passed in.
            CapacityError: a prompt and its answer do not fit the model's context.
            UnsupportedModelError: the model cannot be decoded exactly.
            ConfigurationError: this process was forked from one that had used a model.
        """
        claim_torch()
        mask = model_kwargs.get("attention_mask")
        processors, criteria = tuple(logits_processor), tuple(stopping_criteria)
        call = GenerateCall(input_ids, mask, processors, criteria, generation_config)
        call.check(model_kwargs)
        engine = engine_for(model)
        given = self._references(call, references, engine.vocab_size)
        seeds = [0] * call.num_rows
        if generation_config.do_sample:
            seeds = torch.randint(0, 2**63 - 1, (call.num_rows,)).tolist()
        requests = [
            call.request(row, own, seeds[row], self.namespace) for row, own in enumerate(given)
        ]
        return call.output(
            self._generate(engine, requests, pads_finished_rows=call.pads_finished_rows)
        )

    def _references(
        self, call: GenerateCall, references: Sequence[Any], vocab_size: int
    ) -> list[tuple[Reference, ...]]:
        """Return the references of every row, in token ids."""
        references = [] if references is None else references
        each = _references_per_row(references, call.num_rows, call.config.num_return_sequences or 1)
        texts = any(not isinstance(one, Reference) for own in each for one in own)
        if texts and self.tokenizer is None:
            raise ConfigurationError(
                "references that are texts need a tokenizer: custom_generate=ragaccel."
                "custom_generate.with_settings(tokenizer=tokenizer), or give lists of token ids"
            )
        tokenizer = _tokenizer(self.tokenizer) if texts else None
        rows = []
        for row, own in enumerate(each):
            if tokenizer is None:
                rows.append(tuple(own))
            else:
                rows.append(read_prompt(call.prompt(row), own, tokenizer, vocab_size).references)
        return rows

    def _generate(
        self, engine: GenerateEngine, requests: Sequence[Request], *, pads_finished_rows: bool
    ) -> list[list[int]]:
        runner = Runner(engine.scheduler, engine.drafting, self.token_budget)
        for request in requests:
            engine.scheduler.engine.check_fits(request)
        answers = self._decode(runner, requests)
        width = max(map(len, answers))
        short = (
            []
            if pads_finished_rows
            else [row for row, ids in enumerate(answers) if len(ids) < width]
        )
        if short:  # the stock loop goes on with them until the last row ends
            more = [_continuation(requests[row], answers[row], width) for row in short]
            for row, rest in zip(short, self._decode(runner, more), strict=True):
                answers[row] += rest
        return answers

    def _decode(self, runner: Runner, requests: Sequence[Request]) -> list[list[int]]:
        jobs = [Job(request, self.drafter, self.remember) for request in requests]
        answers: list[list[int]] = [[] for _ in jobs]
        with closing(runner.decode_all(jobs)) as steps:
            for row, _, step in steps:
                answers[row] += step.token_ids
        return answers


def _references_per_row(
    references: Sequence[Any], num_rows: int, num_returned: int
) -> list[list[Any]]:
    """Return the references of every row: rows of one prompt stand together."""
    as_given = references_per_prompt(
        [_as_reference(one) for one in references], num_rows // num_returned
    )
    return [[_as_reference(one) for one in own] for own in as_given for _ in range(num_returned)]


def _as_reference(one: Any) -> Any:
    """Return token ids as a reference; anything else as it is."""
    if isinstance(one, torch.Tensor):
        one = one.tolist()
    if isinstance(one, list | tuple) and one and all(isinstance(token, int) for token in one):
        return Reference(tuple(one))
    return one


def _continuation(request: Request, answer: Sequence[int], width: int) -> Request:
    """What is still to come of a row that has met its rules."""
    return replace(
        request,
        prompt_ids=(*request.prompt_ids, *answer),
        max_new_tokens=width - len(answer),
        stop_rules=(),
    )


@lru_cache(maxsize=2)
def _tokenizer(tokenizer: Any) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)


custom_generate = CustomGenerate()
"""The one with the defaults."""
