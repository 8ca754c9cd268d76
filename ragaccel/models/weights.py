"""Weights: how much of them a pass reads, where they are, and what tells them from others."""

from __future__ import annotations

import os
import platform
import re
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.models.architecture import quantization_of
from ragaccel.models.packing import weights_of

if TYPE_CHECKING:
    from torch import Tensor


def weight_bytes(model: Any) -> int:
    """All but the input embedding, of which a pass reads a few rows, unless the head has it too."""
    weights = {id(weight): weight for weight in weights_of(model)}
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


def cost_key(model: Any, device: torch.device) -> str:
    """Tell a model on a device from others whose passes cost differently."""
    place = device.type
    if place == "cuda":
        place = torch.cuda.get_device_name(device)
    elif place == "cpu":
        place = f"{platform.machine()} {torch.get_num_threads()} of {os.cpu_count()} threads"
    spread = sorted({str(part) for part in getattr(model, "hf_device_map", {}).values()})
    if len(spread) > 1 or "disk" in spread:
        place = f"{place} over {' '.join(spread)}"
    weights = list(weights_of(model))
    kinds = {str(weight.dtype) for weight in weights}
    # Quantized weights may have the type of what they stand for.
    kinds |= {type(weight).__name__ for weight in weights} - {"Parameter", "Tensor"}
    kinds |= {quantization_of(model)} - {""}
    count = sum(weight.numel() for weight in weights)
    name = f"{type(model).__name__} {count} {' '.join(sorted(kinds))} {place}"
    return re.sub(r"[^0-9A-Za-z]+", "-", name.replace("torch.", "")).strip("-").lower()
