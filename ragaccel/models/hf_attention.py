"""Attention in transformers' modules: registered functions, caches, copies that share weights.

``attention_forward`` is registered with transformers under the name ``ragaccel``. During a pass of
the engine it attends over the caches of that pass; for any other call it is transformers' own SDPA
attention.

``use_rowwise_activations`` is for deterministic passes. A CPU's vector code and scalar code round
an activation function differently, and which of them computes an element depends on its position
in the tensor and on the number of threads.

``StaticNetwork`` is a second weight-sharing copy whose attention is one opaque operation.
Everything else in its passes depends on token ids and positions alone, so torch can trace and
compile it whole.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn  # Tensor at run time, for an operation's annotations
from transformers import AttentionInterface
from transformers.activations import ACT2CLS
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ragaccel.engine.attention import PassAttention
from ragaccel.engine.capture import CaptureError
from ragaccel.engine.cuda_graphs import KVPool, StateLayout, StaticPass, StepGraphs
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.latency import ROW_BUCKETS
from ragaccel.engine.model_input import causal_rows, is_plain, reaches_past
from ragaccel.models.capture_safety import capture_obstacle, use_capturable_experts
from ragaccel.models.fused_layers import FusedLayers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragaccel.engine.cuda_graphs import AttentionKernel, LayerKernels
    from ragaccel.engine.model_input import AttentionMasks, Rows
    from ragaccel.models.space_adapter import AttachedAdapter
    from ragaccel.models.support import Architecture, HuggingFaceTarget


ATTENTION_NAME = "ragaccel"
_UNSUPPORTED = ("s_aux", "position_bias")  # arguments that change the scores


class _CurrentPass(threading.local):
    attention: PassAttention | StaticPass | None = None
    windows: Sequence[int | None] = ()
    layer = -1  # the layer that stored its keys and values last


_CURRENT = _CurrentPass()


@contextmanager
def attention_of_pass(
    attention: PassAttention | StaticPass, windows: Sequence[int | None]
) -> Iterator[None]:
    """Let models in this thread attend over the caches of one pass, within this context.

    ``windows`` has one entry per layer.
    """
    _CURRENT.attention, _CURRENT.windows, _CURRENT.layer = attention, windows, -1
    try:
        yield
    finally:
        _CURRENT.attention = None


def is_deterministic() -> bool:
    """Return whether this thread runs a deterministic (batch-invariant) pass."""
    return isinstance(_CURRENT.attention, PassAttention) and _CURRENT.attention.deterministic


def enter_layer(layer: int) -> None:
    """Record which layer's keys and values the next call of the attention gets."""
    _CURRENT.layer = layer


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with transformers' signature: query [1, H, N, D], key and value [1, K, N, D].

    Raises:
        NotImplementedError: the model passes arguments that change its scores.
    """
    attention = _CURRENT.attention
    if attention is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            softcap=softcap,
            **kwargs,
        )
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"this attention does not support {', '.join(unsupported)}")
    layer = _CURRENT.layer
    found = attention.attend(
        layer,
        (query, key, value),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_CURRENT.windows[layer],
        softcap=softcap,
    )
    return found, None


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


logger = logging.getLogger("ragaccel")


def make_shared_copy(model: Any, attention: str = ATTENTION_NAME) -> Any:
    """Copy a model's modules and config; share its weights, and replace its attention.

    Returns:
        The copy, or None if the model cannot be copied or its attention cannot be replaced.
    """
    can_exchange = getattr(model, "_can_set_attn_implementation", None)
    if can_exchange is None or not can_exchange():
        return None
    try:
        shared_copy = deepcopy(model, _memo_of_tensors(model))
        shared_copy.set_attn_implementation(attention)
    except Exception as error:  # hooks or weights that cannot be copied
        logger.info(
            "each request runs in passes of its own, as the model cannot be copied: %s", error
        )
        return None
    implementation = shared_copy.config.get_text_config(decoder=True)._attn_implementation
    return shared_copy if implementation == attention else None


def _memo_of_tensors(model: nn.Module) -> dict[int, Any]:
    """Return the ``memo`` argument with which ``deepcopy`` shares tensors instead of copying."""
    tensors = [*model.parameters(), *model.buffers()]
    return {id(thing): thing for thing in (*tensors, *_offload_maps(model))}


def _offload_maps(model: nn.Module) -> Iterator[Any]:
    """Yield the maps in which accelerate's hooks keep offloaded weights."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            for name in ("weights_map", "tied_params_map"):
                kept = getattr(part, name, None)
                if kept is not None:
                    yield kept


class PassThroughCache(Cache):
    """A cache that returns the rows' own states, because the attention stores them."""

    def __init__(self, length: int = 0) -> None:
        super().__init__(layers=[])
        self._length = length

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the rows' own states."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return how many tokens are cached."""
        return self._length


class PassCache(PassThroughCache):
    """The cache that a model sees during its passes of ``PassAttention``, one after another."""

    def begin(self, rows: Rows) -> PassCache:
        """Take the length of a pass; return this cache."""
        self._length = max(0, rows.attended - rows.num_rows)
        return self

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Record the layer and return the rows' own states."""
        enter_layer(layer_idx)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Return how many states an update returns, and the first one's position."""
        return query_length, 0


class _CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a ``KVCache``, for models that query single layers."""

    is_sliding = False

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first write allocates the buffers."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' states and return all attended ones."""
        return self._cache.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many states an update returns, and the first one's position."""
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens are cached."""
        return self._cache.length

    def get_max_length(self) -> int:
        """Return -1: the cache grows without a limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, for releases of transformers that use this name."""
        return -1


class CacheAdapter(Cache):
    """A ``KVCache`` with the interface of transformers; made once per cache."""

    def __init__(self, cache: KVCache, num_layers: int) -> None:
        super().__init__(layers=[_CacheLayer(cache, i) for i in range(num_layers)])
        self._cache = cache

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows' states and return all attended ones."""
        return self._cache.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return how many tokens are cached."""
        return self._cache.length


def stock_mask(
    rows: Rows, masks: AttentionMasks, architecture: Architecture
) -> Tensor | dict[str, Tensor | None] | None:
    """Make the mask for a model's own attention, for the rows of one sequence."""
    span, window = rows.spans[0], architecture.window
    skips = architecture.omits_causal_masks
    if not architecture.has_mixed_layers:
        if skips and is_plain(span, window):
            return None
        return masks.make(rows, span, window)[None, None]
    full = None if skips and is_plain(span) else masks.make(rows, span)[None, None]
    sliding = full
    if reaches_past(span, window):
        sliding = masks.make(rows, span, window)[None, None]
    return {"full_attention": full, "sliding_attention": sliding}


_TORCH_ACTIVATIONS = (nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Mish, nn.Softplus, nn.ELU)
_BY_NAME = (kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
_ACTIVATIONS = (*_TORCH_ACTIVATIONS, *cast("Iterator[type[nn.Module]]", _BY_NAME))


def use_rowwise_activations(network: nn.Module) -> None:
    """Compute a module tree's activations row by row in deterministic passes."""
    for module in network.modules():
        if isinstance(module, _ACTIVATIONS):
            vars(module)["forward"] = partial(_activate, module.forward)


def _activate(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if (
        not is_deterministic()
        or inputs.dim() < 2
        or inputs.numel() == 0
        or inputs.device.type != "cpu"
    ):
        return forward(inputs)
    rows = [forward(row) for row in inputs.flatten(0, -2)]
    return torch.stack(rows).view(inputs.shape)


STATIC_ATTENTION_NAME = "ragaccel_static"


@torch.library.custom_op("ragaccel::static_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float, softcap: float
) -> Tensor:
    """Attend over the KV pool of the running pass. [1, N, H, D]."""
    if not isinstance(_CURRENT.attention, StaticPass):
        raise RuntimeError("no static pass is running")
    return _CURRENT.attention.attend(
        layer,
        (query, key, value),
        scaling=scaling,
        window=_CURRENT.windows[layer],
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


def static_attention_forward(
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
    """Attend with transformers' signature; the module names its layer."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = _attend(query, key, value, module.layer_idx, float(scaling), float(softcap or 0.0))
    return found, None


AttentionInterface.register(STATIC_ATTENTION_NAME, static_attention_forward)
AttentionMaskInterface.register(STATIC_ATTENTION_NAME, sdpa_mask)


class StaticNetwork:
    """A target model's weight-sharing copy for static passes, compiled on request.

    Layers of a known form are computed by ``FusedLayers``, unless torch compiles the model.

    Args:
        target: the model whose weights it shares.
        network: the copy.
        kernels: compute what lies between the products of fused layers; None for the modules.
    """

    def __init__(
        self, target: HuggingFaceTarget, network: Any, kernels: LayerKernels | None = None
    ) -> None:
        self._network = self._eager = network
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
            past_key_values=PassThroughCache(),
            use_cache=True,
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
