"""The LLM: load a model, generate and stream answers, batch the requests of several callers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from ragaccel.answer import Answer, AsyncStream, Stream, await_answer, run_cancellable
from ragaccel.config import (
    OPTIONS,
    SAMPLING,
    EngineConfig,
    Settings,
    check_names,
    check_settings,
    remembers,
)
from ragaccel.decoding.request import Cancellation, Request, Sampling
from ragaccel.drafting.policy import JIT_WARMUP, DraftingPolicy
from ragaccel.engine.engine import Engine, warm_up_passes
from ragaccel.engine.scheduler import Scheduler
from ragaccel.errors import ConfigurationError, brief
from ragaccel.models.generation_config import GenerationDefaults
from ragaccel.models.hf_processors import logits_processors, make_criterion_rules
from ragaccel.models.load import (
    bundled_reader_path,
    find_eos_ids,
    is_bundled,
    load_model,
    make_target,
)
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
    from collections.abc import Generator
    from pathlib import Path

    from typing_extensions import Unpack

    from ragaccel.config import EngineOptions, Space
    from ragaccel.decoding.session import Drafter, Session
    from ragaccel.decoding.stats import Step
    from ragaccel.drafting.memory import Memory
    from ragaccel.models.hf_model import HuggingFaceModel
    from ragaccel.passage import Passage
    from ragaccel.prompt import AnyReference, Batch, OnePrompt


SUGGESTED_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
"""A model that answers in its own words and runs on a laptop; 3 GB."""
BUNDLED_READER_NOTICE = (
    "no model named: the bundled reader answers, a small one that quotes English sentences"
)


def open_model(
    name_or_path: str | Path | None, *, warm_up_jit: bool, **arguments: Any
) -> tuple[HuggingFaceModel, Tokenizer]:
    """Load a model and its tokenizer; errors are those of ``load_model``.

    Args:
        name_or_path: what to load; None loads the bundled reader and says so on stderr.
        warm_up_jit: compile the drafting functions while the model loads.
        **arguments: passed to ``load_model``.
    """
    if name_or_path is None:
        name_or_path = bundled_reader_path()
        sys.stderr.write(
            f"ragaccel: {BUNDLED_READER_NOTICE} (another: LLM.load({SUGGESTED_MODEL!r}))\n"
        )
    if not isinstance(name_or_path, str | PathLike):
        raise ConfigurationError(
            f"name_or_path must be a string or a path, not {brief(name_or_path)}"
        )
    if warm_up_jit:
        JIT_WARMUP.start()
    return load_model(str(name_or_path), **arguments)


def attach_space(model: HuggingFaceModel, space: Space | None, *, exact: bool) -> range:
    """Attach a SPACE adapter to a model, or none if ``space`` is ``False`` or ``None``.

    Returns:
        the ids of the mask tokens worth using (``SpaceAdapter.num_useful``).

    Raises:
        ModelNotFoundError: there is no adapter of that name, or none in the model's folder.
        ConfigurationError: the adapter does not fit the model or has no useful mask token.
    """
    first = model.vocab_size
    if space is None or space is False:
        return range(first, first)
    if exact:
        raise ConfigurationError(
            "a SPACE adapter cannot be used in exact mode: leave out space, or exact=True"
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
    """A checked request in token ids, with the options, stop rule and passages of its answer.

    ``dropped`` are the passages that did not fit in the prompt.
    """

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
    """Check a request and tokenize its prompt, references and predictions.

    Args:
        model: the model that decodes the request.
        tokenizer: the model's tokenizer.
        prompt: one prompt of any kind.
        references: texts that the answer is likely to repeat.
        settings: the settings of the request.
        defaults: the settings of the model's generation config, for those the request leaves out.
        max_tokens: the maximum number of tokens of prompt and answer; ``None`` means no limit.

    Raises:
        ConfigurationError: the prompt or a setting is invalid.
        TypeError: a setting is unknown.
    """
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    check_names(given)
    built = read_prompt(prompt, references, tokenizer, model.vocab_size)
    eos_ids = defaults.eos_ids(tokenizer.eos_ids)
    more = defaults.complete(
        given,
        prompt_ids=built.token_ids,
        eos_ids=eos_ids,
        max_tokens=max_tokens,
        vocab_size=model.vocab_size,
        device=model.device,
    )
    if "stop" in given:
        stop = TextStopRule(as_texts("stop", given.pop("stop")), tokenizer)
    else:  # like generate, find strings that begin in the prompt too
        stop = TextStopRule(more.stop_strings, tokenizer, after=built.token_ids)
    given |= more.settings
    criteria = (*more.criteria, *given.pop("stopping_criteria", ()))
    given.pop("logits_processors", None)
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
        stop_rules=(stop, *make_criterion_rules(criteria, built.token_ids, model.device)),
        processors=logits_processors(more.processors),
        **given,
    )
    return PreparedRequest(request, drafter, remember, stop, built.passages, built.dropped)


def check_mask_ids(drafter: Drafter | None, model: Any) -> None:
    """Raise ConfigurationError if a drafter uses mask tokens that the model does not have."""
    limit = model.vocab_size + model.num_masks
    if drafter is not None and max(drafter.mask_ids, default=0) >= limit:
        raise ConfigurationError(
            f"this drafter uses the mask token {max(drafter.mask_ids)}, but the model has only ids "
            f"below {limit}: load it with a SPACE adapter (space=...) and pass llm.mask_ids"
        )


class _Resources(ExitStack):
    """The resources of requests; in a forked process they are leaked instead of freed.

    Freeing takes locks, which threads of the parent process may have held at the fork.
    """

    def __exit__(self, *details: Any) -> bool:
        if not owns_torch():
            keep_forever(self.pop_all())
        return bool(super().__exit__(*details))


@dataclass(frozen=True, slots=True)
class Job:
    """A request to decode, its own drafter, if any, and whether it uses the memory."""

    request: Request
    drafter: Drafter | None = None
    remember: bool = True


class Runner:
    """A loop that decodes requests, several at a time.

    Args:
        scheduler: runs the steps.
        drafting: opens the sessions.
        token_budget: the maximum number of draft tokens per step; None chooses it at every step.
    """

    def __init__(
        self, scheduler: Scheduler, drafting: DraftingPolicy, token_budget: int | None = None
    ) -> None:
        self.scheduler, self._drafting = scheduler, drafting
        self._token_budget = token_budget

    def decode(
        self, job: Job, cancellation: Cancellation
    ) -> Generator[tuple[Session, Step], None, None]:
        """Decode one request; yield its session and each step.

        Raises:
            Cancelled: the cancellation was requested before the end.
        """
        with _Resources() as stack:
            session = self._open(job, stack)
            for step in self.scheduler.steps(session, cancellation):
                yield session, step

    def decode_all(
        self, jobs: Sequence[Job], cancellation: Cancellation | None = None
    ) -> Generator[tuple[int, Session, Step], None, None]:
        """Decode several requests; yield the index of a job, its session, and each of its steps.

        The resources of a request are freed before its last step is yielded.

        Raises:
            Cancelled: the cancellation was requested before the end.
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
    """A writer of answers, which decodes requests and detokenizes the result.

    Args:
        runner: decodes the requests.
        tokenizer: turns tokens into text.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self._runner, self._tokenizer = runner, tokenizer

    def stream(self, prepared: PreparedRequest) -> Stream:
        """Return a stream of one answer; iterating it computes the answer."""
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
        """Return the answers of several requests, in order, decoded in batches.

        Raises:
            Cancelled: the cancellation was requested before the end.
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
    """A detokenizer of one answer's steps; text once returned does not change."""

    def __init__(self, prepared: PreparedRequest, session: Session, tokenizer: Tokenizer) -> None:
        self.session, self._prepared = session, prepared
        self._decoder, self._text = IncrementalDecoder(tokenizer), prepared.stop.make_filter()
        self._pieces: list[str] = []

    def add(self, step: Step) -> str:
        """Add a step; return the new text that later steps cannot change, possibly empty."""
        tokens, session = step.token_ids, self.session
        if session.finish_reason == "stop" and tokens[-1] in session.request.eos_ids:
            tokens = tokens[:-1]
        return self._keep(self._text.push(self._decoder.push(tokens)))

    def finish(self) -> str:
        """Return the remaining text; call it once, at the end."""
        return self._keep(self._text.push(self._decoder.finish()) + self._text.finish())

    def answer(self) -> Answer:
        """Return the finished answer."""
        prepared, text = self._prepared, "".join(self._pieces)
        return Answer.of(text, self.session.result(), prepared.passages, prepared.dropped)

    def _keep(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece


class LLM:
    """A language model and its tokenizer, ready to complete prompts.

    Build it from objects of transformers, or by name with ``load``. Calls from several threads are
    safe. By default drafts are token trees built from the request's texts and from the prompts and
    answers of earlier requests of its namespace. The memory holds four namespaces and is lost with
    this object, unless ``memory`` is a path. During the JIT warm-up (the first seconds of the
    first use on a machine), drafts are single copied spans.

    Args:
        model: a causal language model of transformers, or the result of ``load_model``. Changed
            weights, buffers and switched adapters take effect at the next request, except writes
            through ``data``: call ``llm.model.mark_weights_changed()`` after those. Added modules
            or hooks are refused.
        tokenizer: the model's tokenizer, of transformers or a ``Tokenizer``.
        **options: the fields of ``ragaccel.config.EngineConfig``: ``drafter``, ``memory``,
            ``remember``, ``capacity``, ``token_budget``, ``save_measurements``, ``exact``,
            ``max_batch``, ``space`` and ``generation_config``.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly; the message names the cause.
        ConfigurationError: arguments are invalid or conflict; or this process was forked from one
            that had used a model (requests raise that too).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        **options: Unpack[EngineOptions],
    ) -> None:
        claim_torch()
        self.config = config = EngineConfig(**options)
        """The options of this LLM, checked."""
        keep = config.save_measurements
        self.model = make_target(model, check_folder(keep=keep))
        self._defaults = GenerationDefaults(self.model.model, config.generation_config)
        self.mask_ids = attach_space(self.model, config.space, exact=config.exact)
        """Ids of the mask tokens worth using in a drafter; empty without a SPACE adapter."""
        check_mask_ids(config.drafter, self.model)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer, eos_ids=find_eos_ids(self.model.model, tokenizer))
        self.tokenizer: Tokenizer = tokenizer
        self.engine = Engine(
            self.model,
            capacity=config.capacity,
            latency_file=latency_file(self.model.latency_key) if keep else None,
            exact=config.exact,
        )
        self._drafting = DraftingPolicy(
            config.drafter,
            config.memory,
            tokenizer,
            self.model.vocab_size,
            mask_ids=self.mask_ids,
            remember=config.remember,
        )
        scheduler = Scheduler(self.engine, max_batch=config.max_batch)
        self._writer = Writer(Runner(scheduler, self._drafting, config.token_budget), tokenizer)

    @classmethod
    def load(
        cls,
        name_or_path: str | Path | None = None,
        *,
        dtype: Any = "auto",
        device: Any = None,
        device_map: Any = None,
        **options: Any,
    ) -> LLM:
        """Load a model by its folder or its name on the hub.

        Without a name, load the bundled reader, which needs no network, and say so on stderr.
        ``device_map="auto"`` splits a model that is larger than one GPU, layer by layer.

        Args:
            name_or_path: the folder or the name.
            dtype: the type of the weights, as in transformers.
            device: the device of the model.
            device_map: the distribution of the weights over devices, as in transformers.
            **options: the options of ``LLM`` (``EngineConfig``); others are passed to
                ``from_pretrained`` of transformers.

        Raises:
            ModelNotFoundError: there is no such folder or model.
            UnsupportedModelError: the model cannot be decoded exactly; the message names the cause.
            ConfigurationError: arguments exclude each other.
        """
        own = {name: options.pop(name) for name in OPTIONS & options.keys()}
        config = EngineConfig(**own)
        claim_torch()
        model, tokenizer = open_model(
            name_or_path,
            warm_up_jit=config.drafter is None,
            dtype=dtype,
            device=device,
            device_map=device_map,
            check_folder=check_folder(keep=config.save_measurements),
            **options,
        )
        return cls(model, tokenizer, **own)

    def warm_up(self, *, compile: bool = False, context: int = 1024) -> None:  # noqa: A002
        """Prepare the model and the drafting now, so that the first answers do not wait.

        On a GPU, capture a CUDA graph for every width of a pass.

        Args:
            compile: compile the model with torch first, if torch supports it; takes about a
                minute. Has no effect on a CPU, where compiled models were not faster.
            context: the number of tokens that the passes of the warm-up attend to.
        """
        claim_torch()
        if compile:
            self.model.compile()
        warm_up_passes(self.engine, context=context)
        self._drafting.warm_up()

    @property
    def drafter(self) -> Drafter | None:
        """Return the drafter given to this LLM; None if it drafts token trees, the default."""
        return self._drafting.drafter

    @property
    def memory(self) -> Memory:
        """Return the memory of earlier requests, by namespace."""
        return self._drafting.memory

    @property
    def context_length(self) -> int | None:
        """Return the maximum number of tokens of prompt and answer; None if there is no limit."""
        return self.engine.max_tokens

    @property
    def is_bundled_reader(self) -> bool:
        """Return whether this is the package's own model, which only quotes sentences."""
        return is_bundled(getattr(getattr(self.model, "model", None), "name_or_path", ""))

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
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
        """Complete a prompt, with exactly the tokens of the model's plain decoding, but faster.

        A prompt is a ``str``, completed as it is; a list of messages (``{"role": ..., "content":
        ...}``), rendered with the chat template; a list of token ids; or a ``Prompt`` from
        ``build_prompt``. A list of prompts is a batch, decoded together, with the same references
        for all or a list for each. Calls from several threads share passes as well.

        ``references`` are texts that the answer is likely to repeat: strings, passages, or token
        ids as ``Reference``. They need not be in the prompt and never change the answer. Strings
        and passages among them are the answer's ``passages``, in which copied spans are found.

        Settings left out are taken from the model's ``generation_config``, as in
        ``model.generate(do_sample=False)``.

        Raises:
            ConfigurationError: the prompt, a setting or a field of the ``generation_config`` is
                invalid or unsupported; nothing was computed.
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

        This call checks the request; iterating the stream computes the answer.
        """
        if is_batch(prompt):
            raise ConfigurationError("stream takes one prompt: call it for each prompt of a batch")
        return self._writer.stream(self._prepare(prompt, references, settings))

    async def agenerate(
        self, prompt: Any, *, references: Sequence[Any] = (), **settings: Unpack[Settings]
    ) -> Any:
        """Complete a prompt as ``generate`` does, for asyncio; cancelling the task stops it."""
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
        """Complete one prompt piece by piece, for asyncio; leaving the loop over it stops it."""
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
