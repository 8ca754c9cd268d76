"""Planning: from a prompt, references and settings to a checked request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.decoding.request import Request, Sampling
from ragaccel.errors import ConfigurationError
from ragaccel.inputs import as_texts, read_prompt
from ragaccel.models.generation_config import TimeRule
from ragaccel.models.hf_processors import criterion_rules, logits_processors
from ragaccel.models.streaming import TextStopRule
from ragaccel.references import predicted_answers
from ragaccel.settings import SAMPLING, Settings, check_names, remembers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decoding.session import Drafter
    from ragaccel.inputs import AnyReference
    from ragaccel.models.generation_config import GenerationDefaults
    from ragaccel.models.hf_model import HuggingFaceModel
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.passage import Passage


@dataclass(frozen=True, slots=True)
class Plan:
    """One checked request, and what its answer will be made of."""

    request: Request
    drafter: Drafter | None
    remember: bool
    stop: TextStopRule
    passages: tuple[Passage, ...]
    dropped: tuple[Passage, ...]


def make_plan(
    model: HuggingFaceModel,
    tokenizer: Tokenizer,
    prompt: Any,
    references: Sequence[AnyReference],
    settings: Settings,
    *,
    defaults: GenerationDefaults,
    room: int | None,
) -> Plan:
    """Check what is asked for and put it into token ids.

    Args:
        model: decodes it.
        tokenizer: its tokenizer.
        prompt: one prompt of any kind.
        references: texts its answer is likely to repeat.
        settings: what the request sets.
        defaults: what the model's generation config sets, where the request does not.
        room: most tokens of a prompt with its answer; ``None`` where there is no limit.

    Raises:
        ConfigurationError: a prompt or setting that cannot work.
        TypeError: a setting that there is not.
    """
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    check_names(given)
    built = read_prompt(prompt, references, tokenizer, model.vocab_size)
    eos_ids = defaults.eos_ids(tokenizer.eos_ids)
    more = defaults.complete(
        given,
        num_prompt=len(built.token_ids),
        eos_ids=eos_ids,
        room=room,
        vocab_size=model.vocab_size,
    )
    if "stop" in given:
        stop = TextStopRule(as_texts("stop", given.pop("stop")), tokenizer)
    else:  # where generate looks for them: in the prompt's end as well
        stop = TextStopRule(more.stop_strings, tokenizer, after=built.token_ids)
    given |= more.settings
    timed = () if more.max_seconds is None else (TimeRule(more.max_seconds),)
    criteria = given.pop("stopping_criteria", ())
    processors = given.pop("logits_processors", ())
    drafter, remember = given.pop("drafter", None), remembers(settings)
    check_probes(drafter, model)
    given.pop("remember", None)
    predictions = as_texts("prediction", given.pop("prediction", ()))
    sampling = Sampling(**{name: given.pop(name) for name in SAMPLING & given.keys()})
    predicted = predicted_answers(predictions, tokenizer, built.token_ids)
    request = Request(
        prompt_ids=built.token_ids,
        references=(*built.references, *predicted),
        sampling=sampling,
        eos_ids=eos_ids,
        stop_rules=(stop, *timed, *criterion_rules(criteria, built.token_ids, model.device)),
        score_rules=more.score_rules,
        processors=(*logits_processors(processors), *more.processors),
        **given,
    )
    return Plan(request, drafter, remember, stop, built.passages, built.dropped)


def check_probes(drafter: Drafter | None, model: Any) -> None:
    """Raise ConfigurationError for a drafter that wants mask tokens the model does not read."""
    limit = model.vocab_size + model.num_masks
    if drafter is not None and max(drafter.probe_ids, default=0) >= limit:
        raise ConfigurationError(
            f"this drafter wants the mask token {max(drafter.probe_ids)}, and the model reads ids "
            f"below {limit}: load it with a SPACE adapter (space=...) and give llm.probe_ids"
        )
