"""Packed weights on a CPU: which layers to pack, and the size of a model's weights.

On a CPU a pass of few rows is bound by reading weights, and oneDNN reads its own packed layout
faster: packed layers take half to a third of the time at 1 to 64 rows. The products are the same
sums in another order. Layers are packed where torch's own compiler would pack them.
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


class PackedLinear(nn.Module):
    """A linear layer over packed weights; ``weight`` holds the stored weights if they are kept."""

    def __init__(self, linear: nn.Linear, *, keep: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = _pack(linear.weight)
        self.weight = linear.weight if keep else self.packed

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs [..., out_features] for inputs [..., in_features]."""
        rows = inputs.shape[-2] if inputs.dim() == 3 and inputs.shape[0] == 1 else 0
        num_padding = _num_padding_rows(rows)
        if num_padding:
            inputs = torch.nn.functional.pad(inputs, (0, 0, 0, num_padding))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.packed, self.bias, "none", [], ""
        )
        return product[:, :rows] if num_padding else product

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save dense weights, so that a packed model's checkpoint is an ordinary one."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight is self.packed:
            destination[prefix + "weight"] = self.packed.to_dense()

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Copy all but the packed weights, which cannot be copied and are never written to."""
        memo[id(self.packed)] = self.packed
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def repack(self) -> None:
        """Pack the current values of ``weight``."""
        self.packed = _pack(self.weight)


def _num_padding_rows(rows: int) -> int:
    """Return the number of rows to add, so that few different numbers of rows occur.

    oneDNN caches a kernel for every number of rows: half a gigabyte after a thousand prompts.
    """
    step = next((step for limit, step in _ROW_STEPS if rows <= limit), _LARGE_ROW_STEP)
    return -rows % step


def pack_linears(models: Sequence[nn.Module], *, keep: bool) -> list[PackedLinear]:
    """Replace linear layers by packed ones, if this build of torch multiplies those correctly.

    Layers are packed one after another, and unused weights are freed at once.

    Args:
        models: module trees over the same weights, changed in place.
        keep: keep the stored weights for other users.

    Returns:
        The packed layers.
    """
    works: dict[tuple[Any, ...], bool] = {}
    packed: list[PackedLinear] = []
    for slots in _group_by_weights(models):
        layer: nn.Linear = getattr(*slots[0])
        kind = (layer.weight.shape, layer.weight.dtype)
        if kind not in works:
            works[kind] = _is_correct(layer)
        if works[kind]:
            packed.append(PackedLinear(layer, keep=keep))
            for parent, name in slots:
                setattr(parent, name, packed[-1])
    return packed


def _group_by_weights(models: Sequence[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """List (parent, name) of all layers that can be packed, grouped by weights and bias."""
    slots: dict[tuple[int, int], list[tuple[nn.Module, str]]] = {}
    for model in models:
        for parent in model.modules():
            for name, layer in parent.named_children():
                if _can_pack(layer):
                    weights = (id(layer.weight), id(layer.bias))
                    slots.setdefault(weights, []).append((parent, name))
    return list(slots.values())


def has_packed(model: nn.Module) -> bool:
    """Return whether a module tree has packed layers."""
    return any(isinstance(layer, PackedLinear) for layer in model.modules())


def all_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield a model's parameters, and the packed weights that replaced some of them."""
    yield from model.parameters()
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and layer.weight is layer.packed:
            yield layer.packed


def packed_bytes(model: nn.Module) -> int:
    """Return the size of packed copies of a model's weights, in bytes."""
    weights = {id(layer): layer.weight for layer in model.modules() if _can_pack(layer)}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def _can_pack(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a plain ``nn.Linear`` with large enough plain weights on a CPU."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight = layer.weight
    return (
        "forward" not in vars(layer)
        and type(weight) in _STOCK_TENSORS
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.numel() >= _MIN_WEIGHTS
        and _is_supported(weight.dtype)
    )


def _is_supported(dtype: torch.dtype) -> bool:
    """Return whether torch's compiler packs weights of this dtype on this machine."""
    if not cast("Any", torch.backends.mkldnn).is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    has_fast_float32 = torch._C.has_mkl or torch.ops.mkldnn._is_mkldnn_acl_supported()
    return dtype == torch.float32 and bool(has_fast_float32)


@torch.inference_mode()
def _is_correct(layer: nn.Linear) -> bool:
    """Return whether a packed layer gives the layer's own products."""
    trials = [_make_inputs(layer, rows) for rows in (1, _ROWS, 2 * _ROWS)]
    try:
        packed = PackedLinear(layer, keep=True)
        return all(_is_close(packed(inputs), layer(inputs)) for inputs in trials)
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


def _pack(weight: Tensor) -> Tensor:
    with torch.no_grad():
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
