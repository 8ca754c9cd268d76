"""Packed weights on a CPU: where packing pays, and what weights weigh.

On a CPU a pass of few rows is bound by reading its weights, and a matrix product over weights as
they are stored reads them badly: packed ones take half to a third of the time at 1 to 64 rows. The
products are the same sums in another order.
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
    """Whether layers of a shape and type are packed; the next run chooses alike, without measuring.

    What was measured twice may come out differently, and packed sums round differently. A file
    that is no such file, or cannot be written, does no harm: choices are measured anew.

    Args:
        path: the file, of one processor, number of threads and version of torch; without it
            nothing is kept.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._decisions = _read_cache(path)
        self._is_saved = True

    def get(self, weight: Tensor) -> bool | None:
        """What is known of weights like these."""
        return self._decisions.get(_cache_key(weight))

    def put(self, weight: Tensor, pays: bool) -> None:
        """Take what was measured on these weights."""
        self._decisions[_cache_key(weight)] = pays
        self._is_saved = False

    def save(self) -> None:
        """Write what is new; what other programs have written meanwhile stays."""
        if self._path is None or self._is_saved:
            return
        document = {"format": _FORMAT, "pays": {**self._decisions, **_read_cache(self._path)}}
        try:
            with atomic_write(self._path) as file:
                file.write(json.dumps(document, indent=1).encode())
        except OSError as error:
            logger.debug("packing choices are not kept: %s", error)
        self._is_saved = True


def packing_cache_path(*, keep: bool = True) -> Path | None:
    """Where choices are kept for this processor, its threads and this torch; None if they are not.

    Beside what passes cost.
    """
    if not keep:
        return None
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    kernels = torch.backends.cpu.get_cpu_capability()
    place = f"packing {platform.machine()} {kernels} {threads} torch {torch.__version__}"
    return latency_file(re.sub(r"[^0-9A-Za-z.]+", "-", place).lower())


def clear_packing_cache() -> None:
    """Have choices measured anew that are kept for this processor and its threads."""
    path = packing_cache_path()
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("packing choices are not forgotten: %s", error)


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
    except Exception as error:  # measured anew: what it holds is no one's work
        logger.debug("packing choices are not read: %s", error)
    return {}


_STOCK_TENSORS = (nn.Parameter, torch.Tensor)
_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 8  # a hint for the packing; what is packed for 8 rows serves 1 and 512 as well
_ROW_STEPS = ((16, 1), (64, 8))  # rows up to which numbers are rounded up to multiples of these
_LARGE_ROW_STEP = 64
_MIN_WEIGHTS = 1 << 16  # weights of a layer below which calling it takes longer than computing it
_REPEATS = 5
# One layer by itself stays in the processor's caches, where packing gains least.
_MAX_SLOWDOWN = 1.2


class PackedLinear(nn.Module):
    """A linear layer over packed weights; ``weight`` is what was packed, if it is kept."""

    def __init__(self, linear: nn.Linear, *, keep: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = _pack(linear.weight)
        self.weight = linear.weight if keep else self.packed

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply [..., in_features] to [..., out_features]."""
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
        """Save the weights as they were stored, so that a packed model's checkpoint is whole."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight is self.packed:
            destination[prefix + "weight"] = self.packed.to_dense()

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Copy all but the packed weights, which cannot be copied and which nobody writes to."""
        memo[id(self.packed)] = self.packed
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def repack(self) -> None:
        """Follow the weights as they are now."""
        self.packed = _pack(self.weight)


def _num_padding_rows(rows: int) -> int:
    """How many rows are added, so that few different numbers of them occur.

    oneDNN keeps what it makes for every number it meets: half a gigabyte after a thousand prompts.
    """
    step = next((step for limit, step in _ROW_STEPS if rows <= limit), _LARGE_ROW_STEP)
    return -rows % step


def pack_linears(
    models: Sequence[nn.Module], *, keep: bool, cache: PackingCache | None = None
) -> list[PackedLinear]:
    """Put packed layers in place of linear ones, where that is faster here.

    One layer after another: weights that nobody else keeps are freed as they are packed.

    Args:
        models: module trees over the same weights, changed in place.
        keep: leave the weights as they were stored alive, for others that use them.
        cache: what is known of it, and takes what is measured.
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
    """Where the layers stand that can be packed, those over the same weights together."""
    slots: dict[tuple[int, int], list[tuple[nn.Module, str]]] = {}
    for model in models:
        for parent in model.modules():
            for name, layer in parent.named_children():
                if _can_pack(layer):
                    weights = (id(layer.weight), id(layer.bias))
                    slots.setdefault(weights, []).append((parent, name))
    return list(slots.values())


def has_packed(model: nn.Module) -> bool:
    """Whether a module tree computes with packed weights."""
    return any(isinstance(layer, PackedLinear) for layer in model.modules())


def all_weights(model: nn.Module) -> Iterator[Tensor]:
    """A model's parameters, and the packed weights that took the place of some."""
    yield from model.parameters()
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and layer.weight is layer.packed:
            yield layer.packed


def packed_bytes(model: nn.Module) -> int:
    """How much memory the packed copies of a model's weights would take, in bytes."""
    weights = {id(layer): layer.weight for layer in model.modules() if _can_pack(layer)}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def _can_pack(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Only stock layers with stock weights: others hold what a copy would not follow."""
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
    """Look whether packing one layer works; measure whether it pays unless that is known."""
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
    """Seconds of the fastest of a few runs of each layer, taking turns."""
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(_REPEATS):
        for own, layer in zip(times, layers, strict=True):
            started = perf_counter()
            layer(inputs)
            own.append(perf_counter() - started)
    return [min(own) for own in times]


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether two products differ by rounding at most."""
    wanted = wanted.float()
    share = 2e-2 if found.dtype == torch.bfloat16 else 1e-4
    return bool((found.float() - wanted).abs().max() <= share * wanted.abs().max() + 1e-6)


def _pack(weight: Tensor) -> Tensor:
    with torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def weight_bytes(model: Any) -> int:
    """All but the input embedding, of which a pass reads a few rows, unless the head has it too."""
    weights = {id(weight): weight for weight in all_weights(model)}
    given, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not given.weight:
        weights.pop(id(given.weight), None)
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def input_device(model: Any, embedding: Tensor) -> torch.device:
    """Where token ids go in; of offloaded weights accelerate's hooks know where they are used."""
    if embedding.device.type != "meta":
        return embedding.device
    for module in (model.get_input_embeddings(), model):
        place = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if place is not None:
            return torch.device(place)
    return embedding.device


def latency_key(model: Any, device: torch.device) -> str:
    """Tell a model on a device from others whose passes cost differently."""
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
    # Quantized weights may have the type of what they stand for.
    kinds |= {type(weight).__name__ for weight in weights} - {"Parameter", "Tensor"}
    kinds |= {describe_quantization(model)} - {""}
    count = sum(weight.numel() for weight in weights)
    name = f"{type(model).__name__} {count} {' '.join(sorted(kinds))} {place}"
    return re.sub(r"[^0-9A-Za-z]+", "-", name.replace("torch.", "")).strip("-").lower()
