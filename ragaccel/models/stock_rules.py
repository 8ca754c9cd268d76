"""Stock rules: what transformers' generate prepared for its own loop, as the rules of requests.

Shapes: B rows of the batch, P padding tokens before a row's prompt, L tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragaccel.decoding.request import Sampling
from ragaccel.models.caller_rules import CriterionRule, is_stateful

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ragaccel.decoding.request import StopRule

_NEVER = -float("inf")
# In the order in which they are applied, by transformers and by us.
_WARPERS = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)
# Those of transformers that treat every row of a batch alike, wherever it stands.
_ALIKE_FOR_ROWS = frozenset(
    f"{name}LogitsProcessor"
    for name in (
        "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove", "MinLength", "MinNewTokensLength",
        "NoBadWords", "NoRepeatNGram", "SequenceBias", "SuppressTokens", "SuppressTokensAtBegin",
    )
) | frozenset(
    f"{name}LogitsWarper"
    for name in ("Epsilon", "Eta", "MinP", "Temperature", "TopH", "TopK", "TopP", "Typical")
) | {"ExponentialDecayLengthPenalty", "LogitNormalization"}  # fmt: skip


class RowProcessors:
    """The logits processors of a batch, for one of its rows.

    They are given what transformers' loop would give them: the row with its padding, scores in
    float32, on the device of the batch, and where they may tell the rows of a batch apart, this
    row at its place among copies of itself.

    Args:
        processors: pure functions of (ids [B, L], scores [B, V]).
        padding: what stands before the row's prompt. [P]
        row: which of the batch it is.
        num_rows: how many there are.
    """

    def __init__(
        self, processors: Iterable[Any], padding: Tensor, *, row: int, num_rows: int
    ) -> None:
        self._processors, self._padding = tuple(processors), padding
        self._row, self._num_rows = row, num_rows
        self.stateful = any(map(is_stateful, self._processors))

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores [1, V] of the row, which holds these tokens [1, L - P] now."""
        device = self._padding.device
        ids = torch.cat((self._padding[None], token_ids.to(device)), dim=1)
        processed = scores.to(device, torch.float32)
        for processor in self._processors:
            processed = self._apply(processor, ids, processed)
        return processed.to(scores.device)

    def _apply(self, processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
        processed: Tensor
        if self._num_rows == 1 or _is_alike_for_rows(processor):
            processed = processor(ids, scores)
            return processed
        processed = processor(ids.repeat(self._num_rows, 1), scores.repeat(self._num_rows, 1))
        return processed[self._row : self._row + 1]


def split_processors(
    processors: Sequence[Any], *, row: int, num_padding: int, sampled: bool
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Tell the processors that we have of our own, for all rows of a pass, from the others.

    Returns:
        Settings of a ``Request``, settings of a ``Sampling``, and the others in order.
    """
    rest = list(processors)
    request: dict[str, Any] = {}
    if not num_padding:  # theirs see the padding
        if rest and _penalizes_all(rest[0], row):
            request["repetition_penalty"] = rest.pop(0).penalty
        if rest and type(rest[0]) is NoRepeatNGramLogitsProcessor:
            request["no_repeat_ngram_size"] = rest.pop(0).ngram_size
    sampling: dict[str, Any] = {"temperature": 1.0} if sampled else {}
    for kind, name in reversed(_WARPERS if sampled else ()):
        if rest and type(rest[-1]) is kind and _is_usual(rest[-1]):
            sampling[name] = getattr(rest.pop(), name)
    return request, sampling, rest


def end_ids(criteria: Iterable[Any]) -> frozenset[int]:
    """The end tokens among stopping criteria."""
    return frozenset(
        int(token)
        for criterion in criteria
        if type(criterion) is EosTokenCriteria
        for token in criterion.eos_token_id
    )


def longest(criteria: Iterable[Any], num_prompt: int) -> int:
    """How many new tokens the maximal lengths among stopping criteria leave; at least one."""
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    return max(1, min(lengths) - num_prompt)


def other_rules(criteria: Iterable[Any], row: Tensor) -> tuple[StopRule, ...]:
    """The other stopping criteria as rules of a row [L], which they see with its padding."""
    return tuple(
        CriterionRule(criterion, row.tolist(), row.device)
        for criterion in criteria
        if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)
    )


def ends_rows_with_padding(criteria: Iterable[Any]) -> bool:
    """Whether a row that has ended is padded, or goes on until all others have ended."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


def make_sampling(settings: dict[str, Any], seed: int) -> Sampling:
    """How a row chooses: greedily without settings."""
    return Sampling(**settings, seed=seed)


def _is_alike_for_rows(processor: Any) -> bool:
    kind = type(processor)
    is_stock = kind.__module__ == NoRepeatNGramLogitsProcessor.__module__
    return is_stock and kind.__name__ in _ALIKE_FOR_ROWS


def _penalizes_all(processor: Any, row: int) -> bool:
    if type(processor) is not RepetitionPenaltyLogitsProcessor:
        return False
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):
        ignored = int(ignored[row])
    return not ignored


def _is_usual(warper: Any) -> bool:
    """Whether it is as ``generate`` makes it; one may also be told to keep more, or all but one."""
    keeps_one = getattr(warper, "min_tokens_to_keep", 1) == 1
    drops = getattr(warper, "filter_value", _NEVER) == _NEVER
    return keeps_one and drops and getattr(warper, "top_p", 1.0) > 0.0
