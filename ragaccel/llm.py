"""LLM: a local language model that completes prompts, copying from references where it can."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from ragaccel.answer import Answer, Stream
from ragaccel.decode.request import Request, Sampling
from ragaccel.engine.engine import Engine
from ragaccel.errors import ConfigurationError
from ragaccel.guessing import Guessing
from ragaccel.homes import cost_file
from ragaccel.inputs import as_texts, is_batch, read_prompt, references_of_each
from ragaccel.models.caller_rules import criterion_rules, logits_processors
from ragaccel.models.detokenizer import IncrementalDecoder
from ragaccel.models.huggingface import HuggingFaceModel
from ragaccel.models.load import bundled_reader_path, end_tokens, load_model
from ragaccel.models.stop_strings import TextStopRule
from ragaccel.models.tokenizer import Tokenizer
from ragaccel.references import predicted_answers
from ragaccel.rehearsal import REHEARSAL
from ragaccel.settings import SAMPLING, Settings, check_names, remembers

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from typing_extensions import Unpack

    from ragaccel.decode.interfaces import Drafter, Verifier
    from ragaccel.decode.session import Session
    from ragaccel.inputs import AnyReference, Batch, OnePrompt
    from ragaccel.memory.namespaces import Memory
    from ragaccel.passage import Passage


@dataclass(frozen=True, slots=True)
class _Plan:
    """One checked request, and what its answer will be made of."""

    request: Request
    drafter: Drafter | None
    remember: bool
    stop: TextStopRule
    passages: tuple[Passage, ...]
    dropped: tuple[Passage, ...]


class LLM:
    """A language model and its tokenizer, ready to complete prompts.

    Takes ready objects of transformers as well as what ``load`` makes of a name. Calls from
    several threads are safe. By default guesses are token trees over the request's texts and over
    what earlier requests of the same namespace said and answered; all have one namespace unless
    they name another, and four are remembered. That is kept with this object, in
    memory only, unless ``memory`` has a path. While the drafting functions are being compiled, the
    first seconds of the first use on a machine, one copied span is guessed instead.

    Args:
        model: a causal language model of transformers, or a ``HuggingFaceModel``.
        tokenizer: its tokenizer, of transformers or a ``Tokenizer``.
        drafter: where guesses come from, in place of the token trees; memory is not used then.
        memory: what earlier requests taught, or the file it is read from and, when Python exits,
            written to; by default it ends with this object.
        capacity: most tokens of a prompt with its answer; the model's own limit by default.
        token_budget: most guesses a verify pass takes; by default what pays at measured cost.
        keep_costs: keep what passes cost on this device for the next run, a small file in the
            user's data folder (``RAGACCEL_HOME``); nothing of any text is in it.

    Raises:
        ModelRefusedError: the model cannot be decoded exactly; the message names the cause.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        drafter: Drafter | None = None,
        memory: Memory | str | Path | None = None,
        capacity: int | None = None,
        token_budget: int | None = None,
        keep_costs: bool = True,
    ) -> None:
        self.model = model if isinstance(model, HuggingFaceModel) else HuggingFaceModel(model)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer, eos_ids=end_tokens(self.model.model, tokenizer))
        self.tokenizer: Tokenizer = tokenizer
        kept = cost_file(self.model.cost_key) if keep_costs else None
        self.engine = Engine(self.model, capacity=capacity, cost_file=kept)
        self.token_budget = token_budget
        self._guessing = Guessing(drafter, memory, tokenizer, self.model.vocab_size)

    @classmethod
    def load(
        cls,
        name_or_path: str | Path | None = None,
        *,
        dtype: Any = "auto",
        device: Any = None,
        device_map: Any = None,
        drafter: Drafter | None = None,
        memory: Memory | str | Path | None = None,
        capacity: int | None = None,
        token_budget: int | None = None,
        keep_costs: bool = True,
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
        if drafter is None:
            REHEARSAL.start()  # beside the loading
        model, tokenizer = load_model(
            str(name_or_path), dtype=dtype, device=device, device_map=device_map, **model_kwargs
        )
        return cls(
            model,
            tokenizer,
            drafter=drafter,
            memory=memory,
            capacity=capacity,
            token_budget=token_budget,
            keep_costs=keep_costs,
        )

    @property
    def drafter(self) -> Drafter | None:
        """Where guesses come from; None for token trees over the texts and the past."""
        return self._guessing.drafter

    @property
    def memory(self) -> Memory:
        """What earlier requests taught, by namespace."""
        return self._guessing.memory

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
        opened = closing(self.engine.open(request))
        with opened as verifier, self._session(verifier, plan) as session:
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

    def _session(self, verifier: Verifier, plan: _Plan) -> AbstractContextManager[Session]:
        return self._guessing.session(
            verifier,
            plan.request,
            drafter=plan.drafter,
            remember=plan.remember,
            token_budget=self.token_budget,
        )

    def _plan(self, prompt: Any, references: Sequence[AnyReference], settings: Settings) -> _Plan:
        given: dict[str, Any] = {n: value for n, value in settings.items() if value is not None}
        check_names(given)
        stop = TextStopRule(as_texts("stop", given.pop("stop", ())), self.tokenizer)
        criteria = given.pop("stopping_criteria", ())
        processors = given.pop("logits_processors", ())
        drafter, remember = given.pop("drafter", None), remembers(settings)
        given.pop("remember", None)
        predictions = as_texts("prediction", given.pop("prediction", ()))
        sampling = Sampling(**{name: given.pop(name) for name in SAMPLING & given.keys()})
        built = read_prompt(prompt, references, self.tokenizer, self.model.vocab_size)
        predicted = predicted_answers(predictions, self.tokenizer, built.token_ids)
        request = Request(
            prompt_ids=built.token_ids,
            references=(*built.references, *predicted),
            sampling=sampling,
            eos_ids=frozenset(self.tokenizer.eos_ids),
            stop_rules=(stop, *criterion_rules(criteria, built.token_ids, self.model.device)),
            processors=logits_processors(processors),
            **given,
        )
        self.engine.check_fits(request)
        return _Plan(request, drafter, remember, stop, built.passages, built.dropped)
