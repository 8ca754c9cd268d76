"""LLM: a local language model that completes prompts, copying from references where it can."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, overload

from ragaccel.answer import Answer, Stream
from ragaccel.decode.request import Request, Sampling
from ragaccel.decode.session import Session
from ragaccel.draft.copying import CopyDrafter
from ragaccel.engine.engine import Engine
from ragaccel.errors import ConfigurationError
from ragaccel.homes import cost_file
from ragaccel.inputs import is_batch, read_prompt, references_of_each
from ragaccel.models.caller_rules import criterion_rules, logits_processors
from ragaccel.models.detokenizer import IncrementalDecoder
from ragaccel.models.huggingface import HuggingFaceModel
from ragaccel.models.load import bundled_reader_path, end_tokens, load_model
from ragaccel.models.stop_strings import TextStopRule
from ragaccel.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from typing_extensions import Unpack

    from ragaccel.decode.interfaces import Drafter
    from ragaccel.inputs import AnyReference, Batch, OnePrompt
    from ragaccel.passage import Passage

_SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})


class Settings(TypedDict, total=False):
    """What a single request may set; everything has a default.

    Attributes:
        max_new_tokens: most tokens of an answer, 256 by default.
        min_new_tokens: no end token counts before so many.
        temperature: 0 (the default) takes the likeliest token, more samples.
        top_k: sample from so many likeliest tokens; 0 is off.
        top_p: sample from the likeliest tokens that hold this much probability; 1 is off.
        min_p: leave out tokens below this share of the likeliest one's probability; 0 is off.
        seed: the same seed gives the same text, with or without drafting.
        repetition_penalty: as in transformers; 1 is off.
        no_repeat_ngram_size: never repeat an n-gram of this size; 0 is off.
        stop: strings at the first of which the answer ends; never part of the answer.
        logits_processors: transformers' LogitsProcessors, pure functions of (ids, scores); one
            with a true attribute ``stateful`` is fine too, and turns drafting off.
        stopping_criteria: transformers' StoppingCriteria, asked after every token.
        drafter: where guesses come from, in place of the LLM's own.
        namespace: keeps what is learned from one tenant's requests apart.
    """

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    stop: str | Sequence[str]
    logits_processors: Sequence[Any]
    stopping_criteria: Sequence[Any]
    drafter: Drafter | None
    namespace: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """One checked request, and what its answer will be made of."""

    request: Request
    drafter: Drafter
    stop: TextStopRule
    passages: tuple[Passage, ...]
    dropped: tuple[Passage, ...]


class LLM:
    """A language model and its tokenizer, ready to complete prompts.

    Takes ready objects of transformers as well as what ``load`` makes of a name. Calls from
    several threads are safe. Nothing is kept between requests.

    Args:
        model: a causal language model of transformers, or a ``HuggingFaceModel``.
        tokenizer: its tokenizer, of transformers or a ``Tokenizer``.
        drafter: where guesses come from; ``CopyDrafter()`` by default.
        capacity: most tokens of a prompt with its answer; the model's own limit by default.
        token_budget: most guesses a verify pass takes; by default what pays at measured cost.

    Raises:
        ModelRefusedError: the model cannot be decoded exactly; the message names the cause.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        drafter: Drafter | None = None,
        capacity: int | None = None,
        token_budget: int | None = None,
    ) -> None:
        self.model = model if isinstance(model, HuggingFaceModel) else HuggingFaceModel(model)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer, eos_ids=end_tokens(self.model.model, tokenizer))
        self.tokenizer: Tokenizer = tokenizer
        kept = cost_file(self.model.cost_key)
        self.engine = Engine(self.model, capacity=capacity, cost_file=kept)
        self.drafter: Drafter = CopyDrafter() if drafter is None else drafter
        self.token_budget = token_budget

    @classmethod
    def load(
        cls,
        name_or_path: str | Path | None = None,
        *,
        dtype: Any = "auto",
        device: Any = None,
        device_map: Any = None,
        drafter: Drafter | None = None,
        capacity: int | None = None,
        token_budget: int | None = None,
        **model_kwargs: Any,
    ) -> LLM:
        """Load a model by its folder or its name on the hub.

        Without a name the bundled reader is loaded, without any network, and stderr says so.
        ``model_kwargs`` go to transformers' ``from_pretrained``.

        Raises:
            ModelNotFoundError: there is no such folder or model.
            ModelRefusedError: the model cannot be decoded exactly; the message names the cause.
        """
        if name_or_path is None:
            name_or_path = bundled_reader_path()
            sys.stderr.write(
                "ragaccel: no model named, so the bundled reader answers: it quotes one sentence "
                "and names its passage\n"
            )
        model, tokenizer = load_model(
            str(name_or_path), dtype=dtype, device=device, device_map=device_map, **model_kwargs
        )
        return cls(model, tokenizer, drafter=drafter, capacity=capacity, token_budget=token_budget)

    @property
    def context_length(self) -> int | None:
        """Most tokens of a prompt with its answer; None where the model has no limit."""
        return self.engine.max_tokens

    def count_tokens(self, text: str) -> int:
        """How many tokens a text takes, without special ones."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    @overload
    def generate(
        self,
        prompt: OnePrompt,
        *,
        references: Sequence[AnyReference] = ...,
        **settings: Unpack[Settings],
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: Batch,
        *,
        references: Sequence[AnyReference] | Sequence[Sequence[AnyReference]] = ...,
        **settings: Unpack[Settings],
    ) -> list[Answer]: ...

    def generate(
        self, prompt: Any, *, references: Sequence[Any] = (), **settings: Unpack[Settings]
    ) -> Answer | list[Answer]:
        """Complete a prompt: greedily and exactly as the model alone would, only sooner.

        A ``str`` is completed as it is; a list of messages (``{"role": ..., "content": ...}``)
        goes through the chat template; a list of ints is token ids; a ``Prompt`` is what
        ``build_prompt`` made. A list of those is a batch, answered one by one, with the same
        references for all or a list of references for each.

        ``references`` are texts the answer is likely to repeat: strings, passages, or token ids
        as ``Reference``. They need not be in the prompt and never change the answer. Texts among
        them are the ``passages`` in which the answer's copied spans are looked up.

        Raises:
            ConfigurationError: a prompt or setting that cannot work, before anything is computed.
            CapacityError: prompt and answer do not fit the context.
        """
        if not is_batch(prompt):
            return self._stream(self._plan(prompt, references, settings)).finish()
        each = references_of_each(references, len(prompt))
        plans = [self._plan(one, own, settings) for one, own in zip(prompt, each, strict=True)]
        return [self._stream(plan).finish() for plan in plans]

    def stream(
        self,
        prompt: OnePrompt,
        *,
        references: Sequence[AnyReference] = (),
        **settings: Unpack[Settings],
    ) -> Stream:
        """Complete one prompt piece by piece; arguments and errors are those of ``generate``.

        The request is checked here and computed while the stream is iterated, by the thread that
        iterates it.
        """
        if is_batch(prompt):
            raise ConfigurationError("a stream takes one prompt: call stream for each of a batch")
        return self._stream(self._plan(prompt, references, settings))

    def _stream(self, plan: _Plan) -> Stream:
        return Stream(self._pieces(plan), plan.passages)

    def _pieces(self, plan: _Plan) -> Generator[str, None, Answer]:
        request = plan.request
        pieces: list[str] = []
        with closing(self.engine.open(request)) as verifier:
            session = Session(verifier, plan.drafter, request, token_budget=self.token_budget)
            decoder, text = IncrementalDecoder(self.tokenizer), plan.stop.hold_back()
            for step in session:
                ended = session.finish_reason == "stop" and step.token_ids[-1] in request.eos_ids
                pieces.append(text.push(decoder.push(step.token_ids[: -1 if ended else None])))
                if pieces[-1]:
                    yield pieces[-1]
        pieces.append(text.push(decoder.finish()) + text.finish())
        if pieces[-1]:
            yield pieces[-1]
        return Answer.of("".join(pieces), session.result(), plan.passages, plan.dropped)

    def _plan(self, prompt: Any, references: Sequence[AnyReference], settings: Settings) -> _Plan:
        given: dict[str, Any] = {n: value for n, value in settings.items() if value is not None}
        _check_names(given)
        stop = TextStopRule(_as_strings(given.pop("stop", ())), self.tokenizer)
        criteria = given.pop("stopping_criteria", ())
        processors = given.pop("logits_processors", ())
        drafter = given.pop("drafter", self.drafter)
        sampling = Sampling(**{name: given.pop(name) for name in _SAMPLING & given.keys()})
        built = read_prompt(prompt, references, self.tokenizer, self.model.vocab_size)
        request = Request(
            prompt_ids=built.token_ids,
            references=built.references,
            sampling=sampling,
            eos_ids=frozenset(self.tokenizer.eos_ids),
            stop_rules=(stop, *criterion_rules(criteria, built.token_ids, self.model.device)),
            processors=logits_processors(processors),
            **given,
        )
        self.engine.check_fits(request)
        return _Plan(request, drafter, stop, built.passages, built.dropped)


def _check_names(settings: Mapping[str, Any]) -> None:
    unknown = sorted(settings.keys() - Settings.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown setting {', '.join(unknown)}: there are {', '.join(Settings.__annotations__)}"
        )


def _as_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) and string for string in strings):
        raise ConfigurationError("stop is a string or a list of strings, none of them empty")
    return strings
