"""Sampling: from the logits of a pass to token ids.

Adding Gumbel noise to log-probabilities and taking the argmax draws a true sample (the Gumbel-max
trick). The noise depends on seed, position and token only, so the same seed gives the same text
with drafting on or off. It is counter-based like Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3" (SC 2011), in integer arithmetic, which is the same on every platform.

Logits processing keeps one state for the committed tokens, plus the path of each row: every row's
scores are what they would be if its tokens were generated one by one. Order and arithmetic are
those of transformers' ``generate``: all rows at once, in float32.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragaccel.decoding.request import Request
from ragaccel.decoding.session import MASK_TOP_K, SampledTokens
from ragaccel.errors import ConfigurationError, brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.decoding.request import Sampling
    from ragaccel.decoding.tree import DraftTree


_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# Just below 2^-32, so that the largest counter does not round up to a uniform number of one.
_SCALE = 2.0**-32 * (1 - 2.0**-50)


@lru_cache(maxsize=4096)
def position_keys(seed: int, position: int) -> tuple[int, int]:
    """Derive two 32-bit keys from a seed and a position, with the finalizer of SplitMix64."""
    state = _mix64(_mix64(seed & _MASK64) + 0x9E3779B97F4A7C15 * (position + 1))
    return state >> 32, state & _MASK32


def noise_keys(seed: int, positions: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys of positions on a device, [n, 2] int64, without waiting for it."""
    return _to_device([position_keys(seed, position) for position in positions], device)


def _to_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Copy integers to a device, without waiting for its pending work."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class TokenNoise:
    """Gumbel noise over a vocabulary, a function of seed, position and token."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        tokens = torch.arange(vocab_size, dtype=torch.int64, device=device)
        # Hash token ids to 32 bits, so that no two positions share noise between adjacent tokens.
        self._high = _mix32(tokens + 1)
        self._low = _mix32(tokens + 0x5851F42D)
        # Apple's GPUs have no float64: the tail is a little coarser there.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64

    def gumbel(self, seed: int, positions: Sequence[int]) -> Tensor:
        """Return the noise of every token at these positions. [n, V], float64."""
        return self.gumbel_of(noise_keys(seed, positions, self._high.device))

    def gumbel_of(self, keys: Tensor) -> Tensor:
        """Return the noise of every token at the positions of ``noise_keys``. [n, V], float64."""
        counter = _mix32(self._high ^ keys[:, :1])
        # The low half refines the far tail, between two values of the high half.
        uniform = (self._low ^ keys[:, 1:]).to(self._dtype)
        uniform.add_(0.5).mul_(2.0**-32).add_(counter).mul_(_SCALE)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(state: Tensor) -> Tensor:
    # lowbias32; both multipliers are below 2^31, so no int64 product overflows.
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


_BANNED = float("-inf")


class ScoreProcessing:
    """Logits processing of one request: penalties, bans, and logits processors."""

    def __init__(self, request: Request) -> None:
        self._penalty = request.repetition_penalty
        self._bans = NgramBans(request.no_repeat_ngram_size)
        self._processors: tuple[Any, ...] = tuple(request.processors)
        self._takes_batches = all(
            getattr(processor, "takes_batches", False) for processor in self._processors
        )
        self._num_prompt = len(request.prompt_ids)
        self._min_new_tokens = request.min_new_tokens
        self._eos_ids = sorted(request.eos_ids)
        self._seen: Tensor | None = None
        self._marked: set[int] = set()
        self._num_marked = 0
        self._history: list[int] = []
        self.is_idle = not (
            self._penalty != 1.0
            or self._bans.size
            or self._processors
            or (self._min_new_tokens and self._eos_ids)
        )

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add committed tokens to the state that all later rows share."""
        if self.is_idle:
            return
        self._bans.extend(token_ids)
        self._history.extend(token_ids)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]], num_masks: int = 0) -> Tensor:
        """Process scores [n, V]; row i follows the committed tokens and ``paths[i]``.

        Processors are not called for the last ``num_masks`` rows, which are mask
        tokens, because the text there is not known yet.
        """
        if self._penalty != 1.0:
            scores = self._penalize(scores, paths)
        if self._bans.size:
            scores = self._ban(scores, self._bans.banned(paths))
        if self._min_new_tokens and self._eos_ids:
            scores = self._ban_eos(scores, paths)
        if self._processors:
            brief = len(paths) - num_masks
            known = self._call_processors(scores[:brief], paths[:brief])
            scores = torch.cat((known, scores[brief:])) if num_masks else known
        return scores

    def _penalize(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Penalize committed tokens in all rows, and the tokens of a row's path in that row.

        Only these tokens' scores are read: they are a small part of the vocabulary.
        """
        vocab_size = scores.shape[-1]
        seen = self._seen_tokens(scores)
        found = scores.index_copy(1, seen, _apply_penalty(scores[:, seen], self._penalty))
        # An embedding may be wider than the scores; such tokens cannot be sampled nor penalized.
        pairs = [
            (row, token) for row, path in enumerate(paths) for token in path if token < vocab_size
        ]
        if not pairs:
            return found
        rows, tokens = _to_device(pairs, scores.device).unbind(1)
        return found.index_put_((rows, tokens), _apply_penalty(scores[rows, tokens], self._penalty))

    def _seen_tokens(self, scores: Tensor) -> Tensor:
        """Return the distinct committed tokens, updated on demand."""
        if self._seen is None:
            self._seen = torch.zeros(0, dtype=torch.int64, device=scores.device)
        tokens = dict.fromkeys(self._history[self._num_marked :])
        self._num_marked = len(self._history)
        new = [token for token in tokens if token < scores.shape[-1] and token not in self._marked]
        if new:
            self._marked.update(new)
            self._seen = torch.cat((self._seen, _to_device(new, scores.device)))
        return self._seen

    def _ban_eos(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        known = len(self._history) - self._num_prompt
        early = [row for row, path in enumerate(paths) if known + len(path) < self._min_new_tokens]
        return self._ban(scores, [(row, eos) for row in early for eos in self._eos_ids])

    def _call_processors(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Call the processors for one row at a time, or for all rows of a length if they can."""
        groups: dict[int, list[int]] = {}
        for row, path in enumerate(paths):
            groups.setdefault(len(path) if self._takes_batches else row, []).append(row)
        history = _to_device(self._history, scores.device)
        processed, order = [], list[int]()
        for rows in groups.values():
            tails = _to_device([paths[row] for row in rows], scores.device)
            ids = torch.cat((history.expand(len(rows), -1), tails), dim=1)
            own = scores[rows]
            for processor in self._processors:
                own = _check_returned(processor, processor(ids, own), own)
            processed.append(own)
            order += rows
        places = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat(processed)[_to_device(places, scores.device)]

    @staticmethod
    def _ban(scores: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        pairs = [(row, token) for row, token in pairs if token < scores.shape[-1]]
        if not pairs:
            return scores
        rows, tokens = _to_device(pairs, scores.device).unbind(1)
        return scores.index_put((rows, tokens), scores.new_full((), _BANNED))


def _check_returned(processor: Any, returned: Any, given: Tensor) -> Tensor:
    """Return a processor's result if it has the shape and device of the scores it was given.

    Raises:
        ConfigurationError: the result has another type, shape or device.
    """
    wanted = f"a floating-point tensor of shape {tuple(given.shape)} on {given.device}"
    if not isinstance(returned, torch.Tensor):
        what = brief(returned)
    elif returned.shape != given.shape or returned.device != given.device:
        what = f"a tensor of shape {tuple(returned.shape)} on {returned.device}"
    elif not returned.is_floating_point():
        what = f"a tensor of {returned.dtype}"
    else:
        return returned
    raise ConfigurationError(
        f"the logits processor {brief(processor)} returns {what}: it must return {wanted}"
    )


class NgramBans:
    """The n-grams of one request, to find the tokens that would repeat one.

    Args:
        size: n; 0 bans nothing, 1 bans every token seen.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._history: list[int] = []
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add committed tokens."""
        if not self.size:
            return
        first_new = len(self._history)
        self._history.extend(token_ids)
        for end in range(max(first_new, self.size - 1), len(self._history)):
            key = tuple(self._history[end - self.size + 1 : end])
            self._followers[key].add(self._history[end])

    def banned(self, paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """List (row, token) pairs that would repeat an n-gram of the history or the path."""
        pairs: list[tuple[int, int]] = []
        context = self._history[len(self._history) - self.size + 1 :] if self.size > 1 else []
        for row, path in enumerate(paths):
            tokens = [*context, *path]
            if len(tokens) < self.size - 1:
                continue
            key = tuple(tokens[len(tokens) - self.size + 1 :])
            pairs.extend((row, token) for token in self._followers.get(key, ()))
            # N-grams that end in the path itself are not in the shared table.
            pairs.extend(
                (row, tokens[end])
                for end in range(self.size - 1, len(tokens))
                if tuple(tokens[end - self.size + 1 : end]) == key
            )
        return pairs


def _apply_penalty(scores: Tensor, penalty: float) -> Tensor:
    """Divide positive scores by the penalty and multiply negative ones: above 1 lowers both."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


_NO_IDS = torch.empty(0, 0, dtype=torch.int64)
_PROBABILITY_SCALE = 1 << 30  # a probability of 1, as an integer


class Sampler:
    """A sampler of one request's tokens; each depends on its prefix and the seed only.

    x_t = argmax(log p_t + Gumbel(seed, position, token)): every token is a true sample, the same
    in plain decoding and inside a draft tree.

    Args:
        request: sampling settings, penalties and logits processors.
    """

    def __init__(self, request: Request) -> None:
        self._sampling, self._warpers = request.sampling, _warpers(request.sampling)
        self._processing = ScoreProcessing(request)
        self._noise: TokenNoise | None = None
        self._prepared: tuple[list[int], Tensor] | None = None
        self.is_argmax = not _is_processed(request)
        """Whether the sampled tokens are ``greedy_ids`` of the logits."""

    @classmethod
    def of(cls, request: Request) -> Sampler:
        """Return a sampler for a request; greedy ones without processing share one, stateless."""
        return cls(request) if _is_processed(request) else _GREEDY

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that were committed to the cache, in order."""
        self._processing.commit(token_ids)

    def prepare(self, tree: DraftTree, start: int, device: torch.device) -> None:
        """Copy to the device what ``sample`` will need, before the pass is launched.

        Afterwards a copy would wait for the pass, and what is sampled would be launched late.
        """
        if self._sampling.temperature > 0.0:
            positions = _next_positions(tree, start)
            self._prepared = positions, noise_keys(self._sampling.seed, positions, device)

    def sample(
        self, logits: Tensor, tree: DraftTree, start: int, num_alternatives: int = 0
    ) -> Tensor:
        """Sample a token after each node of a tree that follows ``start`` committed tokens.

        Returns:
            int64 [n, k] on the logits' device, for ``read_sampled``: the sampled token; if
            ``num_alternatives`` is not 0, that many likeliest tokens plus one, as the sampled token
            may be among them; if the tree has mask tokens, the likeliest tokens after them and
            their probabilities, in units of 2^-30.
        """
        scores = perturbed = self.process(logits, tree)
        if self._sampling.temperature > 0.0:
            perturbed = self._add_noise(scores, _next_positions(tree, start))
        parts = [_argmax(perturbed)]
        if num_alternatives:
            count = min(num_alternatives + 1, scores.shape[-1])
            parts.append(scores.topk(count, dim=-1).indices)
        if tree.num_masks:
            parts.append(_top_masks(perturbed, tree.num_masks))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def rank_masks(self, logits: Tensor, start: int) -> Tensor:
        """Rank the tokens that may follow consecutive mask tokens, the first at ``start``.

        Takes logits [M, V]; returns int64 [M, 2 * MASK_TOP_K], for ``read_top_masks``. The
        caller's processors are not called.
        """
        scores = logits
        if self._sampling.temperature > 0.0:
            scores = self._warp(logits.float())
            scores = self._add_noise(scores, [start + 1 + i for i in range(len(logits))])
        return _top_masks(scores, len(scores))

    def _warp(self, scores: Tensor) -> Tensor:
        # Warpers read the scores only, so the tokens of the rows need not be passed.
        for warper in self._warpers:
            scores = warper(_NO_IDS, scores)
        return scores

    def _add_noise(self, scores: Tensor, positions: list[int]) -> Tensor:
        if self._noise is None:
            self._noise = TokenNoise(scores.shape[-1], scores.device)
        if self._prepared is None or self._prepared[0] != positions:
            return self._noise.gumbel(self._sampling.seed, positions).add_(scores)
        return self._noise.gumbel_of(self._prepared[1].to(scores.device)).add_(scores)

    def process(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """Return the scores to sample from: processed and warped logits, [n, V].

        They are float32 as in ``generate``, so that equal scores are equal there too and the first
        one wins. Half-precision logits stay as they are for greedy decoding without processors, as
        conversion to float32 does not change which score is highest.
        """
        sampled = self._sampling.temperature > 0.0
        if self._processing.is_idle and not sampled:
            return _greedy_scores(logits)
        scores = logits.float()
        if not self._processing.is_idle:
            scores = self._processing.apply(scores, token_paths(tree), tree.num_masks)
        return self._warp(scores) if sampled else scores


def _is_processed(request: Request) -> bool:
    return bool(
        not request.sampling.is_greedy
        or request.repetition_penalty != 1.0
        or request.no_repeat_ngram_size
        or request.processors
        or (request.min_new_tokens and request.eos_ids)
    )


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """Return the warpers that ``generate`` would apply, in the same order."""
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
    """List the tokens from the root to each node; a mask token itself is left out."""
    paths: list[list[int]] = []
    first_mask = len(tree) - tree.num_masks
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        before = paths[parent] if parent >= 0 else []
        paths.append(before if node >= first_mask else [*before, token])
    return paths


def to_host(parts: Sequence[Tensor]) -> list[list[list[int]]]:
    """Copy the sampled ids of several requests to the host, in one synchronization."""
    if len(parts) < 2:
        return [part.tolist() for part in parts]
    numbers = torch.cat([part.reshape(-1) for part in parts]).tolist()
    found, at = [], 0
    for part in parts:
        rows, width = part.shape
        found.append([numbers[at + row * width : at + (row + 1) * width] for row in range(rows)])
        at += rows * width
    return found


def wait_until_computed(logits: Tensor) -> None:
    """Wait until the device has computed these logits."""
    logits[-1, 0].item()


def read_sampled(
    rows: Sequence[Sequence[int]], num_alternatives: int, num_masks: int = 0
) -> SampledTokens:
    """Convert rows that ``Sampler.sample`` returned into ``SampledTokens``."""
    chosen = [row[0] for row in rows]
    end = len(rows[0])
    mask_predictions: list[list[tuple[int, float]]] = []
    if num_masks:
        end -= 2 * MASK_TOP_K
        mask_predictions = read_top_masks(
            [row[end : end + 2 * MASK_TOP_K] for row in rows[-num_masks:]]
        )
    if num_alternatives == 0:
        return SampledTokens(chosen, mask_predictions=mask_predictions)
    others = [[token for token in row[1:end] if token != row[0]] for row in rows]
    return SampledTokens(chosen, [row[:num_alternatives] for row in others], mask_predictions)


def read_top_masks(rows: Sequence[Sequence[int]]) -> list[list[tuple[int, float]]]:
    """Convert rows of ``Sampler.rank_masks`` into pairs (token, probability above 0)."""
    pairs = (zip(row[:MASK_TOP_K], row[MASK_TOP_K:], strict=True) for row in rows)
    return [
        [(token, share / _PROBABILITY_SCALE) for token, share in row if share > 0] for row in pairs
    ]


def greedy_ids(logits: Tensor) -> Tensor:
    """Return the token that greedy decoding without processing takes after each row. [n, 1]."""
    return _argmax(_greedy_scores(logits))


def _greedy_scores(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.float64 else logits


def _next_positions(tree: DraftTree, start: int) -> list[int]:
    """Return the position of the token after each node."""
    return [start + depth + 1 for depth in tree.depths()]


def _argmax(scores: Tensor) -> Tensor:
    """Return the index of each row's highest score, the first one of equals. [n, 1]."""
    # On a CPU, argmax takes five times as long as max in half precision.
    if scores.element_size() < 4 and scores.device.type == "cpu":
        return scores.max(dim=-1, keepdim=True).indices
    return scores.argmax(dim=-1, keepdim=True)


def _top_masks(scores: Tensor, num_masks: int) -> Tensor:
    """Return the likeliest tokens after each mask token, and their probabilities.

    [n, 2 * MASK_TOP_K] int64; 0 in the rows of other nodes, and if the vocabulary is smaller. When
    sampling, scores include the position's noise: the first token is the one that the model draws
    if it agrees with the mask prediction.
    """
    found = torch.zeros(len(scores), 2, MASK_TOP_K, dtype=torch.int64, device=scores.device)
    rows = scores[-num_masks:].float()
    best = rows.topk(min(MASK_TOP_K, rows.shape[-1]), dim=-1)
    chances = (best.values - rows.logsumexp(-1, keepdim=True)).exp()
    count = best.indices.shape[-1]
    found[-num_masks:, 0, :count] = best.indices
    found[-num_masks:, 1, :count] = (chances * _PROBABILITY_SCALE).nan_to_num(0.0).long()
    return found.flatten(1)


_GREEDY = Sampler(Request((0,)))
