"""Sampling noise: Gumbel variates that depend on seed, position and token alone.

Adding them to log-probabilities and taking the argmax draws a true sample (the Gumbel-max trick);
because a position keeps its noise however it is reached, the same seed gives the same text with
drafting on or off. Counter-based like Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), in integer arithmetic that no platform rounds.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# Just below 2^-32: the largest counter must not round up to a uniform of exactly one.
_SCALE = 2.0**-32 * (1 - 2.0**-50)


def position_keys(seed: int, position: int) -> tuple[int, int]:
    """Derive two 32-bit keys from a seed and a position, by the finalizer of SplitMix64."""
    state = _mix64(_mix64(seed & _MASK64) + 0x9E3779B97F4A7C15 * (position + 1))
    return state >> 32, state & _MASK32


class TokenNoise:
    """Gumbel noise over a vocabulary, for any seeds and positions."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        tokens = torch.arange(vocab_size, dtype=torch.int64, device=device)
        # Scattered over 32 bits once, so that no two positions share noise between near tokens.
        self._high = _mix32(tokens + 1)
        self._low = _mix32(tokens + 0x5851F42D)
        # Apple's GPUs have no float64; there the tail is a little coarser.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64

    def gumbel(self, seed: int, positions: Sequence[int]) -> Tensor:
        """Return the noise of every token at these positions. [n, V], float64."""
        keys = torch.tensor([position_keys(seed, position) for position in positions])
        keys = keys.to(self._high.device)
        counter = _mix32(self._high ^ keys[:, :1])
        # The low half only refines what lies between two values of the high half: the far tail.
        uniform = (self._low ^ keys[:, 1:]).to(self._dtype)
        uniform.add_(0.5).mul_(2.0**-32).add_(counter).mul_(_SCALE)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(state: Tensor) -> Tensor:
    # lowbias32; both multipliers are below 2^31, so that no product of int64 overflows.
    state = state ^ (state >> 16)
    state.mul_(0x21F0AAAD).bitwise_and_(_MASK32)
    state ^= state >> 15
    state.mul_(0x735A2D97).bitwise_and_(_MASK32)
    state ^= state >> 15
    return state


def _mix64(state: int) -> int:
    state &= _MASK64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
    return state ^ state >> 31
