"""The passes of Llama-like models on a CPU in few operations.

transformers' modules compute a decoder layer in some forty operations. Of few rows most of these
take longer to start than to compute. Here queries, keys and values are one product, and so are the
two of an MLP's gate; the residual stream is added inside the products; norms and rotations take a
few operations for all heads, and one function of ``row_kernels`` each for bfloat16 rows, if they
are few for the number of threads, once numba has compiled these in the background. Where the
products and the attention are compiled, too, all layers are one call (``bfloat16_layers``).

The sums are those of the modules. In bfloat16 the residual stream is rounded once a product instead
of twice; norms and rotations are rounded as the modules do. With the compiled attention and
products of ``engine.bfloat16`` a row has the same bits in any pass (``is_batch_invariant``).

The low-rank changes of a SPACE adapter are added to the products in the rows of mask tokens alone.

Shapes: N rows, padded to few different numbers, E hidden size, H query heads, K heads of keys and
values, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from ragaccel.engine import bfloat16
from ragaccel.engine.attention import PassAttention
from ragaccel.jit import JitWarmup
from ragaccel.models.hf_attention import is_rowwise
from ragaccel.models.packing import PackedLinear, PackedWeights
from ragaccel.models.space_adapter import GatedLinear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel.engine.bfloat16_layers import CompiledLayers
    from ragaccel.engine.model_input import AttentionMasks, Rows, RowSpan
    from ragaccel.models.space_adapter import AttachedAdapter

MODELS = (
    "transformers.models.llama.modeling_llama.LlamaForCausalLM",
    "transformers.models.mistral.modeling_mistral.MistralForCausalLM",
    "transformers.models.phi3.modeling_phi3.Phi3ForCausalLM",
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM",
    "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
)
"""Classes whose layers have the form that ``FusedDecoder`` computes, by name: imports take time."""
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are packed together for it."""
KERNEL_WORK, FIRST_ROWS = 1024, 64
"""Most rows of a pass times torch's threads that ``row_kernels`` compute one by one, which takes
one thread; and most rows of a pass that begins their compilation."""
KERNELS_WARMUP = JitWarmup(
    f"{__name__}:compile_kernels", "ragaccel.engine.row_kernels:rotate_and_store"
)
"""The compilation of ``row_kernels`` in this process; it begins with the first pass of few rows
over a cache, in a check at load or after the first token, and no token waits for it."""
_HEAD_NORMS = ("q_norm", "k_norm")
_SILU = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")
_GLOBAL_HOOKS = ("_hooks", "_pre_hooks")


def has_fused_form(network: nn.Module) -> bool:
    """Return whether a model may be computed by a ``FusedDecoder``, once its weights are packed."""
    if not has_known_class(network):
        return False
    kinds = {(one.device.type, one.dtype) for one in network.parameters()}
    return len(kinds) == 1 and kinds <= {("cpu", torch.bfloat16), ("cpu", torch.float32)}


def has_compiled_form(config: Any) -> bool:
    """Return whether this processor has compiled functions for all of a packed bfloat16 model."""
    package = type(config).__module__.rpartition(".")[0]
    is_known = package in {model.rsplit(".", 2)[0] for model in MODELS}
    if not is_known or not bfloat16.is_supported():
        return False
    size = config.hidden_size
    head_size = getattr(config, "head_dim", None) or size // config.num_attention_heads
    sizes = size, head_size, config.intermediate_size, config.vocab_size
    is_whole = all(one % bfloat16.BLOCK_OUTPUTS == 0 for one in sizes)
    rotation = getattr(config, "rope_parameters", None) or {}
    rotates_all = rotation.get("partial_rotary_factor", 1.0) == 1.0
    return is_whole and rotates_all and config.hidden_act == "silu"


def packed_groups(network: nn.Module) -> Sequence[Sequence[str]]:
    """Return the names of the layers of a model that are packed together; none without the form."""
    return GROUPS if has_fused_form(network) else ()


def has_known_class(network: nn.Module) -> bool:
    """Return whether a model's class is one of ``MODELS``."""
    return _class_name(network) in MODELS


def is_silu(activation: nn.Module) -> bool:
    """Return whether a module is torch's or transformers' SiLU."""
    return _class_name(activation) in _SILU


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


@dataclass(frozen=True, slots=True)
class _Norm:
    """An RMS norm over the last axis."""

    weight: Tensor
    epsilon: float

    def apply(self, states: Tensor, kernels: Any = None) -> Tensor:
        """Return the normalized rows of [.., size], rounded before the weights and after."""
        if kernels is not None:
            out = torch.empty_like(states)
            kernels.normalize(
                states.data_ptr(), self.weight.data_ptr(), out.data_ptr(), *states.shape,
                self.epsilon,
            )  # fmt: skip
            return out
        if states.dtype == torch.bfloat16:  # equal to the kernels, which sum in another order
            scales = states.double().square_().sum(-1, keepdim=True)
            scales = scales.div_(states.shape[-1]).add_(self.epsilon).sqrt_().reciprocal_().float()
            return torch.mul(states, scales, out=torch.empty_like(states)).mul_(self.weight)
        scales = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        scales.square_().div_(states.shape[-1]).add_(self.epsilon).rsqrt_()
        return torch.mul(states, scales, out=torch.empty_like(states)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The packed weights and norms of one decoder layer."""

    attention_norm: _Norm
    states: PackedWeights  # queries, keys and values
    head_norms: tuple[_Norm, _Norm] | None  # of queries and keys
    output: PackedWeights
    mlp_norm: _Norm
    gate: PackedWeights  # gate and up
    activation: partial[Tensor]
    has_compiled_silu: bool  # whether products apply the activation
    down: PackedWeights
    scaling: float

    @property
    def products(self) -> tuple[PackedWeights, ...]:
        """All packed weights of the layer."""
        return self.states, self.output, self.gate, self.down

    @property
    def norms(self) -> tuple[_Norm, ...]:
        """All norms of the layer."""
        return self.attention_norm, self.mlp_norm, *(self.head_norms or ())

    @property
    def has_one_epsilon(self) -> bool:
        """Whether the norms of query and key heads have the same epsilon."""
        return len({norm.epsilon for norm in self.head_norms or ()}) < 2

    @property
    def norm_addresses(self) -> tuple[int, int, float]:
        """The addresses of the weights of ``head_norms``, 0 for none, and their epsilon."""
        if self.head_norms is None:
            return 0, 0, 0.0
        of_queries, of_keys = self.head_norms
        return of_queries.weight.data_ptr(), of_keys.weight.data_ptr(), of_queries.epsilon


class _Change:
    """The low-rank change of a product in the rows of mask tokens.

    The changes of all layers of the product are one, through the block-diagonal matrix of their
    ``up`` matrices. ``down`` and ``up`` are packed if the weights are.

    Args:
        weights: the packed weights of the layers.
        layers: those of them that an adapter changes, by their index.
    """

    def __init__(self, weights: PackedWeights, layers: Mapping[int, GatedLinear]) -> None:
        parts = [layers[index] for index in sorted(layers)]
        down = torch.cat([part.down for part in parts])
        down = pad(down, (0, 0, 0, -len(down) % bfloat16.BLOCK_OUTPUTS))
        up = down.new_zeros(sum(weights.sizes), len(down))
        places = list(pairwise(accumulate(weights.sizes, initial=0)))
        start = 0
        for index, part in zip(sorted(layers), parts, strict=True):
            rank = part.up.shape[1]
            up[slice(*places[index]), start : start + rank] = part.up
            start += rank
        self._is_paired = weights.is_paired
        self.down, self.up = map(bfloat16.pack, (down, up)) if self._is_paired else (down.T, up.T)

    def add(self, inputs: Tensor, product: Tensor, masks: slice | Tensor) -> None:
        """Add the change to rows of a product [N, O] of inputs [N, I], in place."""
        own, rows = inputs[masks], product[masks]
        if self._is_paired:
            multiply = bfloat16.kernels("products").multiply
            product[masks] = multiply(multiply(own, self.down), self.up, None, rows)
        else:
            product[masks] = torch.addmm(rows, own @ self.down, self.up)


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
        check_modules(network)
        self._network, self._masks, self._windows = network, masks, windows
        self._embedding: nn.Embedding = network.get_input_embeddings()
        self._rotary = network.model.rotary_emb
        self._norm = _norm_of(network.model.norm)
        self._layers = [_layer_of(layer) for layer in network.model.layers]
        attention = network.model.layers[0].self_attn
        self._size: int = attention.head_dim
        self._num_heads, self._num_kv_heads = _num_heads(attention)
        norms = [self._norm, *(norm for layer in self._layers for norm in layer.norms)]
        self._space: AttachedAdapter | None = None
        self._changes: dict[PackedWeights, _Change] = {}
        products = [product for layer in self._layers for product in layer.products]
        vectors = [norm.weight for norm in norms]
        vectors += [bias for product in products for bias in product.biases]
        self._vector_sizes = [(vector, vector.numel()) for vector in vectors]
        self._layer_norms = [
            weight
            for layer in self._layers
            for weight in (
                layer.attention_norm.weight,
                layer.mlp_norm.weight,
                *(norm.weight for norm in layer.head_norms or ()),
                *(() if layer.head_norms else (None, None)),
            )
        ]
        self._takes_kernels = (
            self._embedding.weight.dtype == torch.bfloat16
            and all(norm.epsilon > 0 for norm in norms)
            and all(one.head_norms is None or one.has_one_epsilon for one in self._layers)
        )

    @cached_property
    def is_batch_invariant(self) -> bool:
        """Whether a row has the same bits in any pass, with any number of threads."""
        head = self._network.get_output_embeddings()
        return self._is_compiled and isinstance(head, PackedLinear) and head.group.is_paired

    @cached_property
    def _is_compiled(self) -> bool:
        """Whether all products of the layers and the attention are compiled code."""
        return (
            self._embedding.weight.dtype == torch.bfloat16
            and all(product.is_paired for layer in self._layers for product in layer.products)
            and all(layer.has_compiled_silu for layer in self._layers)
            and (attention := bfloat16.kernels("attention")) is not None
            and self._size % attention.HEAD_STEP == 0
        )

    @cached_property
    def _compiled_layers(self) -> CompiledLayers | None:
        """The layers as one call; None if they cannot be that. Not asked before it is compiled."""
        compiled = bfloat16.kernels("layers") if self._is_compiled else None
        if compiled is None:
            return None
        shapes = [
            compiled.LayerShape(
                [_sizes_of(product) for product in layer.products],
                (*(norm.epsilon for norm in layer.norms), 0.0)[:3],
                layer.scaling,
            )
            for layer in self._layers
        ]
        heads = self._num_heads, self._num_kv_heads, self._size
        made: CompiledLayers = compiled.CompiledLayers(shapes, heads)
        return made

    @torch.no_grad()
    def attach_space(self, space: AttachedAdapter) -> None:
        """Take the changes from an adapter whose layers wrap those of the model."""
        changed: dict[PackedWeights, dict[int, GatedLinear]] = {}
        for module in self._network.modules():
            layer = module.inner if isinstance(module, GatedLinear) else None
            if isinstance(layer, PackedLinear) and len(module.down):
                changed.setdefault(layer.group, {})[layer.index] = module
        self._changes = {weights: _Change(weights, layers) for weights, layers in changed.items()}
        self._space = space

    @torch.no_grad()
    def run(self, rows: Rows, keep: int) -> Tensor:
        """Write the rows' keys and values to their caches; return the last logits, [keep, V]."""
        for span in rows.spans:
            span.cache.flush_moves()
        attention, num_rows = PassAttention(rows, self._masks), rows.num_rows
        num_padding = max(one.num_padding_rows(num_rows) for one in self._layers[0].products)
        ids = pad(rows.token_ids[0], (0, num_padding)) if num_padding else rows.token_ids[0]
        masks = None
        if rows.is_mask is None or self._space is None:
            hidden = embedding(ids, self._embedding.weight)
        else:
            hidden = self._space.embed(self._network, ids[None])[0]
            masks = self._mask_rows(ids) if self._changes else None
        angles = _angles(*self._rotary(hidden[None], rows.positions))
        kernels = self._kernels(rows, masks)
        if kernels is not None and self._is_one_call(masks):
            self._run_compiled(attention, hidden, angles, masks)
        else:
            hidden = self._run_layers(attention, hidden, angles, masks, kernels)
        last = self._norm.apply(hidden[num_rows - keep : num_rows], kernels)
        logits: Tensor = self._network.get_output_embeddings()(last[None])[0]
        return logits

    def _run_compiled(
        self,
        attention: PassAttention,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        masks: slice | Tensor | None,
    ) -> None:
        """Compute all layers in place, in one call."""
        from ragaccel.engine.bfloat16_layers import CachedRows, LayerWeights, RowChanges

        sequences = [
            CachedRows(
                span,
                cast("list[Tensor]", span.cache.buffers),
                [attention.window_mask(span, window) for window in self._windows],
            )
            for span in attention.rows.spans
        ]
        products = [product for layer in self._layers for product in layer.products]
        weights = LayerWeights(
            [product.packed for product in products],
            [product.bias for product in products],
            self._layer_norms,
        )
        changes = None
        if isinstance(masks, slice):
            added = [self._changes.get(product) for product in products]
            changes = RowChanges(
                masks,
                [None if one is None else one.down for one in added],
                [None if one is None else one.up for one in added],
            )
        assert self._compiled_layers is not None
        self._compiled_layers.run(hidden, angles, sequences, weights, changes)

    def _run_layers(
        self,
        attention: PassAttention,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        masks: slice | Tensor | None,
        kernels: Any,
    ) -> Tensor:
        """Return the hidden states behind all layers, computed one operation after another."""
        num_rows = attention.rows.num_rows
        num_padding = len(hidden) - num_rows
        for index, layer in enumerate(self._layers):
            normed = layer.attention_norm.apply(hidden, kernels)
            states = self._multiply(layer.states, normed, masks)[:num_rows]
            if kernels is None:
                heads = self._attend(attention, index, states, angles)
            else:
                heads = self._attend_by_kernels(attention, index, states, angles, kernels)
            if num_padding:
                heads = pad(heads, (0, 0, 0, num_padding))
            hidden = self._multiply(layer.output, heads, masks, hidden)
            normed = layer.mlp_norm.apply(hidden, kernels)
            hidden = self._multiply(
                layer.down, self._activated(layer, normed, masks), masks, hidden
            )
        return hidden

    def _mask_rows(self, ids: Tensor) -> slice | Tensor | None:
        """Return where the adapter's mask tokens are among ids [N]; those of a sequence adjoin."""
        found = (ids >= self._embedding.num_embeddings).nonzero()[:, 0]
        if not len(found):
            return None
        first, last = int(found[0]), int(found[-1])
        return slice(first, last + 1) if last - first < len(found) else found

    def _multiply(
        self,
        weights: PackedWeights,
        inputs: Tensor,
        masks: slice | Tensor | None,
        added: Tensor | None = None,
    ) -> Tensor:
        """Return a product plus ``added``, with the adapter's change in the rows ``masks``."""
        product = weights.multiply(inputs, added)
        if masks is not None and (change := self._changes.get(weights)) is not None:
            change.add(inputs, product, masks)
        return product

    def _activated(self, layer: _Layer, normed: Tensor, masks: slice | Tensor | None) -> Tensor:
        """Return an MLP's activated gate times the values that it lets through."""
        if layer.has_compiled_silu and masks is None:
            return layer.gate.multiply(normed, is_activated=True)
        products = self._multiply(layer.gate, normed, masks)
        if layer.has_compiled_silu:
            activated: Tensor = bfloat16.kernels("products").silu_and_mul(products)
            return activated
        gate, up = products.chunk(2, -1)
        return layer.activation(gate).mul_(up)

    def finish_compiling(self) -> None:
        """Wait for ``row_kernels``, if passes of this model use them."""
        if self._takes_kernels:
            KERNELS_WARMUP.wait()

    def _is_one_call(self, masks: slice | Tensor | None) -> bool:
        """Return whether all layers can be one call. Not asked before ``KERNELS_WARMUP``."""
        return not isinstance(masks, Tensor) and self._compiled_layers is not None

    def _kernels(self, rows: Rows, masks: slice | Tensor | None = None) -> Any:
        """Return ``row_kernels`` if they can compute a pass; None if torch has to."""
        if not self._takes_kernels:
            return None
        work = rows.num_rows * torch.get_num_threads()
        is_ready = KERNELS_WARMUP.is_ready()
        if work > KERNEL_WORK and not (is_ready and self._is_one_call(masks)):
            return None
        if is_ready:
            self._make_buffers(rows)
        if not all(self._has_room(span) for span in rows.spans):
            return None
        if not all(one.is_contiguous() and one.numel() == size for one, size in self._vector_sizes):
            return None  # weights were replaced through their data
        if not is_ready:
            if rows.num_rows <= FIRST_ROWS:
                KERNELS_WARMUP.start()
            return None
        from ragaccel.engine import row_kernels  # imports numba, so as late as possible

        return row_kernels

    def _make_buffers(self, rows: Rows) -> None:
        """Create the buffers of caches that nothing was written to yet."""
        weight = self._embedding.weight
        like = weight.new_empty(1, self._num_kv_heads, 0, self._size)
        for span in rows.spans:
            if span.cache.layer_buffers(0) is None:
                for layer in range(len(self._layers)):
                    span.cache.make_buffers(layer, like, like)

    def _has_room(self, span: RowSpan) -> bool:
        """Return whether buffers of all layers hold the rows of a pass that has begun.

        Where they do not, torch's operations raise an error, and addresses would not.
        """
        cache, last = span.cache, len(self._layers) - 1
        if cache.stop - cache.length != span.num_rows or cache.layer_buffers(last) is None:
            return False
        return all(buffer is not None and buffer.shape[2] >= cache.stop for buffer in cache.buffers)

    def _attend(
        self, attention: PassAttention, index: int, states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the attention output of a layer for its states, [N, H * D]."""
        layer, num_rows = self._layers[index], len(states)
        heads = states.view(num_rows, -1, self._size)
        turning = self._num_heads + self._num_kv_heads
        rotated = heads[:, :turning]
        if layer.head_norms is not None:
            parts = rotated.tensor_split((self._num_heads,), dim=1)
            norms = zip(layer.head_norms, parts, strict=True)
            rotated = torch.cat([norm.apply(part) for norm, part in norms], dim=1)
        rotated = _rotate(rotated, *angles).transpose(0, 1)[None]
        found = attention.attend(
            index,
            (
                rotated[:, : self._num_heads],
                rotated[:, self._num_heads :],
                heads[:, turning:].transpose(0, 1)[None],
            ),
            scaling=layer.scaling,
            window=self._windows[index],
        )
        return found.view(num_rows, -1)

    def _attend_by_kernels(
        self,
        attention: PassAttention,
        index: int,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        kernels: Any,
    ) -> Tensor:
        """Return the attention output of a layer for its states, [N, H * D]."""
        layer, size, found = self._layers[index], self._size, []
        for span in attention.rows.spans:
            cache, first, num_rows = span.cache, span.first, span.num_rows
            buffers = cache.layer_buffers(index)
            assert buffers is not None, "passes of kernels have caches with buffers"
            keys, values = buffers
            queries = states.new_empty(1, self._num_heads, num_rows, size)
            kernels.rotate_and_store(
                states[first].data_ptr(),
                (angles[0][first].data_ptr(), angles[1][first].data_ptr()),
                layer.norm_addresses,
                queries.data_ptr(),
                (
                    keys[0, 0, cache.length].data_ptr(),
                    values[0, 0, cache.length].data_ptr(),
                    keys.stride(1),
                    values.stride(1),
                ),
                (num_rows, self._num_heads, self._num_kv_heads, size),
            )
            stored = keys[:, :, : cache.stop], values[:, :, : cache.stop]
            found.append(
                attention.attend_span(
                    span, (queries, *stored), scaling=layer.scaling, window=self._windows[index]
                )
            )
        return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).view(len(states), -1)


def _angles(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Return [1, N, D] cosines and sines as [N, 1, D], the sines of the first half negated."""
    signed = sines[0, :, None].clone()
    signed[..., : sines.shape[-1] // 2].neg_()
    return cosines[0, :, None].contiguous(), signed


def _rotate(heads: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Return heads [N, .., D] rotated; products are rounded before their sum."""
    crossed = heads.roll(heads.shape[-1] // 2, -1).mul_(signed_sines)
    return crossed.add_(heads * cosines)


def compile_kernels() -> None:
    """Compile ``row_kernels``, and compare them with torch's operations.

    Raises:
        RuntimeError: they give other bits, so that answers would change once they are compiled.
    """
    from ragaccel.engine import row_kernels

    bfloat16.kernels("layers")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    size = 2 * 67  # vectors and a remainder
    states, weight = draw(3, 3, size), draw(size)
    cosines, sines = draw(3, 1, size), draw(3, 1, size)
    norm = _Norm(weight, 1e-5)
    normed = norm.apply(states.view(9, size), row_kernels).view(3, 3, size)
    queries, keys, values = (torch.empty(1, 3, size, dtype=torch.bfloat16) for _ in range(3))
    for norms in ((0, 0, 0.0), (weight.data_ptr(), weight.data_ptr(), norm.epsilon)):
        row_kernels.rotate_and_store(
            states.data_ptr(),
            (cosines.data_ptr(), sines.data_ptr()),
            norms,
            queries.data_ptr(),
            (keys.data_ptr(), values.data_ptr(), 3 * size, 3 * size),
            (3, 1, 1, size),
        )
        heads = norm.apply(states) if norms[0] else states
        turned = _rotate(heads[:, :2], cosines, sines).transpose(0, 1)
        found, wanted = (queries, keys, values), (turned[:1], turned[1:], states[:, 2][None])
        if not all(map(torch.equal, (normed, *found), (norm.apply(states), *wanted))):
            raise RuntimeError("compiled norms and rotations differ from those of torch")


def check_modules(network: Any) -> None:
    """Raise ValueError unless every part of a model is its class's own and runs its own code.

    Linear layers may be of any kind, such as quantized ones.
    """
    decoder, home = network.model, type(network).__module__
    layers = list(decoder.layers)
    attentions = [layer.self_attn for layer in layers]
    own = [decoder, decoder.norm, decoder.rotary_emb, *layers, *attentions]
    own += [part for layer in layers for part in (layer.mlp, layer.input_layernorm)]
    own += [layer.post_attention_layernorm for layer in layers]
    own += [getattr(one, name) for one in attentions for name in _HEAD_NORMS if hasattr(one, name)]
    # Derived and parametrized classes are of other modules, and so are patched functions.
    foreign = [
        type(part).__name__
        for part in own
        if type(part).__module__ != home or type(part).forward.__module__ != home
    ]
    changed = [
        name
        for name, module in network.named_modules()
        if module._forward_hooks
        or module._forward_pre_hooks
        or ("forward" in vars(module) and not is_rowwise(module))
    ]
    heads = {(_num_heads(one), one.head_dim) for one in attentions}
    if (
        foreign
        or changed
        or len(heads) != 1
        or len(layers) != network.config.num_hidden_layers
        or any(getattr(nn.modules.module, f"_global_forward{kind}") for kind in _GLOBAL_HOOKS)
        or type(network.get_input_embeddings()) is not nn.Embedding
    ):
        raise ValueError(f"modules of this model were changed: {', '.join(foreign + changed)}")
    size = attentions[0].head_dim
    weight = decoder.norm.weight
    position = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
    if size % 2 or decoder.rotary_emb(weight, position)[0].shape[-1] != size:
        raise ValueError("this model rotates a part of each head")


def _num_heads(attention: Any) -> tuple[int, int]:
    """Return the numbers of query heads, and of heads of keys and values."""
    size: int = attention.head_dim
    if hasattr(attention, "qkv_proj"):  # Phi 3: one product already
        num_kv_heads: int = attention.num_key_value_heads
        return attention.qkv_proj.out_features // size - 2 * num_kv_heads, num_kv_heads
    return attention.q_proj.out_features // size, attention.k_proj.out_features // size


def _layer_of(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    is_joined = hasattr(attention, "qkv_proj")
    activation = mlp.activation_fn if is_joined else mlp.act_fn
    gate = _group_of(mlp.gate_up_proj, 1) if is_joined else _group_of(mlp.gate_proj, 2)
    return _Layer(
        _norm_of(layer.input_layernorm),
        _group_of(attention.qkv_proj, 1) if is_joined else _group_of(attention.q_proj, 3),
        None if norms[0] is None else (_norm_of(norms[0]), _norm_of(norms[1])),
        _group_of(attention.o_proj, 1),
        _norm_of(layer.post_attention_layernorm),
        gate,
        partial(type(activation).forward, activation),
        gate.takes_silu and is_silu(activation),
        _group_of(mlp.down_proj, 1),
        attention.scaling,
    )


def _sizes_of(product: PackedWeights) -> tuple[int, int]:
    return sum(product.sizes), product.num_inputs


def _norm_of(module: Any) -> _Norm:
    return _Norm(module.weight, float(module.variance_epsilon))


def _group_of(layer: nn.Module, size: int) -> PackedWeights:
    if not isinstance(layer, PackedLinear) or len(layer.group.sizes) != size:
        raise ValueError("the weights of this model are not packed in groups")
    return layer.group
