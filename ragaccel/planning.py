"""Planning: from a prompt, references and settings to a checked request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel.decode.request import Request, Sampling
from ragaccel.errors import ConfigurationError
from ragaccel.inputs import as_texts, read_prompt
from ragaccel.models.caller_rules import criterion_rules, logits_processors
from ragaccel.models.stop_strings import TextStopRule
from ragaccel.references import predicted_answers
from ragaccel.settings import SAMPLING, Settings, check_names, remembers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.decode.interfaces import Drafter
    from ragaccel.inputs import AnyReference
    from ragaccel.models.huggingface import HuggingFaceModel
    from ragaccel.models.parallel import ParallelModel
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
    model: HuggingFaceModel | ParallelModel,
    tokenizer: Tokenizer,
    prompt: Any,
    references: Sequence[AnyReference],
    settings: Settings,
) -> Plan:
    """Check what is asked for and put it into token ids.

    Raises:
        ConfigurationError: a prompt or setting that cannot work.
        TypeError: a setting that there is not.
    """
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    check_names(given)
    stop = TextStopRule(as_texts("stop", given.pop("stop", ())), tokenizer)
    criteria = given.pop("stopping_criteria", ())
    processors = given.pop("logits_processors", ())
    drafter, remember = given.pop("drafter", None), remembers(settings)
    check_probes(drafter, model)
    given.pop("remember", None)
    predictions = as_texts("prediction", given.pop("prediction", ()))
    sampling = Sampling(**{name: given.pop(name) for name in SAMPLING & given.keys()})
    built = read_prompt(prompt, references, tokenizer, model.vocab_size)
    predicted = predicted_answers(predictions, tokenizer, built.token_ids)
    request = Request(
        prompt_ids=built.token_ids,
        references=(*built.references, *predicted),
        sampling=sampling,
        eos_ids=frozenset(tokenizer.eos_ids),
        stop_rules=(stop, *criterion_rules(criteria, built.token_ids, model.device)),
        processors=logits_processors(processors),
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
