"""What is known of a model before its passes are captured as CUDA graphs.

A capture that fails costs more than one that is not tried, so that which is known to wait for the
device is refused by its configuration, and experts run in an implementation that does not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ragaccel.engine.memory import memory_share
from ragaccel.models.support import rope_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

_SWITCHABLE_EXPERTS = ("eager", "grouped_mm", "batched_mm")
_GATHERED_SHARE = 0.05  # of the device's memory, for copies of the selected experts' weights
_HOPPER = (9, 0)


def capture_obstacle(network: Any) -> str:
    """Return why a model's passes cannot be captured; empty if no reason is known.

    Call it for the copy whose passes are captured, after ``use_capturable_experts``.
    """
    if "dynamic" in rope_kinds(network.config.get_text_config(decoder=True)):
        return "its dynamic rope compares the sequence's length on the host"
    if any(_offloads(module) for module in network.modules()):
        return "a part of its weights is offloaded"
    if _has_experts(network) and network.config._experts_implementation == "eager":
        return "its experts are chosen on the host"
    return ""


def use_capturable_experts(network: Any, device: torch.device, dtype: torch.dtype) -> int | None:
    """Let a model's experts run without waiting for the device, if it has any.

    A grouped product does that where the device has one of its own; elsewhere torch reads the
    groups' sizes on the host. A batched product always does, but copies the weights of each row's
    experts, so it is for passes of few rows.

    Returns:
        The most rows of a pass, or None for no limit.
    """
    if not _has_experts(network) or not network._can_set_experts_implementation():
        return None
    current = network.config._experts_implementation
    if current not in _SWITCHABLE_EXPERTS or (
        current == "grouped_mm" and _multiplies_groups(device, dtype)
    ):
        return None
    network.set_experts_implementation("batched_mm")
    room = memory_share(device, _GATHERED_SHARE)
    return max(1, room // max(1, _gathered_bytes(network)))


def _multiplies_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device has a grouped product of its own for a dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= _HOPPER


def _offloads(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,)))


def _has_experts(network: nn.Module) -> bool:
    return next(_experts(network), None) is not None


def _experts(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with the weights of all experts of a layer, [experts, .., ..]."""
    for module in network.modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            yield module


def _gathered_bytes(network: Any) -> int:
    """Return the bytes of the largest weights of the experts that one row selects."""
    config = network.config.get_text_config(decoder=True)
    number = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 8
    weights: list[Tensor] = [one for module in _experts(network) for one in module.parameters()]
    return int(number) * max((one[0].nbytes for one in weights if one.dim() > 1), default=0)
