"""Checks of a SPACE adapter's parts: what would fail, or spoil other rows, only in a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_MOST_MASKS = 1024
_LARGEST = 1e3  # beyond it passes overflow, and what is not a number spreads to other rows


def check_masks(num_masks: int, hidden_size: int, embeddings: Tensor) -> None:
    """Look at mask embeddings.

    Raises:
        ConfigurationError: not [1, D] or [K, D], or numbers that no training ends with.
    """
    if type(num_masks) is not int or not 1 <= num_masks <= _MOST_MASKS:
        raise ConfigurationError(f"num_masks must be 1 to {_MOST_MASKS}, not {num_masks!r}")
    shape = tuple(embeddings.shape)
    if shape not in ((1, hidden_size), (num_masks, hidden_size)):
        raise ConfigurationError(
            f"mask embeddings of {shape} for {num_masks} mask tokens of a model of hidden "
            f"size {hidden_size}"
        )
    _check_numbers("mask_embeddings", embeddings)


def check_changes(changes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Look at low-rank changes of layers.

    Raises:
        ConfigurationError: not [R, in] and [out, R], or numbers that no training ends with.
    """
    for name, (down, up) in changes.items():
        if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
            raise ConfigurationError(
                f"changes of {name} of {tuple(down.shape)} and {tuple(up.shape)}: they must be "
                "[R, in] and [out, R]"
            )
        _check_numbers(f"{name}.down", down)
        _check_numbers(f"{name}.up", up)


def tokens_per_pass(training: Mapping[str, Any]) -> list[float]:
    """What held-out answers gave by the number of mask tokens; nothing where it is not told."""
    figures = training.get("held_out")
    told = figures.get("tokens_per_pass") if isinstance(figures, dict) else None
    if not isinstance(told, list) or not all(isinstance(one, (int, float)) for one in told):
        return []
    return told


def _check_numbers(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not bool((tensor.float().abs() <= _LARGEST).all()):
        raise ConfigurationError(
            f"{name} has numbers that are none, or far too large: was the learning rate too high?"
        )
