"""Packed weights on a CPU: which layers to pack, and the size of a model's weights.

On a CPU a pass of few rows is bound by reading weights, and oneDNN reads its own packed layout
faster: packed layers take half to a third of the time at 1 to 64 rows. The products are the same
sums in another order.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from copy import deepcopy
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ragaccel.models.support import describe_quantization
from ragaccel.paths import atomic_write, latency_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import TypeGuard

    from torch import Tensor


_FORMAT = "ragaccel packing 1"

logger = logging.getLogger("ragaccel")


class PackingCache:
    """Stored decisions on which layers to pack, by shape and dtype.

    Packed sums round differently, and a second measurement may decide differently: with a stored
    decision all runs give the same logits. A file that is invalid or cannot be written is ignored,
    and decisions are measured anew.

    Args:
        path: the file, for one CPU, number of threads and version of torch; ``None`` keeps
            decisions in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._decisions = _read_cache(path)
        self._is_saved = True

    def get(self, weight: Tensor) -> bool | None:
        """Return whether packing pays for weights of this shape and dtype; None if unknown."""
        return self._decisions.get(_cache_key(weight))

    def put(self, weight: Tensor, pays: bool) -> None:
        """Store whether packing pays for weights of this shape and dtype."""
        self._decisions[_cache_key(weight)] = pays
        self._is_saved = False

    def save(self) -> None:
        """Write new decisions; entries that other processes wrote take precedence."""
        if self._path is None or self._is_saved:
            return
        document = {"format": _FORMAT, "pays": {**self._decisions, **_read_cache(self._path)}}
        try:
            with atomic_write(self._path) as file:
                file.write(json.dumps(document, indent=1).encode())
        except OSError as error:
            logger.debug("packing decisions cannot be written: %s", error)
        self._is_saved = True


def packing_cache_path(*, keep: bool = True) -> Path | None:
    """Return the file for this CPU, its number of threads and this torch; None without ``keep``.

    It lies beside the latency profile.
    """
    if not keep:
        return None
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    kernels = torch.backends.cpu.get_cpu_capability()
    place = f"packing {platform.machine()} {kernels} {threads} torch {torch.__version__}"
    return latency_file(re.sub(r"[^0-9A-Za-z.]+", "-", place).lower())


def clear_packing_cache() -> None:
    """Delete the stored decisions for this CPU and number of threads."""
    path = packing_cache_path()
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("packing decisions cannot be deleted: %s", error)


def _cache_key(weight: Tensor) -> str:
    outputs, inputs = weight.shape
    return f"{outputs} x {inputs} {str(weight.dtype).removeprefix('torch.')}"


def _read_cache(path: Path | None) -> dict[str, bool]:
    if path is None:
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] == _FORMAT:
            kept = document["pays"].items()
            return {name: pays for name, pays in kept if isinstance(pays, bool)}
    except Exception as error:  # the decisions can be measured again
        logger.debug("packing decisions cannot be read: %s", error)
    return {}


_STOCK_TENSORS = (nn.Parameter, torch.Tensor)
_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 8  # a hint for oneDNN; weights packed for 8 rows serve 1 and 512 rows as well
_ROW_STEPS = ((16, 1), (64, 8))  # (most rows, multiple to round up to)
_LARGE_ROW_STEP = 64
_MIN_WEIGHTS = 1 << 16  # in smaller layers the call takes longer than the product
_REPEATS = 5
# A measured layer stays in the CPU's caches, so it gains less than the layers of a pass.
_MAX_SLOWDOWN = 1.2


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


def pack_linears(
    models: Sequence[nn.Module], *, keep: bool, cache: PackingCache | None = None
) -> list[PackedLinear]:
    """Replace linear layers by packed ones where that is faster on this machine.

    Layers are packed one after another, and unused weights are freed at once.

    Args:
        models: module trees over the same weights, changed in place.
        keep: keep the stored weights for other users.
        cache: earlier decisions, to which new ones are added.

    Returns:
        The packed layers.
    """
    cache = cache or PackingCache()
    chosen: dict[tuple[Any, ...], bool] = {}
    packed: list[PackedLinear] = []
    for slots in _group_by_weights(models):
        layer: nn.Linear = getattr(*slots[0])
        kind = (layer.weight.shape, layer.weight.dtype)
        if kind not in chosen:
            chosen[kind] = _is_faster(layer, cache)
        if chosen[kind]:
            packed.append(PackedLinear(layer, keep=keep))
            for parent, name in slots:
                setattr(parent, name, packed[-1])
    cache.save()
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
        and weight.dtype in _DTYPES
        and weight.numel() >= _MIN_WEIGHTS
        and cast("Any", torch.backends.mkldnn).is_available()
    )


@torch.inference_mode()
def _is_faster(layer: nn.Linear, cache: PackingCache) -> bool:
    """Return whether a packed layer is correct and faster; measure only if not decided before."""
    pays = cache.get(layer.weight)
    if pays is False:
        return False
    trials = [_make_inputs(layer, rows) for rows in (1, _ROWS, 2 * _ROWS)]
    try:
        packed = PackedLinear(layer, keep=True)
        if not all(_is_close(packed(inputs), layer(inputs)) for inputs in trials):
            return False
        if pays is None:
            seconds = [_time_layers(inputs, packed, layer) for inputs in trials]
            pays = sum(own for own, _ in seconds) < _MAX_SLOWDOWN * sum(
                stock for _, stock in seconds
            )
            cache.put(layer.weight, pays)
    except (AttributeError, RuntimeError):  # a build of torch without these kernels
        return False
    return pays


def _make_inputs(layer: nn.Linear, rows: int) -> Tensor:
    inputs = torch.linspace(-1, 1, rows * layer.in_features).to(layer.weight.dtype)
    return inputs.view(1, rows, layer.in_features)


def _time_layers(inputs: Tensor, *layers: nn.Module) -> list[float]:
    """Return the seconds of each layer's fastest run, measured in turns."""
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(_REPEATS):
        for own, layer in zip(times, layers, strict=True):
            started = perf_counter()
            layer(inputs)
            own.append(perf_counter() - started)
    return [min(own) for own in times]


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


def input_device(model: Any, embedding: Tensor) -> torch.device:
    """Return the device for token ids; accelerate's hooks name it for offloaded weights."""
    if embedding.device.type != "meta":
        return embedding.device
    for module in (model.get_input_embeddings(), model):
        place = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if place is not None:
            return torch.device(place)
    return embedding.device


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
