"""A model for static passes: a weight-sharing copy, its KV pool, its graphs and its kernels.

Everything in its passes but attention depends on token ids and positions alone, so that a pass can
be captured as a CUDA graph, and torch can compile it whole.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.engine.capture import CaptureError
from ragaccel.engine.cuda_graphs import KVPool, StateLayout, StaticPass, StepGraphs
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.latency import ROW_BUCKETS
from ragaccel.engine.model_input import causal_rows
from ragaccel.models.capture_safety import capture_obstacle, use_capturable_experts
from ragaccel.models.fused_layers import FusedLayers
from ragaccel.models.hf_attention import (
    STATIC_ATTENTION_NAME,
    PassThroughCache,
    attention_of_pass,
    make_shared_copy,
)
from ragaccel.models.support import cache_keyword

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ragaccel.engine.cuda_graphs import AttentionKernel, LayerKernels
    from ragaccel.models.space_adapter import AttachedAdapter
    from ragaccel.models.support import HuggingFaceTarget

logger = logging.getLogger("ragaccel")


class StaticNetwork:
    """A target model's weight-sharing copy for static passes, compiled on request.

    Layers of a known form are computed by ``FusedLayers``, unless torch compiles the model.

    Args:
        target: the model whose weights it shares.
        network: the copy.
        kernels: the kernels of fused layers; None for the model's modules.
    """

    def __init__(
        self, target: HuggingFaceTarget, network: Any, kernels: LayerKernels | None = None
    ) -> None:
        self._network = self._eager = network
        self._cache_keyword = cache_keyword(network)
        self._fused: FusedLayers | None = None
        if kernels is not None:
            try:
                self._fused = FusedLayers(network, kernels, target.architecture.windows)
            except ValueError as error:
                logger.debug("static passes run through the model's modules: %s", error)
        self._windows = target.architecture.windows
        self._has_mixed_layers = target.architecture.has_mixed_layers
        self._mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=target.device)
        self._space: AttachedAdapter | None = None

    @property
    def eager(self) -> Any:
        """The copy, not compiled."""
        return self._eager

    def attach_space(self, space: AttachedAdapter) -> None:
        """Attach a SPACE adapter, so that passes may contain mask tokens."""
        space.wrap(self._eager)
        self._space = space

    def compute(self, static: StaticPass) -> Tensor:
        """Run the model over a static pass; return the logits of all its rows, [N, V]."""
        ids, space = static.token_ids, self._space
        with attention_of_pass(static, self._windows):
            if space is None or not static.size.has_masks:
                if self.is_fused:
                    return self._run(self._eager.get_input_embeddings()(ids), static)
                return self._run(ids, static)
            with space.mark_rows(ids):
                return self._run(space.embed(self._eager, ids), static)

    @property
    def is_fused(self) -> bool:
        """Whether passes run through ``FusedLayers``."""
        return self._fused is not None and not self.is_compiled

    def compile(self) -> None:
        """Let torch compile the model at the next pass, for any number of rows."""
        self._network = torch.compile(self._eager, dynamic=True)

    @property
    def is_compiled(self) -> bool:
        """Whether passes are compiled, or will be at their next run."""
        return self._network is not self._eager

    def _run(self, inputs: Tensor, static: StaticPass) -> Tensor:
        """Run over token ids [1, N] or embedded rows [1, N, E]."""
        if self._fused is not None and not self.is_compiled:
            return self._fused.compute(inputs, static)
        given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
        positions = static.positions
        kinds = ("full_attention", "sliding_attention")
        mask = dict.fromkeys(kinds, self._mask) if self._has_mixed_layers else self._mask
        try:
            output = self._forward(given, positions, mask)
        except Exception as error:
            if self._network is self._eager or isinstance(error, torch.OutOfMemoryError):
                raise
            cause = next(filter(None, str(error).splitlines()), type(error).__name__)
            logger.warning("torch.compile fails on this model, which runs uncompiled: %s", cause)
            self._network = self._eager
            output = self._forward(given, positions, mask)
        logits: Tensor = output.logits[0]
        return logits

    def _forward(self, given: dict[str, Tensor], positions: Tensor, mask: Any) -> Any:
        return self._network(
            **given,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_keyword: PassThroughCache()},
        )


def make_graphs(
    target: HuggingFaceTarget,
    make_kernel: Callable[[], AttentionKernel],
    *,
    capture: bool,
    layers: LayerKernels | None = None,
) -> tuple[KVPool, StepGraphs, StaticNetwork]:
    """Build the pool, graphs and network for static passes.

    A short pass shows the shapes of the layers' keys and values.

    Raises:
        CaptureError: the model has no static passes: layers differ or lie on several devices, the
            model cannot be copied, or, with ``capture``, it is known to wait for the device.
    """
    shared_copy = make_shared_copy(target.model, STATIC_ATTENTION_NAME)
    if shared_copy is None:
        raise CaptureError("its modules cannot be copied")
    cache = KVCache(limit=16)
    with torch.inference_mode():
        target.forward(causal_rows([0, 0], cache, target.device), 1)
    layout = StateLayout.of(cache)
    if layout is None or layout.device != target.device:
        raise CaptureError("the keys and values of its layers differ, or lie on several devices")
    max_rows = use_capturable_experts(shared_copy, layout.device, layout.dtype)
    if capture and (obstacle := capture_obstacle(shared_copy)):
        raise CaptureError(obstacle)
    config = target.model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    kv_pool, network = KVPool(layout), StaticNetwork(target, shared_copy, layers)
    graphs = StepGraphs(
        network.compute,
        kv_pool,
        make_kernel,
        group=group,
        capture=capture,
        max_rows=ROW_BUCKETS[-1] if max_rows is None else max_rows,
    )
    return kv_pool, graphs, network


def triton_kernels() -> tuple[Callable[[], AttentionKernel], LayerKernels]:
    """Return ragaccel's GPU kernels: the class of those for attention, and those for layers.

    Raises:
        CaptureError: triton is not installed.
    """
    try:
        from ragaccel.engine.triton_attention import TritonKernel
        from ragaccel.engine.triton_layers import TritonLayers
    except ImportError:
        raise CaptureError("triton is not installed: pip install triton") from None
    return TritonKernel, TritonLayers()
