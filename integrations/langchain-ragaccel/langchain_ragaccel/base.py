"""The options, calls and answers that ``ChatRagaccel`` and ``RagaccelLLM`` share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from uuid import uuid4

from langchain_core.callbacks.base import BaseCallbackHandler
from langchain_core.globals import get_llm_cache
from langchain_core.language_models.base import BaseLanguageModel
from langchain_core.messages.ai import UsageMetadata
from langchain_core.tracers.base import BaseTracer
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator
from ragaccel import ConfigurationError, RagaccelError, Settings
from ragaccel.frameworks import (
    ALIASES as LLM_ALIASES,
    DEFAULT_MAX_NEW_TOKENS,
    SharedModel,
    Sources,
    areply_all,
    check_registry,
    get_shared_model,
    read_options,
    refuse_settings,
    rename_options,
    reply_all,
    searched_references,
)

from langchain_ragaccel.callbacks import CURRENT_CALLER, Caller
from langchain_ragaccel.convert import as_list, as_references
from langchain_ragaccel.tools import ResponseFormat, parse_response_format

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.language_models.model_profile import ModelProfile
    from ragaccel import LLM
    from ragaccel.frameworks import Call, Reply, VisibleReferences
    from typing_extensions import Self

    from langchain_ragaccel.convert import AnyReference


PROVIDER = "ragaccel"

LLM_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""{name of an option here: its name in ``ragaccel.LLM``}; all others have the same name."""

_OWN_NAMES = {name: own for own, name in LLM_NAMES.items()}
ALIASES = _OWN_NAMES | {
    other: _OWN_NAMES.get(name, name)
    for other, name in LLM_ALIASES.items()
    if other not in LLM_NAMES
}
"""{name in other classes and libraries: name used here}."""

SETTINGS = frozenset(_OWN_NAMES.get(name, name) for name in Settings.__annotations__)
"""The names of the settings of ``LLM.generate``, as they are called here."""

_CACHE_NEUTRAL = frozenset({
    "references", "prediction", "drafter", "namespace", "remember", "registry", "auto_references",
    "adjacent_chunks", "max_reference_tokens", "timeout", "stream", "stream_usage",
    "ls_structured_output_format", "structured_output_format",
})  # fmt: skip
"""Options of a call that never change the answer to a given prompt."""

_FUNCTIONS = frozenset({"logits_processors", "stopping_criteria"})

_LOADING_OPTIONS = (
    "dtype", "device", "device_map", "capacity", "token_budget", "max_batch", "exact",
    "memory", "space",
)  # fmt: skip
_SAMPLING_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "n",
)  # fmt: skip

_CALL_REPLACEMENTS = {
    "max_length": "use max_tokens, which counts the answer alone",
    "response_format": "pass it to a call of a chat model: bind(response_format=...), or use "
    "with_structured_output(schema)",
    "model_kwargs": "pass it to the constructor: it holds loading options",
}
_REPLACEMENTS = {
    **_CALL_REPLACEMENTS,
    **dict.fromkeys(
        ("documents", "references", "prediction", "drafter", "logits_processors", "tools",
         "stopping_criteria", "tool_choice", "parallel_tool_calls"),
        "pass it to calls: invoke(..., name=value) or bind(name=value)",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of one call, those of the object included.

    Attributes:
        settings: the settings of ``LLM.generate``.
        options: all options by name, and None for those that neither call nor object has.
    """

    settings: dict[str, Any]
    options: dict[str, Any]
    references: list[AnyReference]
    response_format: ResponseFormat | None
    started: float = field(default_factory=monotonic)

    @property
    def count(self) -> int:
        """Return the number of answers."""
        return self.options["n"] or 1

    def visible_references(self, caller: Caller) -> VisibleReferences | None:
        """Return the references that the call may search, or None if it searches none."""
        options = self.options
        return searched_references(
            options["registry"],
            options["namespace"],
            caller.scopes,
            enabled=options["auto_references"],
        )

    def sources(
        self,
        caller: Caller,
        given: Sequence[AnyReference] = (),
        retrieved: Sequence[AnyReference] = (),
    ) -> Sources:
        """Return where references come from: the call, its messages, its tools and the caller."""
        return Sources(
            [*self.references, *given],
            retrieved,
            self.visible_references(caller),
            self.options["adjacent_chunks"],
            self.options["max_reference_tokens"],
        )

    def check_stream(self) -> None:
        """Raise ConfigurationError if a stream is asked for more than one answer."""
        if self.count > 1:
            raise ConfigurationError(
                f"a stream gives one answer, not n={self.count}: use generate instead"
            )


def as_stop_list(stop: Sequence[str] | str | None) -> list[str] | None:
    """Return stop strings as a list; a single string becomes a list of one."""
    return [stop] if isinstance(stop, str) else None if stop is None else list(stop)


def usage_metadata(reply: Reply) -> UsageMetadata:
    """Return the token counts of an answer as LangChain's usage metadata."""
    usage = reply.answer.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )


def token_usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Return the summed token counts of several answers, with the keys of LLM outputs."""
    return {
        name: sum(getattr(reply.answer.usage, name) for reply in replies)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }


def response_metadata(reply: Reply, model: str) -> dict[str, Any]:
    """Return the contents of ``response_metadata``; copied spans refer to the reply's text."""
    report = reply.answer.report(reply.text)
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": reply.finish_reason,
        "ragaccel": {"copied_spans": report.pop("citations"), **report},
    }


Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class ModelOptions(BaseLanguageModel[Any]):
    """The options that ``ChatRagaccel`` and ``RagaccelLLM`` share.

    The model is loaded at the first answer. All objects in a process with the same model name and
    loading options share one copy, which is freed with the last of them. Pass ``llm`` to use a
    ``ragaccel.LLM`` that is already loaded.

    Attributes:
        model: A name on the Hugging Face Hub or a folder; by default the bundled reader. With
            ``llm``, the name under which that model is reported.
        llm: A loaded ``ragaccel.LLM`` to use instead of ``model``.
        dtype, device, device_map, capacity, token_budget, max_batch, exact, memory, space: Options
            of ``ragaccel.LLM.load``.
        model_kwargs: Further arguments for transformers' ``from_pretrained``.
        temperature, top_p, top_k, min_p, seed, repetition_penalty, no_repeat_ngram_size, stop: The
            settings of ``ragaccel.Settings``.
        max_tokens, min_tokens: Its ``max_new_tokens`` and ``min_new_tokens``.
        n: Number of answers, sampled with consecutive seeds; 1 by default.
        timeout: Seconds after which an unfinished answer raises ``TimeoutError``.
        namespace: Isolates the references and remembered text of one tenant from those of others.
        remember: Draft from earlier requests of the namespace, and keep this one for later ones.
        registry: A ``ragaccel.frameworks.ReferenceRegistry`` to search for references. None
            searches what the current run and ``ragaccel.reference_scope`` retrieved and, with a
            namespace, the process's registry.
        auto_references: Copy from retrieved passages that occur in the prompt.
        adjacent_chunks: Copy also from the chunks next to those passages in the same document.
        max_reference_tokens: Maximum number of tokens of references that the call did not name.
        streaming: Whether ``invoke`` sends tokens to callbacks. None, the default, sends them if a
            callback handles new tokens.
        stream_usage: Whether streams end with token counts; on by default.
        max_retries, api_key: Accepted and ignored: the model runs in this process.
    """

    model: str | None = None
    llm: Any = Field(default=None, exclude=True, repr=False)

    dtype: str | None = None
    device: str | None = None
    device_map: Any = None
    capacity: Positive | None = None
    token_budget: int | None = None
    max_batch: Positive | None = None
    exact: bool | None = None
    memory: str | None = None
    space: str | bool | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)

    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_tokens: Positive | None = None
    min_tokens: NotNegative | None = None
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: NotNegative | None = None
    min_p: Probability | None = None
    seed: int | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    no_repeat_ngram_size: NotNegative | None = None
    n: Positive | None = None
    stop: list[str] | str | None = None
    timeout: float | None = Field(default=None, gt=0)

    namespace: str = ""
    remember: bool = True
    registry: Any = Field(default=None, exclude=True, repr=False)
    auto_references: bool = True
    adjacent_chunks: bool = True
    max_reference_tokens: NotNegative = 8192

    streaming: bool | None = None
    stream_usage: bool | None = None
    max_retries: int | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    settable: ClassVar[frozenset[str]] = SETTINGS | _CACHE_NEUTRAL | {"model", "n"}
    """The names that a call and ``bind`` accept."""

    _shared_model: SharedModel | None = PrivateAttr(default=None)

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    @field_validator("model", "memory", "dtype", "device", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> str | None:
        """Convert paths, torch dtypes and devices to strings, for serialization and cache keys."""
        return None if value is None else str(value).removeprefix("torch.")

    @model_validator(mode="before")
    @classmethod
    def _normalize_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = read_options(values, cls.__name__, cls.model_fields, _REPLACEMENTS, ALIASES)
        refuse_settings(
            values.get("model_kwargs") or (), "it is an argument of its own, not a loading option"
        )
        return values

    @model_validator(mode="after")
    def _check_and_share(self) -> Self:
        if "" in (as_stop_list(self.stop) or ()):
            raise ConfigurationError("stop contains an empty string: remove it")
        check_registry(self.registry)
        most, least = self.max_tokens or DEFAULT_MAX_NEW_TOKENS, self.min_tokens or 0
        if least > most:
            raise ConfigurationError(
                f"min_tokens ({least}) is more than max_tokens ({most}): lower one or raise the "
                "other"
            )
        if self.llm is not None:
            self._check_llm()
        _ = self.shared
        return self

    @model_validator(mode="after")
    def _set_ragaccel_version(self) -> Self:
        if hasattr(self, "_add_version"):  # langchain-core has it since 1.4
            from langchain_ragaccel import __version__

            self._add_version("langchain-ragaccel", __version__)
        return self

    def _check_llm(self) -> None:
        from ragaccel import LLM

        if not isinstance(self.llm, LLM):
            raise ConfigurationError(
                f"llm must be a ragaccel.LLM, not {type(self.llm).__name__}: "
                "pass a model's name as model="
            )
        loading = (*_LOADING_OPTIONS, "model_kwargs")
        if given := [name for name in loading if getattr(self, name) not in (None, {})]:
            raise ConfigurationError(
                f"llm= is already loaded and takes no {', '.join(given)}: pass them to LLM.load, "
                "or pass model= instead of llm="
            )

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: LangChain can rebuild the object from its constructor's plain values."""
        return True

    def to_json(self) -> Any:
        """Serialize the constructor's arguments, unless ``llm`` or ``registry`` is set."""
        if self.llm is not None or self.registry is not None:
            return self.to_json_not_implemented()
        return super().to_json()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options and share ``llm`` and ``registry``."""
        memo = {} if memo is None else memo
        memo.update({id(shared): shared for shared in (self.llm, self.registry)})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state to pickle; raise TypeError if ``llm`` or ``registry`` is set."""
        if self.llm is not None or self.registry is not None:
            raise TypeError(
                f"a {type(self).__name__} made with llm= or registry= cannot be pickled: "
                "pass the model's name instead, and each process loads its own"
            )
        return super().__getstate__()

    @property
    def shared(self) -> SharedModel:
        """Return the model, loaded or not, shared by all objects with the same options."""
        if self.llm is None:
            shared = get_shared_model(self.model, **self._loading_options())
        else:
            shared = SharedModel(self.model, ready=self.llm)
        if self._shared_model is None or self._shared_model != shared:
            self._shared_model = shared
        return self._shared_model

    @property
    def model_name(self) -> str:
        """Return the model's name, as reported in every answer's metadata."""
        return self.shared.label

    @property
    def ready_llm(self) -> LLM:
        """Return the ``ragaccel.LLM`` that answers, and load it if necessary."""
        return self.shared.load()

    @property
    def identity_params(self) -> dict[str, Any]:
        """Return the options that an answer depends on; speculation never changes an answer."""
        names = ("dtype", "device", "device_map", "capacity", "exact", *_SAMPLING_OPTIONS)
        known = {name: getattr(self, name) for name in names} | {"stop": as_stop_list(self.stop)}
        if self.model_kwargs:
            known["model_kwargs"] = {name: repr(one) for name, one in self.model_kwargs.items()}
        if self.llm is not None and self.model is None:
            known["llm"] = self.shared.identity
        plain = (bool, int, float, str, list, dict)
        return {
            "model": self.model_name,
            **{
                name: value if isinstance(value, plain) else str(value)
                for name, value in known.items()
                if value is not None
            },
        }

    def check_names(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by the names used here.

        Raises:
            TypeError: A name is not a setting of a call; the message says what to use instead.
        """
        owner = f"a call of {type(self).__name__}"
        return read_options(kwargs, owner, self.settable, _CALL_REPLACEMENTS, ALIASES)

    def call_options(
        self, stop: Sequence[str] | str | None, kwargs: Mapping[str, Any]
    ) -> CallOptions:
        """Merge a call's settings with this object's; the call's take precedence.

        Raises:
            TypeError: The call has an unknown argument.
            ConfigurationError: A setting is invalid, or the call names another model.
        """
        own = self.check_names(kwargs)
        if (model := own.pop("model", None)) not in (None, self.model, self.model_name):
            raise ConfigurationError(
                f"a call cannot switch from {self.model_name!r} to {model!r}: "
                f"create {type(self).__name__}(model={model!r})"
            )
        options = {
            name: getattr(self, name, None) if name in type(self).model_fields else None
            for name in self.settable
        } | {name: value for name, value in own.items() if value is not None}
        if stop is not None:
            options["stop"] = stop
        options["stop"] = as_stop_list(options["stop"])
        _check_options(options)
        return CallOptions(
            settings={
                LLM_NAMES.get(name, name): options[name]
                for name in SETTINGS
                if options[name] is not None
            },
            options=options,
            references=as_references(as_list(options["references"], "references")),
            response_format=parse_response_format(own.get("response_format")),
        )

    def with_settings(self, kwargs: dict[str, Any]) -> Self:
        """Return a copy that has a call's sampling options, and remove those from ``kwargs``."""
        settings = rename_options(kwargs, type(self).__name__, ALIASES).items()
        own = {k: v for k, v in settings if k in _SAMPLING_OPTIONS and v is not None}
        for name in [name for name in kwargs if ALIASES.get(name, name) in _SAMPLING_OPTIONS]:
            del kwargs[name]
        if kwargs.keys() & _FUNCTIONS:
            own["cache"] = False  # functions have no cache key
        return self.model_copy(update=own) if own else self

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, by the model's tokenizer and without special tokens."""
        counted = self.custom_get_token_ids
        return list(self.shared.tokenizer.encode(text)) if counted is None else counted(text)

    def bind(self, **kwargs: Any) -> Any:
        """Return a runnable that passes these settings to every call.

        Raises:
            TypeError: A name is not a setting of a call.
        """
        self.check_names(kwargs)
        return super().bind(**kwargs)

    @property
    def uses_cache(self) -> bool:
        """Return whether answers are cached, in the own cache or LangChain's global one."""
        if self.cache is None or self.cache is True:
            return get_llm_cache() is not None
        return self.cache is not False

    def prompt_dependencies(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the cache-key entries for what a documents-only model's prompt is made of.

        Such a prompt contains only the references given and registered. Return an empty dict for
        other models, whose prompts do not depend on them. The keys are valid in this process only,
        since a registry is. No weights are loaded.
        """
        try:
            if not self.shared.is_documents_only:
                return {}
        except RagaccelError:  # the answer raises it again
            return {}
        known = kwargs.keys() & {"references", "registry", "namespace", "auto_references"}
        call = self.call_options(None, {name: kwargs[name] for name in known})
        visible = call.visible_references(CURRENT_CALLER.get())
        return {
            "references": repr(call.references),
            "registry": "" if visible is None else visible.state,
            "namespace": call.options["namespace"],
        }

    def _sends_tokens(self, run_manager: Any) -> bool:
        """Return whether ``invoke`` sends tokens to callbacks.

        ``streaming`` decides if it is set. Otherwise it does if a handler takes tokens, such as
        that of ``astream_events``. Tracers do not count: they record the whole text anyway.
        """
        if run_manager is None or not run_manager.handlers:
            return False
        if self.streaming is not None:
            return self.streaming
        return any(_receives_tokens(handler) for handler in run_manager.handlers)

    def _generate(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        """Answer messages or prompts; the tokens of a single answer go to callbacks if wanted."""
        options = self.call_options(stop, kwargs)
        calls = self._calls(asked, options, run_manager)
        if len(calls) != 1 or not self._sends_tokens(run_manager):
            return self._result(reply_all(calls), options)
        for part, _ in self._parts(calls[0], options, run_manager):  # noqa: B007
            pass
        return self._result([part], options)  # the last part is the reply

    async def _agenerate(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        options, calls = await self._acalls(asked, stop, run_manager, kwargs)
        if len(calls) != 1 or not self._sends_tokens(run_manager):
            return self._result(await areply_all(calls), options)
        async for part, _ in self._aparts(calls[0], options, run_manager):  # noqa: B007
            pass
        return self._result([part], options)

    def _stream(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        """Yield the chunks of an answer, after callbacks got them."""
        options = self.call_options(stop, kwargs)
        options.check_stream()
        (call,) = self._calls(asked, options, run_manager)
        for _, chunk in self._parts(call, options, run_manager):
            yield chunk

    async def _astream(
        self, asked: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        options, calls = await self._acalls(asked, stop, run_manager, kwargs)
        options.check_stream()
        async with aclosing(self._aparts(calls[0], options, run_manager)) as parts:
            async for _, chunk in parts:
                yield chunk

    async def _acalls(
        self, asked: Any, stop: list[str] | None, run_manager: Any, kwargs: Mapping[str, Any]
    ) -> tuple[CallOptions, list[Call]]:
        """Prepare calls off the event loop; waiting for a model occupies no worker thread."""
        options = await asyncio.to_thread(self.call_options, stop, kwargs)
        await self.shared.aload()
        return options, await asyncio.to_thread(self._calls, asked, options, run_manager)

    def _parts(
        self, call: Call, options: CallOptions, run_manager: Any
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the parts of an answer with their chunks, after callbacks got them."""
        for part in call.pieces():
            for chunk in self._chunks(part, options):
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield part, chunk

    async def _aparts(
        self, call: Call, options: CallOptions, run_manager: Any
    ) -> AsyncGenerator[tuple[Any, Any], None]:
        async with aclosing(await call.apieces()) as parts:
            async for part in parts:
                for chunk in self._chunks(part, options):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield part, chunk

    def _calls(self, asked: Any, options: CallOptions, run_manager: Any) -> list[Call]:
        """Return the calls that answer messages or prompts."""
        raise NotImplementedError

    def _result(self, replies: Sequence[Reply], options: CallOptions) -> Any:
        """Return LangChain's result for the answers of a call."""
        raise NotImplementedError

    def _chunks(self, part: str | Reply, options: CallOptions) -> Iterator[Any]:
        """Yield the chunks of a piece of an answer, or of its end."""
        raise NotImplementedError

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """Return the provider and model name for traces.

        LangChain's chat and LLM base classes both have this method; their common base does not.
        """
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        return params

    def _loading_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _LOADING_OPTIONS}
        known = {name: value for name, value in given.items() if value is not None}
        return self.model_kwargs | known


def _check_options(options: Mapping[str, Any]) -> None:
    """Check a call's options that neither pydantic nor the LLM checks."""
    timeout, tokens, count = (options[name] for name in ("timeout", "max_reference_tokens", "n"))
    if timeout is not None and not timeout > 0:
        raise ConfigurationError(
            f"timeout must be above 0 seconds, not {timeout}: pass None for no limit"
        )
    if tokens < 0:
        raise ConfigurationError(f"max_reference_tokens must be 0 or more, not {tokens}")
    check_registry(options["registry"])
    if count in (None, 1):
        return
    if not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"n must be a whole number of 1 or more, not {count!r}")
    if not options["temperature"]:
        raise ConfigurationError(
            f"n={count} answers with temperature=0 would be identical: set a temperature above 0"
        )


def model_profile(model: SharedModel) -> ModelProfile | None:
    """Return a model's abilities, from its config and tokenizer, or None if they cannot be read.

    The first answer raises the error; LangChain allows a missing profile.
    """
    try:
        length, calls_tools = model.context_length, model.tokenizer.takes_tools
    except RagaccelError:
        return None
    unsupported = (
        "image_inputs", "audio_inputs", "video_inputs", "pdf_inputs", "image_outputs",
        "audio_outputs",
        "structured_output",  # schemas are sent as tools, and decoding does not enforce them
    )  # fmt: skip
    profile: ModelProfile = {
        "text_inputs": True,
        "text_outputs": True,
        "tool_calling": calls_tools,
        **dict.fromkeys(unsupported, False),  # type: ignore[typeddict-item]
    }
    if length:
        profile["max_input_tokens"] = length
    return profile


def cache_key(
    identity_params: Mapping[str, Any], stop: Sequence[str] | str | None, kwargs: Mapping[str, Any]
) -> str:
    """Return an answer's cache key: all settings that the answer depends on, as text."""
    kept = {
        name: value
        for name, value in rename_options(kwargs, "a call", ALIASES).items()
        if name not in _CACHE_NEUTRAL and value is not None
    }
    if kept.keys() & _FUNCTIONS:
        kept["once"] = uuid4().hex  # functions have no key: never cache
    if stop is not None:
        kept["stop"] = as_stop_list(stop)
    return str(sorted({**identity_params, **kept}.items()))


def _receives_tokens(handler: Any) -> bool:
    if getattr(handler, "ignore_llm", False) or isinstance(handler, BaseTracer):
        return hasattr(handler, "tap_output_aiter")
    own = getattr(type(handler), "on_llm_new_token", None)
    return own is not BaseCallbackHandler.on_llm_new_token
