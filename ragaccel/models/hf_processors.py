"""Convert the logits processors and stopping criteria of ``generate`` into request settings.

Shapes: B rows of the batch, P padding tokens before a row's prompt, L tokens of the padded prompt
and the answer so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

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
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ragaccel.decoding.request import Request, Sampling
from ragaccel.errors import ConfigurationError, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from ragaccel.decoding.request import Reference


# transformers' processors that keep state between calls, so that each token counts once only.
_STATEFUL = frozenset(
    {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
)


class CriterionRule:
    """Stop rule that calls a StoppingCriteria after every token, on the prompt and the answer.

    Args:
        criterion: called with (ids [1, L], None); must return a bool or a [1] bool tensor.
        prompt_ids: the request's prompt.
        device: device of the ids that the criterion gets.
    """

    def __init__(
        self,
        criterion: Callable[..., Any],
        prompt_ids: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self._criterion = criterion
        self._prompt = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=device)

    def cut(self, token_ids: Sequence[int], start: int) -> int | None:
        """Return the number of answer tokens when the criterion first holds; None if never."""
        answer = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._prompt.device)
        ids = torch.cat((self._prompt, answer), dim=1)
        num_prompt = self._prompt.shape[1]
        for end in range(start + 1, len(token_ids) + 1):
            done = self._criterion(ids[:, : num_prompt + end], None)
            try:
                holds = bool(done.all() if isinstance(done, torch.Tensor) else done)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"the stopping criterion {brief(self._criterion)} returns {brief(done)}: it "
                    "must return a bool or a bool tensor"
                ) from error
            if holds:
                return end
        return None


def make_criterion_rules(
    criteria: Iterable[Callable[..., Any]],
    prompt_ids: Sequence[int],
    device: torch.device | str = "cpu",
) -> tuple[CriterionRule, ...]:
    """Convert a StoppingCriteriaList, or any iterable of criteria, to stop rules."""
    return tuple(CriterionRule(criterion, prompt_ids, device) for criterion in criteria)


class StatefulProcessor:
    """A logits processor that must see each token once, in order, which forces plain decoding."""

    stateful = True

    def __init__(self, processor: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._processor = processor

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores of one row."""
        return self._processor(token_ids, scores)


def is_stateful(processor: Any) -> bool:
    """Return whether a logits processor is known to keep state between calls."""
    return type(processor).__name__ in _STATEFUL or bool(getattr(processor, "stateful", False))


def logits_processors(processors: Iterable[Callable[..., Any]]) -> tuple[Any, ...]:
    """Return processors for a request: stateful ones wrapped, or stock ones joined for batches."""
    wrapped = tuple(StatefulProcessor(one) if is_stateful(one) else one for one in processors)
    if wrapped and all(map(_is_row_independent, wrapped)):
        return (BatchProcessors(wrapped),)
    return wrapped


class BatchProcessors:
    """Logits processors of transformers that treat each row of a batch by itself."""

    takes_batches = True

    def __init__(self, processors: Sequence[Callable[[Tensor, Tensor], Tensor]]) -> None:
        self._processors = processors

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores of several rows of equal length."""
        for processor in self._processors:
            scores = processor(token_ids, scores)
        return scores


_MINUS_INFINITY = -float("inf")
# In the order in which transformers and the engine apply them.
_WARPERS = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)
# transformers' processors whose result for a row depends on that row alone.
_ROW_INDEPENDENT = frozenset(
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
    """The logits processors of a batch, applied to one of its rows.

    They get what transformers' loop would pass: the row with its padding, and scores in float32 on
    the device of the batch. Processors that may depend on the row's index get B copies of the row,
    and the copy with that index counts.

    Args:
        processors: pure functions of (ids [B, L], scores [B, V]).
        padding: the padding tokens before the row's prompt. [P]
        row: index of the row in the batch.
        num_rows: number of rows in the batch: B.
    """

    def __init__(
        self, processors: Iterable[Any], padding: Tensor, *, row: int, num_rows: int
    ) -> None:
        self._processors, self._padding = tuple(processors), padding
        self._row, self._num_rows = row, num_rows
        self.stateful = any(map(is_stateful, self._processors))

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the row's scores [1, V] after its tokens [1, L - P]."""
        device = self._padding.device
        ids = torch.cat((self._padding[None], token_ids.to(device)), dim=1)
        processed = scores.to(device, torch.float32)
        for processor in self._processors:
            processed = self._apply(processor, ids, processed)
        return processed.to(scores.device)

    def _apply(self, processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
        processed: Tensor
        if self._num_rows == 1 or _is_row_independent(processor):
            processed = processor(ids, scores)
            return processed
        processed = processor(ids.repeat(self._num_rows, 1), scores.repeat(self._num_rows, 1))
        return processed[self._row : self._row + 1]


def split_processors(
    processors: Sequence[Any], *, row: int, num_padding: int, sampled: bool
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Split processors into request settings, sampling settings and the remaining ones.

    Settings are applied to all rows of a pass at once, processors to one row at a time.

    Returns:
        Settings of a ``Request``, settings of a ``Sampling``, and the other processors in order.
    """
    rest = list(processors)
    request: dict[str, Any] = {}
    if not num_padding:  # transformers' processors also process padding
        if rest and _penalizes_prompt(rest[0], row):
            request["repetition_penalty"] = rest.pop(0).penalty
        if rest and type(rest[0]) is NoRepeatNGramLogitsProcessor:
            request["no_repeat_ngram_size"] = rest.pop(0).ngram_size
    sampling: dict[str, Any] = {"temperature": 1.0} if sampled else {}
    for kind, name in reversed(_WARPERS if sampled else ()):
        if rest and type(rest[-1]) is kind and _has_default_options(rest[-1]):
            sampling[name] = getattr(rest.pop(), name)
    return request, sampling, rest


def _is_row_independent(processor: Any) -> bool:
    kind = type(processor)
    is_stock = kind.__module__ == NoRepeatNGramLogitsProcessor.__module__
    return is_stock and kind.__name__ in _ROW_INDEPENDENT


def _penalizes_prompt(processor: Any, row: int) -> bool:
    if type(processor) is not RepetitionPenaltyLogitsProcessor:
        return False
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):
        ignored = int(ignored[row])
    return not ignored


def _has_default_options(warper: Any) -> bool:
    """Return whether a warper's other options are the defaults that ``generate`` uses."""
    keeps_one = getattr(warper, "min_tokens_to_keep", 1) == 1
    drops = getattr(warper, "filter_value", _MINUS_INFINITY) == _MINUS_INFINITY
    return keeps_one and drops and getattr(warper, "top_p", 1.0) > 0.0


_CUSTOM_GENERATE = "custom_generate=ragaccel.custom_generate"
_HARMLESS = frozenset({"attention_mask", "position_ids", "cache", "past_key_values", "use_cache",
    "cache_position", "logits_to_keep", "num_logits_to_keep", "return_dict",
    "token_type_ids"})  # fmt: skip
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The arguments of one call of transformers' decoding loop.

    Args:
        input_ids: the prompts, padded on the left. [B, L]
        attention_mask: 0 for padding, 1 for tokens; None if there is no padding. [B, L]
        processors: the logits processors, including those that ``generate`` made.
        criteria: the stopping criteria, including those that ``generate`` made.
        config: the generation config.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    processors: Sequence[Any]
    criteria: Sequence[Any]
    config: Any

    @property
    def num_rows(self) -> int:
        """Number of sequences: B."""
        return self.input_ids.shape[0]

    @property
    def pads_finished_rows(self) -> bool:
        """True if finished rows are padded, False if they continue until all rows end."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    def prompt(self, row: int) -> list[int]:
        """Return the tokens of a row's prompt, without padding."""
        ids: list[int] = self.input_ids[row, self._num_padding(row) :].tolist()
        return ids

    def check(self, model_kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigurationError for arguments that would change what ``generate`` returns."""
        _check_mode(self.config)
        _check_inputs(model_kwargs)
        _check_positions(model_kwargs.get("position_ids"), self.attention_mask, self.input_ids)
        for row in range(self.num_rows):
            if not self._is_left_padded(row):
                raise ConfigurationError(
                    f"row {row} of the batch is empty, or not padded on the left only: set the "
                    "tokenizer's padding_side='left', and pass its attention_mask"
                )
        if self.num_rows > 1 and any(map(is_stateful, self.processors)):
            names = [type(one).__name__ for one in self.processors if is_stateful(one)]
            raise ConfigurationError(
                f"{names[0]} keeps state between calls, and rows end at different times: pass "
                f"one prompt per call, or leave out {_CUSTOM_GENERATE}"
            )

    def request(
        self, row: int, references: Sequence[Reference], seed: int, namespace: str
    ) -> Request:
        """Make the request for one row."""
        num_padding, ids = self._num_padding(row), self.input_ids[row]
        ends = [
            int(token)
            for one in self.criteria
            if type(one) is EosTokenCriteria
            for token in one.eos_token_id
        ]
        lengths = [one.max_length for one in self.criteria if type(one) is MaxLengthCriteria]
        known = (EosTokenCriteria, MaxLengthCriteria)
        others = [one for one in self.criteria if type(one) not in known]
        settings, sampling, rest = split_processors(
            self.processors, row=row, num_padding=num_padding, sampled=self.config.do_sample
        )
        if rest:
            settings["processors"] = (
                RowProcessors(rest, ids[:num_padding], row=row, num_rows=self.num_rows),
            )
        return Request(
            prompt_ids=tuple(self.prompt(row)),
            references=tuple(references),
            sampling=Sampling(**sampling, seed=seed),
            max_new_tokens=max(1, min(lengths) - self.input_ids.shape[1]),
            eos_ids=frozenset(ends),
            stop_rules=make_criterion_rules(others, ids.tolist(), ids.device),
            namespace=namespace,
            **settings,
        )

    def output(self, answers: Sequence[Sequence[int]]) -> Any:
        """Join prompts and answers in the form that ``generate`` returns."""
        width = max(map(len, answers))
        padding = getattr(self.config, "_pad_token_tensor", None)
        pad = 0 if padding is None else int(padding)
        rows = [[*answer, *[pad] * (width - len(answer))] for answer in answers]
        new = torch.tensor(rows, dtype=self.input_ids.dtype, device=self.input_ids.device)
        sequences = torch.cat((self.input_ids, new), dim=1)
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences))
        return sequences

    def _num_padding(self, row: int) -> int:
        if self.attention_mask is None:
            return 0
        return int((self.attention_mask[row] == 0).sum())

    def _is_left_padded(self, row: int) -> bool:
        if self.attention_mask is None:
            return self.input_ids.shape[1] > 0
        return bool(self.attention_mask[row, self._num_padding(row) :].all()) and bool(
            self.attention_mask[row].any()
        )


def _check_mode(config: Any) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigurationError(
            f"{mode.value.replace('_', ' ')} is not supported by {_CUSTOM_GENERATE}, which decodes "
            "greedily or by sampling and drafts by itself: leave out num_beams and the like, or "
            "custom_generate"
        )
    wanted = [name for name in _OUTPUTS if getattr(config, name, None)]
    if config.return_dict_in_generate and wanted:
        raise ConfigurationError(
            f"{wanted[0]}=True is not supported by {_CUSTOM_GENERATE}, whose passes verify several "
            "tokens at a time: leave out one of the two"
        )


def _check_inputs(model_kwargs: Mapping[str, Any]) -> None:
    token_types = model_kwargs.get("token_type_ids")
    typed = token_types is not None and bool(token_types.any())
    unknown = [name for name in model_kwargs.keys() - _HARMLESS if model_kwargs[name] is not None]
    for name in sorted([*unknown, *["token_type_ids"] * typed]):
        raise ConfigurationError(f"{_CUSTOM_GENERATE} reads token ids only: leave out {name}")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    is_users = getattr(cache, "_is_user_defined", False)
    if is_users or (cache is not None and cache.get_seq_length() > 0):
        raise ConfigurationError(
            f"{_CUSTOM_GENERATE} keeps its own cache, also of prefixes of earlier prompts: leave "
            "out past_key_values (cache), and pass whole prompts"
        )


def _check_positions(positions: Tensor | None, mask: Tensor | None, ids: Tensor) -> None:
    """Raise ConfigurationError if positions do not count the unmasked tokens from 0."""
    if positions is None:
        return
    seen = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype).to(ids.device)
    counted = seen.cumsum(-1) - 1
    shape_fits = positions.dim() == 2 and positions.shape[1] == ids.shape[1]
    if not shape_fits or not bool(((positions.to(ids.device) == counted) | (seen == 0)).all()):
        raise ConfigurationError(
            f"{_CUSTOM_GENERATE} counts positions by itself: leave out position_ids"
        )
