"""Warping: temperature, top-k, top-p and min-p, as transformers' sampling applies them.

The same operations in the same order, so that the distribution is the same to the last bit.
Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ragaccel.decode.request import Sampling

_NEVER = float("-inf")


def warp(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scale scores [n, V] and set the tokens that may not be drawn to -inf."""
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if sampling.top_k > 0:
        scores = _top_k(scores, sampling.top_k)
    if sampling.top_p < 1.0:
        scores = _top_p(scores, sampling.top_p)
    if sampling.min_p > 0.0:
        scores = _min_p(scores, sampling.min_p)
    return scores


def _top_k(scores: Tensor, top_k: int) -> Tensor:
    least = torch.topk(scores, min(top_k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < least, _NEVER)


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    ascending, order = torch.sort(scores)
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    drop[:, -1] = False
    return scores.masked_fill(drop.scatter(1, order, drop), _NEVER)


def _min_p(scores: Tensor, min_p: float) -> Tensor:
    probs = scores.softmax(dim=-1)
    best, best_id = probs.max(dim=-1, keepdim=True)
    drop = probs < min_p * best
    drop.scatter_(1, best_id, False)
    return scores.masked_fill(drop, _NEVER)
