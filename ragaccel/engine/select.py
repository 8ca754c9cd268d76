"""Choosing: from the logits of a pass to token ids, greedily or by sampling.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragaccel.decoding.session import PROBE_RANKS, Choices
from ragaccel.engine.noise import TokenNoise
from ragaccel.engine.processing import ScoreProcessing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.decoding.request import Request, Sampling
    from ragaccel.decoding.tree import DraftTree


_NO_IDS = torch.empty(0, 0, dtype=torch.int64)
_WHOLE = 1 << 30  # a chance of 1, as an integer


class Chooser:
    """Chooses one request's tokens, so that a choice depends on its own prefix and the seed alone.

    Sampling is x_t = argmax(log p_t + Gumbel(seed, position, token)): every token is a true
    sample, and whether it was reached alone or inside a tree changes nothing.

    Args:
        request: how to choose.
    """

    def __init__(self, request: Request) -> None:
        self._sampling, self._warpers = request.sampling, _warpers(request.sampling)
        self._processing = ScoreProcessing(request)
        self._noise: TokenNoise | None = None
        self._normalizes = request.score_rules.renormalize_logits

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add tokens that are now in the cache, in order."""
        self._processing.commit(token_ids)

    def choose(
        self, logits: Tensor, tree: DraftTree, start: int, num_runner_ups: int = 0
    ) -> Tensor:
        """Choose after each node of a tree that follows ``start`` committed tokens.

        Returns:
            int64 [n, k] on the logits' device, for ``read_choices``: the choice, then, if any were
            asked for, the likeliest tokens, one more than asked, as the choice may be among them,
            then, if the tree has probes, the tokens that may follow them and their chances, in
            units of 2^-30.
        """
        scores = judged = self.process(logits, tree)
        if self._sampling.temperature > 0.0:
            judged = self._noised(scores, [start + depth + 1 for depth in tree.depths()])
        parts = [_best(judged)]
        if num_runner_ups:
            count = min(num_runner_ups + 1, scores.shape[-1])
            parts.append(scores.topk(count, dim=-1).indices)
        if tree.num_probes:
            parts.append(_probed(judged, tree.num_probes))
        return torch.cat(parts, dim=1)

    def rank(self, logits: Tensor, start: int) -> Tensor:
        """Rank what may follow each of a run of mask tokens, of which the first is at ``start``.

        Logits [M, V]; returns int64 [M, 2 * PROBE_RANKS], for ``read_ranks``. They are guesses: no
        processor is asked about them.
        """
        scores = logits
        if self._sampling.temperature > 0.0:
            scores = self._warp(logits.float())
            scores = self._noised(scores, [start + 1 + i for i in range(len(logits))])
        return _probed(scores, len(scores))

    def _warp(self, scores: Tensor) -> Tensor:
        # Warpers look at scores alone: there is no need to make a tensor of every row's tokens.
        for warper in self._warpers:
            scores = warper(_NO_IDS, scores)
        return scores

    def _noised(self, scores: Tensor, positions: list[int]) -> Tensor:
        if self._noise is None:
            self._noise = TokenNoise(scores.shape[-1], scores.device)
        return self._noise.gumbel(self._sampling.seed, positions).add_(scores)

    def process(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """Return what the choice is made from: processed and warped scores, [n, V].

        As in ``generate`` they are float32, whatever the model computes in: two scores that differ
        by less are equal, and the first of them is chosen. Half precision loses nothing by it, so
        a greedy choice without any processor reads it as it is.
        """
        sampled = self._sampling.temperature > 0.0
        if self._processing.is_idle and not sampled:
            return logits.float() if logits.dtype == torch.float64 else logits
        scores = logits.float()
        if not self._processing.is_idle:
            scores = self._processing.apply(scores, token_paths(tree), tree.num_probes)
        if sampled:
            return self._warp(scores)  # what would normalize them changes no chance
        return scores.log_softmax(dim=-1) if self._normalizes else scores


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """List the warpers that ``generate`` would apply, in its order."""
    warpers: list[LogitsProcessor] = []
    if sampling.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


def token_paths(tree: DraftTree) -> list[list[int]]:
    """List the tokens from the root to each node, both included; to a probe, those before it."""
    paths: list[list[int]] = []
    first_probe = len(tree) - tree.num_probes
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        before = paths[parent] if parent >= 0 else []
        paths.append(before if node >= first_probe else [*before, token])
    return paths


def to_host(parts: Sequence[Tensor]) -> list[list[list[int]]]:
    """Bring what several requests chose to the host, in one synchronization."""
    if len(parts) < 2:
        return [part.tolist() for part in parts]
    numbers = torch.cat([part.reshape(-1) for part in parts]).tolist()
    found, at = [], 0
    for part in parts:
        rows, width = part.shape
        found.append([numbers[at + row * width : at + (row + 1) * width] for row in range(rows)])
        at += rows * width
    return found


def wait_for(logits: Tensor) -> None:
    """Wait until a pass has been computed of which nothing is read: its seconds are its own."""
    logits[-1, 0].item()


def read_choices(
    rows: Sequence[Sequence[int]], num_runner_ups: int, num_probes: int = 0
) -> Choices:
    """Read what ``Chooser.choose`` returned, as lists."""
    chosen = [row[0] for row in rows]
    end = len(rows[0])
    probed: list[list[tuple[int, float]]] = []
    if num_probes:
        end -= 2 * PROBE_RANKS
        probed = read_ranks([row[end : end + 2 * PROBE_RANKS] for row in rows[-num_probes:]])
    if num_runner_ups == 0:
        return Choices(chosen, probed=probed)
    others = [[token for token in row[1:end] if token != row[0]] for row in rows]
    return Choices(chosen, [row[:num_runner_ups] for row in others], probed)


def read_ranks(rows: Sequence[Sequence[int]]) -> list[list[tuple[int, float]]]:
    """Read what ``Chooser.rank`` returned: tokens and their chances, without those of no chance."""
    pairs = (zip(row[:PROBE_RANKS], row[PROBE_RANKS:], strict=True) for row in rows)
    return [[(token, share / _WHOLE) for token, share in row if share > 0] for row in pairs]


def _best(scores: Tensor) -> Tensor:
    """The first of the highest scores of each row. [n, 1]."""
    # On a CPU argmax takes five times as long as max in half precision; both take the first.
    if scores.element_size() < 4 and scores.device.type == "cpu":
        return scores.max(dim=-1, keepdim=True).indices
    return scores.argmax(dim=-1, keepdim=True)


def _probed(scores: Tensor, num_probes: int) -> Tensor:
    """The likeliest tokens after each probe and their chances. [n, 2 * PROBE_RANKS] int64.

    With sampling the position's noise is in the scores, so the first is what the model will draw if
    it agrees with the probe. Rows of other nodes are 0, and so is what a vocabulary lacks.
    """
    found = torch.zeros(len(scores), 2, PROBE_RANKS, dtype=torch.int64, device=scores.device)
    rows = scores[-num_probes:].float()
    best = rows.topk(min(PROBE_RANKS, rows.shape[-1]), dim=-1)
    chances = (best.values - rows.logsumexp(-1, keepdim=True)).exp()
    count = best.indices.shape[-1]
    found[-num_probes:, 0, :count] = best.indices
    found[-num_probes:, 1, :count] = (chances * _WHOLE).nan_to_num(0.0).long()
    return found.flatten(1)
