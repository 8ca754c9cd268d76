"""Packed weights on a CPU: which layers to pack, and the size of a model's weights.

On a CPU a pass of few rows is bound by reading weights, and oneDNN reads its own packed layout
faster: packed layers take half to a third of the time at 1 to 64 rows. The products are the same
sums in another order. Layers are packed where torch's own compiler would pack them; bfloat16
weights for our own products (``engine.bfloat16_products``) where those are faster.
"""

from __future__ import annotations

import os
import platform
import re
from copy import deepcopy
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ragaccel.engine import bfloat16, int8
from ragaccel.models.support import describe_quantization

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeGuard

    from torch import Tensor


_STOCK_TENSORS = (nn.Parameter, torch.Tensor)
_ROWS = 8  # a hint for oneDNN; weights packed for 8 rows serve 1 and 512 rows as well
_ROW_STEPS = ((16, 1), (64, 8))  # (most rows, multiple to round up to)
_LARGE_ROW_STEP = 64
_MIN_WEIGHTS = 1 << 16  # in smaller layers the call takes longer than the product


class PackedWeights:
    """The packed weights of linear layers over the same inputs, multiplied in one product.

    Args:
        layers: the layers, in the order of their outputs; all have a bias, or none has.
        keep: keep the stored weights, for ``repack``.
        is_int8: keep them in 8 bits, if our products can multiply them.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, keep: bool, is_int8: bool = False) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.num_inputs = layers[0].in_features
        self._weights = [layer.weight for layer in layers] if keep else []
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        weight = _concatenated([layer.weight for layer in layers])
        self.is_paired = bfloat16.can_pack(weight) and bfloat16.kernels("products") is not None
        self.is_int8 = is_int8 and self.is_paired
        self.packed = _pack(weight, self.is_paired, self.is_int8)
        # The inputs of the last product and its parts, as one object: threads may share a model.
        self._last: tuple[Tensor, Sequence[Tensor]] | None = None

    def multiply(
        self, inputs: Tensor, added: Tensor | None = None, *, is_activated: bool = False
    ) -> Tensor:
        """Return the outputs of all layers [.., sum of sizes], plus ``added`` of that shape.

        ``is_activated``, if this ``takes_silu``, returns SiLU of their first half times the other.
        """
        bias = self.bias
        product: Tensor
        if self.is_paired:
            kernels = bfloat16.kernels("products")
            product = kernels.multiply(inputs, self.packed, bias, added, is_activated=is_activated)
        elif added is None:
            product = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, bias, "none", [], "")
        else:
            product = torch.ops.mkldnn._linear_pointwise.binary(
                inputs, added, self.packed, bias, "add"
            )
        return product

    @property
    def bias(self) -> Tensor | None:
        """The biases of all layers as they are now."""
        return _concatenated(self.biases) if self.biases else None

    @property
    def takes_silu(self) -> bool:
        """Whether ``multiply`` can apply SiLU, to halves of whole blocks."""
        return self.is_paired and sum(self.sizes) % (2 * bfloat16.BLOCK_OUTPUTS) == 0

    def outputs_of(self, index: int, inputs: Tensor) -> Tensor:
        """Return the outputs of one layer; layers that are given the same object share a product.

        Modules compute new inputs in every pass, and none changes them between its layers.
        """
        if len(self.sizes) == 1:
            return _multiply_padded(self, inputs)
        last = self._last
        if last is None or last[0] is not inputs:
            last = inputs, torch.split(_multiply_padded(self, inputs), self.sizes, dim=-1)
        self._last = None if index == len(self.sizes) - 1 else last
        return last[1][index]

    def dense(self, index: int) -> Tensor:
        """Return the weights of one layer as they were before packing, or rounded to 8 bits."""
        if self.is_paired:
            whole = (int8 if self.is_int8 else bfloat16).unpack(self.packed)
        else:
            whole = self.packed.to_dense()
        dense: Tensor = torch.split(whole, self.sizes)[index]
        return dense.clone() if len(self.sizes) > 1 else dense

    def repack(self) -> None:
        """Pack the current values of kept weights."""
        if self._weights:
            self.packed = _pack(_concatenated(self._weights), self.is_paired, self.is_int8)

    def num_padding_rows(self, rows: int) -> int:
        """Return the number of rows to add, so that few different numbers of rows occur.

        oneDNN caches a kernel for every number of rows: half a gigabyte after a thousand prompts.
        """
        if self.is_paired:
            return 0
        step = next((step for limit, step in _ROW_STEPS if rows <= limit), _LARGE_ROW_STEP)
        return -rows % step

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeights:
        """Share the packed weights, which are never written to; oneDNN's cannot be copied."""
        memo[id(self)] = copied = type(self).__new__(type(self))
        memo[id(self.packed)] = self.packed
        copied.__dict__.update(deepcopy(self.__dict__ | {"_last": None}, memo))
        return copied


class PackedLinear(nn.Module):
    """A linear layer over packed weights; ``weight`` holds the stored weights if they are kept.

    Args:
        linear: the layer.
        keep: keep its stored weights.
        group: the packed weights of several layers, this one's among them; ``None`` packs it alone.
        index: the layer's place in the group.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        keep: bool,
        group: PackedWeights | None = None,
        index: int = 0,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.group, self.index = group or PackedWeights([linear], keep=keep), index
        self.weight = linear.weight if keep else self.packed

    @property
    def packed(self) -> Tensor:
        """The packed weights of the group."""
        return self.group.packed

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs [..., out_features] for inputs [..., in_features]."""
        return self.group.outputs_of(self.index, inputs)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save dense weights, so that a packed model's checkpoint is an ordinary one."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight is self.packed:
            destination[prefix + "weight"] = self.group.dense(self.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Copy all but the packed weights."""
        memo[id(self.packed)] = self.packed
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.detach() for part in parts])


def _multiply_padded(weights: PackedWeights, inputs: Tensor) -> Tensor:
    rows = inputs.shape[-2] if inputs.dim() == 3 and inputs.shape[0] == 1 else 0
    num_padding = weights.num_padding_rows(rows)
    if not num_padding:
        return weights.multiply(inputs)
    return weights.multiply(nn.functional.pad(inputs, (0, 0, 0, num_padding)))[:, :rows]


def pack_linears(
    models: Sequence[nn.Module],
    *,
    keep: bool,
    groups: Sequence[Sequence[str]] = (),
    is_int8: bool = False,
) -> list[PackedLinear]:
    """Replace linear layers by packed ones, if this build of torch multiplies those correctly.

    Layers are packed one after another, and unused weights are freed at once.

    Args:
        models: module trees over the same weights, changed in place.
        keep: keep the stored weights for other users.
        groups: names of layers of one module that get the same inputs and are packed together.
        is_int8: keep weights in 8 bits where that is possible.

    Returns:
        The packed layers.
    """
    works: dict[tuple[Any, ...], bool] = {}
    packed: list[PackedLinear] = []
    places = _places_by_weights(models)
    for ids in _units(models[0], groups):
        unit = [places.pop(own) for own in ids]
        layers: list[nn.Linear] = [getattr(*slots[0]) for slots in unit]
        kind = tuple((layer.weight.shape, layer.weight.dtype) for layer in layers)
        if kind not in works:
            works[kind] = _is_correct(layers, is_int8=is_int8)
        if works[kind]:
            weights = PackedWeights(layers, keep=keep, is_int8=is_int8)
            for index, slots in enumerate(unit):
                packed.append(PackedLinear(layers[index], keep=keep, group=weights, index=index))
                for parent, name in slots:
                    setattr(parent, name, packed[-1])
    return packed


_Key = tuple[int, int]  # of a layer's weights and bias


def _key(layer: nn.Linear) -> _Key:
    return id(layer.weight), id(layer.bias)


def _places_by_weights(models: Sequence[nn.Module]) -> dict[_Key, list[tuple[nn.Module, str]]]:
    """Return (parent, name) of all layers that can be packed, by their weights and bias."""
    places: dict[_Key, list[tuple[nn.Module, str]]] = {}
    for model in models:
        for parent in model.modules():
            for name, layer in parent.named_children():
                if _is_stock(layer):
                    places.setdefault(_key(layer), []).append((parent, name))
    return places


def _units(model: nn.Module, groups: Sequence[Sequence[str]] = ()) -> list[list[_Key]]:
    """Return the layers to pack, those of one product together."""
    units: dict[_Key, list[_Key]] = {}
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in groups:
            layers = [children.get(name) for name in names]
            if _can_group(layers) and not any(_key(layer) in units for layer in layers):
                for layer in layers:
                    units[_key(layer)] = [_key(each) for each in layers]
    for module in model.modules():
        if _is_stock(module) and module.weight.numel() >= _MIN_WEIGHTS:
            units.setdefault(_key(module), [_key(module)])
    return list({tuple(unit): unit for unit in units.values()}.values())


def _can_group(layers: Sequence[nn.Module | None]) -> TypeGuard[Sequence[nn.Linear]]:
    """Return whether layers can be packed together: different ones over inputs of one size."""
    stock = [layer for layer in layers if layer is not None and _is_stock(layer)]
    if len(stock) < len(layers):
        return False
    kinds = {(one.in_features, one.weight.dtype, one.bias is None) for one in stock}
    is_large = sum(one.weight.numel() for one in stock) >= _MIN_WEIGHTS
    return len(kinds) == 1 and is_large and len({_key(one) for one in stock}) == len(stock)


def has_packed(model: nn.Module) -> bool:
    """Return whether a module tree has packed layers."""
    return any(isinstance(layer, PackedLinear) for layer in model.modules())


def all_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield a model's parameters, and the packed weights that replaced some of them."""
    yield from model.parameters()
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    yield from {id(one.packed): one.packed for one in layers if one.weight is one.packed}.values()


def packed_bytes(model: nn.Module, groups: Sequence[Sequence[str]] = ()) -> int:
    """Return the size of packed copies of a model's weights, in bytes."""
    wanted = {key for unit in _units(model, groups) for key in unit}
    layers = {
        id(layer): layer.weight
        for layer in model.modules()
        if _is_stock(layer) and _key(layer) in wanted
    }
    return sum(weight.numel() * weight.element_size() for weight in layers.values())


def _is_stock(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a plain ``nn.Linear`` with plain weights on a CPU."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight = layer.weight
    return (
        "forward" not in vars(layer)
        and type(weight) in _STOCK_TENSORS
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and _is_supported(weight)
    )


def _is_supported(weight: Tensor) -> bool:
    """Return whether our products, or those of torch's compiler, multiply such weights here."""
    if bfloat16.can_pack(weight) and bfloat16.kernels("products") is not None:
        return True
    dtype = weight.dtype
    if not cast("Any", torch.backends.mkldnn).is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    has_fast_float32 = torch._C.has_mkl or torch.ops.mkldnn._is_mkldnn_acl_supported()
    return dtype == torch.float32 and bool(has_fast_float32)


@torch.inference_mode()
def _is_correct(layers: Sequence[nn.Linear], *, is_int8: bool = False) -> bool:
    """Return whether layers that are packed together give their own products."""
    trials = [_make_inputs(layers[0], rows) for rows in (1, _ROWS, 2 * _ROWS)]
    try:
        packed = PackedWeights(layers, keep=True, is_int8=is_int8)
        # Rounding to 8 bits changes more than what counts as close.
        rounded = int8.unpack(packed.packed) if packed.is_int8 else None
        for inputs in trials:
            if rounded is None:
                wanted = torch.cat([layer(inputs) for layer in layers], -1)
            else:
                wanted = nn.functional.linear(inputs, rounded, packed.bias)
            sums = packed.multiply(inputs, wanted)
            if not (_is_close(packed.multiply(inputs), wanted) and _is_close(sums, 2 * wanted)):
                return False
        return True
    except (AttributeError, RuntimeError):  # a build of torch without these kernels
        return False


def _make_inputs(layer: nn.Linear, rows: int) -> Tensor:
    inputs = torch.linspace(-1, 1, rows * layer.in_features).to(layer.weight.dtype)
    return inputs.view(1, rows, layer.in_features)


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two products differ by no more than rounding."""
    wanted = wanted.float()
    share = 2e-2 if found.dtype == torch.bfloat16 else 1e-4
    return bool((found.float() - wanted).abs().max() <= share * wanted.abs().max() + 1e-6)


@torch.no_grad()
def _pack(weight: Tensor, is_paired: bool, is_int8: bool) -> Tensor:
    if is_int8:
        return int8.pack(weight)
    if is_paired:
        return bfloat16.pack(weight)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that one pass reads.

    The input embedding does not count, unless the head shares it: a pass reads few of its rows.
    """
    weights = {id(weight): weight for weight in all_weights(model)}
    given, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not given.weight:
        weights.pop(id(given.weight), None)
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def latency_key(model: Any, device: torch.device) -> str:
    """Return a key for the latency profile: model class, size, dtypes, device and threads."""
    place = device.type
    if place == "cuda":
        place = torch.cuda.get_device_name(device)
    elif place == "cpu":
        place = f"{platform.machine()} {torch.get_num_threads()} of {os.cpu_count()} threads"
    spread = sorted({str(part) for part in getattr(model, "hf_device_map", {}).values()})
    if len(spread) > 1 or "disk" in spread:
        place = f"{place} over {' '.join(spread)}"
    weights = list(all_weights(model))
    kinds = {str(weight.dtype) for weight in weights}
    # Quantized weights may report the dtype of their dequantized values.
    kinds |= {type(weight).__name__ for weight in weights} - {"Parameter", "Tensor"}
    kinds |= {describe_quantization(model)} - {""}
    count = sum(weight.numel() for weight in weights)
    name = f"{type(model).__name__} {count} {' '.join(sorted(kinds))} {place}"
    return re.sub(r"[^0-9A-Za-z]+", "-", name.replace("torch.", "")).strip("-").lower()


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 about as fast as float32; measured once."""
    is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if is_x86 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False  # whatever a busy machine measures
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    with torch.inference_mode():
        for _ in range(5):
            for dtype in seconds:
                rows, weights = (
                    torch.ones(16, 1024, dtype=dtype),
                    torch.ones(1024, 1024, dtype=dtype),
                )
                started = perf_counter()
                torch.nn.functional.linear(rows, weights)
                seconds[dtype] = min(seconds[dtype], perf_counter() - started)
    return seconds[torch.bfloat16] <= 1.2 * seconds[torch.float32]
