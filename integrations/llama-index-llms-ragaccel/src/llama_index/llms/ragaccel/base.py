"""Responses: an answer as the framework's responses, with token counts where it looks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.types import PydanticProgramMode
from typing_extensions import Self

from llama_index.llms.ragaccel.citations import (
    as_references,
    citation_label,
    find_visible_references,
)
from llama_index.llms.ragaccel.messages import (
    TemplateMessage,
    TemplatePrompt,
    Toolbox,
    append_invalid_calls,
    as_tool,
    explain_missing_call,
    pop_toolbox,
    read_tool_calls,
    render_messages,
    text_of,
    tool_call_kwargs,
    uses_model_template,
)
from ragaccel import CapacityError, ConfigurationError, Prompt, Settings
from ragaccel.errors import check_arguments, has_no_effect
from ragaccel.frameworks import SharedModel, get_shared_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable

    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import BaseTool

    from llama_index.llms.ragaccel.citations import AnyReference
    from ragaccel import LLM, Answer, AsyncStream, Stream
    from ragaccel.frameworks import VisibleReferences
    from ragaccel.models import ToolCall, ToolCalling


Response = TypeVar("Response", CompletionResponse, ChatResponse)


def completion_response(text: str, delta: str | None = None) -> CompletionResponse:
    """A completion, or as much of it as there is."""
    return CompletionResponse(text=text, delta=delta)


def chat_response(text: str, delta: str | None = None) -> ChatResponse:
    """An assistant's message, or as much of it as there is.

    Nothing but calls is put beside its text: the framework writes that into later prompts.
    """
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def final_response(
    response: Response, answer: Answer, model_name: str, calls: Sequence[ToolCall] = ()
) -> Response:
    """A response with what is known at the end: calls, token counts, statistics, citations."""
    text = response.message.content if isinstance(response, ChatResponse) else response.text
    usage, report = asdict(answer.usage), answer.report(text or "", format_citation=citation_label)
    if calls and isinstance(response, ChatResponse):
        response.message.additional_kwargs = tool_call_kwargs(calls)
    calls_tools = any(call.is_valid for call in calls)
    finish_reason = "tool_calls" if calls_tools else answer.finish_reason
    response.raw = {
        "model": model_name,
        "finish_reason": finish_reason,
        "usage": usage,
        "ragaccel": report,
    }
    response.additional_kwargs = {
        **usage,
        "finish_reason": finish_reason,
        "citations": report["citations"],
    }
    return response


def max_prompt_tokens(llm: LLM, settings: Mapping[str, Any], window: int | None) -> int | None:
    """How many tokens a prompt may take beside its answer; None without a limit."""
    limits = [limit for limit in (llm.context_length, window) if limit is not None]
    answer: int = settings["max_new_tokens"]
    return min(limits) - answer if limits else None


def check_context_window(
    prompt: Any, llm: LLM, settings: Mapping[str, Any], window: int | None
) -> None:
    """Raise CapacityError for more than ``window`` holds; what the model reads, it checks itself.

    Args:
        prompt: a text, messages, token ids or a ``Prompt``.
        llm: the model that it is for.
        settings: those of the call.
        window: most tokens of a prompt with its answer, if fewer than the model reads.
    """
    limit, answer = llm.context_length, settings["max_new_tokens"]
    if window is None or (limit is not None and window >= limit):
        return
    taken = _num_tokens(prompt, llm)
    if taken + answer > window:
        raise CapacityError(
            f"prompt ({taken:,}) + max_new_tokens ({answer:,}) exceed context_window={window:,}: "
            "shorten the prompt, ask for fewer tokens, or give a larger window"
        )


def _num_tokens(prompt: Any, llm: LLM) -> int:
    if isinstance(prompt, Prompt):
        return len(prompt.token_ids)
    if isinstance(prompt, str):
        return len(llm.tokenizer.encode(prompt, add_special_tokens=True))
    if prompt and isinstance(prompt[0], int):
        return len(prompt)
    return len(llm.tokenizer.chat(prompt))


_MIN_TOKENS_FOR_THREAD = 256  # shorter answers are parsed for tool calls on the event loop
_MAX_THREADS = 4  # matching and tokenizing long prompts takes tens of milliseconds


@dataclass(frozen=True, slots=True)
class DeferredRequest:
    """One call whose names are checked; ``prepare`` does what needs the model to be loaded."""

    model: SharedModel
    prepare: Callable[[], Request]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with all that its answer is made from, and what the model is called."""

    llm: LLM
    prompt: Any
    references: Sequence[Any]
    settings: dict[str, Any]
    model_name: str
    calling: ToolCalling | None = None

    def visible_text(self, piece: str, emitted: str, stream: Stream | AsyncStream) -> str:
        """What may be told now that a piece more is there: nothing that may be a call."""
        if self.calling is None:
            return piece
        return self.calling.next_content(emitted, stream.token_ids)

    def read(self, answer: Answer) -> tuple[str, list[ToolCall]]:
        """The answer's content, and the calls in it if it may hold some."""
        if self.calling is None:
            return answer.text, []
        content, calls = self.calling.read(answer.text, answer.token_ids)
        return append_invalid_calls(content, calls), calls

    def last_response(
        self, emitted: str, answer: Answer, make_response: Callable[..., Response]
    ) -> Response:
        """The last piece of a stream, with what was held back and all that is known."""
        content, calls = self.read(answer)
        rest = content[len(emitted) :] if content.startswith(emitted) else ""
        return final_response(make_response(content, rest), answer, self.model_name, calls)

    def stream(self) -> Stream:
        """Check it; it is answered while this is read."""
        return self.llm.stream(self.prompt, references=self.references, **self.settings)

    def astream(self) -> AsyncStream:
        """Check it; it is answered while this is awaited."""
        return self.llm.astream(self.prompt, references=self.references, **self.settings)


def make_request(
    model: SharedModel,
    prompt: str | list[TemplateMessage],
    given: Sequence[AnyReference],
    settings: dict[str, Any],
    *,
    registry: VisibleReferences | None,
    adjacent_chunks: bool,
    context_window: int | None,
    toolbox: Toolbox | None = None,
) -> Request:
    """Lay out a prompt and find what its answer may be copied from.

    Raises:
        CapacityError: prompt and answer are more than ``context_window``.
    """
    from ragaccel.frameworks import gather_references, parse_prompt
    from ragaccel.prompt import adapt_messages

    llm, namespace = model.load(), settings["namespace"]
    references: Sequence[Any] = gather_references(
        prompt if isinstance(prompt, str) else text_of(prompt),
        given,
        registry=registry,
        namespace=namespace,
        tokenizer=llm.tokenizer,
        adjacent_chunks=adjacent_chunks,
    )
    calling = None
    if isinstance(prompt, str):
        asked: Any = prompt
    elif toolbox is not None:
        calling = toolbox.calling(llm, settings.get("stop"))
        render = partial(llm.tokenizer.chat_text, tools=toolbox.tools)
        ids = llm.tokenizer.chat(adapt_messages(prompt, render), tools=toolbox.tools)
        asked = [*ids, *calling.opening_ids]
    elif not model.is_documents_only:
        asked = adapt_messages(prompt, llm.tokenizer.chat_text)
    else:
        room = max_prompt_tokens(llm, settings, context_window)
        asked = parse_prompt(
            prompt, llm.tokenizer, registry, given=given, namespace=namespace, max_tokens=room
        )
        references = [one for one in references if one not in asked.passages]
    check_context_window(asked, llm, settings, context_window)
    return Request(llm, asked, references, settings, model.label, calling)


def generate_response(
    deferred: DeferredRequest, make_response: Callable[..., Response]
) -> Response:
    """Answer at once."""
    deferred.model.load()
    request = deferred.prepare()
    answer = request.stream().finish()
    content, calls = request.read(answer)
    return final_response(make_response(content), answer, request.model_name, calls)


def stream_responses(
    deferred: DeferredRequest, make_response: Callable[..., Response]
) -> Generator[Response, None, None]:
    """Answer piece by piece; what is asked is settled now, and not when the first is taken."""
    deferred.model.load()
    request = deferred.prepare()
    stream = request.stream()

    def generate() -> Generator[Response, None, None]:
        text = ""
        with stream:
            for piece in stream:
                if emitted := request.visible_text(piece, text, stream):
                    text += emitted
                    yield make_response(text, emitted)
        yield request.last_response(text, stream.answer, make_response)

    return generate()


async def agenerate_response(
    deferred: DeferredRequest, make_response: Callable[..., Response]
) -> Response:
    """Answer without holding up the event loop; if the caller is cancelled, so is the answer."""
    request, stream = await _open_stream(deferred)
    answer = await stream.finish()
    content, calls = request.read(answer)
    return final_response(make_response(content), answer, request.model_name, calls)


async def astream_responses(
    deferred: DeferredRequest, make_response: Callable[..., Response]
) -> AsyncGenerator[Response, None]:
    """Answer piece by piece without holding up the event loop; leaving ends it."""
    request, stream = await _open_stream(deferred)

    async def generate() -> AsyncGenerator[Response, None]:
        text = ""
        try:
            async for piece in stream:
                if emitted := await _avisible_text(request, piece, text, stream):
                    text += emitted
                    yield make_response(text, emitted)
        finally:
            await stream.aclose()
        yield request.last_response(text, stream.answer, make_response)

    return generate()


async def _avisible_text(request: Request, piece: str, emitted: str, stream: AsyncStream) -> str:
    """What may be told, found in a thread where that takes long: a whole answer is read again."""
    if request.calling is None or len(stream.token_ids) < _MIN_TOKENS_FOR_THREAD:
        return request.visible_text(piece, emitted, stream)
    return await asyncio.to_thread(request.visible_text, piece, emitted, stream)


async def _open_stream(deferred: DeferredRequest) -> tuple[Request, AsyncStream]:
    """Do beside the event loop what goes before an answer.

    The model is loaded first, in a thread of its own: calls that wait for it take none of the
    few that prepare the prompts of others.
    """
    await deferred.model.aload()
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, _prepare_stream, deferred)


def _prepare_stream(deferred: DeferredRequest) -> tuple[Request, AsyncStream]:
    request = deferred.prepare()
    return request, request.astream()


_EXECUTOR = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="ragaccel-prepare")


def resolve_model(model: Any, tokenizer: Any, llm: Any, options: Mapping[str, Any]) -> SharedModel:
    """The model that a constructor's arguments mean.

    Args:
        model: a name or a folder, None, or a model of transformers that is loaded.
        tokenizer: its tokenizer, beside a loaded model.
        llm: a ready ``ragaccel.LLM``.
        options: those of ``LLM.load``, or of ``LLM`` for a loaded model.

    Raises:
        ConfigurationError: arguments that exclude or miss each other.
    """
    if isinstance(llm, str):
        raise ConfigurationError(
            "this was saved with a ready model, which a file cannot hold: give it again, "
            "Ragaccel.from_dict(data, llm=...)"
        )
    is_named = model is None or isinstance(model, str | Path)
    if llm is not None:
        if model is not None or tokenizer is not None or options:
            raise ConfigurationError("llm= is ready: neither a model nor options go with it")
        if not hasattr(llm, "astream"):
            raise ConfigurationError(f"llm is a ready ragaccel.LLM, not {type(llm).__name__}")
        return SharedModel(ready=llm)
    if is_named and tokenizer is not None:
        raise ConfigurationError(
            "a named model brings its tokenizer: give tokenizer= with a loaded model only"
        )
    if is_named:
        return get_shared_model(model, **options)
    if tokenizer is None:
        raise ConfigurationError("a loaded model needs its tokenizer: model=..., tokenizer=...")
    from ragaccel import LLM

    return SharedModel(ready=LLM(model, tokenizer, **options))


SETTINGS = frozenset(Settings.__annotations__)
_ALIASES = {"max_tokens": "max_new_tokens"}
_REPLACEMENTS = {
    "api_key": "the model runs in this process",
    "format": "as_structured_llm(Schema) or structured_predict",
    "is_chat_model": "a model with a chat template is one",
    "load_in_4bit": 'model_kwargs={"quantization_config": ...}',
    "load_in_8bit": 'model_kwargs={"quantization_config": ...}',
    "n": "call it once for each answer, with another seed",
    "num_output": "max_new_tokens",
    "num_return_sequences": "call it once for each answer, with another seed",
    "reasoning": "the model's chat template decides",
    "request_timeout": "asyncio.wait_for(llm.achat(...), seconds)",
    "response_format": "as_structured_llm(Schema) or structured_predict",
    "stop_sequences": 'stop=["..."]',
    "streamer": "stream_complete and stream_chat give the pieces",
    "timeout": "asyncio.wait_for(llm.achat(...), seconds)",
    "tokenizer_kwargs": "a tokenizer of your own is given as model=..., tokenizer=...",
    "tokenizer_name": "a tokenizer of your own is given as model=..., tokenizer=...",
    "tokenizer_outputs_to_remove": "only token ids are taken from a tokenizer",
    "tool_choice": "chat, chat_with_tools and FunctionAgent take tools, and a choice of them",
    "tools": "chat, chat_with_tools and FunctionAgent take tools",
    "torch_dtype": "dtype",
}


def call_settings(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one call over those of the model; what is None says nothing.

    Raises:
        TypeError: a setting that there is not, or one given under two names.
        ConfigurationError: no settings at all, or answers of no length.
    """
    settings = dict(defaults)
    _require_mapping("generate_kwargs", given)
    own = {
        name: value
        for name, value in given.items()
        if value is not None and not has_no_effect(name, value)
    }
    for other, name in _ALIASES.items():
        if other in own and name in own:
            raise TypeError(f"{other} and {name} are one setting: give one of them")
    settings.update((_ALIASES.get(name, name), value) for name, value in own.items())
    check_names("a call", settings, SETTINGS)
    length = settings.get("max_new_tokens", 1)
    if not hasattr(length, "__index__"):
        raise ConfigurationError(f"max_new_tokens must be a whole number, not {length!r}")
    return settings


def loading_options(**given: Any) -> dict[str, Any]:
    """Options of ``LLM.load``, those that are given, under the names that it has for them."""
    more = given.pop("model_kwargs") or {}
    _require_mapping("model_kwargs", more)
    options: dict[str, Any] = dict(more)
    of_answers = dict.fromkeys(
        (*SETTINGS, *_ALIASES), "it is a setting of answers: generate_kwargs={...}, or a call"
    )
    misplaced = [name for name in options if name in of_answers and name != "drafter"]
    check_arguments("model_kwargs", misplaced, (), of_answers)
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    options.update((name, value) for name, value in given.items() if value is not None)
    return options


def check_names(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a name that there is not, with what to use instead."""
    check_arguments(owner, given, known, _REPLACEMENTS)


def _require_mapping(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{name} is a dict, not {type(given).__name__}")


_MUST_CALL = "must_call"  # a tool: how streams of objects tell ``_prepare_chat_with_tools``
_TOOL_MODES = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)
_EXTRA_ARGUMENTS = ("model_name", "tokenizer", "device", "device_map", "dtype")


class Ragaccel(FunctionCallingLLM):
    """A local language model whose answers are the same, only sooner: it copies from what was read.

    >>> Settings.llm = Ragaccel("Qwen/Qwen2.5-7B-Instruct")

    What retrievers return is looked for in each prompt and copied from where it stands there; no
    engine, retriever or prompt has to change. Making one loads nothing: the model is loaded at the
    first answer, once for all objects that name it with the same options.

    Every call takes ``references`` (texts, nodes, passages: what else the answer may repeat) and
    the settings of ``ragaccel.LLM.generate``: ``max_new_tokens`` (or ``max_tokens``),
    ``temperature``, ``top_p``, ``top_k``, ``seed``, ``stop``, ``namespace``, ``remember`` …

    Where the model's chat template takes tools, ``FunctionAgent`` works, and ``chat`` takes
    ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Args:
        model: a name on the hub or a folder; the bundled reader by default; or a model of
            transformers that is loaded, with its ``tokenizer``. ``model_name`` says the same.
        llm: a ready ``ragaccel.LLM``, in place of these.
        tokenizer: that of a loaded model.
        device, device_map, dtype: where to put the model, how to spread it, type of its weights.
        model_kwargs: further options of ``ragaccel.LLM.load``, such as ``quantization_config``,
            ``memory``, ``space`` or ``exact``. A ``token`` among them is left out of what is saved.
        context_window: most tokens of a prompt with its answer, if fewer than the model reads.
        max_new_tokens: most tokens of an answer.
        temperature: 0 takes the likeliest token, more samples.
        generate_kwargs: further settings of every call.
        namespace: keeps references and what is remembered of one tenant apart.
        remember: False neither uses what earlier requests of the namespace taught nor adds to it.
        registry: one more place where references are looked for, besides what was retrieved in the
            same root span, in a ``ragaccel.reference_scope`` or in the namespace.
        auto_references: look for retrieved nodes in prompts.
        adjacent_chunks: copy also from what stands beside those in the same documents.
        system_prompt: what the system says, before texts to complete and in prompts of engines;
            as everywhere in the framework, ``chat`` takes messages as they are.
        messages_to_prompt: writes messages as a text; the model's chat template by default.
        completion_to_prompt: writes a text to complete as a prompt. By default it is a user's
            message to a chat model, and completed as it is by any other.
        **others: whatever else the framework gives its models, such as ``callback_manager`` or
            ``output_parser``, and fields of subclasses.

    Raises:
        TypeError: an argument that there is not; the message says what to use instead.
        ConfigurationError: arguments that exclude each other.
    """

    model: str | None = Field(default=None, frozen=True)
    llm: Any = Field(default=None, frozen=True)
    model_kwargs: dict[str, Any] = Field(default_factory=dict, frozen=True, repr=False)
    context_window: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    namespace: str = ""
    remember: bool = True
    registry: Any = Field(default=None, exclude=True)
    auto_references: bool = True
    adjacent_chunks: bool = True

    _model: SharedModel = PrivateAttr()

    def __init__(
        self,
        model: Any = None,
        *,
        model_name: Any = None,
        llm: Any = None,
        tokenizer: Any = None,
        device: Any = None,
        device_map: Any = None,
        dtype: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        messages_to_prompt: Any = None,
        callback_manager: CallbackManager | None = None,
        **others: Any,
    ) -> None:
        if model is not None and model_name is not None:
            raise TypeError("model and model_name are one argument: give one of them")
        check_names("Ragaccel", others, {*type(self).model_fields, *_EXTRA_ARGUMENTS})
        options = loading_options(
            model_kwargs=model_kwargs, device=device, device_map=device_map, dtype=dtype
        )
        shared = resolve_model(model_name if model is None else model, tokenizer, llm, options)
        if messages_to_prompt is None or isinstance(messages_to_prompt, TemplatePrompt):
            messages_to_prompt = TemplatePrompt(shared)
        super().__init__(
            model=shared.name,
            llm=shared.ready,
            model_kwargs=dict(shared.options),
            generate_kwargs=call_settings({}, generate_kwargs or {}),
            messages_to_prompt=messages_to_prompt,
            callback_manager=CallbackManager([]) if callback_manager is None else callback_manager,
            **others,
        )
        self._model = shared

    @classmethod
    def class_name(cls) -> str:
        """The name that the framework knows it by."""
        return "Ragaccel"

    @property
    def metadata(self) -> LLMMetadata:
        """What the model is, read from its files without its weights.

        It is a function calling model if messages are laid out by a chat template of its own that
        takes tools; that it was trained to call them is what the template stands for.

        Raises:
            ConfigurationError: ``context_window`` is more than the model reads.
        """
        limit, wanted = self._model.context_length, self.context_window
        if limit is not None and wanted is not None and wanted > limit:
            raise ConfigurationError(
                f"context_window={wanted:,} is more than the {limit:,} tokens that "
                f"{self._model.label} reads: leave it out"
            )
        return LLMMetadata(
            context_window=wanted or limit or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_new_tokens,
            is_chat_model=self._model.is_chat_model,
            is_function_calling_model=self._calls_tools,
            model_name=self._model.label,
        )

    @property
    def _calls_tools(self) -> bool:
        return uses_model_template(self.messages_to_prompt) and self._model.takes_tools

    def load(self) -> LLM:
        """Return the ``ragaccel.LLM`` that answers, loading it now if it is not."""
        return self._model.load()

    async def aload(self) -> LLM:
        """Load it as ``load`` does, without holding up the event loop: at a server's start."""
        return await self._model.aload()

    def tokenize(self, text: str) -> list[int]:
        """Turn text into the model's tokens: ``Settings.tokenizer = llm.tokenize``.

        The framework packs prompts by another model's tokens unless it is told how to count.
        """
        return self._model.tokenizer.encode(text, add_special_tokens=False)

    def to_payload(self) -> dict[str, Any]:
        """What traces may hold of it: no texts, and nothing that has to be read from a file."""
        return {
            "class_name": self.class_name(),
            "model_name": self._model.label,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text; a ``formatted`` one is read as it is, special tokens included."""
        return generate_response(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Complete a text piece by piece; all is settled before the first one is taken."""
        return stream_responses(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Complete a text as ``complete`` does; if the caller is cancelled, that ends it."""
        return await agenerate_response(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Complete a text piece by piece; leaving the loop over the pieces ends it."""
        return await astream_responses(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, laid out by the model's chat template.

        ``tools`` (LlamaIndex's, or dicts) are what it may call, ``tool_choice`` is ``"auto"``,
        ``"none"``, ``"any"`` or a name. ``get_tool_calls_from_response`` reads the calls.
        """
        return generate_response(self._chat_request(messages, kwargs), chat_response)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages piece by piece; all is settled before the first one is taken."""
        return stream_responses(self._chat_request(messages, kwargs), chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages as ``chat`` does; if the caller is cancelled, that ends it."""
        return await agenerate_response(self._chat_request(messages, kwargs), chat_response)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer messages piece by piece; leaving the loop over the pieces ends it."""
        return await astream_responses(self._chat_request(messages, kwargs), chat_response)

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002 - the framework's signature
    ) -> list[ToolSelection]:
        """Read the calls of an answer; one that cannot be read is told by its text alone.

        Raises:
            ValueError: there is none, and ``error_on_no_tool_call``; the message says why.
        """
        calls = read_tool_calls(response.message)
        if not calls and error_on_no_tool_call:
            raw = response.raw if isinstance(response.raw, dict) else {}
            raise ValueError(explain_missing_call(response.message, str(raw.get("finish_reason"))))
        return calls

    def stream_structured_predict(
        self,
        output_cls: Any,
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Answer with an object of a class, as a stream; arguments are those of the base class."""
        llm_kwargs = {**(llm_kwargs or {}), **self._forced_call_option()}
        return super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

    async def astream_structured_predict(
        self,
        output_cls: Any,
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """Answer with an object of a class, as a stream; arguments are those of the base class."""
        llm_kwargs = {**(llm_kwargs or {}), **self._forced_call_option()}
        return await super().astream_structured_predict(
            output_cls, prompt, llm_kwargs, **prompt_args
        )

    def _forced_call_option(self) -> dict[str, Any]:
        """What makes the base class's streams of objects call: they tell it to no model."""
        by_tools = self.pydantic_program_mode in _TOOL_MODES and self._calls_tools
        return {_MUST_CALL: True} if by_tools else {}

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002 - whoever runs the tools tells of them
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What ``chat`` is asked for by an agent, or by a program that wants an object."""
        must_call = kwargs.pop(_MUST_CALL, False) or tool_required
        choice = kwargs.pop("tool_choice", None)
        said = [] if user_msg is None else [user_msg]
        return {
            **kwargs,
            "messages": [
                *(chat_history or []),
                *(ChatMessage(content=one) if isinstance(one, str) else one for one in said),
            ],
            "tools": [as_tool(tool) for tool in tools],
            "tool_choice": "any" if choice is None and must_call else choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
        }

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options; a ready model and a registry are shared."""
        memo = {} if memo is None else memo
        memo.update({id(shared): shared for shared in (self.llm, self.registry)})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to pickle what is ready and cannot be made again elsewhere."""
        if self.llm is not None or self.registry is not None:
            raise TypeError(
                "a Ragaccel made with a ready model or a registry cannot be pickled: name the "
                "model instead, and each process loads its own"
            )
        return super().__getstate__()

    @field_serializer("llm")
    def _serialize_ready(self, llm: Any) -> str | None:
        """Tells it from every other: caches of what is answered have this in their keys."""
        return None if llm is None else f"a ready ragaccel.LLM, {self._model.identity}"

    @field_serializer("model_kwargs")
    def _without_token(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name != "token"}

    def _completion_request(
        self, prompt: str, formatted: bool, given: dict[str, Any]
    ) -> DeferredRequest:
        if not isinstance(prompt, str):
            raise ConfigurationError(
                f"a prompt to complete is a str, not {type(prompt).__name__}: messages go to chat"
            )
        return self._deferred_request(
            (lambda: prompt) if formatted else partial(self._render_completion, prompt), given
        )

    def _chat_request(
        self, messages: Sequence[ChatMessage], given: dict[str, Any]
    ) -> DeferredRequest:
        own = dict(given)
        toolbox = pop_toolbox(own)
        tools = None if toolbox is None else toolbox.tools
        render = partial(render_messages, messages, self.messages_to_prompt, self._model, tools)
        return self._deferred_request(render, own, toolbox)

    def _render_completion(self, prompt: str) -> str | list[TemplateMessage]:
        """A text to complete, as a user's message to a chat model or as the text it is."""
        to_prompt = self.completion_to_prompt or default_completion_to_prompt
        if to_prompt is not default_completion_to_prompt or not self._model.is_chat_model:
            return self._extend_prompt(to_prompt(prompt))
        if self.query_wrapper_prompt is not None:
            prompt = self.query_wrapper_prompt.format(query_str=prompt)
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]

    def _deferred_request(
        self,
        render: Callable[[], str | list[TemplateMessage]],
        given: dict[str, Any],
        toolbox: Toolbox | None = None,
    ) -> DeferredRequest:
        """Settle what one call asks for; names are checked before anything is loaded."""
        own = dict(given)
        references = as_references(own.pop("references", None))
        settings = call_settings(
            {
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.temperature,
                "namespace": self.namespace,
                **({} if self.remember else {"remember": False}),
                **self.generate_kwargs,
            },
            own,
        )
        # Now, and not when it is prepared: that may be in a thread which knows of no caller.
        visible = find_visible_references(
            self.registry, settings["namespace"], enabled=self.auto_references
        )

        def prepare() -> Request:
            return make_request(
                self._model,
                render(),
                references,
                settings,
                registry=visible,
                adjacent_chunks=self.adjacent_chunks,
                context_window=self.context_window,
                toolbox=toolbox,
            )

        return DeferredRequest(self._model, prepare)
