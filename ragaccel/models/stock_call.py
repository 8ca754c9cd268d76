"""Stock call: what transformers' generate hands to a decoding loop, checked and cut into rows.

Shapes: B rows of the batch, L tokens of the padded prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ragaccel.decoding.request import Request
from ragaccel.errors import ConfigurationError
from ragaccel.models.caller_rules import is_stateful
from ragaccel.models.stock_rules import (
    RowProcessors,
    end_ids,
    ends_rows_with_padding,
    longest,
    make_sampling,
    other_rules,
    split_processors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ragaccel.decoding.request import Reference

_OWN = "custom_generate=ragaccel.custom_generate"
_HARMLESS = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache",
    "cache_position", "logits_to_keep", "num_logits_to_keep", "return_dict",
    "token_type_ids"})  # fmt: skip
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class StockCall:
    """One call of a decoding loop of transformers.

    Args:
        input_ids: the prompts, padded on the left. [B, L]
        attention_mask: 0 where there is padding; None where there is none. [B, L]
        processors: the logits processors, those that ``generate`` made itself included.
        criteria: the stopping criteria, likewise.
        config: how to generate.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    processors: Sequence[Any]
    criteria: Sequence[Any]
    config: Any

    @property
    def num_rows(self) -> int:
        """How many sequences there are."""
        return self.input_ids.shape[0]

    @property
    def pads(self) -> bool:
        """Whether a row that has ended is padded, or goes on until all others have ended."""
        return ends_rows_with_padding(self.criteria)

    def prompt(self, row: int) -> list[int]:
        """The tokens of a prompt, without padding."""
        ids: list[int] = self.input_ids[row, self._num_padding(row) :].tolist()
        return ids

    def check(self, model_kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigurationError for what cannot be done, or not exactly as it would be."""
        _check_mode(self.config)
        _check_inputs(model_kwargs)
        _check_positions(model_kwargs.get("position_ids"), self.attention_mask, self.input_ids)
        for row in range(self.num_rows):
            if not self._is_whole(row):
                raise ConfigurationError(
                    f"row {row} of the batch is not padded on the left alone, or empty: set the "
                    "tokenizer's padding_side='left', and pass its attention_mask"
                )
        if self.num_rows > 1 and any(map(is_stateful, self.processors)):
            names = [type(one).__name__ for one in self.processors if is_stateful(one)]
            raise ConfigurationError(
                f"{names[0]} remembers earlier calls, and rows end at different times: give one "
                f"prompt a call, or leave out {_OWN}"
            )

    def request(
        self, row: int, references: Sequence[Reference], seed: int, namespace: str
    ) -> Request:
        """What is asked for of one row."""
        num_padding = self._num_padding(row)
        settings, sampling, others = split_processors(
            self.processors, row=row, num_padding=num_padding, sampled=self.config.do_sample
        )
        if others:
            padding = self.input_ids[row, :num_padding]
            processors = RowProcessors(others, padding, row=row, num_rows=self.num_rows)
            settings["processors"] = (processors,)
        return Request(
            prompt_ids=tuple(self.prompt(row)),
            references=tuple(references),
            sampling=make_sampling(sampling, seed),
            max_new_tokens=longest(self.criteria, self.input_ids.shape[1]),
            eos_ids=end_ids(self.criteria),
            stop_rules=other_rules(self.criteria, self.input_ids[row]),
            namespace=namespace,
            **settings,
        )

    def output(self, answers: Sequence[Sequence[int]]) -> Any:
        """Put prompts and answers together, as ``generate`` returns them."""
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

    def _is_whole(self, row: int) -> bool:
        if self.attention_mask is None:
            return self.input_ids.shape[1] > 0
        return bool(self.attention_mask[row, self._num_padding(row) :].all()) and bool(
            self.attention_mask[row].any()
        )


def _check_mode(config: Any) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigurationError(
            f"{mode.value.replace('_', ' ')} is not what {_OWN} does: it chooses greedily or by "
            "sampling, and drafts by itself; leave out num_beams and the like, or custom_generate"
        )
    wanted = [name for name in _OUTPUTS if getattr(config, name, None)]
    if config.return_dict_in_generate and wanted:
        raise ConfigurationError(
            f"{wanted[0]}=True is not given by {_OWN}: passes run over drafts, several tokens at a "
            "time; leave out one of the two"
        )


def _check_inputs(model_kwargs: Mapping[str, Any]) -> None:
    token_types = model_kwargs.get("token_type_ids")
    typed = token_types is not None and bool(token_types.any())
    unknown = [name for name in model_kwargs.keys() - _HARMLESS if model_kwargs[name] is not None]
    for name in sorted([*unknown, *["token_type_ids"] * typed]):
        raise ConfigurationError(f"{_OWN} reads token ids only: leave out {name}")
    cache = model_kwargs.get("past_key_values")
    is_users = getattr(cache, "_is_user_defined", False)
    if is_users or (cache is not None and cache.get_seq_length() > 0):
        raise ConfigurationError(
            f"{_OWN} keeps states by itself, of what earlier prompts began with too: leave out "
            "past_key_values, and give whole prompts"
        )


def _check_positions(positions: Tensor | None, mask: Tensor | None, ids: Tensor) -> None:
    """Only the positions that every model counts itself are known."""
    if positions is None:
        return
    seen = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype).to(ids.device)
    counted = seen.cumsum(-1) - 1
    shape_fits = positions.dim() == 2 and positions.shape[1] == ids.shape[1]
    if not shape_fits or not bool(((positions.to(ids.device) == counted) | (seen == 0)).all()):
        raise ConfigurationError(f"{_OWN} counts positions by itself: leave out position_ids")
