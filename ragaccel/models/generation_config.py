"""Generation config: translate a model's own generation settings into request settings.

``generate`` reads some sixty fields. Each is in one of three lists here: honoured; refused, because
LLM does not implement what the field asks for; or without influence on greedy tokens. Sampling
fields are in the last list. They apply when a request asks for sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any

from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ragaccel.decoding.request import MAX_NEW_TOKENS, NO_RULES, ScoreRules
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set

HONOURED = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "eos_token_id", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "max_length", "max_new_tokens", "max_time",
    "min_length", "min_new_tokens", "no_repeat_ngram_size", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "sequence_bias", "stop_strings", "suppress_tokens",
})  # fmt: skip
"""Fields that change greedy answers, in ``generate`` and in LLM alike."""

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

    ``settings`` are fields of a ``Request`` and its ``Sampling``, by name. ``processors`` are
    logits processors for options that have no such field.
    """

    settings: dict[str, Any]
    score_rules: ScoreRules = NO_RULES
    stop_strings: tuple[str, ...] = ()
    processors: tuple[Any, ...] = ()
    max_seconds: float | None = None


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
        self._read_ids("eos_token_id")
        if (self._value("max_length") or 2) != 1:  # no prompt fits in a length of 1
            self.complete({})

    def eos_ids(self, otherwise: frozenset[int]) -> frozenset[int]:
        """Return the end tokens if they were overridden or changed since this object was made.

        Otherwise return ``otherwise``.
        """
        overrides, now = self._overrides.get("eos_token_id"), self._model_value("eos_token_id")
        if overrides is None and (now is None or now == self._initial_eos_ids):
            return otherwise
        return frozenset(self._read_ids("eos_token_id"))

    def complete(
        self,
        settings: Mapping[str, Any],
        *,
        num_prompt: int = 1,
        eos_ids: Set[int] = frozenset(),
        max_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> RequestDefaults:
        """Return the model's own values for the settings that a request leaves unset.

        Args:
            settings: the request's own settings, which stay unchanged.
            num_prompt: number of prompt tokens.
            eos_ids: the tokens that end the answer.
            max_tokens: limit for the prompt and its answer together; ``None`` for no limit.
            vocab_size: upper bound of token ids; ``None`` skips that check.

        Raises:
            ConfigurationError: a field is invalid, or the prompt is as long as ``max_length``.
        """
        self._refuse()
        processor_names = {type(one).__name__ for one in settings.get("logits_processors", ())}
        found: dict[str, Any] = {}
        if "max_new_tokens" not in settings:
            found |= self._max_new_tokens(num_prompt, max_tokens)
        for name, kind, read in _PENALTIES:
            if name not in settings and kind not in processor_names:
                found |= self._read_optional(name, getattr(self, read))
        if "min_new_tokens" not in settings and (minimum := self._min_new_tokens(num_prompt)):
            maximum = settings.get("max_new_tokens", found.get("max_new_tokens", MAX_NEW_TOKENS))
            found["min_new_tokens"] = min(minimum, maximum) if isinstance(maximum, int) else minimum
        sampling: dict[str, Any] = {}
        processors: tuple[Any, ...] = ()
        if self._is_sampled(settings):
            sampling, processors = self._sampling(settings)
        return RequestDefaults(
            found | sampling,
            self._without_overridden(processor_names, self._score_rules(eos_ids, vocab_size)),
            () if "stop" in settings else self._read_strings("stop_strings"),
            processors,
            self._read_optional("max_time", self._read_number).get("max_time"),
        )

    def _model_value(self, name: str) -> Any:
        return getattr(getattr(self._model, "generation_config", None), name, None)

    def _value(self, name: str) -> Any:
        overrides = self._overrides.get(name)
        return self._model_value(name) if overrides is None else overrides

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

    def _is_sampled(self, settings: Mapping[str, Any]) -> bool:
        if "temperature" in settings:
            return bool(settings["temperature"] != 0.0)
        return bool(self._overrides.get("do_sample")) and self._value("temperature") != 0.0

    def _sampling(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Return sampling settings that the request leaves unset, and logits processors.

        If a field has no setting in ragaccel, all filters become logits processors.
        """
        found: dict[str, Any] = {} if "temperature" in settings else {"temperature": 1.0}
        for name, read in _SAMPLING_SETTINGS.items():
            if name not in settings:
                found |= self._read_optional(name, getattr(self, read))
        others = {
            name: value
            for name in ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
            for value in self._read_optional(name, self._read_number).values()
            if value != _OFF[name]
        }
        if not others:
            return found, ()
        asked = {name: settings[name] for name in _SAMPLING_SETTINGS.keys() & settings.keys()}
        return _NEUTRAL_SAMPLING, tuple(_warpers({**found, **asked, **others}))

    def _score_rules(self, eos_ids: Set[int], vocab_size: int | None) -> ScoreRules:
        found: dict[str, Any] = {}
        found |= self._read_optional("encoder_repetition_penalty", self._read_number)
        found |= self._read_optional("encoder_no_repeat_ngram_size", self._read_integer)
        if forced := self._read_ids("forced_bos_token_id", vocab_size):
            found["forced_bos_token_id"] = forced[0]
        found["forced_eos_token_id"] = self._read_ids("forced_eos_token_id", vocab_size)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            found[name] = self._read_ids(name)
        for name in ("remove_invalid_values", "renormalize_logits"):
            found[name] = bool(self._value(name))
        found |= self._read_optional("exponential_decay_length_penalty", self._read_decay)
        found["sequence_bias"] = tuple(self._read_biases(vocab_size))
        words = self._check_sequences(
            "bad_words_ids", self._value("bad_words_ids") or (), vocab_size
        )
        ends = {(token,) for token in eos_ids}  # banning these is ignored, as in transformers
        found["bad_words_ids"] = tuple(word for word in words if word not in ends)
        return ScoreRules(**found)

    @staticmethod
    def _without_overridden(processor_names: Set[str], rules: ScoreRules) -> ScoreRules:
        """Drop the rules for which the caller passes transformers' own processor."""
        off = {
            name: _RULES_OFF[name]
            for kind, name in _RULE_OF_PROCESSOR.items()
            if kind in processor_names
        }
        return replace(rules, **off) if off else rules

    def _max_new_tokens(self, num_prompt: int, max_tokens: int | None) -> dict[str, int]:
        maximum = self._read_optional("max_new_tokens", self._read_integer).get("max_new_tokens")
        if maximum is None:
            length = self._read_optional("max_length", self._read_integer).get("max_length")
            if length is None:
                return {}
            if length <= num_prompt:
                raise ConfigurationError(
                    f"the model's generation_config sets max_length={length:,}, and the prompt "
                    f"alone has {num_prompt:,} tokens: give max_new_tokens"
                )
            maximum = length - num_prompt
        if maximum < 1:
            raise self._field_error("max_new_tokens", "1 or more")
        # A default must not make a request exceed the context length.
        return {
            "max_new_tokens": maximum
            if max_tokens is None
            else max(1, min(maximum, max_tokens - num_prompt))
        }

    def _min_new_tokens(self, num_prompt: int) -> int:
        minimum = self._read_optional("min_new_tokens", self._read_integer).get("min_new_tokens")
        if minimum is None:
            minimum = (
                self._read_optional("min_length", self._read_integer).get("min_length", 0)
                - num_prompt
            )
        return int(max(0, minimum))

    def _read_optional(self, name: str, read: Callable[[str], Any]) -> dict[str, Any]:
        return {} if self._value(name) is None else {name: read(name)}

    def _read_number(self, name: str) -> float:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self._field_error(name, "a number")
        if name in _POSITIVE and value <= 0:
            raise self._field_error(name, "above 0")
        return float(value)

    def _read_integer(self, name: str) -> int:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._field_error(name, "a whole number, 0 or more")
        return value

    def _read_ids(self, name: str, vocab_size: int | None = None) -> tuple[int, ...]:
        value = self._value(name)
        if value is None:
            return ()
        found = self._check_sequences(
            name, [[value] if isinstance(value, int) else value], vocab_size
        )
        return tuple(token for one in found for token in one if token >= 0)

    def _check_sequences(
        self, name: str, value: Any, vocab_size: int | None
    ) -> tuple[tuple[int, ...], ...]:
        """Check and return lists of token ids; ``value`` is all or part of the field's value."""
        if hasattr(value, "tolist"):
            value = value.tolist()
        try:
            found = tuple(tuple(one) for one in value if len(one))
        except TypeError:
            raise self._field_error(name, "made of token ids") from None
        for token in (token for one in found for token in one):
            minimum = -1 if name in _MAY_BE_MINUS_ONE else 0
            if isinstance(token, bool) or not isinstance(token, int) or token < minimum:
                raise self._field_error(name, "made of token ids")
            if vocab_size is not None and token >= vocab_size:
                raise self._field_error(
                    name, f"of token ids below {vocab_size:,}, the vocabulary's size"
                )
        return found

    def _read_biases(self, vocab_size: int | None) -> Iterable[tuple[tuple[int, ...], float]]:
        value = self._value("sequence_bias")
        try:
            pairs = [tuple(pair) for pair in (value.items() if hasattr(value, "items") else value)]
            sequences, biases = [pair[0] for pair in pairs], [float(pair[1]) for pair in pairs]
        except (TypeError, ValueError, IndexError):
            if value is None:
                return
            raise self._field_error("sequence_bias", "pairs of token ids and a number") from None
        for sequence, bias in zip(sequences, biases, strict=True):
            for ids in self._check_sequences("sequence_bias", [sequence], vocab_size):
                yield ids, bias

    def _read_strings(self, name: str) -> tuple[str, ...]:
        value = self._value(name)
        if value is None:
            return ()
        found = (value,) if isinstance(value, str) else value
        if not isinstance(found, list | tuple) or not all(
            isinstance(one, str) and one for one in found
        ):
            raise self._field_error(name, "a string or a list of strings, none of them empty")
        return tuple(found)

    def _read_decay(self, name: str) -> tuple[int, float]:
        value = self._value(name)
        try:
            start, factor = value
            return int(start), float(factor)
        except (TypeError, ValueError):
            raise self._field_error(name, "a pair of a start and a factor") from None

    def _field_error(self, name: str, wanted: str) -> ConfigurationError:
        return ConfigurationError(
            f"{name} of the model's generation_config must be {wanted}, not {self._value(name)!r}"
        )


class TimeRule:
    """Stop rule: end the answer at the first step that ends after a time limit.

    Args:
        seconds: the limit, counted from the creation of the rule.
    """

    def __init__(self, seconds: float) -> None:
        self._until = monotonic() + seconds

    def cut(self, token_ids: Sequence[int], start: int) -> int | None:  # noqa: ARG002
        """Return the number of tokens so far once the time is up, else None."""
        return len(token_ids) if monotonic() >= self._until else None


_PENALTIES = (
    ("repetition_penalty", "RepetitionPenaltyLogitsProcessor", "_read_number"),
    ("no_repeat_ngram_size", "NoRepeatNGramLogitsProcessor", "_read_integer"),
)
_POSITIVE = frozenset({"repetition_penalty", "encoder_repetition_penalty"})
# Some files use -1 for "no token".
_MAY_BE_MINUS_ONE = frozenset({"begin_suppress_tokens", "eos_token_id", "suppress_tokens"})
_SAMPLING_SETTINGS = {
    "temperature": "_read_number",
    "top_k": "_read_integer",
    "top_p": "_read_number",
    "min_p": "_read_number",
}
_OFF = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
_NEUTRAL_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_WARPERS: tuple[tuple[str, Any, Any], ...] = (  # in transformers' order
    ("temperature", 1.0, TemperatureLogitsWarper),
    ("top_h", None, TopHLogitsWarper),
    ("top_k", 0, TopKLogitsWarper),
    ("top_p", 1.0, TopPLogitsWarper),
    ("min_p", 0.0, MinPLogitsWarper),
    ("typical_p", 1.0, TypicalLogitsWarper),
    ("epsilon_cutoff", 0.0, EpsilonLogitsWarper),
    ("eta_cutoff", 0.0, EtaLogitsWarper),
)
# transformers' processor for each rule; a processor that the caller passes replaces the rule.
_RULE_OF_PROCESSOR = {
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "LogitNormalization": "renormalize_logits",
}
_RULES_OFF = {name: getattr(NO_RULES, name) for name in _RULE_OF_PROCESSOR.values()}


def _warpers(settings: Mapping[str, Any]) -> Iterable[Any]:
    for name, off, make in _WARPERS:
        value = settings.get(name)
        if value is None or value == off:
            continue
        try:
            yield make(value)
        except ValueError as error:
            raise ConfigurationError(f"{name} of the model's generation_config: {error}") from error


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
