"""Drafting and verification inside ``model.generate(custom_generate=...)`` of transformers."""

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
from ragaccel.llm import Generation, decode
from ragaccel.models.hf_processors import GenerateCall
from ragaccel.models.load import make_target
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
    """The engine, scheduler and drafting policy of a model of transformers."""

    def __init__(self, model: Any) -> None:
        target = make_target(model, check_folder())
        self.vocab_size = target.vocab_size
        self.scheduler = Scheduler(Engine(target, latency_file=latency_file(target.latency_key)))
        self.drafting = DraftingPolicy(None, None, None, target.vocab_size)


class _EngineSlot:
    """The attribute of a model that holds its engine, so that both are freed together.

    A table of weak references would keep both alive, since the engine refers to the model. Copies
    and pickles of the model hold None instead.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.engine: GenerateEngine | None = None
        self.structure: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def engine_for(model: Any) -> GenerateEngine:
    """Return the engine of a model, created on first use and again when its modules change.

    Raises:
        ConfigurationError: the model is in training mode, or called under autocast.
        UnsupportedModelError: the model cannot be decoded exactly.
    """
    if model.training:
        raise ConfigurationError("the model is in training mode: call model.eval() first")
    device = model.device.type
    if torch.is_autocast_enabled(device):
        raise ConfigurationError(
            "custom_generate does not work under autocast, which would also apply to the requests "
            "of other callers: leave its block, or load the model with the dtype that you want"
        )
    with _SLOT_LOCK:
        slot = model.__dict__.get(_SLOT_ATTRIBUTE)
        if slot is None:
            slot = model.__dict__[_SLOT_ATTRIBUTE] = _EngineSlot()
    with slot.lock:
        structure = tuple(_structure(model))
        if slot.engine is None or slot.structure != structure:
            slot.engine = None  # free its packed weights before packing new ones
            slot.engine, slot.structure = GenerateEngine(model), structure
        engine: GenerateEngine = slot.engine
        return engine


def _structure(model: Any) -> Iterator[Any]:
    """Yield the properties of a model that its engine depends on: modules, hooks, adapters, device.

    A different sequence means that the engine must be created again.
    """
    yield model.device, model.dtype, model.config._attn_implementation
    for module in model.modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        adapters = getattr(module, "active_adapters", None)
        if callable(adapters):  # a method, which raises, in a model without adapters
            adapters = None
        off = getattr(module, "_disable_adapters", None), getattr(module, "merged_adapters", None)
        there = [id(p) for p in module._parameters.values() if p is not None and not p.is_meta]
        yield id(module), hooks, str(adapters), str(off), *there  # hooks replace meta ones


@dataclass(frozen=True, slots=True)
class CustomGenerate:
    """A faster loop for ``model.generate(..., custom_generate=ragaccel.custom_generate)``.

    Greedy tokens are exactly those of ``generate``. Sampled tokens have the same distribution and
    depend on ``torch.manual_seed``. Every row of a batch is a request of its own, and calls of
    several threads share passes. By default nothing of a request is remembered.

    The first call for a model takes seconds: it runs a self-check and, on a CPU, packs the weights
    if they fit in half of the free memory. The engine lives as long as the model.

    Args:
        tokenizer: tokenizes references given as texts.
        drafter: the source of draft tokens, in place of token trees.
        remember: draft from the model's earlier answers too.
        namespace: the name of the memory that is used; namespaces share nothing.
        token_budget: the maximum number of draft tokens per step; by default it is chosen at every
            step by expected gain and measured latency.
    """

    tokenizer: Any = None
    drafter: Drafter | None = None
    remember: bool = False
    namespace: str = ""
    token_budget: int | None = None

    def with_settings(self, **settings: Any) -> CustomGenerate:
        """Return a copy with other settings; raise TypeError for an unknown setting."""
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
        """Decode in place of the loop of ``generate``, which prepares these arguments.

        ``generate`` then takes ``references``, texts that the answers are likely to repeat: lists
        of token ids or ``Reference`` objects or, if ``tokenizer`` is set, strings and passages;
        one list for all rows, or a list for each prompt. A streamer or an assistant model has no
        effect, since ``generate`` passes them only to its own loops.

        Raises:
            ConfigurationError: the call needs something unsupported, such as beams or scores, or
                passes in a cache.
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
        """Return the references of each row of the batch, in token ids."""
        references = [] if references is None else references
        each = _references_per_row(references, call.num_rows, call.config.num_return_sequences or 1)
        texts = any(not isinstance(one, Reference) for own in each for one in own)
        if texts and self.tokenizer is None:
            raise ConfigurationError(
                "references given as texts need a tokenizer: pass custom_generate=ragaccel."
                "custom_generate.with_settings(tokenizer=tokenizer), or lists of token ids"
            )
        if not texts:
            return [tuple(own) for own in each]
        tokenizer = _tokenizer(self.tokenizer)
        return [
            read_prompt(call.prompt(row), own, tokenizer, vocab_size).references
            for row, own in enumerate(each)
        ]

    def _generate(
        self, engine: GenerateEngine, requests: Sequence[Request], *, pads_finished_rows: bool
    ) -> list[list[int]]:
        answers = self._decode(engine, requests)
        width = max(map(len, answers))
        short = (
            []
            if pads_finished_rows
            else [row for row, ids in enumerate(answers) if len(ids) < width]
        )
        if short:  # like the loop of transformers, continue them until the last row ends
            more = [_continuation(requests[row], answers[row], width) for row in short]
            for row, rest in zip(short, self._decode(engine, more), strict=True):
                answers[row] += rest
        return answers

    def _decode(self, engine: GenerateEngine, requests: Sequence[Request]) -> list[list[int]]:
        generations = [
            Generation(engine.scheduler.engine.open(request), self.drafter, remember=self.remember)
            for request in requests
        ]
        answers: list[list[int]] = [[] for _ in requests]
        steps = decode(
            engine.scheduler, engine.drafting, generations, token_budget=self.token_budget
        )
        with closing(steps):
            for row, _, step in steps:
                answers[row] += step.token_ids
        return answers


def _references_per_row(
    references: Sequence[Any], num_rows: int, num_returned: int
) -> list[list[Any]]:
    """Return the references of each row of the batch; rows of one prompt are adjacent."""
    as_given = references_per_prompt(
        [_as_reference(one) for one in references], num_rows // num_returned
    )
    return [[_as_reference(one) for one in own] for own in as_given for _ in range(num_returned)]


def _as_reference(one: Any) -> Any:
    """Return token ids as a reference, and any other object as it is."""
    if isinstance(one, torch.Tensor):
        one = one.tolist()
    if isinstance(one, list | tuple) and one and all(isinstance(token, int) for token in one):
        return Reference(tuple(one))
    return one


def _continuation(request: Request, answer: Sequence[int], width: int) -> Request:
    """Return a request that continues a finished row until its answer has ``width`` tokens."""
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
"""A ``CustomGenerate`` with the default settings."""
