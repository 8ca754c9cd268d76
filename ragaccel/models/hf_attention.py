"""Attention in transformers' modules: registered functions, caches, copies that share weights.

``attention_forward`` is registered with transformers under the name ``ragaccel``. During a pass of
the engine it attends over the caches of that pass; for any other call it is transformers' own SDPA
attention.

``use_rowwise_activations`` is for deterministic passes. A CPU's vector code and scalar code round
an activation function differently, and which of them computes an element depends on its position
in the tensor and on the number of threads.

``static_attention_forward`` is for static passes (``static_network``): one opaque operation, so
that torch can trace and compile the rest.
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
from ragaccel.engine.cuda_graphs import StaticPass
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.model_input import is_plain, reaches_past

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragaccel.engine.model_input import AttentionMasks, Rows
    from ragaccel.models.support import Architecture


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

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._length = 0

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


def is_rowwise(module: nn.Module) -> bool:
    """Return whether a module is an activation that only ``use_rowwise_activations`` changed."""
    forward = vars(module).get("forward")
    if not isinstance(forward, partial) or forward.func is not _activate:
        return False
    return getattr(forward.args[0], "__func__", None) is type(module).forward


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
