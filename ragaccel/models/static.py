"""Static passes of transformers' models: what a CUDA graph captures and torch.compile compiles.

A second twin whose attention is one opaque operation: everything else of a pass depends on its
token ids and positions alone, so that it can be traced as a whole.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor  # at run time, for the operation's annotations
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ragaccel.engine.cuda_graphs import Arena, StateLayout, StaticPass, StepGraphs
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.model_input import run_rows
from ragaccel.models.twin import make_twin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.engine.cuda_graphs import Kernel
    from ragaccel.models.huggingface import HuggingFaceModel
    from ragaccel.models.space import WornSpace

NAME = "ragaccel_static"

logger = logging.getLogger("ragaccel")


class _Running(threading.local):
    static: StaticPass | None = None
    windows: Sequence[int | None] = ()


_RUNNING = _Running()


@torch.library.custom_op("ragaccel::static_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float, softcap: float
) -> Tensor:
    """Attend over the arena of the running pass. [1, N, H, D]."""
    if _RUNNING.static is None:
        raise RuntimeError("no static pass is running")
    return _RUNNING.static.attend(
        layer,
        (query, key, value),
        scaling=scaling,
        window=_RUNNING.windows[layer],
        softcap=softcap or None,
    )


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    layer: int,  # noqa: ARG001
    scaling: float,  # noqa: ARG001
    softcap: float,  # noqa: ARG001
) -> Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1])


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    dropout: float = 0.0,  # noqa: ARG001
    scaling: float | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers calls it, with the layer that the module says it is."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = _attend(query, key, value, module.layer_idx, float(scaling), float(softcap or 0.0))
    return found, None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


class StaticNetwork:
    """A target model's twin for static passes, compiled when ``compile`` is called.

    Args:
        target: whose weights it shares.
        network: the twin.
    """

    def __init__(self, target: HuggingFaceModel, network: Any) -> None:
        self._network = self._eager = network
        self._windows = target.architecture.windows
        self._is_mixed = target.architecture.is_mixed
        self._mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=target.device)
        self._space: WornSpace | None = None

    @property
    def eager(self) -> Any:
        """The twin, not compiled."""
        return self._eager

    def use_space(self, space: WornSpace) -> None:
        """Let passes have mask tokens among their rows."""
        space.wrap(self._eager)
        self._space = space

    def compute(self, static: StaticPass) -> Tensor:
        """Run the model over a static pass; return the logits of all its rows, [N, V]."""
        _RUNNING.static, _RUNNING.windows = static, self._windows
        try:
            return self._compute(static)
        finally:
            _RUNNING.static = None

    def _compute(self, static: StaticPass) -> Tensor:
        ids, space = static.token_ids, self._space
        if space is None or not static.size.has_masks:
            return self._run({"input_ids": ids}, static.positions)
        with space.marked(ids, is_static=True):
            return self._run({"inputs_embeds": space.embed(self._eager, ids)}, static.positions)

    def compile(self) -> None:
        """Have torch compile the pass at its next runs, for any number of rows."""
        self._network = torch.compile(self._eager, dynamic=True)

    @property
    def is_compiled(self) -> bool:
        """Whether passes are compiled, or will be at their next run."""
        return self._network is not self._eager

    def _run(self, given: dict[str, Tensor], positions: Tensor) -> Tensor:
        kinds = ("full_attention", "sliding_attention")
        mask = dict.fromkeys(kinds, self._mask) if self._is_mixed else self._mask
        try:
            output = self._forward(given, positions, mask)
        except Exception as error:
            if self._network is self._eager or isinstance(error, torch.OutOfMemoryError):
                raise
            cause = next(filter(None, str(error).splitlines()), type(error).__name__)
            logger.warning("torch.compile does not take this model, it runs without: %s", cause)
            self._network = self._eager
            output = self._forward(given, positions, mask)
        logits: Tensor = output.logits[0]
        return logits

    def _forward(self, given: dict[str, Tensor], positions: Tensor, mask: Any) -> Any:
        return self._network(
            **given,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=_Through(),
            use_cache=True,
        )


def make_graphs(
    target: HuggingFaceModel, make_kernel: Callable[[], Kernel], *, capture: bool
) -> tuple[Arena, StepGraphs, StaticNetwork] | None:
    """Build what a model needs to run static passes; None where it cannot.

    A short pass tells what the states of its layers look like; models whose layers differ, or
    lie on several devices, have no arena.
    """
    twin = make_twin(target.model, NAME)
    cache = KVCache(limit=16)
    with torch.inference_mode():
        target.forward(run_rows([0, 0], cache, target.device), 1)
    layout = StateLayout.of(cache)
    if twin is None or layout is None or layout.device != target.device:
        return None
    config = target.model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    arena, network = Arena(layout), StaticNetwork(target, twin)
    graphs = StepGraphs(network.compute, arena, make_kernel, group=group, capture=capture)
    return arena, graphs, network


def triton_kernel() -> Callable[[], Kernel] | None:
    """Return the maker of our GPU attention; None where triton is not installed."""
    try:
        from ragaccel.engine.triton_attention import TritonKernel
    except ImportError:
        logger.info("no triton: passes are launched operation by operation")
        return None
    return TritonKernel


class _Through(Cache):
    """A cache that hands the rows' own states on: the attention stores them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return what is given."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return 0: positions are given."""
        return 0
