"""Attention in transformers' modules: registered functions, caches, copies that share weights.

One function is registered with transformers under a name of ours. Within one of our passes it
attends over the caches of that pass; for any other call it is transformers' own SDPA attention.

A processor's vectors and its scalar code round a curve differently, and what is left over for the
latter lies where a tensor, or a thread's part of it, ends.

A second twin whose attention is one opaque operation: everything else of a pass depends on its
token ids and positions alone, so that it can be traced as a whole.
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

from ragaccel.engine.cuda_graphs import KVPool, StateLayout, StaticPass, StepGraphs
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.model_input import causal_rows, is_plain, reaches_past

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragaccel.engine.attention import PassAttention
    from ragaccel.engine.cuda_graphs import AttentionKernel
    from ragaccel.engine.model_input import AttentionMasks, Rows
    from ragaccel.models.space_adapter import AttachedAdapter
    from ragaccel.models.support import Architecture, HuggingFaceTarget


ATTENTION_NAME = "ragaccel"
_UNSUPPORTED = ("s_aux", "position_bias")  # change the scores in ways that ours does not


class _CurrentPass(threading.local):
    attention: PassAttention | None = None
    windows: Sequence[int | None] = ()
    layer = -1  # the last one to have stored its keys and values


_CURRENT = _CurrentPass()


@contextmanager
def attention_of_pass(attention: PassAttention, windows: Sequence[int | None]) -> Iterator[None]:
    """Let this thread's model attend over the caches of one pass; ``windows`` are the layers'."""
    _CURRENT.attention, _CURRENT.windows, _CURRENT.layer = attention, windows, -1
    try:
        yield
    finally:
        _CURRENT.attention = None


def is_deterministic() -> bool:
    """Whether this thread runs an exact pass."""
    return _CURRENT.attention is not None and _CURRENT.attention.deterministic


def enter_layer(layer: int) -> None:
    """Note which layer's keys and values come next."""
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
    """Attend, as transformers calls it: query [1, H, N, D], key and value [1, K, N, D].

    Raises:
        NotImplementedError: the model changes its scores in a way that is not known here.
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
        raise NotImplementedError(f"attention with {', '.join(unsupported)}")
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
    """Copy a model's modules and configuration, not its weights, and give the copy our attention.

    Returns None for models whose attention cannot be exchanged.
    """
    can_exchange = getattr(model, "_can_set_attn_implementation", None)
    if can_exchange is None or not can_exchange():
        return None
    try:
        shared_copy = deepcopy(model, _memo_of_tensors(model))
        shared_copy.set_attn_implementation(attention)
    except Exception as error:  # hooks or weights that cannot be copied
        logger.info("passes run through the model itself, one request each: %s", error)
        return None
    implementation = shared_copy.config.get_text_config(decoder=True)._attn_implementation
    return shared_copy if implementation == attention else None


def _memo_of_tensors(model: nn.Module) -> dict[int, Any]:
    """What a copy has in common with its original, as ``deepcopy`` wants to be told."""
    tensors = [*model.parameters(), *model.buffers()]
    return {id(thing): thing for thing in (*tensors, *_offload_maps(model))}


def _offload_maps(model: nn.Module) -> Iterator[Any]:
    """What accelerate's hooks keep of weights that are elsewhere until they are used."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            for name in ("weights_map", "tied_params_map"):
                kept = getattr(part, name, None)
                if kept is not None:
                    yield kept


class PassCache(Cache):
    """The cache as models see it during a pass whose attention does the storing itself."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(layers=[])
        self._length = rows.attended - rows.num_rows

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Note the layer; the attention is given the rows' own states and stores them."""
        enter_layer(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return how many tokens are cached."""
        return max(0, self._length)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Return how many states an update returns, and the first one's position."""
        return query_length, 0


class _CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of our cache, for the questions models ask of single layers."""

    is_sliding = False

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: our buffers are made by the first write."""

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
        """Return -1: our cache grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, for releases that still ask under this name."""
        return -1


class CacheAdapter(Cache):
    """Our cache as transformers' models see it; made once for each of our caches."""

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
    """Make the mask that a model's own attention is given for the rows of one sequence."""
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
    """Let a module tree's activations take one row after another in exact passes."""
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


class _CurrentStaticPass(threading.local):
    static: StaticPass | None = None
    windows: Sequence[int | None] = ()


_CURRENT_STATIC = _CurrentStaticPass()


@torch.library.custom_op("ragaccel::static_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float, softcap: float
) -> Tensor:
    """Attend over the KV pool of the running pass. [1, N, H, D]."""
    if _CURRENT_STATIC.static is None:
        raise RuntimeError("no static pass is running")
    return _CURRENT_STATIC.static.attend(
        layer,
        (query, key, value),
        scaling=scaling,
        window=_CURRENT_STATIC.windows[layer],
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
    """Attend, as transformers calls it, with the layer that the module says it is."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = _attend(query, key, value, module.layer_idx, float(scaling), float(softcap or 0.0))
    return found, None


AttentionInterface.register(STATIC_ATTENTION_NAME, static_attention_forward)
AttentionMaskInterface.register(STATIC_ATTENTION_NAME, sdpa_mask)


class StaticNetwork:
    """A target model's twin for static passes, compiled when ``compile`` is called.

    Args:
        target: whose weights it shares.
        network: the twin.
    """

    def __init__(self, target: HuggingFaceTarget, network: Any) -> None:
        self._network = self._eager = network
        self._windows = target.architecture.windows
        self._has_mixed_layers = target.architecture.has_mixed_layers
        self._mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=target.device)
        self._space: AttachedAdapter | None = None

    @property
    def eager(self) -> Any:
        """The twin, not compiled."""
        return self._eager

    def attach_space(self, space: AttachedAdapter) -> None:
        """Let passes have mask tokens among their rows."""
        space.wrap(self._eager)
        self._space = space

    def compute(self, static: StaticPass) -> Tensor:
        """Run the model over a static pass; return the logits of all its rows, [N, V]."""
        _CURRENT_STATIC.static, _CURRENT_STATIC.windows = static, self._windows
        try:
            return self._compute(static)
        finally:
            _CURRENT_STATIC.static = None

    def _compute(self, static: StaticPass) -> Tensor:
        ids, space = static.token_ids, self._space
        if space is None or not static.size.has_masks:
            return self._run({"input_ids": ids}, static.positions)
        with space.mark_rows(ids, is_static=True):
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
        mask = dict.fromkeys(kinds, self._mask) if self._has_mixed_layers else self._mask
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
            past_key_values=_PassThroughCache(),
            use_cache=True,
        )


def make_graphs(
    target: HuggingFaceTarget, make_kernel: Callable[[], AttentionKernel], *, capture: bool
) -> tuple[KVPool, StepGraphs, StaticNetwork] | None:
    """Build what a model needs to run static passes; None where it cannot.

    A short pass tells what the states of its layers look like; models whose layers differ, or
    lie on several devices, have no KV pool.
    """
    shared_copy = make_shared_copy(target.model, STATIC_ATTENTION_NAME)
    cache = KVCache(limit=16)
    with torch.inference_mode():
        target.forward(causal_rows([0, 0], cache, target.device), 1)
    layout = StateLayout.of(cache)
    if shared_copy is None or layout is None or layout.device != target.device:
        return None
    config = target.model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    kv_pool, network = KVPool(layout), StaticNetwork(target, shared_copy)
    graphs = StepGraphs(network.compute, kv_pool, make_kernel, group=group, capture=capture)
    return kv_pool, graphs, network


def triton_kernel() -> Callable[[], AttentionKernel] | None:
    """Return the maker of our GPU attention; None where triton is not installed."""
    try:
        from ragaccel.engine.triton_attention import TritonKernel
    except ImportError:
        logger.info("no triton: passes are launched operation by operation")
        return None
    return TritonKernel


class _PassThroughCache(Cache):
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
