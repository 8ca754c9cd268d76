"""Score processing: repetition penalty, n-gram bans, the shortest answer, the caller's processors.

One state for the tokens committed so far, plus the path of each row: what a row's scores become
is what they would be had its tokens been generated one by one. Order and arithmetic are those of
transformers' ``generate``. Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ragaccel.decode.request import Request

_NEVER = float("-inf")


class ScoreProcessing:
    """What one request does to the scores of its rows before a token is chosen."""

    def __init__(self, request: Request) -> None:
        self._penalty = request.repetition_penalty
        self._bans = NgramBans(request.no_repeat_ngram_size)
        self._processors: tuple[Any, ...] = tuple(request.processors)
        self._num_prompt = len(request.prompt_ids)
        self._min_new_tokens = request.min_new_tokens
        self._eos_ids = sorted(request.eos_ids)
        self._seen: Tensor | None = None
        self._num_marked = 0
        self._history: list[int] = []
        self.is_idle = not (
            self._penalty != 1.0
            or self._bans.size
            or self._processors
            or (self._min_new_tokens and self._eos_ids)
        )

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the state that all later rows share."""
        if self.is_idle:
            return
        self._bans.extend(token_ids)
        self._history.extend(token_ids)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]], num_probes: int = 0) -> Tensor:
        """Process scores [n, V]; row i follows the committed tokens and ``paths[i]``.

        The last ``num_probes`` rows are guesses at what follows tokens not known yet: the caller's
        processors, which may rely on being shown a text, are not asked about them.
        """
        if self._penalty != 1.0:
            scores = self._penalize(scores, paths)
        if self._bans.size:
            scores = self._ban(scores, self._bans.banned(paths))
        if self._min_new_tokens and self._eos_ids:
            scores = self._keep_going(scores, paths)
        if self._processors:
            shown = len(paths) - num_probes
            known = self._call_processors(scores[:shown], paths[:shown])
            scores = torch.cat((known, scores[shown:])) if num_probes else known
        return scores

    def _penalize(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        num_rows, vocab_size = scores.shape
        # An embedding may be wider than the scores; such ids, which cannot be chosen nor
        # penalized, share a last column that is cut off again.
        seen = torch.zeros(num_rows, vocab_size + 1, dtype=torch.bool, device=scores.device)
        seen[:, :vocab_size] = self._seen_tokens(scores)
        width = max(map(len, paths))
        # Every path begins with the root: repeating it pads without adding a token.
        padded = [[*path, *[path[0]] * (width - len(path))] for path in paths]
        seen.scatter_(1, torch.tensor(padded, device=scores.device).clamp_(max=vocab_size), True)
        penalized = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(seen[:, :vocab_size], penalized, scores)

    def _seen_tokens(self, scores: Tensor) -> Tensor:
        """Tell of every token whether it was committed, [V]; brought up to date when asked."""
        if self._seen is None:
            self._seen = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
        new = [token for token in self._history[self._num_marked :] if token < scores.shape[-1]]
        self._num_marked = len(self._history)
        if new:
            self._seen[torch.tensor(new, device=scores.device)] = True
        return self._seen

    def _keep_going(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        known = len(self._history) - self._num_prompt
        early = [known + len(path) < self._min_new_tokens for path in paths]
        if not any(early):
            return scores
        pairs = [(row, eos) for row, soon in enumerate(early) if soon for eos in self._eos_ids]
        return self._ban(scores, pairs)

    def _call_processors(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        history = torch.tensor(self._history, device=scores.device, dtype=torch.int64)
        processed = []
        for row, path in enumerate(paths):
            tail = torch.tensor(list(path), device=scores.device, dtype=torch.int64)
            ids, row_scores = torch.cat((history, tail))[None], scores[row : row + 1].clone()
            for processor in self._processors:
                row_scores = processor(ids, row_scores)
            processed.append(row_scores)
        return torch.cat(processed)

    @staticmethod
    def _ban(scores: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        pairs = [(row, token) for row, token in pairs if token < scores.shape[-1]]
        if not pairs:
            return scores
        rows, tokens = torch.tensor(pairs, device=scores.device).unbind(1)
        return scores.index_put((rows, tokens), scores.new_full((), _NEVER))


class NgramBans:
    """The tokens that would repeat an n-gram: those that followed the last n - 1 tokens before.

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
        """List (row, token) pairs that may not follow the committed tokens and a row's path."""
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
