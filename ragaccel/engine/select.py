"""Choosing: from the logits of a pass to token ids, greedily or by sampling.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ragaccel.engine.noise import TokenNoise
from ragaccel.engine.processing import ScoreProcessing
from ragaccel.engine.warp import warp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.decode.request import Request
    from ragaccel.decode.tree import DraftTree


class Chooser:
    """Chooses one request's tokens, so that a choice depends on its own prefix and the seed alone.

    Sampling is x_t = argmax(log p_t + Gumbel(seed, position, token)): every token is a true
    sample, and whether it was reached alone or inside a tree changes nothing.
    """

    def __init__(self, request: Request) -> None:
        self._sampling = request.sampling
        self._processing = ScoreProcessing(request)
        self._noise: TokenNoise | None = None

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add tokens that are now in the cache, in order."""
        self._processing.commit(token_ids)

    def choose(
        self, logits: Tensor, tree: DraftTree, start: int, num_runner_ups: int = 0
    ) -> Tensor:
        """Choose after each node of a tree that follows ``start`` committed tokens.

        Returns:
            [n, 1 + num_runner_ups + 1] on the logits' device: the choice, then, if any were
            asked for, the likeliest tokens, one more than asked, as the choice may be among them.
        """
        scores = self.process(logits, tree)
        if self._sampling.temperature > 0.0:
            positions = [start + depth + 1 for depth in tree.depths()]
            if self._noise is None:
                self._noise = TokenNoise(logits.shape[-1], logits.device)
            noise = self._noise.gumbel(self._sampling.seed, positions)
            chosen = noise.add_(scores).argmax(dim=-1, keepdim=True)
        else:
            chosen = scores.argmax(dim=-1, keepdim=True)
        if num_runner_ups == 0:
            return chosen
        count = min(num_runner_ups + 1, scores.shape[-1])
        return torch.cat((chosen, scores.topk(count, dim=-1).indices), dim=1)

    def process(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """Return what the choice is made from: processed and warped scores, [n, V].

        Greedy choice without any processor reads the logits as they are.
        """
        sampled = self._sampling.temperature > 0.0
        if self._processing.is_idle and not sampled:
            return logits
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if not self._processing.is_idle:
            scores = self._processing.apply(scores, token_paths(tree))
        return warp(scores, self._sampling) if sampled else scores


def token_paths(tree: DraftTree) -> list[list[int]]:
    """List the tokens from the root to each node, both included."""
    paths: list[list[int]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths
