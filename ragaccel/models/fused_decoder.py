"""The passes of Llama-like models on a CPU in few operations.

transformers' modules compute a decoder layer in some forty operations. Of few rows most of these
take longer to start than to compute. Here queries, keys and values are one product, and so are the
two of an MLP's gate; the residual stream is added inside the products; norms and rotations are
compiled functions over the rows.

The sums are those of the modules. In bfloat16 the residual stream is rounded once a product instead
of twice; norms and rotations are rounded as the modules do.

Shapes: N rows, padded to few different numbers, E hidden size, H query heads, K heads of keys and
values, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from ragaccel.drafting import compiled, compiled_sums, is_jit_disabled
from ragaccel.engine.attention import PassAttention
from ragaccel.models.packing import PackedLinear, PackedWeights, num_padding_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ragaccel.engine.model_input import AttentionMasks, Rows

    Bits = NDArray[Any]

MODELS = (
    "transformers.models.llama.modeling_llama.LlamaForCausalLM",
    "transformers.models.mistral.modeling_mistral.MistralForCausalLM",
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM",
    "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
)
"""Classes whose layers have the form that ``FusedDecoder`` computes, by name: imports take time."""
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are packed together for it."""


def has_fused_form(network: nn.Module) -> bool:
    """Return whether a model may be computed by a ``FusedDecoder``, once its weights are packed."""
    name = f"{type(network).__module__}.{type(network).__qualname__}"
    if name not in MODELS or is_jit_disabled():
        return False
    kinds = {(one.device.type, one.dtype) for one in network.parameters()}
    return len(kinds) == 1 and kinds <= {("cpu", torch.bfloat16), ("cpu", torch.float32)}


@dataclass(frozen=True, slots=True)
class _Norm:
    """An RMS norm over the last axis."""

    weight: Bits
    epsilon: float

    def apply(self, states: Tensor, found: Bits) -> None:
        """Write the normalized rows of ``states`` [M, size] to ``found``."""
        function = _rms_norm_bfloat16 if states.dtype == torch.bfloat16 else _rms_norm_float32
        function(_bits(states), self.weight, self.epsilon, found)


class _Scratch:
    """Memory that all layers of a pass use, and the rotations of its rows."""

    def __init__(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], shape: tuple[int, int, int]
    ) -> None:
        self.normed, self.rotated = torch.empty_like(hidden), hidden.new_empty(shape)
        self.normed_bits, self.rotated_bits = _bits(self.normed), _bits(self.rotated)
        self.cosines, self.sines = (_bits(one[0]) for one in angles)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The packed weights and norms of one decoder layer."""

    attention_norm: _Norm
    states: PackedWeights  # queries, keys and values
    head_norms: tuple[_Norm, _Norm] | None  # of queries and keys
    output: PackedWeights
    mlp_norm: _Norm
    gate: PackedWeights  # gate and up
    activation: Callable[[Tensor], Tensor]
    down: PackedWeights
    scaling: float


class FusedDecoder:
    """The passes of a model over its packed weights.

    Args:
        network: a model with ``has_fused_form``, its linear layers packed in ``GROUPS``.
        masks: makes masks in the model's dtype.
        windows: the sliding window of each layer, None for full attention.

    Raises:
        ValueError: parts of the model are not those of its class, or not packed.
    """

    def __init__(self, network: Any, masks: AttentionMasks, windows: Sequence[int | None]) -> None:
        _check_modules(network)
        self._network, self._masks, self._windows = network, masks, windows
        self._embedding: nn.Embedding = network.get_input_embeddings()
        self._rotary = network.model.rotary_emb
        self._norm = _norm_of(network.model.norm)
        self._layers = [_layer_of(layer) for layer in network.model.layers]
        first = network.model.layers[0].self_attn
        self._size: int = first.head_dim
        self._num_heads = first.q_proj.out_features // self._size
        self._num_kv_heads = first.k_proj.out_features // self._size

    def forward(self, rows: Rows, keep: int) -> Tensor:
        """Write the rows' keys and values to their caches; return the last logits, [keep, V]."""
        for span in rows.spans:
            span.cache.flush_moves()
        attention = PassAttention(rows, self._masks)
        num_rows = rows.num_rows
        num_padding = num_padding_rows(num_rows)
        ids = pad(rows.token_ids[0], (0, num_padding)) if num_padding else rows.token_ids[0]
        hidden = embedding(ids, self._embedding.weight)
        angles = self._rotary(hidden[None], rows.positions)
        num_rotated = self._num_heads + self._num_kv_heads
        scratch = _Scratch(hidden, angles, (num_rotated, num_rows, self._size))
        for index, layer in enumerate(self._layers):
            layer.attention_norm.apply(hidden, scratch.normed_bits)
            states = layer.states.multiply(scratch.normed)
            heads = self._attend(attention, index, states[:num_rows], scratch)
            if num_padding:
                heads = pad(heads, (0, 0, 0, num_padding))
            hidden = layer.output.multiply(heads, hidden)
            layer.mlp_norm.apply(hidden, scratch.normed_bits)
            gate, up = layer.gate.multiply(scratch.normed).chunk(2, -1)
            hidden = layer.down.multiply(layer.activation(gate).mul_(up), hidden)
        self._norm.apply(hidden, scratch.normed_bits)
        last = scratch.normed[None, num_rows - keep : num_rows]
        logits: Tensor = self._network.get_output_embeddings()(last)[0]
        return logits

    def _attend(
        self, attention: PassAttention, index: int, states: Tensor, scratch: _Scratch
    ) -> Tensor:
        """Return the attention output of a layer for its states, [N, H * D]."""
        layer, size = self._layers[index], self._size
        num_rows, rotated = len(states), scratch.rotated
        if layer.head_norms is not None:
            states = self._normalize_heads(layer.head_norms, states)
        function = _rotate_bfloat16 if states.dtype == torch.bfloat16 else _rotate_float32
        function(_bits(states), scratch.cosines, scratch.sines, scratch.rotated_bits)
        values = states[:, len(rotated) * size :].view(num_rows, -1, size).transpose(0, 1)
        found = attention.attend(
            index,
            (rotated[None, : self._num_heads], rotated[None, self._num_heads :], values[None]),
            scaling=layer.scaling,
            window=self._windows[index],
        )
        return found.view(num_rows, -1)

    def _normalize_heads(self, norms: tuple[_Norm, _Norm], states: Tensor) -> Tensor:
        """Return states with each head of queries and keys normalized."""
        found = states.clone()
        start = 0
        for norm, num_heads in zip(norms, (self._num_heads, self._num_kv_heads), strict=True):
            stop = start + num_heads * self._size
            heads = states[:, start:stop].reshape(-1, self._size)
            normed = torch.empty_like(heads)
            norm.apply(heads, _bits(normed))
            found[:, start:stop] = normed.view(len(states), -1)
            start = stop
        return found


def _check_modules(network: Any) -> None:
    """Raise ValueError if a module has hooks or another forward function than its class."""
    kinds = {type(layer) for layer in network.model.layers}
    changed = [
        name
        for name, module in network.named_modules()
        if module._forward_hooks
        or module._forward_pre_hooks
        or ("forward" in vars(module) and not name.endswith(".act_fn"))
    ]
    if changed or len(kinds) != 1 or type(network.get_input_embeddings()) is not nn.Embedding:
        raise ValueError(f"modules of this model were changed: {', '.join(changed)}")
    rotary, size = network.model.rotary_emb, network.model.layers[0].self_attn.head_dim
    if rotary(network.model.norm.weight, torch.zeros(1, 1, dtype=torch.long))[0].shape[-1] != size:
        raise ValueError("this model rotates a part of each head")


def _layer_of(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    activation = mlp.act_fn
    return _Layer(
        _norm_of(layer.input_layernorm),
        _group_of(attention.q_proj, 3),
        None if norms[0] is None else (_norm_of(norms[0]), _norm_of(norms[1])),
        _group_of(attention.o_proj, 1),
        _norm_of(layer.post_attention_layernorm),
        _group_of(mlp.gate_proj, 2),
        partial(type(activation).forward, activation),
        _group_of(mlp.down_proj, 1),
        attention.scaling,
    )


def _norm_of(module: Any) -> _Norm:
    return _Norm(_bits(module.weight.detach()), module.variance_epsilon)


def _group_of(layer: nn.Module, size: int) -> PackedWeights:
    if not isinstance(layer, PackedLinear) or len(layer.group.sizes) != size:
        raise ValueError("the weights of this model are not packed in groups")
    return layer.group


def _bits(tensor: Tensor) -> Bits:
    """Return a tensor's memory as an array; bfloat16 as integers, as numpy has no type for it."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@compiled
def _widen(bits: np.int16) -> np.float32:
    """Return the float32 number of a bfloat16 number's bits."""
    return np.uint32(np.uint32(np.uint16(bits)) << np.uint32(16)).view(np.float32)  # type: ignore[no-any-return]


@compiled
def _narrow(number: np.float32) -> np.int16:
    """Return the bits of the nearest bfloat16 number, ties to even."""
    bits = np.float32(number).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.int16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))  # type: ignore[no-any-return]


@compiled_sums
def _rms_norm_bfloat16(states: Bits, weight: Bits, epsilon: float, found: Bits) -> None:
    """Write the RMS norm of each row of ``states`` [M, size], rounded before the weights too."""
    num_rows, size = states.shape
    for i in range(num_rows):
        total = np.float32(0.0)
        for j in range(size):
            state = _widen(states[i, j])
            total += state * state
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        for j in range(size):
            normed = _widen(_narrow(_widen(states[i, j]) * scale))
            found[i, j] = _narrow(normed * _widen(weight[j]))


@compiled_sums
def _rms_norm_float32(states: Bits, weight: Bits, epsilon: float, found: Bits) -> None:
    """Write the RMS norm of each row of ``states`` [M, size]."""
    num_rows, size = states.shape
    for i in range(num_rows):
        total = np.float32(0.0)
        for j in range(size):
            total += states[i, j] * states[i, j]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        for j in range(size):
            found[i, j] = states[i, j] * scale * weight[j]


@compiled
def _rotate_bfloat16(states: Bits, cosines: Bits, sines: Bits, found: Bits) -> None:
    """Write the first heads of ``states`` [N, ..] rotated [heads, N, D]; products are rounded."""
    num_heads, num_rows, size = found.shape
    half = size // 2
    for i in range(num_rows):
        for head in range(num_heads):
            at = head * size
            for j in range(half):
                low, high = _widen(states[i, at + j]), _widen(states[i, at + half + j])
                straight = _widen(_narrow(low * _widen(cosines[i, j])))
                crossed = _widen(_narrow(-high * _widen(sines[i, j])))
                found[head, i, j] = _narrow(straight + crossed)
                straight = _widen(_narrow(high * _widen(cosines[i, half + j])))
                crossed = _widen(_narrow(low * _widen(sines[i, half + j])))
                found[head, i, half + j] = _narrow(straight + crossed)


@compiled
def _rotate_float32(states: Bits, cosines: Bits, sines: Bits, found: Bits) -> None:
    """Write the first heads of ``states`` [N, ..] rotated, [heads, N, D]."""
    num_heads, num_rows, size = found.shape
    half = size // 2
    for i in range(num_rows):
        for head in range(num_heads):
            at = head * size
            for j in range(half):
                low, high = states[i, at + j], states[i, at + half + j]
                found[head, i, j] = low * cosines[i, j] - high * sines[i, j]
                found[head, i, half + j] = high * cosines[i, half + j] + low * sines[i, half + j]
