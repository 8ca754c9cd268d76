"""Stock engines: what models are decoded with whose owners call generate, kept with the models."""

from __future__ import annotations

from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.engine.engine import Engine
from ragaccel.engine.scheduler import Scheduler
from ragaccel.errors import ConfigurationError
from ragaccel.guessing import Guessing
from ragaccel.homes import cost_file
from ragaccel.models.load import as_target
from ragaccel.models.packing import packing_file
from ragaccel.models.self_check import check_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = "_ragaccel_stock_engine"
_GIVING_PLACES = Lock()


class StockEngine:
    """An engine over a model of transformers, with its scheduler and its guesses."""

    def __init__(self, model: Any) -> None:
        target = as_target(model, packing_file(keep=True), check_folder(keep=True))
        self.vocab_size = target.vocab_size
        self.scheduler = Scheduler(Engine(target, cost_file=cost_file(target.cost_key)))
        self.guessing = Guessing(None, None, None, target.vocab_size)


class _Place:
    """Where a model keeps its engine: an attribute, so that both end together.

    A table of weak references could not: the engine itself refers to the model. Copies of the
    model, and files of it, hold None there.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.engine: StockEngine | None = None
        self.structure: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def engine_for(model: Any) -> StockEngine:
    """The engine of a model; made at its first use, and anew once its modules are others.

    Raises:
        ConfigurationError: the model is in training mode, or called under autocast.
        ModelRefusedError: it cannot be decoded exactly.
    """
    if model.training:
        raise ConfigurationError("the model is in training mode: call model.eval() first")
    device = model.device.type
    if torch.is_autocast_enabled(device):
        raise ConfigurationError(
            "passes of several callers are computed together, which autocast is not known to: "
            "leave its block, or load the model with the dtype that you want"
        )
    with _GIVING_PLACES:
        place = model.__dict__.get(_NAME)
        if place is None:
            place = model.__dict__[_NAME] = _Place()
    with place.lock:
        structure = tuple(_structure(model))
        if place.engine is None or place.structure != structure:
            place.engine = None  # its packed weights go before others are made
            place.engine, place.structure = StockEngine(model), structure
        engine: StockEngine = place.engine
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
