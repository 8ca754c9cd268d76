"""The LLM: load a model, generate and stream answers, batch the requests of several callers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from ragaccel.answer import Answer, AsyncStream, Stream, run_cancellable
from ragaccel.config import (
    OPTIONS,
    SAMPLING,
    EngineConfig,
    Settings,
    check_settings,
)
from ragaccel.decoding.request import Cancellation, Request, Sampling
from ragaccel.drafting.policy import DraftingPolicy
from ragaccel.engine.engine import Engine
from ragaccel.engine.measurement import warm_up_passes
from ragaccel.engine.scheduler import Scheduler
from ragaccel.errors import ConfigurationError, brief
from ragaccel.models.generation_config import GenerationDefaults
from ragaccel.models.hf_processors import logits_processors, make_criterion_rules
from ragaccel.models.hub import suggested_model
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
    prediction_references,
    read_prompt,
    references_per_prompt,
    split_batch,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from typing_extensions import Unpack

    from ragaccel.config import EngineOptions, Space
    from ragaccel.decoding.session import Drafter, Session
    from ragaccel.decoding.stats import Step
    from ragaccel.drafting.memory import Memory, NamespaceMemory
    from ragaccel.engine.engine import EngineVerifier
    from ragaccel.models.hf_model import HuggingFaceModel
    from ragaccel.passage import Passage
    from ragaccel.prompt import AnyReference, Batch, OnePrompt


BUNDLED_READER_NOTICE = (
    "no model named: the bundled reader answers, a small one that only quotes English sentences of "
    "the passages that RAG or build_prompt gives it"
)


def open_model(
    name_or_path: str | Path | None, **arguments: Any
) -> tuple[HuggingFaceModel, Tokenizer]:
    """Load a model and its tokenizer; errors are those of ``load_model``.

    Args:
        name_or_path: what to load; None loads the bundled reader and says so on stderr.
        **arguments: passed to ``load_model``.
    """
    if name_or_path is None:
        name_or_path = bundled_reader_path()
        name, size = suggested_model()
        sys.stderr.write(
            f"ragaccel: {BUNDLED_READER_NOTICE} (another: LLM.load({name!r}), {size} GB)\n"
        )
    if not isinstance(name_or_path, str | PathLike):
        raise ConfigurationError(
            f"name_or_path must be a string or a path, not {brief(name_or_path)}"
        )
    return load_model(str(name_or_path), **arguments)


_NO_SPACE = (
    "a SPACE adapter can be used in exact mode only with bfloat16 models whose rows have the same "
    "bits in any pass on this processor: leave out space, or exact=True"
)


def attach_space(model: HuggingFaceModel, space: Space | None, *, exact: bool) -> range:
    """Attach a SPACE adapter to a model, or none if ``space`` is ``False`` or ``None``.

    Returns:
        the ids of the mask tokens worth using (``SpaceAdapter.num_useful``).

    Raises:
        ModelNotFoundError: there is no adapter of that name, or none in the model's folder.
        ConfigurationError: the adapter does not fit the model or has no useful mask token, the
            model has one already, or its deterministic passes cannot read mask tokens.
    """
    first = model.vocab_size
    if space is None or space is False:
        return range(first, first)
    if exact and not model.is_batch_invariant:
        raise ConfigurationError(_NO_SPACE)
    if space is True:
        revision = getattr(model.model.config, "_commit_hash", None)
        adapter = SpaceAdapter.load_for_model(model.model.name_or_path, revision)
    else:
        adapter = space if isinstance(space, SpaceAdapter) else SpaceAdapter.load(space)
    model.attach_space(adapter)
    return range(first, first + adapter.num_useful)


def check_mask_ids(drafter: Drafter | None, model: Any) -> None:
    """Raise ConfigurationError if a drafter uses mask tokens that the model does not have."""
    limit = model.vocab_size + model.num_masks
    if drafter is not None and max(drafter.mask_ids, default=0) >= limit:
        raise ConfigurationError(
            f"this drafter uses the mask token {max(drafter.mask_ids)}, but the model has only ids "
            f"below {limit}: load it with a SPACE adapter (space=...) and pass llm.mask_ids"
        )


class Generation:
    """One request on its way: opened, decoded by ``decode``, closed; then its answer is written.

    Args:
        verifier: the request in the engine, which this object closes.
        drafter: replaces the drafter of the LLM; the memory is not used then.
        remember: whether the request uses the memory and adds to it.
        stop: the stop strings of its answer, which it does not show.
        passages: the passages of its answer.
        dropped: the passages that did not fit in the prompt.
    """

    def __init__(
        self,
        verifier: EngineVerifier,
        drafter: Drafter | None = None,
        *,
        remember: bool = True,
        stop: TextStopRule | None = None,
        passages: Sequence[Passage] = (),
        dropped: Sequence[Passage] = (),
    ) -> None:
        self.verifier, self.request = verifier, verifier.request
        self.drafter, self.remember = drafter, remember
        self.stop, self.passages, self.dropped = stop, passages, dropped
        self.session: Session | None = None
        self._learned: NamespaceMemory | None = None

    def open(self, drafting: DraftingPolicy, token_budget: int | None) -> Session:
        """Return the session that decodes the request."""
        self.session, self._learned = drafting.open(
            self.verifier,
            self.request,
            drafter=self.drafter,
            remember=self.remember,
            token_budget=token_budget,
        )
        return self.session

    def close(self, scheduler: Scheduler, drafting: DraftingPolicy) -> None:
        """Free the resources and remember the answer, once.

        In a forked process they are leaked instead: freeing takes locks, which threads of the
        parent process may have held at the fork.
        """
        if self.verifier.is_closed:
            return
        if not owns_torch():
            keep_forever(self)
            return
        try:
            if self.session is not None:
                self.session.close()
                scheduler.discard(self.session)
                if self.remember and self.drafter is None:
                    drafting.remember(self.session, self._learned)
        finally:
            self.verifier.close()

    def visible(self, token_ids: Sequence[int], finish_reason: str | None) -> Sequence[int]:
        """Return the last tokens of the answer without the end token, which has no text."""
        is_end = finish_reason == "stop" and token_ids[-1] in self.request.eos_ids
        return token_ids[:-1] if is_end else token_ids

    def answer(self, text: str) -> Answer:
        """Return the finished answer."""
        assert self.session is not None
        return Answer.of(text, self.session.result(), self.passages, self.dropped)


def decode(
    scheduler: Scheduler,
    drafting: DraftingPolicy,
    generations: Sequence[Generation],
    *,
    token_budget: int | None = None,
    cancellation: Cancellation | None = None,
) -> Generator[tuple[int, Session, Step], None, None]:
    """Decode requests, ``scheduler.max_batch`` at a time; yield each step with its request's index.

    A request is closed before its last step is yielded.

    Raises:
        Cancelled: the cancellation was requested before the end.
    """
    waiting = deque(enumerate(generations))
    running: dict[Session, tuple[int, Generation]] = {}
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < scheduler.max_batch:
                number, generation = waiting.popleft()
                stack.callback(generation.close, scheduler, drafting)
                running[generation.open(drafting, token_budget)] = number, generation
            for session, step in scheduler.advance(list(running), cancellation):
                number, generation = running[session]
                if session.finish_reason is not None:
                    del running[session]
                    generation.close(scheduler, drafting)
                yield number, session, step


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
        if self.engine.deterministic and self.mask_ids:  # a check at load found so
            raise ConfigurationError(_NO_SPACE)
        self._drafting = DraftingPolicy(
            config.drafter,
            config.memory,
            tokenizer,
            self.model.vocab_size,
            mask_ids=self.mask_ids,
            remember=config.remember,
        )
        self.scheduler = Scheduler(self.engine, max_batch=config.max_batch)
        """It batches the steps of all callers."""

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
            dtype: the type of the weights, as in transformers, or "int8": linear layers are rounded
                to 8 bits and take half the memory, on Linux and x86 CPUs with AVX2. The model is
                another one then.
            device: the device of the model.
            device_map: the distribution of the weights over devices, as in transformers.
            **options: the options of ``LLM`` (``EngineConfig``); others are passed to
                ``from_pretrained`` of transformers.

        Raises:
            ModelNotFoundError: there is no such folder or model.
            UnsupportedModelError: the model cannot be decoded exactly; the message names the cause.
            ConfigurationError: arguments exclude each other, or this machine lacks int8.
        """
        own = {name: options.pop(name) for name in OPTIONS & options.keys()}
        config = EngineConfig(**own)
        claim_torch()
        try:
            model, tokenizer = open_model(
                name_or_path,
                dtype=dtype,
                device=device,
                device_map=device_map,
                check_folder=check_folder(keep=config.save_measurements),
                **options,
            )
        except TypeError as error:
            unknown = [name for name in options if f"argument '{name}'" in str(error)]
            if not unknown:
                raise
            raise TypeError(
                f"unknown option {unknown[0]}: transformers does not take it, and those of LLM are "
                f"{', '.join(sorted(OPTIONS))}"
            ) from error
        return cls(model, tokenizer, **own)

    def warm_up(self, *, compile: bool = False, context: int = 1024) -> None:  # noqa: A002
        """Prepare the model and the drafting now, so that the first answers do not wait.

        On a GPU, capture the CUDA graphs of all passes up to ``context`` tokens, for
        ``max_batch`` requests at a time; takes a tenth of a second each.

        Args:
            compile: compile the model with torch first, if torch supports it; takes about a
                minute. Has no effect on a CPU, where compiled models were not faster.
            context: the maximum number of tokens of a prompt and its answer. Graphs for longer
                ones are captured when they are first needed.
        """
        claim_torch()
        if compile:
            self.model.compile()
        warm_up_passes(self.engine, context=context, num_sequences=self.scheduler.max_batch)
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
        return self._generate(prompt, references, settings)

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
        generations, is_many = self._prepare(prompt, references, settings)
        if is_many:
            raise ConfigurationError("stream takes one prompt: call it for each prompt of a batch")
        cancellation, token_ids = Cancellation(), list[int]()
        pieces = self._pieces(generations[0], cancellation, token_ids)
        return Stream(pieces, generations[0].passages, cancellation, token_ids)

    async def agenerate(
        self, prompt: Any, *, references: Sequence[Any] = (), **settings: Unpack[Settings]
    ) -> Any:
        """Complete a prompt as ``generate`` does, for asyncio; cancelling the task stops it."""
        return await run_cancellable(partial(self._generate, prompt, references, settings))

    def astream(
        self,
        prompt: OnePrompt,
        *,
        references: Sequence[AnyReference] = (),
        **settings: Unpack[Settings],
    ) -> AsyncStream:
        """Complete one prompt piece by piece, for asyncio; leaving the loop over it stops it."""
        return AsyncStream(self.stream(prompt, references=references, **settings))

    def _prepare(
        self, prompt: Any, references: Any, settings: Settings
    ) -> tuple[list[Generation], bool]:
        """Check the prompts and settings of a call; return its requests, and if it is a batch."""
        claim_torch()
        settings = check_settings(settings)
        prompts = split_batch(prompt)
        if prompts is None:
            references = as_reference_list(references)
            return [self._request(prompt, references, dict(settings))], False
        each = references_per_prompt(references, len(prompts))
        return [
            self._request(one, own, dict(settings)) for one, own in zip(prompts, each, strict=True)
        ], True

    def _request(
        self, prompt: Any, references: Sequence[AnyReference], given: dict[str, Any]
    ) -> Generation:
        """Tokenize a prompt and its references, and complete the checked settings ``given``."""
        model, tokenizer = self.model, self.tokenizer
        built = read_prompt(prompt, references, tokenizer, model.vocab_size)
        eos_ids = self._defaults.eos_ids(tokenizer.eos_ids)
        more = self._defaults.complete(
            given,
            prompt_ids=built.token_ids,
            eos_ids=eos_ids,
            max_tokens=self.engine.max_tokens,
            vocab_size=model.vocab_size,
            device=model.device,
        )
        stop = None
        if "stop" in given:
            stop = TextStopRule(given.pop("stop"), tokenizer)
        elif more.stop_strings:  # like generate, find strings that begin in the prompt too
            stop = TextStopRule(more.stop_strings, tokenizer, after=built.token_ids)
        given |= more.settings
        criteria = (*more.criteria, *given.pop("stopping_criteria", ()))
        rules = make_criterion_rules(criteria, built.token_ids, model.device) if criteria else ()
        given.pop("logits_processors", None)
        drafter, remember = given.pop("drafter", None), given.pop("remember", True)
        check_mask_ids(drafter, model)
        predicted = prediction_references(given.pop("prediction", ()), tokenizer, built.token_ids)
        request = Request(
            prompt_ids=built.token_ids,
            references=(*built.references, *predicted),
            sampling=Sampling(**{name: given.pop(name) for name in SAMPLING & given.keys()}),
            eos_ids=eos_ids,
            stop_rules=(*([stop] if stop else ()), *rules),
            processors=logits_processors(more.processors) if more.processors else (),
            **given,
        )
        return Generation(
            self.engine.open(request),
            drafter,
            remember=remember,
            stop=stop,
            passages=built.passages,
            dropped=built.dropped,
        )

    def _decode(
        self, generations: Sequence[Generation], cancellation: Cancellation | None
    ) -> Generator[tuple[int, Session, Step], None, None]:
        return decode(
            self.scheduler,
            self._drafting,
            generations,
            token_budget=self.config.token_budget,
            cancellation=cancellation,
        )

    def _generate(
        self,
        prompt: Any,
        references: Any,
        settings: Settings,
        cancellation: Cancellation | None = None,
    ) -> Answer | list[Answer]:
        generations, is_many = self._prepare(prompt, references, settings)
        with closing(self._decode(generations, cancellation)) as steps:
            deque(steps, maxlen=0)
        answers = [self._answer(generation) for generation in generations]
        return answers if is_many else answers[0]

    def _answer(self, generation: Generation) -> Answer:
        session = generation.session
        assert session is not None
        shown = generation.visible(session.answer_ids, session.finish_reason)
        text = self.tokenizer.decode(shown)
        return generation.answer(generation.stop.trim(text) if generation.stop else text)

    def _pieces(
        self, generation: Generation, cancellation: Cancellation, token_ids: list[int]
    ) -> Generator[str, None, Answer]:
        """Yield the text piece by piece; a piece is never changed by later ones."""
        decoder, stop = IncrementalDecoder(self.tokenizer), generation.stop
        hidden = stop.make_filter() if stop is not None else None
        said: list[str] = []
        with closing(self._decode([generation], cancellation)) as steps:
            for _, session, step in steps:
                token_ids += step.token_ids
                visible = generation.visible(step.token_ids, session.finish_reason)
                piece = decoder.push(visible)
                piece = hidden.push(piece) if hidden is not None else piece
                if piece:
                    said.append(piece)
                    yield piece
        rest = decoder.finish()
        rest = hidden.push(rest) + hidden.finish() if hidden is not None else rest
        if rest:
            yield rest
        return generation.answer("".join([*said, rest]))
