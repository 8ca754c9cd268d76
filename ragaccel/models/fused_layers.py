"""The layers of Llama-like models in static passes, in nine kernels each.

Products of few rows by torch's own linear layers are kernels of ``LayerKernels``, one for each
group that reads the same rows. Of more rows, or of other modules, such as quantized ones, products
are calls of the modules, seven in all. What lies between them, forty small
kernels of transformers' modules, is three or four of ``LayerKernels``. Results are rounded where
the modules round them.

Shapes: N rows, E hidden size, H query heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ragaccel.engine.cuda_graphs import LayerNorm, Weights
from ragaccel.models.fused_decoder import check_modules, has_known_class, is_silu
from ragaccel.models.space_adapter import GatedLinear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.engine.cuda_graphs import LayerKernels, StaticPass


_TENSORS = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Any
    mlp: Any
    attention_norm: LayerNorm
    mlp_norm: LayerNorm
    head_norms: tuple[LayerNorm, LayerNorm] | None  # of queries and keys


class FusedLayers:
    """A model's computation from embedded rows to logits.

    Args:
        network: a model of one of the classes in ``MODELS``.
        kernels: compute products of few rows, and what lies between products.
        windows: the sliding window of each layer, None for full attention.

    Raises:
        ValueError: the model, or a part of it, is of another form.
    """

    def __init__(self, network: Any, kernels: LayerKernels, windows: Sequence[int | None]) -> None:
        _check_form(network)
        self._network, self._kernels, self._windows = network, kernels, windows
        self._layers = [_layer_of(layer) for layer in network.model.layers]
        self._last_norm = _norm_of(network.model.norm)

    def compute(self, embedded: Tensor, static: StaticPass) -> Tensor:
        """Compute the logits [N, V] of embedded rows [1, N, E]."""
        model, kernels = self._network.model, self._kernels
        cosines, sines = model.rotary_emb(embedded, position_ids=static.positions)
        angles = cosines[0].contiguous(), sines[0].contiguous()
        residual = embedded[0]
        states = kernels.normalize(residual, self._layers[0].attention_norm)
        following = [*(layer.attention_norm for layer in self._layers[1:]), self._last_norm]
        for index, (layer, norm) in enumerate(zip(self._layers, following, strict=True)):
            mixed = self._attend(index, states, angles, static)
            states, residual = kernels.add_and_normalize(mixed, residual, layer.mlp_norm)
            mixed = self._in_parts(self._gated(layer.mlp, states), layer.mlp.down_proj)
            states, residual = kernels.add_and_normalize(mixed, residual, norm)
        (logits,) = self._products(states, self._network.get_output_embeddings())
        return logits

    def _attend(
        self, index: int, states: Tensor, angles: tuple[Tensor, Tensor], static: StaticPass
    ) -> Tensor:
        attention = self._layers[index].attention
        queries, keys, values = self._products(
            states, attention.q_proj, attention.k_proj, attention.v_proj
        )
        found = static.attend_rotated(
            index,
            (queries, keys, values),
            angles,
            self._kernels,
            norms=self._layers[index].head_norms,
            scaling=attention.scaling,
            window=self._windows[index],
        )
        return self._in_parts(found, attention.o_proj)

    def _products(self, states: Tensor, *linears: Any) -> list[Tensor]:
        """Return the products of rows by the matrices of linear modules."""
        weights = self._weights_of(states, linears)
        if weights is None:
            return [linear(states) for linear in linears]
        found = self._kernels.multiply(states, weights)
        return [_with_changes(*one, states) for one in zip(linears, found, strict=True)]

    def _in_parts(self, states: Tensor, linear: Any) -> Tensor:
        """Return a product for ``LayerKernels.add_and_normalize``, which adds its parts."""
        weights = self._weights_of(states, (linear,))
        if weights is None:
            product: Tensor = linear(states)
            return product
        parts = self._kernels.multiply_in_parts(states, *weights)
        if not _has_mask_rows((linear,), states):
            return parts
        whole = parts[0]
        for part in parts[1:]:  # in the order in which the kernel adds them
            whole = whole + part
        return _with_changes(linear, whole.to(states.dtype), states)

    def _gated(self, mlp: Any, states: Tensor) -> Tensor:
        """Return the activated gate times the values that it lets through."""
        linears = (mlp.gate_proj, mlp.up_proj)
        weights = self._weights_of(states, linears)
        if weights is None or _has_mask_rows(linears, states):
            return self._kernels.gate(*self._products(states, *linears))
        return self._kernels.multiply_gated(states, *weights)

    def _weights_of(self, states: Tensor, linears: Sequence[Any]) -> list[Weights] | None:
        """Return the weights of linear modules, None if the kernels do not compute all."""
        inner: list[Any] = [one.inner if isinstance(one, GatedLinear) else one for one in linears]
        if not all(map(_is_plain, inner)):
            return None
        weights = [Weights(one.weight, one.bias) for one in inner]
        return weights if self._kernels.supports(states, weights) else None


def _is_plain(linear: Any) -> bool:
    """Return whether a module is torch's own linear layer, with numbers in memory.

    Quantized weights may be of another class in a layer of the same one.
    """
    return type(linear) is nn.Linear and all(
        type(one) in _TENSORS for one in (linear.weight, linear.bias) if one is not None
    )


def _has_mask_rows(linears: Sequence[Any], states: Tensor) -> bool:
    return any(isinstance(one, GatedLinear) and one.has_mask_rows(states) for one in linears)


def _with_changes(linear: Any, product: Tensor, states: Tensor) -> Tensor:
    """Return a product with the change of a SPACE adapter in the rows of mask tokens, if any."""
    if isinstance(linear, GatedLinear):
        return linear.change_mask_rows(states, product)
    return product


def _layer_of(layer: Any) -> _Layer:
    attention = layer.self_attn
    norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        attention,
        layer.mlp,
        _norm_of(layer.input_layernorm),
        _norm_of(layer.post_attention_layernorm),
        None if None in norms else (_norm_of(norms[0]), _norm_of(norms[1])),
    )


def _norm_of(module: Any) -> LayerNorm:
    return LayerNorm(module.weight, module.variance_epsilon)


def _check_form(network: Any) -> None:
    """Raise ValueError if a model is not computed as the classes in ``MODELS`` compute."""
    if not has_known_class(network):
        raise ValueError(f"{type(network).__name__} has layers of another form")
    check_modules(network)
    if not hasattr(network.model.layers[0].self_attn, "q_proj"):
        raise ValueError("queries, keys and values are one product")
    norms = [module for module in network.modules() if hasattr(module, "variance_epsilon")]
    if {norm.weight.dtype for norm in norms} != {network.get_input_embeddings().weight.dtype}:
        raise ValueError("its norms are of another dtype")
    if not all(is_silu(layer.mlp.act_fn) for layer in network.model.layers):
        raise ValueError("its gates are not SiLU")
