"""``Ragaccel``: a local LLM for LlamaIndex."""

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
    """Return a completion response; in a stream, of the text so far and the new ``delta``."""
    return CompletionResponse(text=text, delta=delta)


def chat_response(text: str, delta: str | None = None) -> ChatResponse:
    """Return a chat response; in a stream, of the text so far and the new ``delta``.

    The message has no additional data but tool calls: the framework writes it into later prompts.
    """
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def final_response(
    response: Response, answer: Answer, model_name: str, calls: Sequence[ToolCall] = ()
) -> Response:
    """Add tool calls, token counts, statistics and citations to a response, and return it."""
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
    """Return the maximum number of tokens of a prompt, or None if there is no limit."""
    limits = [limit for limit in (llm.context_length, window) if limit is not None]
    answer: int = settings["max_new_tokens"]
    return min(limits) - answer if limits else None


def check_context_window(
    prompt: Any, llm: LLM, settings: Mapping[str, Any], window: int | None
) -> None:
    """Raise CapacityError if prompt and answer exceed ``window``.

    The LLM itself checks the limit of the model.

    Args:
        prompt: A text, messages, token ids or a ``Prompt``.
        llm: The LLM that answers.
        settings: The settings of the call.
        window: Maximum number of tokens of prompt and answer, or None.
    """
    limit, answer = llm.context_length, settings["max_new_tokens"]
    if window is None or (limit is not None and window >= limit):
        return
    taken = _num_tokens(prompt, llm)
    if taken + answer > window:
        raise CapacityError(
            f"prompt ({taken:,}) + max_new_tokens ({answer:,}) exceed context_window={window:,}: "
            "shorten the prompt, lower max_new_tokens or raise context_window"
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
    """A call with checked arguments; ``prepare`` builds the request after the model is loaded."""

    model: SharedModel
    prepare: Callable[[], Request]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with everything needed to answer it."""

    llm: LLM
    prompt: Any
    references: Sequence[Any]
    settings: dict[str, Any]
    model_name: str
    calling: ToolCalling | None = None

    def visible_text(self, piece: str, emitted: str, stream: Stream | AsyncStream) -> str:
        """Return the text that can be emitted after one more piece, without possible tool calls."""
        if self.calling is None:
            return piece
        return self.calling.next_content(emitted, stream.token_ids)

    def read(self, answer: Answer) -> tuple[str, list[ToolCall]]:
        """Split an answer into its text and its tool calls."""
        if self.calling is None:
            return answer.text, []
        content, calls = self.calling.read(answer.text, answer.token_ids)
        return append_invalid_calls(content, calls), calls

    def last_response(
        self, emitted: str, answer: Answer, make_response: Callable[..., Response]
    ) -> Response:
        """Return the last response of a stream, with the text held back and all metadata."""
        content, calls = self.read(answer)
        rest = content[len(emitted) :] if content.startswith(emitted) else ""
        return final_response(make_response(content, rest), answer, self.model_name, calls)

    def stream(self) -> Stream:
        """Check the request and return a stream that computes the answer while it is read."""
        return self.llm.stream(self.prompt, references=self.references, **self.settings)

    def astream(self) -> AsyncStream:
        """Check the request and return a stream that computes the answer while awaited."""
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
    """Render the prompt, find its references and return the request.

    Raises:
        CapacityError: Prompt and answer exceed ``context_window``.
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
        rendered: Any = prompt
    elif toolbox is not None:
        calling = toolbox.calling(llm, settings.get("stop"))
        render = partial(llm.tokenizer.chat_text, tools=toolbox.tools)
        ids = llm.tokenizer.chat(adapt_messages(prompt, render), tools=toolbox.tools)
        rendered = [*ids, *calling.opening_ids]
    elif not model.is_documents_only:
        rendered = adapt_messages(prompt, llm.tokenizer.chat_text)
    else:
        room = max_prompt_tokens(llm, settings, context_window)
        rendered = parse_prompt(
            prompt, llm.tokenizer, registry, given=given, namespace=namespace, max_tokens=room
        )
        references = [one for one in references if one not in rendered.passages]
    check_context_window(rendered, llm, settings, context_window)
    return Request(llm, rendered, references, settings, model.label, calling)


def generate_response(
    deferred: DeferredRequest, make_response: Callable[..., Response]
) -> Response:
    """Return the complete response."""
    deferred.model.load()
    request = deferred.prepare()
    answer = request.stream().finish()
    content, calls = request.read(answer)
    return final_response(make_response(content), answer, request.model_name, calls)


def stream_responses(
    deferred: DeferredRequest, make_response: Callable[..., Response]
) -> Generator[Response, None, None]:
    """Check the request now, and return a generator of responses."""
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
    """Return the complete response; cancelling the caller cancels the answer."""
    request, stream = await _open_stream(deferred)
    answer = await stream.finish()
    content, calls = request.read(answer)
    return final_response(make_response(content), answer, request.model_name, calls)


async def astream_responses(
    deferred: DeferredRequest, make_response: Callable[..., Response]
) -> AsyncGenerator[Response, None]:
    """Check the request now, and return a generator of responses; closing it ends the answer."""
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
    """Return the visible text, computed in a thread if the answer is long.

    All of the answer is parsed again for each piece.
    """
    if request.calling is None or len(stream.token_ids) < _MIN_TOKENS_FOR_THREAD:
        return request.visible_text(piece, emitted, stream)
    return await asyncio.to_thread(request.visible_text, piece, emitted, stream)


async def _open_stream(deferred: DeferredRequest) -> tuple[Request, AsyncStream]:
    """Load the model and prepare the request in threads, off the event loop.

    Loading has a thread of its own, so that waiting calls do not occupy the few threads that
    prepare prompts.
    """
    await deferred.model.aload()
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, _prepare_stream, deferred)


def _prepare_stream(deferred: DeferredRequest) -> tuple[Request, AsyncStream]:
    request = deferred.prepare()
    return request, request.astream()


_EXECUTOR = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="ragaccel-prepare")


def resolve_model(model: Any, tokenizer: Any, llm: Any, options: Mapping[str, Any]) -> SharedModel:
    """Return the model for a constructor's arguments.

    Args:
        model: A name or a folder, None, or a loaded transformers model.
        tokenizer: The tokenizer of a loaded model.
        llm: A loaded ``ragaccel.LLM``.
        options: Options of ``LLM.load``, or of ``LLM`` for a loaded model.

    Raises:
        ConfigurationError: Arguments contradict each other, or one is missing.
    """
    if isinstance(llm, str):
        raise ConfigurationError(
            "this was saved with llm=, which cannot be stored: pass it again, "
            "Ragaccel.from_dict(data, llm=...)"
        )
    is_named = model is None or isinstance(model, str | Path)
    if llm is not None:
        if model is not None or tokenizer is not None or options:
            raise ConfigurationError(
                "llm= is already loaded: leave out model, tokenizer and loading options"
            )
        if not hasattr(llm, "astream"):
            raise ConfigurationError(f"llm must be a ragaccel.LLM, not {type(llm).__name__}")
        return SharedModel(ready=llm)
    if is_named and tokenizer is not None:
        raise ConfigurationError(
            "tokenizer= needs a loaded model as model=: a named model uses its own tokenizer"
        )
    if is_named:
        return get_shared_model(model, **options)
    if tokenizer is None:
        raise ConfigurationError("a loaded model needs tokenizer=: pass model=..., tokenizer=...")
    from ragaccel import LLM

    return SharedModel(ready=LLM(model, tokenizer, **options))


SETTINGS = frozenset(Settings.__annotations__)
_ALIASES = {"max_tokens": "max_new_tokens"}
_REPLACEMENTS = {
    "api_key": "the model runs in this process",
    "format": "use as_structured_llm(Schema) or structured_predict",
    "is_chat_model": "leave it out: a model with a chat template is a chat model",
    "load_in_4bit": 'use model_kwargs={"quantization_config": ...}',
    "load_in_8bit": 'use model_kwargs={"quantization_config": ...}',
    "n": "call it once for each answer, each time with another seed",
    "num_output": "use max_new_tokens",
    "num_return_sequences": "call it once for each answer, each time with another seed",
    "reasoning": "leave it out: the model's chat template decides",
    "request_timeout": "use asyncio.wait_for(llm.achat(...), seconds)",
    "response_format": "use as_structured_llm(Schema) or structured_predict",
    "stop_sequences": 'use stop=["..."]',
    "streamer": "use stream_complete or stream_chat",
    "timeout": "use asyncio.wait_for(llm.achat(...), seconds)",
    "tokenizer_kwargs": "pass your own tokenizer with a loaded model: model=..., tokenizer=...",
    "tokenizer_name": "pass your own tokenizer with a loaded model: model=..., tokenizer=...",
    "tokenizer_outputs_to_remove": "leave it out: only token ids are taken from a tokenizer",
    "tool_choice": "chat, chat_with_tools and FunctionAgent take tools and tool_choice",
    "tools": "chat, chat_with_tools and FunctionAgent take tools",
    "torch_dtype": "use dtype",
}


def call_settings(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a call's settings over the object's; a value of None is ignored.

    Raises:
        TypeError: A setting is unknown, or given under two names.
        ConfigurationError: ``kwargs`` is not a dict, or ``max_new_tokens`` not a whole number.
    """
    settings = dict(defaults)
    _require_mapping("generate_kwargs", kwargs)
    own = {
        name: value
        for name, value in kwargs.items()
        if value is not None and not has_no_effect(name, value)
    }
    for other, name in _ALIASES.items():
        if other in own and name in own:
            raise TypeError(f"{other} and {name} are one setting: pass one of them")
    settings.update((_ALIASES.get(name, name), value) for name, value in own.items())
    check_names("a call", settings, SETTINGS)
    length = settings.get("max_new_tokens", 1)
    if not hasattr(length, "__index__"):
        raise ConfigurationError(f"max_new_tokens must be a whole number, not {length!r}")
    return settings


def loading_options(**kwargs: Any) -> dict[str, Any]:
    """Return the given options under the names of ``LLM.load``."""
    more = kwargs.pop("model_kwargs") or {}
    _require_mapping("model_kwargs", more)
    options: dict[str, Any] = dict(more)
    of_answers = dict.fromkeys(
        (*SETTINGS, *_ALIASES),
        "it is a setting of answers: pass it as generate_kwargs={...} or to a call",
    )
    misplaced = [name for name in options if name in of_answers and name != "drafter"]
    check_arguments("model_kwargs", misplaced, (), of_answers)
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    options.update((name, value) for name, value in kwargs.items() if value is not None)
    return options


def check_names(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown name, and say what to use instead."""
    check_arguments(owner, names, known, _REPLACEMENTS)


def _require_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a dict, not {type(value).__name__}")


_MUST_CALL = "must_call"  # tells ``_prepare_chat_with_tools`` that a tool call is required
_TOOL_MODES = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)
_EXTRA_ARGUMENTS = ("model_name", "tokenizer", "device", "device_map", "dtype")


class Ragaccel(FunctionCallingLLM):
    """A local LLM that answers faster by copying from retrieved nodes, and cites them.

    >>> Settings.llm = Ragaccel("Qwen/Qwen2.5-7B-Instruct")

    Answers are those of the model alone, token for token. Nodes that retrievers return are searched
    for in each prompt; text that an answer repeats of them is copied and verified. Engines,
    retrievers and prompts need no change. The constructor loads nothing: the model is loaded at the
    first answer, once for all objects with the same name and options.

    Every call takes ``references`` (further texts, nodes or passages that the answer may repeat)
    and the settings of ``ragaccel.LLM.generate``: ``max_new_tokens`` (or ``max_tokens``),
    ``temperature``, ``top_p``, ``top_k``, ``seed``, ``stop``, ``namespace``, ``remember`` and
    others.

    If the model's chat template supports tools, ``FunctionAgent`` works, and ``chat`` takes
    ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Args:
        model: A name on the Hugging Face Hub or a folder; by default the bundled reader. Or a
            loaded transformers model, with ``tokenizer``. ``model_name`` is an alias.
        llm: A loaded ``ragaccel.LLM`` to use instead of ``model``.
        tokenizer: The tokenizer of a loaded model.
        device, device_map, dtype: Device, distribution over devices, and type of the weights.
        model_kwargs: Further options of ``ragaccel.LLM.load``, such as ``quantization_config``,
            ``memory``, ``space`` or ``exact``. A ``token`` is not saved by ``to_dict``.
        context_window: Maximum number of tokens of prompt and answer, if below the model's limit.
        max_new_tokens: Maximum number of tokens of an answer.
        temperature: Sampling temperature; 0 always picks the likeliest token.
        generate_kwargs: Further settings of every call.
        namespace: Isolates the references and remembered text of one tenant from those of others.
        remember: Whether to draft from earlier requests of the namespace, and to keep this one.
        registry: A ``ragaccel.frameworks.ReferenceRegistry`` to search in addition to the
            nodes of the same root span, ``ragaccel.reference_scope`` or namespace.
        auto_references: Whether to search prompts for retrieved nodes.
        adjacent_chunks: Whether to copy also from the chunks next to those nodes.
        system_prompt: A system message before completions and in prompts of engines. ``chat``
            does not add it, as everywhere in LlamaIndex.
        messages_to_prompt: Renders messages as text; by default the model's chat template.
        completion_to_prompt: Renders a text to complete as a prompt. By default the text is a user
            message for a chat model, and unchanged for any other.
        **others: Further fields of LlamaIndex's LLMs, such as ``callback_manager`` or
            ``output_parser``, and fields of subclasses.

    Raises:
        TypeError: An argument is unknown; the message says what to use instead.
        ConfigurationError: Arguments contradict each other.
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
            raise TypeError("model and model_name are one argument: pass one of them")
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
        """Return the class name for serialization."""
        return "Ragaccel"

    @property
    def metadata(self) -> LLMMetadata:
        """Return the model's metadata, read from its files without loading weights.

        ``is_function_calling_model`` is True if the model's own chat template renders messages and
        supports tools. Such a template implies that the model was trained to call tools.

        Raises:
            ConfigurationError: ``context_window`` exceeds the model's limit.
        """
        limit, wanted = self._model.context_length, self.context_window
        if limit is not None and wanted is not None and wanted > limit:
            raise ConfigurationError(
                f"context_window={wanted:,} is more than the {limit:,} tokens that "
                f"{self._model.label} supports: lower it or leave it out"
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
        """Return the ``ragaccel.LLM`` that answers, and load it if necessary."""
        return self._model.load()

    async def aload(self) -> LLM:
        """Load the model without blocking the event loop, for example when a server starts."""
        return await self._model.aload()

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text; use it as ``Settings.tokenizer = llm.tokenize``.

        Without that, LlamaIndex sizes prompts by another model's tokenizer.
        """
        return self._model.tokenizer.encode(text, add_special_tokens=False)

    def to_payload(self) -> dict[str, Any]:
        """Return the fields for traces, without texts and without reading files."""
        return {
            "class_name": self.class_name(),
            "model_name": self._model.label,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text; ``formatted`` text is used as it is, special tokens included."""
        return generate_response(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Complete a text as a stream; errors are raised before the first piece is read."""
        return stream_responses(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Complete a text; cancelling the task cancels the answer."""
        return await agenerate_response(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Complete a text as a stream; closing the stream ends the answer."""
        return await astream_responses(
            self._completion_request(prompt, formatted, kwargs), completion_response
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, rendered by the model's chat template.

        ``tools`` takes LlamaIndex tools or dicts, ``tool_choice`` is ``"auto"``, ``"none"``,
        ``"any"`` or a tool's name. Get the calls with ``get_tool_calls_from_response``.
        """
        return generate_response(self._chat_request(messages, kwargs), chat_response)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages as a stream; errors are raised before the first piece is read."""
        return stream_responses(self._chat_request(messages, kwargs), chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages; cancelling the task cancels the answer."""
        return await agenerate_response(self._chat_request(messages, kwargs), chat_response)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer messages as a stream; closing the stream ends the answer."""
        return await astream_responses(self._chat_request(messages, kwargs), chat_response)

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002 - the framework's signature
    ) -> list[ToolSelection]:
        """Return the tool calls of a response; an unreadable call is part of its text only.

        Raises:
            ValueError: There is no call and ``error_on_no_tool_call``; the message says why.
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
        """Stream an object of a class as it grows; take the arguments of the base class."""
        llm_kwargs = {**(llm_kwargs or {}), **self._forced_call_option()}
        return super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

    async def astream_structured_predict(
        self,
        output_cls: Any,
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """Stream an object of a class as it grows; take the arguments of the base class."""
        llm_kwargs = {**(llm_kwargs or {}), **self._forced_call_option()}
        return await super().astream_structured_predict(
            output_cls, prompt, llm_kwargs, **prompt_args
        )

    def _forced_call_option(self) -> dict[str, Any]:
        """Return the option that forces a tool call.

        The base class requires calls in its streams of objects, but does not tell the model.
        """
        by_tools = self.pydantic_program_mode in _TOOL_MODES and self._calls_tools
        return {_MUST_CALL: True} if by_tools else {}

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002 - the runner of the tools prints
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of ``chat`` for an agent, or for a program that wants an object."""
        must_call = kwargs.pop(_MUST_CALL, False) or tool_required
        choice = kwargs.pop("tool_choice", None)
        new_messages = [] if user_msg is None else [user_msg]
        return {
            **kwargs,
            "messages": [
                *(chat_history or []),
                *(
                    ChatMessage(content=one) if isinstance(one, str) else one
                    for one in new_messages
                ),
            ],
            "tools": [as_tool(tool) for tool in tools],
            "tool_choice": "any" if choice is None and must_call else choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
        }

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options and share ``llm`` and ``registry``."""
        memo = {} if memo is None else memo
        memo.update({id(shared): shared for shared in (self.llm, self.registry)})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle; raise TypeError if ``llm`` or ``registry`` is set."""
        if self.llm is not None or self.registry is not None:
            raise TypeError(
                "a Ragaccel made with llm= or registry= cannot be pickled: pass the model's name "
                "instead, and each process loads its own"
            )
        return super().__getstate__()

    @field_serializer("llm")
    def _serialize_ready(self, llm: Any) -> str | None:
        """Return a text that identifies this LLM, for the keys of answer caches."""
        return None if llm is None else f"a ready ragaccel.LLM, {self._model.identity}"

    @field_serializer("model_kwargs")
    def _without_token(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name != "token"}

    def _completion_request(
        self, prompt: str, formatted: bool, kwargs: dict[str, Any]
    ) -> DeferredRequest:
        if not isinstance(prompt, str):
            raise ConfigurationError(
                f"a prompt to complete must be a str, not {type(prompt).__name__}: pass messages "
                "to chat"
            )
        return self._deferred_request(
            (lambda: prompt) if formatted else partial(self._render_completion, prompt), kwargs
        )

    def _chat_request(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> DeferredRequest:
        own = dict(kwargs)
        toolbox = pop_toolbox(own)
        tools = None if toolbox is None else toolbox.tools
        render = partial(render_messages, messages, self.messages_to_prompt, self._model, tools)
        return self._deferred_request(render, own, toolbox)

    def _render_completion(self, prompt: str) -> str | list[TemplateMessage]:
        """Render a text to complete: as a user message for a chat model, else unchanged."""
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
        kwargs: dict[str, Any],
        toolbox: Toolbox | None = None,
    ) -> DeferredRequest:
        """Check a call's arguments before anything is loaded, and return the deferred request."""
        own = dict(kwargs)
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
        # Resolve this here: ``prepare`` may run in a thread without the caller's context.
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
