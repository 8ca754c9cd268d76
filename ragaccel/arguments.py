"""Arguments: names that a class or a call does not take are refused, with what to use instead."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from ragaccel.errors import UnknownArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_HERE = "the model runs in this process, and nothing is sent anywhere"
_PENALTY = "repetition_penalty=1.1 or no_repeat_ngram_size=3 discourage repetition"
_LOGPROBS = (
    "answers hold token ids without probabilities; score an answer with one forward pass of the "
    "transformers model"
)
_LOADING = "it is an option of loading, which goes to model_kwargs={...}"

ELSEWHERE: Mapping[str, str] = {
    "base_url": _HERE,
    "best_of": "call once for each answer, with another seed",
    "do_sample": "temperature=0 takes the likeliest token, more samples",
    "early_stopping": "one answer is decoded, exactly as greedy or sampled decoding would",
    "eos_token_id": 'the model\'s own end tokens count, and stop=["..."]',
    "frequency_penalty": _PENALTY,
    "keep_alive": "the model stays loaded as long as an object holds it",
    "length_penalty": "one answer is decoded, exactly as greedy or sampled decoding would",
    "logit_bias": "logits_processors=[...] of a call, such as SequenceBiasLogitsProcessor",
    "logprobs": _LOGPROBS,
    "max_length": "max_new_tokens counts the answer alone",
    "num_beams": "one answer is decoded, exactly as greedy or sampled decoding would",
    "organization": _HERE,
    "pipeline_kwargs": "give its settings by their own names, such as max_tokens=64",
    "presence_penalty": _PENALTY,
    "reasoning": 'chat_template_kwargs={"enable_thinking": ...}, if the template reads that',
    "stopping_ids": 'stop=["..."], or stopping_criteria=[...] in a call',
    "streamer": "the methods that stream give the pieces",
    "top_logprobs": _LOGPROBS,
    **dict.fromkeys(
        ("attn_implementation", "cache_dir", "load_in_4bit", "load_in_8bit", "local_files_only",
         "quantization_config", "revision", "trust_remote_code"),
        _LOADING,
    ),
}  # fmt: skip
"""Names that other classes and libraries take, and what to use in their place."""

_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "num_beams": (None, 1),
    "presence_penalty": (None, 0),
    "top_logprobs": (None, 0),
}


def says_nothing(name: str, value: object) -> bool:
    """Whether another library's name has the value that asks for nothing, as a penalty of 0."""
    return name in _WITHOUT_EFFECT and value in _WITHOUT_EFFECT[name]


def check_arguments(
    who: str,
    given: Iterable[str],
    known: Iterable[str],
    instead: Mapping[str, str] | None = None,
) -> None:
    """Refuse names that there are not.

    Args:
        who: the class, or "a call".
        given: the names that came.
        known: the names that there are.
        instead: advice for names of other libraries, before that of ``ELSEWHERE``.

    Raises:
        UnknownArgumentError: a name that there is not; the message says what to use instead.
    """
    names = sorted(known)
    unknown = sorted(set(given).difference(names))
    if unknown:
        advice = {**ELSEWHERE, **(instead or {})}
        told = [f"{name}: {advice[name]}" for name in unknown if name in advice]
        others = [_corrected(name, names) for name in unknown if name not in advice]
        listed = [f"there are {', '.join(names)}"] if others else []
        raise UnknownArgumentError(f"{who} takes no {'; '.join([*told, *others, *listed])}")


def _corrected(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"{name}: did you mean {close[0]}?" if close else name
