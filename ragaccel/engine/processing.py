"""Score processing: penalties, bans and forced tokens of a request, the caller's processors.

One state for the tokens committed so far, plus the path of each row: what a row's scores become
is what they would be had its tokens been generated one by one. Order and arithmetic are those of
transformers' ``generate``: all rows at once, in float32. Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ragaccel.checks import shown
from ragaccel.decoding.request import NO_RULES
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ragaccel.decoding.request import Request

_NEVER = float("-inf")


class ScoreProcessing:
    """What one request does to the scores of its rows before a token is chosen."""

    def __init__(self, request: Request) -> None:
        self._request, self._rules = request, request.score_rules
        rules = self._rules
        self._penalty = request.repetition_penalty
        self._bans = NgramBans(request.no_repeat_ngram_size)
        self._prompt_bans = NgramBans(rules.encoder_no_repeat_ngram_size)
        self._prompt_bans.extend(request.prompt_ids)
        self._biases = SequenceBiases(rules.sequence_bias)
        self._bad_words = SequenceBiases((words, _NEVER) for words in rules.bad_words_ids)
        self._processors: tuple[Any, ...] = tuple(request.processors)
        self._num_prompt = len(request.prompt_ids)
        self._min_new_tokens = request.min_new_tokens
        self._eos_ids = sorted(request.eos_ids)
        self._seen: Tensor | None = None
        self._masks: dict[str, Tensor] = {}
        self._marked: set[int] = set()
        self._num_marked = 0
        self._history: list[int] = []
        self.is_idle = not (
            self._penalty != 1.0
            or self._bans.size
            or self._processors
            or (self._min_new_tokens and self._eos_ids)
            or rules != NO_RULES
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
        scores = self._avoid_repeating(self._biases.add(scores, self._history, paths), paths)
        scores = self._bad_words.add(scores, self._history, paths)
        if self._min_new_tokens and self._eos_ids:
            scores = self._keep_going(scores, paths)
        if self._rules != NO_RULES:
            scores = self._force_and_suppress(scores, paths)
        if self._processors:
            shown = len(paths) - num_probes
            known = self._call_processors(scores[:shown], paths[:shown])
            scores = torch.cat((known, scores[shown:])) if num_probes else known
        return scores

    def _avoid_repeating(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        if self._rules.encoder_repetition_penalty != 1.0:
            mask = self._mask("prompt", self._request.prompt_ids, scores)
            penalty = 1 / self._rules.encoder_repetition_penalty
            scores = torch.where(mask, _penalized(scores, penalty), scores)
        if self._penalty != 1.0:
            scores = self._penalize(scores, paths)
        if self._bans.size:
            scores = self._ban(scores, self._bans.banned(paths))
        if self._prompt_bans.size:
            pairs = self._prompt_bans.followers(self._ends(paths, self._prompt_bans.size - 1))
            scores = self._ban(scores, pairs)
        return scores

    def _force_and_suppress(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        rules, request = self._rules, self._request
        lengths = [len(self._history) + len(path) for path in paths]
        if rules.forced_bos_token_id is not None:
            scores = self._force(scores, [rules.forced_bos_token_id], lengths, 1)
        if rules.forced_eos_token_id:
            last = self._num_prompt + request.max_new_tokens - 1
            scores = self._force(scores, rules.forced_eos_token_id, lengths, last)
        if rules.remove_invalid_values:
            limits = torch.finfo(scores.dtype)
            scores = scores.nan_to_num(0.0, posinf=limits.max, neginf=limits.min)
        if rules.exponential_decay_length_penalty is not None:
            scores = self._hasten(scores, lengths, *rules.exponential_decay_length_penalty)
        if rules.suppress_tokens:
            mask = self._mask("suppress", rules.suppress_tokens, scores)
            scores = scores.masked_fill(mask, _NEVER)
        if rules.begin_suppress_tokens:
            second = self._num_prompt == 1 and rules.forced_bos_token_id is not None
            first = self._num_prompt + second
            begins = torch.tensor([length == first for length in lengths], device=scores.device)
            mask = self._mask("begin", rules.begin_suppress_tokens, scores)
            scores = scores.masked_fill(begins[:, None] & mask, _NEVER)
        return scores

    def _force(
        self, scores: Tensor, token_ids: Sequence[int], lengths: Sequence[int], length: int
    ) -> Tensor:
        """Leave only these tokens to the rows that follow so many."""
        rows = [row for row, own in enumerate(lengths) if own == length]
        if not rows:
            return scores
        forced = torch.full_like(scores[0], _NEVER)
        forced[[token for token in token_ids if token < len(forced)]] = 0.0
        scores = scores.clone()
        scores[rows] = forced
        return scores

    def _hasten(self, scores: Tensor, lengths: Sequence[int], start: int, factor: float) -> Tensor:
        """Raise the end tokens, ever more the further a row is past ``start`` new tokens."""
        past = [length - self._num_prompt - start for length in lengths]
        ends = [token for token in self._eos_ids if token < scores.shape[-1]]
        if max(past) <= 0 or not ends:
            return scores
        more = [[_power(factor, count) - 1.0 if count > 0 else 0.0] for count in past]
        own = scores[:, ends]
        raised = own.abs() * torch.tensor(more, dtype=scores.dtype, device=scores.device)
        raised = raised.masked_fill(~own.isfinite(), 0.0)
        return scores.index_add(1, torch.tensor(ends, device=scores.device), raised)

    def _mask(self, name: str, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        """Tell of every token whether it is one of these, [V]; made once."""
        if name not in self._masks:
            mask = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
            mask[[token for token in token_ids if token < len(mask)]] = True
            self._masks[name] = mask
        return self._masks[name]

    def _ends(self, paths: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
        """The last ``size`` tokens before each row's choice, fewer where there are fewer."""
        return [_end(self._history, path, size) for path in paths]

    def _penalize(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Penalize what was committed, in all rows, and what is on a row's path, in that row.

        A prompt and its answer hold few of the vocabulary's tokens: the others are not looked at.
        """
        vocab_size = scores.shape[-1]
        seen = self._seen_tokens(scores)
        found = scores.index_copy(1, seen, _penalized(scores[:, seen], self._penalty))
        # An embedding may be wider than the scores; such tokens cannot be chosen nor penalized.
        pairs = [
            (row, token) for row, path in enumerate(paths) for token in path if token < vocab_size
        ]
        if not pairs:
            return found
        rows, tokens = torch.tensor(pairs, device=scores.device).unbind(1)
        return found.index_put_((rows, tokens), _penalized(scores[rows, tokens], self._penalty))

    def _seen_tokens(self, scores: Tensor) -> Tensor:
        """List the committed tokens, each once; brought up to date when asked."""
        if self._seen is None:
            self._seen = torch.zeros(0, dtype=torch.int64, device=scores.device)
        tokens = dict.fromkeys(self._history[self._num_marked :])
        self._num_marked = len(self._history)
        new = [token for token in tokens if token < scores.shape[-1] and token not in self._marked]
        if new:
            self._marked.update(new)
            self._seen = torch.cat((self._seen, torch.tensor(new, device=scores.device)))
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
                row_scores = _returned(processor, processor(ids, row_scores), row_scores)
            processed.append(row_scores)
        return torch.cat(processed)

    @staticmethod
    def _ban(scores: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        pairs = [(row, token) for row, token in pairs if token < scores.shape[-1]]
        if not pairs:
            return scores
        rows, tokens = torch.tensor(pairs, device=scores.device).unbind(1)
        return scores.index_put((rows, tokens), scores.new_full((), _NEVER))


def _returned(processor: Any, returned: Any, given: Tensor) -> Tensor:
    """What a processor of the caller's returns, which must be scores like those it was given."""
    wanted = f"scores of the shape {tuple(given.shape)} on {given.device}"
    if not isinstance(returned, torch.Tensor):
        what = shown(returned)
    elif returned.shape != given.shape or returned.device != given.device:
        what = f"a tensor of the shape {tuple(returned.shape)} on {returned.device}"
    elif not returned.is_floating_point():
        what = f"a tensor of {returned.dtype}"
    else:
        return returned
    raise ConfigurationError(
        f"the logits processor {shown(processor)} returns {what}, where {wanted} are wanted"
    )


class SequenceBiases:
    """Numbers added to a token's score wherever it would complete a sequence.

    Args:
        biases: sequences of token ids and what is added; for the same sequence the last counts.
    """

    def __init__(self, biases: Iterable[tuple[Sequence[int], float]]) -> None:
        self._single: dict[int, float] = {}
        # By the length of what comes before the last token, then by those tokens.
        self._longer: dict[int, dict[tuple[int, ...], dict[int, float]]] = {}
        for sequence, bias in biases:
            *before, last = sequence
            if not before:
                self._single[last] = bias
                continue
            of_length = self._longer.setdefault(len(before), {})
            of_length.setdefault(tuple(before), {})[last] = bias
        self._vector: Tensor | None = None

    def add(self, scores: Tensor, history: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Add them to scores [n, V]; row i follows ``history`` and ``paths[i]``."""
        if not self._single and not self._longer:
            return scores
        totals: dict[tuple[int, int], np.float32] = {}  # summed in the order of transformers
        for size, of_length in self._longer.items():
            for row, path in enumerate(paths):
                for token, bias in of_length.get(_end(history, path, size), {}).items():
                    first = np.float32(self._single.get(token, 0.0))
                    totals[row, token] = totals.get((row, token), first) + np.float32(bias)
        biased = scores + self._of_single(scores) if self._single else scores
        pairs = [pair for pair in totals if pair[1] < scores.shape[-1]]
        if not pairs:
            return biased
        rows, tokens = torch.tensor(pairs, device=scores.device).unbind(1)
        more = torch.tensor([float(totals[pair]) for pair in pairs], dtype=scores.dtype)
        return biased.index_put((rows, tokens), scores[rows, tokens] + more.to(scores.device))

    def _of_single(self, scores: Tensor) -> Tensor:
        """What sequences of one token add to every row, [V]; made once."""
        if self._vector is None:
            self._vector = torch.zeros_like(scores[0])
            for token, bias in self._single.items():
                if token < len(self._vector):
                    self._vector[token] = bias
        return self._vector


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

    def followers(self, ends: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
        """List (row, token) pairs: what followed, among committed tokens, each row's last ones."""
        pairs = [(row, self._followers.get(end, ())) for row, end in enumerate(ends)]
        return [(row, token) for row, tokens in pairs for token in tokens]

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


def _end(history: Sequence[int], path: Sequence[int], size: int) -> tuple[int, ...]:
    """The last ``size`` tokens of a history and a path behind it."""
    missing = size - len(path)
    before = history[max(0, len(history) - missing) :] if missing > 0 else ()
    return (*before, *path[max(0, len(path) - size) :]) if size else ()


def _penalized(scores: Tensor, penalty: float) -> Tensor:
    """Scores made lower, as all above 1 does, or higher."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _power(factor: float, count: int) -> float:
    try:
        return float(factor**count)
    except OverflowError:
        return float("inf")
