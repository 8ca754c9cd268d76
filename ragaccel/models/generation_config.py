"""Generation config: translate a model's own generation settings into request settings.

``generate`` reads some sixty fields. Each is in one of three lists here: honoured; refused, because
LLM does not implement what the field asks for; or without influence on greedy tokens. Sampling
fields are in the last list. They apply when a request asks for sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import GenerationConfig, MaxTimeCriteria

from ragaccel.decoding.request import MAX_NEW_TOKENS
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set


REFUSED: Mapping[str, tuple[Any, str]] = {
    "num_beams": (1, "beam search"),
    "num_beam_groups": (1, "beam search in groups"),
    "constraints": (None, "constrained beam search"),
    "force_words_ids": (None, "constrained beam search"),
    "penalty_alpha": (0.0, "contrastive search"),
    "dola_layers": (None, "DoLa decoding, which contrasts layers"),
    "guidance_scale": (1.0, "classifier-free guidance, a second pass over another prompt"),
    "watermarking_config": (None, "watermarks"),
    "token_healing": (False, "token healing, which changes the prompt's last tokens"),
    "is_assistant": (False, "stopping early as an assistant model"),
    "num_return_sequences": (1, "several answers to one prompt"),
    "cache_implementation": (None, "a quantized cache, which rounds keys and values"),
}
"""Fields that LLM does not implement: the value that asks for nothing, and the missing feature."""

SAMPLING = frozenset({
    "do_sample", "epsilon_cutoff", "eta_cutoff", "min_p", "temperature", "top_h", "top_k", "top_p",
    "typical_p",
})  # fmt: skip
"""Fields that shape sampling. Sampling is off unless a request or LLM(...) asks for it."""

WITHOUT_INFLUENCE = SAMPLING | frozenset({
    # options of the cache and of passes
    "cache_config", "compile_config", "continuous_batching_config", "disable_compile",
    "low_memory", "max_cache_len", "prefill_chunk_size", "use_cache",
    # outputs besides tokens
    "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "return_dict_in_generate",
    # other ways of drafting, which do not change tokens
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "speculation_type",
    "target_lookbehind", "use_mtp",
    # scores of beams
    "diversity_penalty", "early_stopping", "length_penalty",
    # tokens for padding, empty prompts and encoders
    "bos_token_id", "decoder_start_token_id", "pad_token_id",
    "transformers_version",
})  # fmt: skip
"""Fields that do not change greedy answers."""

_LOSSY_CACHE = "quantized"


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Settings for a request, taken from the model's generation config.

    ``settings`` are fields of a ``Request`` and its ``Sampling``, by name. ``processors`` are the
    caller's logits processors, and transformers' own for options that have no such field.
    """

    settings: dict[str, Any]
    stop_strings: tuple[str, ...]
    processors: tuple[Any, ...]
    criteria: tuple[Any, ...]


class GenerationDefaults:
    """A model's generation settings, read anew for every request.

    Args:
        model: a transformers model, or any object with a ``generation_config``.
        overrides: fields that replace the model's own, as a mapping or a ``GenerationConfig``.

    Raises:
        ConfigurationError: a field is unknown, has an invalid value, or asks for a feature that
            LLM does not have.
    """

    def __init__(
        self, model: Any, overrides: Mapping[str, Any] | GenerationConfig | None = None
    ) -> None:
        self._model, self._overrides = model, _as_fields(overrides)
        self._initial_eos_ids = self._model_value("eos_token_id")
        self._read("eos_token_id")
        if (self._value("max_length") or 2) != 1:  # no prompt fits in a length of 1
            self.complete({})

    def eos_ids(self, otherwise: frozenset[int]) -> frozenset[int]:
        """Return the end tokens if they were overridden or changed since this object was made.

        Otherwise return ``otherwise``.
        """
        overrides, now = self._overrides.get("eos_token_id"), self._model_value("eos_token_id")
        if overrides is None and (now is None or now == self._initial_eos_ids):
            return otherwise
        return frozenset(self._read("eos_token_id"))

    def complete(
        self,
        settings: Mapping[str, Any],
        *,
        prompt_ids: Sequence[int] = (0,),
        eos_ids: Set[int] = frozenset(),
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> RequestDefaults:
        """Return the model's own values for the settings that a request leaves unset.

        Args:
            settings: the request's own settings, which stay unchanged.
            prompt_ids: the prompt's tokens.
            eos_ids: the tokens that end the answer.
            max_tokens: limit for the prompt and its answer together; ``None`` for no limit.
            vocab_size: upper bound of token ids; ``None`` skips that check.
            device: the device of the scores.

        Raises:
            ConfigurationError: a field is invalid, or the prompt is as long as ``max_length``.
        """
        self._refuse()
        num_prompt, found = len(prompt_ids), dict[str, Any]()
        if "max_new_tokens" not in settings:
            found |= self._max_new_tokens(num_prompt, max_tokens)
        maximum = settings.get("max_new_tokens", found.get("max_new_tokens", MAX_NEW_TOKENS))
        if "min_new_tokens" not in settings and (minimum := self._min_new_tokens(num_prompt)):
            found["min_new_tokens"] = min(minimum, maximum) if isinstance(maximum, int) else minimum
        begins_later = num_prompt == 1 and self._value("forced_bos_token_id") is not None
        eos = torch.tensor(sorted(eos_ids), dtype=torch.int64)
        options: dict[str, Callable[[], dict[str, Any]]] = {
            "bad_words_ids": lambda: {"eos_token_id": eos},
            "begin_suppress_tokens": lambda: {"begin_index": num_prompt + begins_later},
            "exponential_decay_length_penalty": lambda: {
                "eos_token_id": eos, "input_ids_seq_length": num_prompt
            },
            "forced_eos_token_id": lambda: {"max_length": num_prompt + maximum},
        }  # fmt: skip
        for name in ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty"):
            options[name] = lambda: {
                "encoder_input_ids": torch.tensor([list(prompt_ids)], device=device)
            }
        processors, penalties = self._processors(settings, options, vocab_size)
        sampling: dict[str, Any] = {}
        if self._is_sampled(settings):
            sampling, warpers = self._sampling(settings)
            processors += warpers
        if self._read("renormalize_logits"):
            processors.append(transformers.LogitNormalization())
        seconds = self._read("max_time")
        return RequestDefaults(
            found | penalties | sampling,
            () if "stop" in settings else self._read("stop_strings") or (),
            tuple(processors),
            () if seconds is None else (MaxTimeCriteria(seconds),),
        )

    def _model_value(self, name: str) -> Any:
        return getattr(getattr(self._model, "generation_config", None), name, None)

    def _value(self, name: str) -> Any:
        overrides = self._overrides.get(name)
        return self._model_value(name) if overrides is None else overrides

    def _read(self, name: str, vocab_size: int | None = None) -> Any:
        """Return a field's checked value, or None if it is not set."""
        value = self._value(name)
        if value is None:
            return None
        read, wanted = _READERS[name]
        try:
            found = read(value.tolist() if hasattr(value, "tolist") else value)
        except (TypeError, ValueError, IndexError):
            raise self._field_error(name, wanted) from None
        if vocab_size is not None and max(_token_ids(found), default=0) >= vocab_size:
            raise self._field_error(
                name, f"of token ids below {vocab_size:,}, the vocabulary's size"
            )
        return found

    def _field_error(self, name: str, wanted: str) -> ConfigurationError:
        return ConfigurationError(
            f"{name} of the model's generation_config must be {wanted}, not {self._value(name)!r}"
        )

    def _refuse(self) -> None:
        for name, (harmless, what) in REFUSED.items():
            value = self._value(name)
            if value is None or value == harmless or (harmless is None and not value):
                continue
            if name == "cache_implementation" and value != _LOSSY_CACHE:
                continue
            off = False if harmless is None else harmless
            raise ConfigurationError(
                f"the model's generation_config sets {name}={value!r} ({what}), which LLM does not "
                f"support: set model.generation_config.{name} = {harmless!r}, or give LLM "
                f"generation_config={{{name!r}: {off!r}}}"
            )
        for name in _unknown_fields():
            if self._value(name) is not None:
                raise ConfigurationError(
                    f"the model's generation_config sets {name}={self._value(name)!r}, which this "
                    f"version of ragaccel does not know: set model.generation_config.{name} = None"
                )

    def _processors(
        self,
        settings: Mapping[str, Any],
        options: Mapping[str, Callable[[], dict[str, Any]]],
        vocab_size: int | None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return logits processors in the order of ``generate``, and the penalties of a request.

        A caller's processor replaces the model's of the same class. The engine applies penalties
        of a request before all processors, so one that has to come later is a processor too.
        """
        callers = list(settings.get("logits_processors", ()))
        made: list[Any] = []
        penalties: dict[str, Any] = {}
        for name, off, kind, keyword in _PROCESSORS:
            is_penalty = name in _PENALTIES
            value = settings.get(name) if is_penalty else None
            if value is None:
                value = self._read(name, vocab_size if name in _OF_VOCABULARY else None)
            if value is None or value == off:
                continue
            replacing = [one for one in callers if type(one) is kind]
            if is_penalty and not made and not replacing:
                penalties[name] = value
                continue
            given = {keyword: value} if keyword else {}
            made += replacing or [_make(name, kind, **given, **options.get(name, dict)())]
            if is_penalty:
                penalties[name] = off
        return [*made, *(one for one in callers if one not in made)], penalties

    def _is_sampled(self, settings: Mapping[str, Any]) -> bool:
        if "temperature" in settings:
            return bool(settings["temperature"] != 0.0)
        return bool(self._overrides.get("do_sample")) and self._value("temperature") != 0.0

    def _sampling(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return sampling settings that the request leaves unset, and logits processors.

        If a field has no setting in ragaccel, all filters become logits processors.
        """
        values = {"temperature": 1.0}
        for name, off, _ in _WARPERS:
            value = settings.get(name) if name in _NEUTRAL_SAMPLING else None
            value = self._read(name) if value is None else value
            if value is not None and (name in _NEUTRAL_SAMPLING or value != off):
                values[name] = value
        if values.keys() <= _NEUTRAL_SAMPLING.keys():
            return {name: values[name] for name in values.keys() - settings.keys()}, []
        return _NEUTRAL_SAMPLING, [
            _make(name, kind, values[name])
            for name, off, kind in _WARPERS
            if values.get(name, off) != off
        ]

    def _max_new_tokens(self, num_prompt: int, max_tokens: int | None) -> dict[str, int]:
        maximum, length = self._read("max_new_tokens"), self._read("max_length")
        if maximum is None:
            if length is None:
                return {}
            if length <= num_prompt:
                raise ConfigurationError(
                    f"the model's generation_config sets max_length={length:,}, and the prompt "
                    f"alone has {num_prompt:,} tokens: give max_new_tokens"
                )
            maximum = length - num_prompt
        if max_tokens is not None:  # a default must not make a request exceed the context length
            maximum = max(1, min(maximum, max_tokens - num_prompt))
        return {"max_new_tokens": maximum}

    def _min_new_tokens(self, num_prompt: int) -> int:
        minimum = self._read("min_new_tokens")
        if minimum is None:
            minimum = (self._read("min_length") or 0) - num_prompt
        return int(max(0, minimum))


def _make(name: str, kind: Callable[..., Any], *value: Any, **options: Any) -> Any:
    try:
        return kind(*value, **options)
    except ValueError as error:
        raise ConfigurationError(f"{name} of the model's generation_config: {error}") from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise TypeError
    return float(value)


def _positive_number(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError
    return value


def _positive_whole(value: Any) -> int:
    if _whole(value) < 1:
        raise ValueError
    return int(value)


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(map(_whole, [value] if isinstance(value, int) else value))


def _ids_or_none(value: Any) -> tuple[int, ...]:
    """Read token ids; some files use -1 for "no token"."""
    values = [value] if isinstance(value, int) else value
    return _ids([one for one in values if isinstance(one, bool) or one != -1])


def _words(value: Any) -> list[list[int]]:
    if any(isinstance(word, int) for word in value):
        raise TypeError
    return [list(_ids(word)) for word in value if len(word)]


def _biases(value: Any) -> dict[tuple[int, ...], float]:
    pairs = value.items() if hasattr(value, "items") else value
    return {_ids(list(pair[0])): float(pair[1]) for pair in pairs if len(pair[0])}


def _decay(value: Any) -> tuple[int, torch.Tensor]:
    start, factor = value  # a large power of a tensor is infinite, and no error
    return int(start), torch.tensor(float(factor), dtype=torch.float64)


def _strings(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(o, str) and o for o in found):
        raise TypeError
    return tuple(found)


def _token_ids(value: Any) -> Iterator[int]:
    """Yield the token ids in a value that one of the functions above returned."""
    for one in (value,) if isinstance(value, int) else value:
        yield from one if isinstance(one, list | tuple) else (one,)


_READERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    name: (read, wanted)
    for read, wanted, names in (
        (_number, "a number", ("epsilon_cutoff", "eta_cutoff", "max_time", "min_p", "temperature",
                               "top_h", "top_p", "typical_p")),
        (_positive_number, "a number above 0",
         ("encoder_repetition_penalty", "repetition_penalty")),
        (_whole, "a whole number, 0 or more",
         ("encoder_no_repeat_ngram_size", "forced_bos_token_id", "max_length", "min_length",
          "min_new_tokens", "no_repeat_ngram_size", "top_k")),
        (_positive_whole, "a whole number, 1 or more", ("max_new_tokens",)),
        (_ids, "made of token ids", ("forced_eos_token_id",)),
        (_ids_or_none, "made of token ids",
         ("begin_suppress_tokens", "eos_token_id", "suppress_tokens")),
        (_words, "made of token ids", ("bad_words_ids",)),
        (_biases, "pairs of token ids and a number", ("sequence_bias",)),
        (_decay, "a pair of a start and a factor", ("exponential_decay_length_penalty",)),
        (_strings, "a string or a list of strings, none of them empty", ("stop_strings",)),
        (bool, "a bool", ("remove_invalid_values", "renormalize_logits")),
    )
    for name in names
}  # fmt: skip
HONOURED = frozenset(_READERS) - SAMPLING
"""Fields that change greedy answers, in ``generate`` and in LLM alike."""

_PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")  # fields of a request as well
_OF_VOCABULARY = frozenset({
    "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias"
})  # fmt: skip
# In the order of transformers: a field, the value that turns it off, its logits processor, and the
# processor's argument for the value.
_PROCESSORS: Sequence[tuple[str, Any, Callable[..., Any], str]] = (
    ("sequence_bias", {}, transformers.SequenceBiasLogitsProcessor, "sequence_bias"),
    ("encoder_repetition_penalty", 1.0,
     transformers.EncoderRepetitionPenaltyLogitsProcessor, "penalty"),
    ("repetition_penalty", 1.0, transformers.RepetitionPenaltyLogitsProcessor, "penalty"),
    ("no_repeat_ngram_size", 0, transformers.NoRepeatNGramLogitsProcessor, "ngram_size"),
    ("encoder_no_repeat_ngram_size", 0,
     transformers.EncoderNoRepeatNGramLogitsProcessor, "encoder_ngram_size"),
    ("bad_words_ids", [], transformers.NoBadWordsLogitsProcessor, "bad_words_ids"),
    ("forced_bos_token_id", None, transformers.ForcedBOSTokenLogitsProcessor, "bos_token_id"),
    ("forced_eos_token_id", (), transformers.ForcedEOSTokenLogitsProcessor, "eos_token_id"),
    ("remove_invalid_values", False, transformers.InfNanRemoveLogitsProcessor, ""),
    ("exponential_decay_length_penalty", (), transformers.ExponentialDecayLengthPenalty,
     "exponential_decay_length_penalty"),
    ("suppress_tokens", (), transformers.SuppressTokensLogitsProcessor, "suppress_tokens"),
    ("begin_suppress_tokens", (),
     transformers.SuppressTokensAtBeginLogitsProcessor, "begin_suppress_tokens"),
)  # fmt: skip
_NEUTRAL_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_WARPERS: Sequence[tuple[str, Any, Callable[[Any], Any]]] = (  # in transformers' order
    ("temperature", 1.0, transformers.TemperatureLogitsWarper),
    ("top_h", None, transformers.TopHLogitsWarper),
    ("top_k", 0, transformers.TopKLogitsWarper),
    ("top_p", 1.0, transformers.TopPLogitsWarper),
    ("min_p", 0.0, transformers.MinPLogitsWarper),
    ("typical_p", 1.0, transformers.TypicalLogitsWarper),
    ("epsilon_cutoff", 0.0, transformers.EpsilonLogitsWarper),
    ("eta_cutoff", 0.0, transformers.EtaLogitsWarper),
)


def _as_fields(overrides: Mapping[str, Any] | GenerationConfig | None) -> dict[str, Any]:
    if isinstance(overrides, GenerationConfig):
        return dict(vars(overrides))
    if not (overrides is None or hasattr(overrides, "keys")):
        raise ConfigurationError(
            "generation_config must be a GenerationConfig or a dict of its fields, not "
            f"{overrides!r}"
        )
    fields = dict(overrides or {})
    if unknown := sorted(fields.keys() - _known_fields(), key=str):
        raise ConfigurationError(
            f"generation_config has no field {unknown[0]!r}: see transformers.GenerationConfig"
        )
    return fields


@cache
def _known_fields() -> frozenset[str]:
    return HONOURED | REFUSED.keys() | WITHOUT_INFLUENCE


@cache
def _unknown_fields() -> tuple[str, ...]:
    """List fields of the installed transformers that are in none of the lists above."""
    made: Any = GenerationConfig
    fields = {name for name in vars(made()) if not name.startswith("_")}
    return tuple(sorted(fields - _known_fields()))
