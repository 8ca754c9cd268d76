"""The LLM: loads a model, generates, streams, and answers several callers in one pass."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Union, overload

from ragaccel.answer import Answer, AsyncStream, Stream, await_answer, run_cancellable
from ragaccel.config import (
    SAMPLING,
    Settings,
    check_names,
    check_options,
    check_settings,
    remembers,
)
from ragaccel.decoding.request import Cancellation, Request, Sampling
from ragaccel.drafting.policy import JIT_WARMUP, DraftingPolicy
from ragaccel.engine.engine import Engine, warm_up_passes
from ragaccel.engine.scheduler import Scheduler
from ragaccel.errors import ConfigurationError, brief
from ragaccel.models.generation_config import GenerationDefaults, TimeRule
from ragaccel.models.hf_processors import logits_processors, make_criterion_rules
from ragaccel.models.load import (
    bundled_reader_path,
    find_eos_ids,
    is_bundled,
    load_model,
    make_target,
)
from ragaccel.models.packing import packing_cache_path
from ragaccel.models.self_check import check_folder
from ragaccel.models.space_adapter import SpaceAdapter
from ragaccel.models.streaming import IncrementalDecoder, TextStopRule
from ragaccel.models.tokenizer import Tokenizer
from ragaccel.paths import claim_torch, keep_forever, latency_file, owns_torch
from ragaccel.prompt import (
    as_reference_list,
    as_texts,
    is_batch,
    prediction_references,
    read_prompt,
    references_per_prompt,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from transformers import GenerationConfig
    from typing_extensions import Unpack

    from ragaccel.decoding.session import Drafter, Session
    from ragaccel.decoding.stats import Step
    from ragaccel.drafting.memory import Memory
    from ragaccel.models.hf_model import HuggingFaceModel
    from ragaccel.passage import Passage
    from ragaccel.prompt import AnyReference, Batch, OnePrompt


SUGGESTED_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
"""A model that answers in its own words and that a laptop runs; 3 GB."""
BUNDLED_READER_NOTICE = (
    "no model named: the bundled reader answers, a small one that quotes English sentences"
)


def open_model(
    name_or_path: str | Path | None, *, warm_up_jit: bool, **arguments: Any
) -> tuple[HuggingFaceModel, Tokenizer]:
    """Load a model and its tokenizer; errors are those of ``load_model``.

    Args:
        name_or_path: what to load; None is the bundled reader, and stderr says so.
        warm_up_jit: compile the drafting functions beside the loading.
        **arguments: for ``load_model``.
    """
    if name_or_path is None:
        name_or_path = bundled_reader_path()
        sys.stderr.write(
            f"ragaccel: {BUNDLED_READER_NOTICE} (another: LLM.load({SUGGESTED_MODEL!r}))\n"
        )
    if not isinstance(name_or_path, str | PathLike):
        raise ConfigurationError(
            f"a model is named by a string or a path, not {brief(name_or_path)}"
        )
    if warm_up_jit:
        JIT_WARMUP.start()
    return load_model(str(name_or_path), **arguments)


Space = Union["SpaceAdapter", str, "Path", bool]
"""A SPACE adapter, or where one is: a folder, a name on the hub, or, if true, the model's own."""


def attach_space(model: HuggingFaceModel, space: Space | None, *, exact: bool) -> range:
    """Let a model wear a SPACE adapter; none if ``space`` is false or ``None``.

    Returns:
        the mask tokens that are worth their rows (``SpaceAdapter.num_useful``).

    Raises:
        ModelNotFoundError: there is none of that name, or the model brings none.
        ConfigurationError: it does not fit the model, or nothing could be guessed with it.
    """
    first = model.vocab_size
    if space is None or space is False:
        return range(first, first)
    if exact:
        raise ConfigurationError(
            "exact mode has no rows for mask tokens: leave out space, or exact=True"
        )
    if space is True:
        revision = getattr(model.model.config, "_commit_hash", None)
        adapter = SpaceAdapter.load_for_model(model.model.name_or_path, revision)
    else:
        adapter = space if isinstance(space, SpaceAdapter) else SpaceAdapter.load(space)
    model.attach_space(adapter)
    return range(first, first + adapter.num_useful)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One checked request, and what its answer will be made of."""

    request: Request
    drafter: Drafter | None
    remember: bool
    stop: TextStopRule
    passages: tuple[Passage, ...]
    dropped: tuple[Passage, ...]


def prepare_request(
    model: HuggingFaceModel,
    tokenizer: Tokenizer,
    prompt: Any,
    references: Sequence[AnyReference],
    settings: Settings,
    *,
    defaults: GenerationDefaults,
    max_tokens: int | None,
) -> PreparedRequest:
    """Check what is asked for and put it into token ids.

    Args:
        model: decodes it.
        tokenizer: its tokenizer.
        prompt: one prompt of any kind.
        references: texts its answer is likely to repeat.
        settings: what the request sets.
        defaults: what the model's generation config sets, where the request does not.
        max_tokens: most tokens of a prompt with its answer; ``None`` where there is no limit.

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
        max_tokens=max_tokens,
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
    check_mask_ids(drafter, model)
    given.pop("remember", None)
    predictions = as_texts("prediction", given.pop("prediction", ()))
    sampling = Sampling(**{name: given.pop(name) for name in SAMPLING & given.keys()})
    predicted = prediction_references(predictions, tokenizer, built.token_ids)
    request = Request(
        prompt_ids=built.token_ids,
        references=(*built.references, *predicted),
        sampling=sampling,
        eos_ids=eos_ids,
        stop_rules=(stop, *timed, *make_criterion_rules(criteria, built.token_ids, model.device)),
        score_rules=more.score_rules,
        processors=(*logits_processors(processors), *more.processors),
        **given,
    )
    return PreparedRequest(request, drafter, remember, stop, built.passages, built.dropped)


def check_mask_ids(drafter: Drafter | None, model: Any) -> None:
    """Raise ConfigurationError for a drafter that wants mask tokens the model does not read."""
    limit = model.vocab_size + model.num_masks
    if drafter is not None and max(drafter.mask_ids, default=0) >= limit:
        raise ConfigurationError(
            f"this drafter wants the mask token {max(drafter.mask_ids)}, and the model reads ids "
            f"below {limit}: load it with a SPACE adapter (space=...) and give llm.mask_ids"
        )


class _Resources(ExitStack):
    """What requests hold until they end; what a forked process inherits is not freed there.

    Other threads of its parent may have held the locks that this takes.
    """

    def __exit__(self, *details: Any) -> bool:
        if not owns_torch():
            keep_forever(self.pop_all())
        return bool(super().__exit__(*details))


@dataclass(frozen=True, slots=True)
class Job:
    """A request and how its tokens are guessed: by a drafter of its own, out of the past or not."""

    request: Request
    drafter: Drafter | None = None
    remember: bool = True


class Runner:
    """Decodes requests beside one another.

    Args:
        scheduler: runs the steps.
        guessing: opens the sessions.
        token_budget: most guesses a verify pass takes; None for what pays.
    """

    def __init__(
        self, scheduler: Scheduler, drafting: DraftingPolicy, token_budget: int | None = None
    ) -> None:
        self.scheduler, self._drafting = scheduler, drafting
        self._token_budget = token_budget

    def decode(
        self, job: Job, cancellation: Cancellation
    ) -> Generator[tuple[Session, Step], None, None]:
        """Decode one request, step by step.

        Raises:
            Cancelled: this was asked for before its end.
        """
        with _Resources() as stack:
            session = self._open(job, stack)
            for step in self.scheduler.steps(session, cancellation):
                yield session, step

    def decode_all(
        self, jobs: Sequence[Job], cancellation: Cancellation | None = None
    ) -> Generator[tuple[int, Session, Step], None, None]:
        """Decode several requests, step by step, each step with the number of its job.

        What a request holds is free when its last step is there.

        Raises:
            Cancelled: this was asked for before their end.
        """
        waiting = deque(enumerate(jobs))
        running: dict[Session, tuple[int, _Resources]] = {}
        with _Resources() as everything:
            while waiting or running:
                while waiting and len(running) < self.scheduler.max_batch:
                    number, job = waiting.popleft()
                    own = everything.enter_context(_Resources())
                    running[self._open(job, own)] = number, own
                for session, step in self.scheduler.advance(list(running), cancellation):
                    number, own = running[session]
                    if session.finish_reason is not None:
                        del running[session]
                        own.close()
                    yield number, session, step

    def _open(self, job: Job, stack: _Resources) -> Session:
        verifier = stack.enter_context(closing(self.scheduler.engine.open(job.request)))
        session = stack.enter_context(
            self._drafting.session(
                verifier,
                job.request,
                drafter=job.drafter,
                remember=job.remember,
                token_budget=self._token_budget,
            )
        )
        stack.callback(self.scheduler.discard, session)
        stack.callback(session.close)
        return session


class Writer:
    """Has requests decoded and writes their answers.

    Args:
        runner: decodes them.
        tokenizer: turns tokens into text.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self._runner, self._tokenizer = runner, tokenizer

    def stream(self, prepared: PreparedRequest) -> Stream:
        """Write one answer while it is read."""
        cancellation, token_ids = Cancellation(), list[int]()
        pieces = self._pieces(prepared, cancellation, token_ids)
        return Stream(pieces, prepared.passages, cancellation, token_ids)

    def _pieces(
        self, prepared: PreparedRequest, cancellation: Cancellation, token_ids: list[int]
    ) -> Generator[str, None, Answer]:
        text: AnswerBuilder | None = None
        with closing(self._runner.decode(_job(prepared), cancellation)) as steps:
            for session, step in steps:
                text = text or AnswerBuilder(prepared, session, self._tokenizer)
                token_ids += step.token_ids
                if piece := text.add(step):
                    yield piece
        assert text is not None
        if piece := text.finish():
            yield piece
        return text.answer()

    def write_all(
        self, requests: Sequence[PreparedRequest], cancellation: Cancellation | None = None
    ) -> list[Answer]:
        """Write several answers, as many at a time as a pass takes sequences; in order.

        Raises:
            Cancelled: this was asked for before their end.
        """
        texts: dict[int, AnswerBuilder] = {}
        with closing(
            self._runner.decode_all([_job(prepared) for prepared in requests], cancellation)
        ) as steps:
            for number, session, step in steps:
                if number not in texts:
                    texts[number] = AnswerBuilder(requests[number], session, self._tokenizer)
                texts[number].add(step)
        for text in texts.values():
            text.finish()
        return [texts[number].answer() for number in range(len(requests))]


def _job(prepared: PreparedRequest) -> Job:
    return Job(prepared.request, prepared.drafter, prepared.remember)


class AnswerBuilder:
    """The text of one answer: steps in, pieces that nothing takes back out."""

    def __init__(self, prepared: PreparedRequest, session: Session, tokenizer: Tokenizer) -> None:
        self.session, self._prepared = session, prepared
        self._decoder, self._text = IncrementalDecoder(tokenizer), prepared.stop.make_filter()
        self._pieces: list[str] = []

    def add(self, step: Step) -> str:
        """Write a step; return the piece of text that is certain now, possibly empty."""
        tokens, session = step.token_ids, self.session
        if session.finish_reason == "stop" and tokens[-1] in session.request.eos_ids:
            tokens = tokens[:-1]
        return self._keep(self._text.push(self._decoder.push(tokens)))

    def finish(self) -> str:
        """Return what was held back, at the end."""
        return self._keep(self._text.push(self._decoder.finish()) + self._text.finish())

    def answer(self) -> Answer:
        """Put the finished answer together."""
        prepared, text = self._prepared, "".join(self._pieces)
        return Answer.of(text, self.session.result(), prepared.passages, prepared.dropped)

    def _keep(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece


class LLM:
    """A language model and its tokenizer, ready to complete prompts.

    Takes ready objects of transformers as well as what ``load`` makes of a name. Calls from
    several threads are safe. By default guesses are token trees over the request's texts and over
    what earlier requests of its namespace said and answered; four namespaces are remembered, with
    this object, unless ``memory`` has a path. While the drafting functions are being compiled, the
    first seconds of the first use on a machine, one copied span is guessed instead.

    Args:
        model: a causal language model of transformers, or what ``load_model`` makes of one. Changed
            weights, buffers and switched adapters are followed at the next request, but for writes
            through ``data`` (call ``llm.model.mark_weights_changed`` after those); other modules or
            hooks are refused then.
        tokenizer: its tokenizer, of transformers or a ``Tokenizer``.
        drafter: where guesses come from, in place of the token trees; memory is not used then.
        memory: what earlier requests taught, or the file it is read from and, when Python exits,
            written to; by default it ends with this object.
        remember: False: no request uses what earlier ones taught, nor adds to it.
        capacity: most tokens of a prompt with its answer; the model's own limit by default.
        token_budget: most guesses a verify pass takes; by default what pays at measured cost.
        keep_costs: keep what passes cost on this device, which weights are worth packing and which
            architectures were checked, for the next run: small files without any text in the
            user's folder (``RAGACCEL_HOME``).
        exact: give, to the last bit, what plain decoding in this mode gives, in any precision:
            passes of a fixed width, drafts that do not branch, one request a pass. Slower.
        max_batch: most requests in one pass.
        space: a SPACE adapter, where one is, or True for the model's own: it guesses at mask tokens
            as well. Answers stay the same; not together with ``exact``.
        generation_config: fields that go before those of the model's own ``generation_config``, as
            transformers names them: ``{"repetition_penalty": 1.0}``. Requests go before both.
            ``{"do_sample": True}`` has requests sampled that do not say otherwise; a model's own
            ``do_sample`` does not.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly; the message names the cause.
        ConfigurationError: arguments cannot work or exclude each other; or this process was forked
            from one that had used a model (requests raise that too).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        drafter: Drafter | None = None,
        memory: Memory | str | Path | None = None,
        remember: bool = True,
        capacity: int | None = None,
        token_budget: int | None = None,
        keep_costs: bool = True,
        exact: bool = False,
        max_batch: int = 16,
        space: Space | None = None,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
    ) -> None:
        claim_torch()
        given = check_options(
            {
                "drafter": drafter,
                "memory": memory,
                "remember": remember,
                "capacity": capacity,
                "token_budget": token_budget,
                "keep_costs": keep_costs,
                "exact": exact,
                "max_batch": max_batch,
                "space": space,
            }
        )
        capacity, token_budget = given.get("capacity"), given.get("token_budget")
        self.model = make_target(
            model, packing_cache_path(keep=keep_costs), check_folder(keep=keep_costs)
        )
        self._defaults = GenerationDefaults(self.model.model, generation_config)
        self.mask_ids = attach_space(self.model, space, exact=exact)
        """Mask tokens for drafters; none without a SPACE adapter. It may have more behind them."""
        check_mask_ids(drafter, self.model)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer, eos_ids=find_eos_ids(self.model.model, tokenizer))
        self.tokenizer: Tokenizer = tokenizer
        latency_profile_file = latency_file(self.model.latency_key) if keep_costs else None
        self.engine = Engine(
            self.model, capacity=capacity, latency_file=latency_profile_file, exact=exact
        )
        self.token_budget = token_budget
        self._drafting = DraftingPolicy(
            drafter,
            memory,
            tokenizer,
            self.model.vocab_size,
            mask_ids=self.mask_ids,
            remember=remember,
        )
        scheduler = Scheduler(self.engine, max_batch=given["max_batch"])
        self._writer = Writer(Runner(scheduler, self._drafting, token_budget), tokenizer)

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
        remember: bool = True,
        capacity: int | None = None,
        token_budget: int | None = None,
        keep_costs: bool = True,
        exact: bool = False,
        max_batch: int = 16,
        space: Space | None = None,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> LLM:
        """Load a model by its folder or its name on the hub.

        Without a name the bundled reader is loaded, without any network, and stderr says so.
        ``model_kwargs`` go to transformers' ``from_pretrained``.

        A model larger than one GPU is spread with ``device_map="auto"``, its layers one after
        another.

        Raises:
            ModelNotFoundError: there is no such folder or model.
            UnsupportedModelError: the model cannot be decoded exactly; the message names the cause.
            ConfigurationError: arguments that exclude each other.
        """
        options: dict[str, Any] = {
            "drafter": drafter,
            "memory": memory,
            "remember": remember,
            "capacity": capacity,
            "token_budget": token_budget,
            "keep_costs": keep_costs,
            "exact": exact,
            "max_batch": max_batch,
            "space": space,
        }
        check_options(options)
        claim_torch()
        model, tokenizer = open_model(
            name_or_path,
            warm_up_jit=drafter is None,
            dtype=dtype,
            device=device,
            device_map=device_map,
            packing_cache_path=packing_cache_path(keep=keep_costs),
            check_folder=check_folder(keep=keep_costs),
            **model_kwargs,
        )
        return cls(model, tokenizer, generation_config=generation_config, **options)

    def warm_up(self, *, compile: bool = False, context: int = 1024) -> None:  # noqa: A002
        """Do now what the first answers would wait for: on a GPU, capture passes of all widths.

        Args:
            compile: have torch compile them first, about a minute, where it takes the model. Does
                nothing on a CPU, where compiling was measured not to pay.
            context: tokens that the passes attend to.
        """
        claim_torch()
        if compile:
            self.model.compile()
        warm_up_passes(self.engine, context=context)
        self._drafting.warm_up()

    @property
    def drafter(self) -> Drafter | None:
        """Where guesses come from; None for token trees over the texts and the past."""
        return self._drafting.drafter

    @property
    def memory(self) -> Memory:
        """What earlier requests taught, by namespace."""
        return self._drafting.memory

    @property
    def context_length(self) -> int | None:
        """Most tokens of a prompt with its answer; None where the model has no limit."""
        return self.engine.max_tokens

    @property
    def is_bundled_reader(self) -> bool:
        """Whether this is the reader that ships with the package: it only quotes sentences."""
        return is_bundled(getattr(getattr(self.model, "model", None), "name_or_path", ""))

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
        ``build_prompt`` made. A list of those is a batch, answered together, with the same
        references for all or a list for each. Calls from several threads share passes as well.

        ``references`` are texts the answer is likely to repeat: strings, passages, or token ids
        as ``Reference``. They need not be in the prompt and never change the answer. Texts among
        them are the ``passages`` in which the answer's copied spans are looked up.

        What the request leaves open is taken from the model's ``generation_config``, as in
        ``model.generate(do_sample=False)``.

        Raises:
            ConfigurationError: a prompt or setting that cannot work, before anything is computed;
                or a field of the ``generation_config`` that asks for what this does not do.
            CapacityError: prompt and answer do not fit the context.
        """
        if not is_batch(prompt):
            return self._writer.stream(self._prepare(prompt, references, settings)).finish()
        return self._writer.write_all(self._prepare_batch(prompt, references, settings))

    def stream(
        self,
        prompt: OnePrompt,
        *,
        references: Sequence[AnyReference] = (),
        **settings: Unpack[Settings],
    ) -> Stream:
        """Complete one prompt piece by piece; arguments and errors are those of ``generate``.

        Checked here, computed by whoever iterates the stream.
        """
        if is_batch(prompt):
            raise ConfigurationError("a stream takes one prompt: call stream for each of a batch")
        return self._writer.stream(self._prepare(prompt, references, settings))

    async def agenerate(
        self, prompt: Any, *, references: Sequence[Any] = (), **settings: Unpack[Settings]
    ) -> Any:
        """Complete a prompt as ``generate`` does, for asyncio; cancelling it ends it."""
        if is_batch(prompt):
            return await run_cancellable(
                lambda asked: self._writer.write_all(
                    self._prepare_batch(prompt, references, settings), asked
                )
            )
        return await await_answer(self.stream(prompt, references=references, **settings))

    def astream(
        self,
        prompt: OnePrompt,
        *,
        references: Sequence[AnyReference] = (),
        **settings: Unpack[Settings],
    ) -> AsyncStream:
        """Complete one prompt piece by piece, for asyncio; leaving the loop over it ends it."""
        return AsyncStream(self.stream(prompt, references=references, **settings))

    def _prepare_batch(
        self, prompts: Any, references: Sequence[Any], settings: Settings
    ) -> list[PreparedRequest]:
        claim_torch()
        settings = check_settings(settings)
        each = references_per_prompt(references, len(prompts))
        return [self._prepare(one, own, settings) for one, own in zip(prompts, each, strict=True)]

    def _prepare(
        self, prompt: Any, references: Sequence[AnyReference], settings: Settings
    ) -> PreparedRequest:
        claim_torch()
        settings, references = check_settings(settings), as_reference_list(references)
        prepared = prepare_request(
            self.model,
            self.tokenizer,
            prompt,
            references,
            settings,
            defaults=self._defaults,
            max_tokens=self.engine.max_tokens,
        )
        self.engine.check_fits(prepared.request)
        return prepared
