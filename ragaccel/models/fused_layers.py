"""The layers of Llama-like models in static passes, in thirteen kernels each.

The matrix products are calls of the model's own linear modules, whatever these are: quantized,
wrapped by an adapter, with biases. What lies between them, forty small kernels of transformers'
modules, is four of ``LayerKernels``. Results are rounded where the modules round them.

Shapes: N rows, E hidden size, H query heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.engine.cuda_graphs import LayerNorm
from ragaccel.models.fused_decoder import check_modules, has_known_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.engine.cuda_graphs import LayerKernels, StaticPass


_SILU = ("SiLU", "SiLUActivation")  # of torch and of transformers


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
        kernels: compute what lies between the products.
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
            gates, values = layer.mlp.gate_proj(states), layer.mlp.up_proj(states)
            mixed = layer.mlp.down_proj(kernels.gate(gates, values))
            states, residual = kernels.add_and_normalize(mixed, residual, norm)
        logits: Tensor = self._network.get_output_embeddings()(states)
        return logits

    def _attend(
        self, index: int, states: Tensor, angles: tuple[Tensor, Tensor], static: StaticPass
    ) -> Tensor:
        attention = self._layers[index].attention
        found = static.attend_rotated(
            index,
            (attention.q_proj(states), attention.k_proj(states), attention.v_proj(states)),
            angles,
            self._kernels,
            norms=self._layers[index].head_norms,
            scaling=attention.scaling,
            window=self._windows[index],
        )
        mixed: Tensor = attention.o_proj(found)
        return mixed


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
    if not all(type(layer.mlp.act_fn).__name__ in _SILU for layer in network.model.layers):
        raise ValueError("its gates are not SiLU")
