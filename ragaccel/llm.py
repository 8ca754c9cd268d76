"""LLM: a local language model that completes prompts, copying from references where it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from ragaccel.answer import Answer, Stream
from ragaccel.awaiting import AsyncStream, answered, unless_cancelled
from ragaccel.engine.engine import Engine, warm_passes
from ragaccel.engine.scheduler import Scheduler
from ragaccel.errors import ConfigurationError
from ragaccel.forking import claim_torch
from ragaccel.guessing import Guessing
from ragaccel.homes import cost_file
from ragaccel.inputs import is_batch, references_of_each
from ragaccel.loading import open_model, use_space
from ragaccel.models.generation_config import GenerationDefaults
from ragaccel.models.load import as_target, end_tokens, is_bundled
from ragaccel.models.packing import packing_file
from ragaccel.models.self_check import check_folder
from ragaccel.models.tokenizer import Tokenizer
from ragaccel.planning import check_probes, make_plan
from ragaccel.references import listed_references
from ragaccel.running import Runner
from ragaccel.settings import check_options, check_settings
from ragaccel.writing import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import GenerationConfig
    from typing_extensions import Unpack

    from ragaccel.decoding.session import Drafter
    from ragaccel.drafting.memory import Memory
    from ragaccel.inputs import AnyReference, Batch, OnePrompt
    from ragaccel.loading import Space
    from ragaccel.planning import Plan
    from ragaccel.settings import Settings


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
            through ``data`` (``llm.model.weights_changed`` tells of them); other modules or hooks
            are refused then.
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
        ModelRefusedError: the model cannot be decoded exactly; the message names the cause.
        ConfigurationError: arguments that cannot work, or exclude each other.
        ForkError: this process was forked from one that had used a model; requests raise it too.
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
        self.model = as_target(model, packing_file(keep=keep_costs), check_folder(keep=keep_costs))
        self._defaults = GenerationDefaults(self.model.model, generation_config)
        self.probe_ids = use_space(self.model, space, exact=exact)
        """Mask tokens for drafters; none without a SPACE adapter. It may have more behind them."""
        check_probes(drafter, self.model)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer, eos_ids=end_tokens(self.model.model, tokenizer))
        self.tokenizer: Tokenizer = tokenizer
        kept = cost_file(self.model.cost_key) if keep_costs else None
        self.engine = Engine(self.model, capacity=capacity, cost_file=kept, exact=exact)
        self.token_budget = token_budget
        self._guessing = Guessing(
            drafter,
            memory,
            tokenizer,
            self.model.vocab_size,
            probe_ids=self.probe_ids,
            remember=remember,
        )
        scheduler = Scheduler(self.engine, max_batch=given["max_batch"])
        self._writer = Writer(Runner(scheduler, self._guessing, token_budget), tokenizer)

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
            ModelRefusedError: the model cannot be decoded exactly; the message names the cause.
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
            rehearse=drafter is None,
            dtype=dtype,
            device=device,
            device_map=device_map,
            packing_file=packing_file(keep=keep_costs),
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
        warm_passes(self.engine, context=context)
        self._guessing.warm_up()

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
            return self._writer.stream(self._plan(prompt, references, settings)).finish()
        return self._writer.all(self._plans(prompt, references, settings))

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
        return self._writer.stream(self._plan(prompt, references, settings))

    async def agenerate(
        self, prompt: Any, *, references: Sequence[Any] = (), **settings: Unpack[Settings]
    ) -> Any:
        """Complete a prompt as ``generate`` does, for asyncio; cancelling it ends it."""
        if is_batch(prompt):
            return await unless_cancelled(
                lambda asked: self._writer.all(self._plans(prompt, references, settings), asked)
            )
        return await answered(self.stream(prompt, references=references, **settings))

    def astream(
        self,
        prompt: OnePrompt,
        *,
        references: Sequence[AnyReference] = (),
        **settings: Unpack[Settings],
    ) -> AsyncStream:
        """Complete one prompt piece by piece, for asyncio; leaving the loop over it ends it."""
        return AsyncStream(self.stream(prompt, references=references, **settings))

    def _plans(self, prompts: Any, references: Sequence[Any], settings: Settings) -> list[Plan]:
        claim_torch()
        settings = check_settings(settings)
        each = references_of_each(references, len(prompts))
        return [self._plan(one, own, settings) for one, own in zip(prompts, each, strict=True)]

    def _plan(self, prompt: Any, references: Sequence[AnyReference], settings: Settings) -> Plan:
        claim_torch()
        settings, references = check_settings(settings), listed_references(references)
        plan = make_plan(
            self.model,
            self.tokenizer,
            prompt,
            references,
            settings,
            defaults=self._defaults,
            room=self.engine.max_tokens,
        )
        self.engine.check_fits(plan.request)
        return plan
