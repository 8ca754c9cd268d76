"""The options, calls and answers that ``ChatRagaccel`` and ``RagaccelLLM`` share."""

from __future__ import annotations

import asyncio
import copy
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Timer
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain_core.callbacks.base import BaseCallbackHandler
from langchain_core.globals import get_llm_cache
from langchain_core.language_models.base import BaseLanguageModel
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables.config import run_in_executor
from langchain_core.tracers.base import BaseTracer
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator
from ragaccel import ConfigurationError, RagaccelError
from ragaccel.errors import check_arguments, has_no_effect
from ragaccel.frameworks import SharedModel, get_shared_model

from langchain_ragaccel.callbacks import Caller, caller_from_callbacks, current_caller
from langchain_ragaccel.tools import ResponseFormat, parse_response_format

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence

    from langchain_core.callbacks.base import BaseCallbackManager
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.language_models.model_profile import ModelProfile
    from ragaccel import LLM, Answer, AsyncStream, Stream
    from ragaccel.frameworks import ReferenceRegistry, VisibleReferences
    from ragaccel.models import ToolCall, ToolCalling
    from typing_extensions import Self


DEFAULT_MAX_TOKENS = 256  # the default of ``LLM.generate``


def check_options(options: ModelOptions) -> None:
    """Check the options that pydantic's fields cannot check by themselves.

    Raises:
        ConfigurationError: An option has the wrong type, or two options contradict each other.
    """
    check_stops(options.stop)
    check_registry(options.registry)
    most, least = options.max_tokens or DEFAULT_MAX_TOKENS, options.min_tokens or 0
    if least > most:
        raise ConfigurationError(
            f"min_tokens ({least}) is more than max_tokens ({most}): lower one or raise the other"
        )
    if options.llm is not None:
        _check_llm(options)


def check_stops(stop: Sequence[str] | str | None) -> None:
    """Raise ConfigurationError for an empty stop string, which would end every answer at once."""
    if stop is not None and (stop == "" or ("" in stop and not isinstance(stop, str))):
        raise ConfigurationError("stop contains an empty string: remove it")


def check_registry(registry: Any) -> None:
    """Raise ConfigurationError unless ``registry`` is None or a ``ReferenceRegistry``."""
    if registry is None:
        return
    from ragaccel.frameworks import ReferenceRegistry

    if not isinstance(registry, ReferenceRegistry):
        raise ConfigurationError(
            "registry must be a ragaccel.frameworks.ReferenceRegistry, not "
            f"{type(registry).__name__}"
        )


def _check_llm(options: ModelOptions) -> None:
    from ragaccel import LLM

    if not isinstance(options.llm, LLM):
        raise ConfigurationError(
            f"llm must be a ragaccel.LLM, not {type(options.llm).__name__}: "
            "pass a model's name as model="
        )
    names = (*LOADING_OPTIONS, "model_kwargs")
    given = [name for name in names if getattr(options, name) not in (None, {})]
    if given:
        raise ConfigurationError(
            f"llm= is already loaded and takes no {', '.join(given)}: pass them to LLM.load, or "
            "pass model= instead of llm="
        )


ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "num_ctx": "capacity",
    "request_timeout": "timeout",
    "torch_dtype": "dtype",
    "format": "response_format",
    "num_return_sequences": "n",
}
"""{name in other classes and libraries: name used here}."""

REPLACEMENTS = {
    "max_length": "use max_tokens, which counts the answer alone",
    "response_format": "pass it to a call of a chat model: bind(response_format=...), or use "
    "with_structured_output(schema)",
    "model_kwargs": "pass it to the constructor: it holds loading options",
}
"""{argument that a call does not take: advice on what to use}."""

GENERATION_SETTINGS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "logits_processors", "stopping_criteria", "n",
})  # fmt: skip
"""Names of a call's settings that affect the answer."""

CACHE_NEUTRAL_SETTINGS = frozenset({
    "references", "prediction", "drafter", "namespace", "remember", "registry", "auto_references",
    "adjacent_chunks", "max_reference_tokens", "timeout", "stream", "stream_usage",
    "ls_structured_output_format", "structured_output_format",
})  # fmt: skip
"""Names of a call's settings that never change the answer to a given prompt.

Some of them change the prompt itself if the model's template is documents-only;
``prompt_dependencies`` adds those to cache keys.
"""

_LLM_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_FORWARDED_SETTINGS = (
    (GENERATION_SETTINGS | {"prediction", "drafter", "namespace", "remember"})
    - _LLM_NAMES.keys()
    - {"n"}
)
_OBJECT_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "namespace", "remember",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of one call: settings for ``LLM.generate`` and the sources of references."""

    settings: dict[str, Any]
    references: tuple[Any, ...]
    registry: ReferenceRegistry | None
    """The registry passed to the call or to the object."""
    uses_auto_references: bool
    """Whether to search for registered passages in the prompt."""
    namespace: str
    adjacent_chunks: bool
    max_reference_tokens: int
    timeout: float | None
    uses_run_tree: bool
    count: int = 1
    """Number of answers."""
    includes_usage: bool = True
    """Whether streams report token counts."""
    response_format: ResponseFormat | None = None
    """The format that the answer's text must have."""
    started: float = field(default_factory=monotonic)
    caller: Caller = field(default_factory=Caller)

    def for_run(self, run_manager: Any, caller: Caller | None = None) -> CallOptions:
        """Return a copy for one run, whose caller is ``caller`` or the run manager's."""
        if caller is None:
            caller = current_caller() if run_manager is None else caller_from_callbacks(run_manager)
        return replace(self, caller=caller)

    @property
    def visible_references(self) -> VisibleReferences | None:
        """Return the references the call may search, or None if it searches none."""
        if not self.uses_auto_references:
            return None
        from ragaccel.frameworks import visible_references

        scopes = self.caller.scopes
        return visible_references(self.registry, self.namespace, scopes=scopes)


def normalize_names(kwargs: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Translate aliases to the names used here, and drop settings without effect.

    A setting without effect is, for example, a penalty of 0.

    Raises:
        TypeError: One setting is given under two names.
    """
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        if has_no_effect(name, value):
            continue
        own = ALIASES.get(name, name)
        if own in named or (own != name and own in kwargs):
            raise TypeError(f"{owner} got {own} twice, once as {name}: pass it once")
        named[own] = value
    return named


def check_names(kwargs: Mapping[str, Any], owner: str, allowed: frozenset[str]) -> None:
    """Raise TypeError for names that no call takes, and say what to use instead."""
    check_arguments(f"a call of {owner}", normalize_names(kwargs, owner), allowed, REPLACEMENTS)


def make_call(
    options: ModelOptions, stop: Sequence[str] | str | None, kwargs: Mapping[str, Any]
) -> CallOptions:
    """Merge a call's own settings with those of the object; the call's take precedence.

    Raises:
        ConfigurationError: A setting is invalid, or the call names another model.
    """
    own = normalize_names(kwargs, type(options).__name__)
    _check_model(options, own.pop("model", None))

    def setting(name: str) -> Any:
        value = own.get(name)
        return getattr(options, name) if value is None else value

    includes_usage = setting("stream_usage")
    settings = {name: own[name] for name in _FORWARDED_SETTINGS & own.keys()}
    for name in _OBJECT_SETTINGS:
        settings[_LLM_NAMES.get(name, name)] = setting(name)
    settings["stop"] = as_stop_list(options.stop if stop is None else stop)
    uses_auto_references = wants_auto_references(options, own)
    return CallOptions(
        settings={name: value for name, value in settings.items() if value is not None},
        references=as_list(own.get("references"), "references"),
        registry=registry_for(options, own),
        uses_auto_references=uses_auto_references,
        namespace=setting("namespace"),
        adjacent_chunks=setting("adjacent_chunks"),
        max_reference_tokens=_check_max_reference_tokens(setting("max_reference_tokens")),
        timeout=_check_timeout(setting("timeout")),
        uses_run_tree=uses_auto_references and options.track == "run-tree",
        count=_num_answers(setting("n"), settings),
        includes_usage=includes_usage is not False,
        response_format=parse_response_format(own.get("response_format")),
    )


def _num_answers(answers: Any, settings: Mapping[str, Any]) -> int:
    if answers in (None, 1):
        return 1
    if not isinstance(answers, int) or answers < 1:
        raise ConfigurationError(f"n must be a whole number of 1 or more, not {answers!r}")
    if not settings.get("temperature"):
        raise ConfigurationError(
            f"n={answers} answers with temperature=0 would be identical: set a temperature above 0"
        )
    return answers


def check_stream(call: CallOptions) -> None:
    """Raise ConfigurationError if a stream is asked for more than one answer."""
    if call.count > 1:
        raise ConfigurationError(
            f"a stream gives one answer, not n={call.count}: use generate instead"
        )


def _check_model(options: ModelOptions, requested: Any) -> None:
    if requested not in (None, options.model, options.model_name):
        raise ConfigurationError(
            f"a call cannot switch from {options.model_name!r} to {requested!r}: "
            f"create {type(options).__name__}(model={requested!r})"
        )


def _check_timeout(seconds: float | None) -> float | None:
    if seconds is not None and not seconds > 0:
        raise ConfigurationError(
            f"timeout must be above 0 seconds, not {seconds}: pass None for no limit"
        )
    return seconds


def _check_max_reference_tokens(tokens: int) -> int:
    if tokens < 0:
        raise ConfigurationError(f"max_reference_tokens must be 0 or more, not {tokens}")
    return tokens


def wants_auto_references(options: ModelOptions, own: Mapping[str, Any]) -> bool:
    """Return whether a call searches for registered passages in its prompt."""
    from ragaccel.frameworks import auto_references_enabled

    requested = own.get("auto_references")
    wanted = options.auto_references if requested is None else requested
    return bool(wanted) and auto_references_enabled()


def registry_for(options: ModelOptions, own: Mapping[str, Any]) -> ReferenceRegistry | None:
    """Return the registry passed to the call, else that of the object."""
    registry: ReferenceRegistry | None = own.get("registry")
    check_registry(registry)
    return options.registry if registry is None else registry


def as_stop_list(stop: Sequence[str] | str | None) -> list[str] | None:
    """Return stop strings as a list; a single string becomes a list of one."""
    return [stop] if isinstance(stop, str) else None if stop is None else list(stop)


def as_list(value: Any, name: str) -> tuple[Any, ...]:
    """Return a list argument as a tuple; raise ConfigurationError for a bare string or object."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigurationError(
            f"{name} must be a list of texts, documents or passages, not "
            f"{type(value).__name__}: wrap it in a list"
        )
    return tuple(value)


_MIN_TOKENS_FOR_THREAD = 256  # shorter answers are parsed for tool calls at once
_MAX_THREADS = 16  # the default batch size of the engine

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with everything needed to answer it."""

    llm: LLM
    prompt: Any
    references: Sequence[Any]
    settings: dict[str, Any]
    timeout: float | None
    started: float = field(default_factory=monotonic)
    """Start of the call. The timeout includes finding references and loading the model."""
    calling: ToolCalling | None = None
    """The tools that the answer may call."""
    response_format: ResponseFormat | None = None
    """The format that the answer's text must have."""
    includes_usage: bool = True
    """Whether the last chunk of a stream carries token counts."""

    @property
    def remaining_seconds(self) -> float | None:
        """Return the seconds left before the timeout; raise TimeoutError if none are."""
        if self.timeout is None:
            return None
        left = self.started + self.timeout - monotonic()
        if left <= 0:
            raise _timeout_error(self.timeout)
        return left

    def read(self, answer: Answer) -> tuple[str, list[ToolCall]]:
        """Split an answer into its text and its tool calls."""
        content: str = answer.text
        calls: list[ToolCall] = []
        if self.calling is not None:
            content, calls = self.calling.read(answer.text, answer.token_ids)
        if self.response_format is None:
            return content, calls
        return self.response_format.read(content, calls, answer.finish_reason)

    def stream(self) -> Stream:
        """Check the request and return a stream that computes the answer while it is read."""
        return self.llm.stream(self.prompt, references=self.references, **self.settings)

    def astream(self) -> AsyncStream:
        """Check the request and return a stream that computes the answer while awaited."""
        return self.llm.astream(self.prompt, references=self.references, **self.settings)


class _StreamFilter:
    """A filter of a stream's text that delays text which may become a tool call."""

    def __init__(self, request: Request) -> None:
        self._calling, self._emitted = request.calling, ""
        # A JSON object can be checked only when it is complete.
        self._buffers_all = request.response_format is not None
        self.is_cheap = self._buffers_all or request.calling is None

    def filter(self, piece: str, stream: Stream | AsyncStream) -> str:
        """Return the text that can be emitted after one more piece has arrived."""
        if self._buffers_all:
            return ""
        if self._calling is None:
            return piece
        piece = self._calling.next_content(self._emitted, stream.token_ids)
        self._emitted += piece
        return piece


def generate_answer(request: Request) -> Answer:
    """Compute the answer of one request.

    Raises:
        TimeoutError: The timeout has passed. The functions below raise it too.
    """
    stream = request.stream()
    with _close_on_timeout(request, stream.close):
        return stream.finish()


def generate_answers(requests: Sequence[Request]) -> list[Answer]:
    """Answer several requests to one LLM in shared forward passes, within one timeout."""
    if len(requests) <= 1:
        return [generate_answer(request) for request in requests]
    first = requests[0]
    if first.timeout is None and _have_same_settings(requests):
        prompts, references = _prompts_and_references(requests)
        return first.llm.generate(prompts, references=references, **first.settings)
    streams = [request.stream() for request in requests]

    def close() -> None:
        for stream in streams:
            stream.close()

    with (
        _close_on_timeout(first, close),
        ThreadPoolExecutor(min(len(requests), _MAX_THREADS)) as pool,
    ):
        return list(pool.map(lambda stream: stream.finish(), streams))


def stream_answer(request: Request) -> Iterator[str | Answer]:
    """Yield the pieces of an answer, then the ``Answer``; closing the iterator ends it."""
    with request.stream() as stream, _close_on_timeout(request, stream.close):
        stream_filter = _StreamFilter(request)
        for piece in stream:
            if text := stream_filter.filter(piece, stream):
                yield text
        yield stream.answer


async def run_in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work, such as matching and tokenizing texts, in a thread."""
    return await run_in_executor(None, work)


async def agenerate_answer(request: Request) -> Answer:
    """Answer one request; cancelling the caller cancels the answer."""
    left, stream = request.remaining_seconds, await run_in_thread(request.astream)
    return await _wait_for(stream.finish(), left, request.timeout)


async def agenerate_answers(requests: Sequence[Request]) -> list[Answer]:
    """Answer several requests to one LLM in shared forward passes, within one timeout."""
    if len(requests) <= 1:
        return [await agenerate_answer(request) for request in requests]
    if not _have_same_settings(requests):
        return list(await asyncio.gather(*map(agenerate_answer, requests)))
    first = requests[0]
    prompts, references = _prompts_and_references(requests)
    left = first.remaining_seconds
    work = first.llm.agenerate(prompts, references=references, **first.settings)
    found: list[Answer] = await _wait_for(work, left, first.timeout)
    return found


async def astream_answer(request: Request) -> AsyncGenerator[str | Answer, None]:
    """Yield the pieces of an answer, then the ``Answer``; closing the iterator ends it."""
    stream, stream_filter = await run_in_thread(request.astream), _StreamFilter(request)
    try:
        while True:
            left = request.remaining_seconds
            piece = await _wait_for(_next(stream), left, request.timeout)
            if piece is None:
                break
            if text := await _filter_piece(stream_filter, piece, stream):
                yield text
        yield stream.answer
    finally:
        await stream.aclose()


async def _filter_piece(stream_filter: _StreamFilter, piece: str, stream: AsyncStream) -> str:
    """Filter a piece, in a thread if the answer is long, since each piece parses all of it."""
    if stream_filter.is_cheap or len(stream.token_ids) < _MIN_TOKENS_FOR_THREAD:
        return stream_filter.filter(piece, stream)
    return await run_in_thread(lambda: stream_filter.filter(piece, stream))


def sample_requests(request: Request, count: int) -> list[Request]:
    """Return ``count`` copies of a request with consecutive seeds, from its own upwards."""
    if count == 1:
        return [request]
    seed = request.settings.get("seed") or 0
    return [
        replace(request, settings={**request.settings, "seed": seed + number})
        for number in range(count)
    ]


def _have_same_settings(requests: Sequence[Request]) -> bool:
    return all(request.settings == requests[0].settings for request in requests)


def _prompts_and_references(requests: Sequence[Request]) -> tuple[list[Any], list[Sequence[Any]]]:
    return [request.prompt for request in requests], [request.references for request in requests]


async def _next(stream: AsyncStream) -> str | None:
    return await anext(stream, None)


async def _wait_for(
    work: Awaitable[Result], seconds: float | None, allowed: float | None
) -> Result:
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError as error:
        raise _timeout_error(allowed) from error


@contextmanager
def _close_on_timeout(request: Request, close: Callable[[], None]) -> Iterator[None]:
    """Close the request at its timeout, from a timer thread, and raise TimeoutError here."""
    seconds = request.remaining_seconds
    if seconds is None:
        yield
        return
    timed_out = Event()

    def end() -> None:
        timed_out.set()
        close()

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:  # raised by a closed stream when asked for its answer
        if timed_out.is_set():
            raise _timeout_error(request.timeout) from error
        raise
    finally:
        timer.cancel()


def _timeout_error(seconds: float | None) -> TimeoutError:
    return TimeoutError(
        f"no complete answer within timeout={seconds} seconds: increase timeout or lower max_tokens"
    )


PROVIDER = "ragaccel"


def usage_metadata(answer: Answer) -> UsageMetadata:
    """Return the token counts of an answer as LangChain's usage metadata."""
    return UsageMetadata(
        input_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.completion_tokens,
        total_tokens=answer.usage.total_tokens,
    )


def token_usage(answers: list[Answer]) -> dict[str, int]:
    """Return the summed token counts of several answers, with the keys of LLM outputs."""
    return {
        name: sum(getattr(answer.usage, name) for answer in answers)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }


def response_metadata(
    answer: Answer, model: str, text: str | None = None, *, calls_tools: bool = False
) -> dict[str, Any]:
    """Return the contents of ``response_metadata``.

    Args:
        answer: The answer.
        model: The model's name.
        text: The answer's text without tool calls, if it had any. Copied spans refer to it.
        calls_tools: Whether the answer makes a valid tool call.
    """
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": "tool_calls" if calls_tools else answer.finish_reason,
        "ragaccel": report(answer, answer.text if text is None else text),
    }


def report(answer: Answer, text: str) -> dict[str, Any]:
    """Return an answer's statistics, and the spans of ``text`` copied from passages."""
    metadata = answer.report(text)
    return {"copied_spans": metadata.pop("citations"), **metadata}


LOADING_OPTIONS = (
    "dtype", "device", "device_map", "capacity", "token_budget", "max_batch", "exact",
    "memory", "space",
)  # fmt: skip
"""Options passed to ``LLM.load``, next to ``model_kwargs``."""

SAMPLING_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "no_repeat_ngram_size", "n",
)  # fmt: skip
"""Options that affect the answer; a call may override them."""


_REPLACEMENTS = {
    **REPLACEMENTS,
    **dict.fromkeys(
        ("documents", "references", "prediction", "drafter", "logits_processors", "tools",
         "stopping_criteria", "tool_choice", "parallel_tool_calls"),
        "pass it to calls: invoke(..., name=value) or bind(name=value)",
    ),
}  # fmt: skip
_SETTING_HINTS = dict.fromkeys(
    (*SAMPLING_OPTIONS, *(other for other, name in ALIASES.items() if name in SAMPLING_OPTIONS)),
    "it is an argument of its own, not a loading option",
)


class ModelOptions(BaseLanguageModel[Any]):
    """The options that ``ChatRagaccel`` and ``RagaccelLLM`` share.

    The model is loaded at the first answer. All objects in a process with the same model name and
    loading options share one copy, which is freed with the last of them. Pass ``llm`` to use a
    ``ragaccel.LLM`` that is already loaded.
    """

    model: str | None = None
    """A name on the Hugging Face Hub or a folder; by default the bundled reader.

    With ``llm``, the name under which that model is reported.
    """
    llm: Any = Field(default=None, exclude=True, repr=False)
    """A loaded ``ragaccel.LLM`` to use instead of ``model``."""

    dtype: str | None = None
    """Type of the weights, such as ``"float16"``."""
    device: str | None = None
    """Device of the model, such as ``"cuda"``."""
    device_map: Any = None
    """Distribution of the weights over devices, as in transformers."""
    capacity: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of prompt and answer together; by default the model's limit."""
    token_budget: int | None = None
    """Maximum number of draft tokens of a step; by default as many as pay off."""
    max_batch: int | None = Field(default=None, ge=1)
    """Maximum number of requests in a forward pass; 16 by default."""
    exact: bool | None = None
    """Deterministic mode: the tokens of plain decoding in any precision; slower."""
    memory: str | None = None
    """A file that keeps text of earlier requests as a source of draft tokens."""
    space: str | bool | None = None
    """Folder or name of a SPACE adapter, or True for the one in the model's folder.

    The adapter drafts tokens; answers do not change.
    """
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for transformers' ``from_pretrained``."""

    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Sampling temperature; 0, the default, always picks the likeliest token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of an answer; 256 by default."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Minimum number of tokens of an answer."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities sum to this."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this many likeliest tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens at least this likely, relative to the likeliest."""
    seed: int | None = None
    """Seed of sampling; 0 by default."""
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Penalty on tokens already used, as in transformers; above 1 discourages repetition."""
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    """Forbid repeated token sequences of this length."""
    n: int | None = Field(default=None, ge=1)
    """Number of answers, sampled with consecutive seeds; 1 by default."""
    stop: list[str] | str | None = None
    """Strings that end an answer and are not part of it."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an unfinished answer raises ``TimeoutError``."""

    namespace: str = ""
    """Isolates the references and remembered text of one tenant from those of others."""
    remember: bool = True
    """Draft from earlier requests of the namespace, and keep this one for later requests."""
    registry: Any = Field(default=None, exclude=True, repr=False)
    """A ``ragaccel.frameworks.ReferenceRegistry`` to search for references.

    None searches what the current run and ``ragaccel.reference_scope`` retrieved and, with a
    namespace, the process's registry.
    """
    auto_references: bool = True
    """Copy from retrieved passages that occur in the prompt."""
    adjacent_chunks: bool = True
    """Copy also from the chunks next to those passages in the same document."""
    max_reference_tokens: int = Field(default=8192, ge=0)
    """Maximum number of tokens of references that the call did not name itself."""
    track: Literal["run-tree"] | None = None
    """``"run-tree"``: copy also from documents whose text is not in the prompt.

    These are the documents retrieved earlier in the same run, for example before a summary.
    """

    streaming: bool | None = None
    """Whether ``invoke`` sends tokens to callbacks.

    None, the default, sends them if a callback handles new tokens.
    """
    stream_usage: bool | None = None
    """Whether streams end with token counts; on by default."""
    max_retries: int | None = None
    """Accepted and ignored: the model runs in this process."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted and ignored: the model runs in this process."""

    settable: ClassVar[frozenset[str]] = (
        GENERATION_SETTINGS | CACHE_NEUTRAL_SETTINGS | {"stop", "model"}
    )
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
        values = normalize_names(values, cls.__name__)
        check_arguments(cls.__name__, values, cls.model_fields, _REPLACEMENTS)
        check_arguments(
            "model_kwargs", _misplaced_settings(values.get("model_kwargs")), (), _SETTING_HINTS
        )
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_options(self)
        return self

    @model_validator(mode="after")
    def _install_run_tree_if_tracking(self) -> Self:
        if self.track is not None:
            from langchain_ragaccel.callbacks import install_run_tree

            install_run_tree()
        return self

    @model_validator(mode="after")
    def _resolve_shared_model(self) -> Self:
        _ = self.shared
        return self

    @model_validator(mode="after")
    def _set_ragaccel_version(self) -> Self:
        if hasattr(self, "_add_version"):  # langchain-core has it since 1.4
            from langchain_ragaccel import __version__

            self._add_version("langchain-ragaccel", __version__)
        return self

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
        names = ("dtype", "device", "device_map", "capacity", "exact", *SAMPLING_OPTIONS)
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

    def call_options(
        self, stop: Sequence[str] | str | None, kwargs: Mapping[str, Any]
    ) -> CallOptions:
        """Merge a call's settings with this object's; the call's take precedence.

        Raises:
            TypeError: The call has an unknown argument.
            ConfigurationError: A setting is invalid.
        """
        check_names(kwargs, type(self).__name__, self.settable)
        return make_call(self, stop, kwargs)

    async def acall_options(
        self, stop: Sequence[str] | str | None, kwargs: Mapping[str, Any]
    ) -> CallOptions:
        """Do what :meth:`call_options` does, and load the model off the event loop.

        Waiting for a model does not occupy the threads that prepare other prompts.
        """
        call = await run_in_thread(lambda: self.call_options(stop, kwargs))
        await self.shared.aload()
        return call

    def with_settings(self, kwargs: dict[str, Any]) -> Self:
        """Return a copy that has a call's sampling options, and remove those from ``kwargs``."""
        settings = normalize_names(kwargs, type(self).__name__).items()
        own = {k: v for k, v in settings if k in SAMPLING_OPTIONS and v is not None}
        for name in [name for name in kwargs if ALIASES.get(name, name) in SAMPLING_OPTIONS]:
            del kwargs[name]
        if kwargs.keys() & {"logits_processors", "stopping_criteria"}:
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
        check_names(kwargs, type(self).__name__, self.settable)
        return super().bind(**kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """Return the provider and model name for traces.

        LangChain's chat and LLM base classes both have this method; their common base does not.
        """
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        return params

    def _loading_options(self) -> dict[str, Any]:
        kwargs = {name: getattr(self, name) for name in LOADING_OPTIONS}
        return {
            **copy.copy(self.model_kwargs),
            **{k: v for k, v in kwargs.items() if v is not None},
        }


def _misplaced_settings(model_kwargs: Any) -> list[str]:
    """Return the generation settings in ``model_kwargs``, which ``from_pretrained`` ignores."""
    return [name for name in model_kwargs or () if name in _SETTING_HINTS]


def model_profile(model: SharedModel) -> ModelProfile | None:
    """Return a model's abilities, from its config and tokenizer, or None if they cannot be read.

    The first answer raises the error; LangChain allows a missing profile.
    """
    try:
        length, calls_tools = model.context_length, model.tokenizer.takes_tools
    except RagaccelError:
        return None
    profile: ModelProfile = {
        "text_inputs": True,
        "image_inputs": False,
        "audio_inputs": False,
        "video_inputs": False,
        "pdf_inputs": False,
        "text_outputs": True,
        "image_outputs": False,
        "audio_outputs": False,
        "tool_calling": calls_tools,
        "structured_output": False,  # schemas are sent as tools, and decoding does not enforce them
    }
    if length:
        profile["max_input_tokens"] = length
    return profile


_REGISTRY_IDS: WeakKeyDictionary[ReferenceRegistry, str] = WeakKeyDictionary()


def cache_key(
    identity_params: Mapping[str, Any], stop: Sequence[str] | str | None, kwargs: Mapping[str, Any]
) -> str:
    """Return an answer's cache key: all settings that the answer depends on, as text."""
    own = normalize_names(kwargs, "a call")
    kept = {
        name: value
        for name, value in own.items()
        if name not in CACHE_NEUTRAL_SETTINGS and value is not None
    }
    if kept.keys() & {"logits_processors", "stopping_criteria"}:
        kept["once"] = uuid4().hex  # functions have no key: never cache
    if stop is not None:
        kept["stop"] = as_stop_list(stop)
    return str(sorted({**identity_params, **kept}.items()))


def uses_cache(options: ModelOptions) -> bool:
    """Return whether answers are cached, in the object's own cache or LangChain's global one."""
    if options.cache is None or options.cache is True:
        return get_llm_cache() is not None
    return options.cache is not False


def prompt_dependencies(options: ModelOptions, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache-key entries for what a documents-only model's prompt is made of.

    Such a prompt contains only the references given and registered. Return an empty dict for other
    models, whose prompts do not depend on them. The keys are valid in this process only, since a
    registry is. No weights are loaded.
    """
    try:
        if not options.shared.is_documents_only:
            return {}
    except RagaccelError:  # the answer raises it again
        return {}
    own = normalize_names(kwargs, type(options).__name__)
    references = {"references": repr(own.get("references") or [])}
    if not wants_auto_references(options, own):
        return references
    from ragaccel.frameworks import visible_references

    namespace = own.get("namespace")
    namespace = options.namespace if namespace is None else namespace
    visible = visible_references(
        registry_for(options, own), namespace, scopes=current_caller().scopes
    )
    registry, state = visible.registry, visible.scopes_digest
    if registry is not None:
        state += f" {_REGISTRY_IDS.setdefault(registry, uuid4().hex)} {registry.version}"
    return {**references, "registry": f"{os.getpid()} {state}", "namespace": namespace}


def should_stream(model: ModelOptions, run_manager: Any) -> bool:
    """Return whether ``invoke`` streams its answer to callbacks.

    ``streaming`` decides if it is set. Otherwise it streams if a handler takes tokens, such as
    that of ``astream_events``. Tracers do not count: they record the whole text anyway.
    """
    if run_manager is None or not run_manager.handlers:
        return False
    if model.streaming is not None:
        return model.streaming
    return any(_receives_tokens(handler) for handler in run_manager.handlers)


def _receives_tokens(handler: BaseCallbackManager | BaseCallbackHandler | Any) -> bool:
    if getattr(handler, "ignore_llm", False) or isinstance(handler, BaseTracer):
        return hasattr(handler, "tap_output_aiter")
    own = getattr(type(handler), "on_llm_new_token", None)
    return own is not BaseCallbackHandler.on_llm_new_token
