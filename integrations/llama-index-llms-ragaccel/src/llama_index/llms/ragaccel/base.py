"""``Ragaccel``: a local LLM for LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict
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

from llama_index.llms.ragaccel.citations import as_references, citation_label, current_root
from llama_index.llms.ragaccel.messages import (
    TOOL_NAMES,
    TemplateMessage,
    TemplatePrompt,
    append_invalid_calls,
    as_tool,
    explain_missing_call,
    read_tool_calls,
    render_messages,
    tool_call_kwargs,
    uses_model_template,
)
from ragaccel import ConfigurationError, Settings
from ragaccel.frameworks import (
    SharedModel,
    Sources,
    Toolbox,
    get_shared_model,
    prepare,
    read_options,
    refuse_settings,
    rename_options,
    searched_references,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import BaseTool

    from ragaccel import LLM
    from ragaccel.frameworks import Call, Reply


Response = TypeVar("Response", CompletionResponse, ChatResponse)


def completion_response(text: str, delta: str | None = None) -> CompletionResponse:
    """Return a completion response; in a stream, of the text so far and the new ``delta``."""
    return CompletionResponse(text=text, delta=delta)


def chat_response(text: str, delta: str | None = None) -> ChatResponse:
    """Return a chat response; in a stream, of the text so far and the new ``delta``.

    The message has no additional data but tool calls: the framework writes it into later prompts.
    """
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def final_response(response: Response, reply: Reply, model_name: str) -> Response:
    """Add tool calls, token counts, statistics and citations to a response, and return it."""
    usage = asdict(reply.answer.usage)
    report = reply.answer.report(reply.text, format_citation=citation_label)
    if reply.calls and isinstance(response, ChatResponse):
        response.message.additional_kwargs = tool_call_kwargs(reply.calls)
    response.raw = {
        "model": model_name,
        "finish_reason": reply.finish_reason,
        "usage": usage,
        "ragaccel": report,
    }
    response.additional_kwargs = {
        **usage,
        "finish_reason": reply.finish_reason,
        "citations": report["citations"],
    }
    return response


class _Responses:
    """Makes the responses of a stream from its parts: each has the text so far and the new one."""

    def __init__(self, make: Callable[..., Any], model_name: str) -> None:
        self._make, self._model_name, self._text = make, model_name, ""

    def __call__(self, part: str | Reply) -> Any:
        if isinstance(part, str):
            self._text += part
            return self._make(self._text, part)
        return final_response(self._make(part.text, ""), part, self._model_name)


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
_REPLACEMENTS = {
    "capacity": 'use context_window, or model_kwargs={"capacity": ...}',
    "api_key": "the model runs in this process",
    "is_chat_model": "leave it out: a model with a chat template is a chat model",
    "load_in_4bit": 'use model_kwargs={"quantization_config": ...}',
    "load_in_8bit": 'use model_kwargs={"quantization_config": ...}',
    "n": "call it once for each answer, each time with another seed",
    "num_output": "use max_new_tokens",
    "reasoning": "leave it out: the model's chat template decides",
    "response_format": "use as_structured_llm(Schema) or structured_predict",
    "streamer": "use stream_complete or stream_chat",
    "timeout": "use asyncio.wait_for(llm.achat(...), seconds)",
    "tokenizer_kwargs": "pass your own tokenizer with a loaded model: model=..., tokenizer=...",
    "tokenizer_name": "pass your own tokenizer with a loaded model: model=..., tokenizer=...",
    "tokenizer_outputs_to_remove": "leave it out: only token ids are taken from a tokenizer",
    "tool_choice": "chat, chat_with_tools and FunctionAgent take tools and tool_choice",
    "tools": "chat, chat_with_tools and FunctionAgent take tools",
}


def call_settings(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a call's settings over the object's; a value of None is ignored.

    Raises:
        TypeError: A setting is unknown, or given under two names.
        ConfigurationError: ``kwargs`` is not a dict, or ``max_new_tokens`` not a whole number.
    """
    _require_mapping("generate_kwargs", kwargs)
    own = read_options(kwargs, "a call", SETTINGS, _REPLACEMENTS)
    settings = {**defaults, **{name: value for name, value in own.items() if value is not None}}
    length = settings.get("max_new_tokens", 1)
    if not hasattr(length, "__index__"):
        raise ConfigurationError(f"max_new_tokens must be a whole number, not {length!r}")
    return settings


def loading_options(**kwargs: Any) -> dict[str, Any]:
    """Return the given options under the names of ``LLM.load``."""
    more = kwargs.pop("model_kwargs") or {}
    _require_mapping("model_kwargs", more)
    options: dict[str, Any] = rename_options(more, "model_kwargs")
    refuse_settings(
        more, "it is a setting of answers: pass it as generate_kwargs={...} or to a call"
    )
    options.update((name, value) for name, value in kwargs.items() if value is not None)
    return options


def _require_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a dict, not {type(value).__name__}")


_MUST_CALL = "must_call"  # tells ``_prepare_chat_with_tools`` that a tool call is required
_TOOL_MODES = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)
_EXTRA_ARGUMENTS = ("tokenizer", "device", "device_map", "dtype")


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
        given = {"model": model, "dtype": dtype}
        others = read_options(
            {**{name: value for name, value in given.items() if value is not None}, **others},
            "Ragaccel",
            {*type(self).model_fields, *_EXTRA_ARGUMENTS},
            _REPLACEMENTS,
        )
        model, dtype = others.pop("model", None), others.pop("dtype", None)
        options = loading_options(
            model_kwargs=model_kwargs, device=device, device_map=device_map, dtype=dtype
        )
        shared = resolve_model(model, tokenizer, llm, options)
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
        return self._respond(self._completion_call(prompt, formatted, kwargs), completion_response)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Complete a text as a stream; errors are raised before the first piece is read."""
        return self._stream(self._completion_call(prompt, formatted, kwargs), completion_response)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Complete a text; cancelling the task cancels the answer."""
        return await self._arespond(
            self._completion_call(prompt, formatted, kwargs), completion_response
        )

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Complete a text as a stream; closing the stream ends the answer."""
        return await self._astream(
            self._completion_call(prompt, formatted, kwargs), completion_response
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, rendered by the model's chat template.

        ``tools`` takes LlamaIndex tools or dicts, ``tool_choice`` is ``"auto"``, ``"none"``,
        ``"any"`` or a tool's name. Get the calls with ``get_tool_calls_from_response``.
        """
        return self._respond(self._chat_call(messages, kwargs), chat_response)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages as a stream; errors are raised before the first piece is read."""
        return self._stream(self._chat_call(messages, kwargs), chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages; cancelling the task cancels the answer."""
        return await self._arespond(self._chat_call(messages, kwargs), chat_response)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer messages as a stream; closing the stream ends the answer."""
        return await self._astream(self._chat_call(messages, kwargs), chat_response)

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

    def structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return an object of a class; take the arguments of the base class."""
        self._require_writer()
        return super().structured_predict(*args, **kwargs)

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return an object of a class; take the arguments of the base class."""
        self._require_writer()
        return await super().astructured_predict(*args, **kwargs)

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

    def _require_writer(self) -> None:
        if self._model.is_documents_only:
            raise ConfigurationError(
                "this model only answers from passages, it writes no JSON: load one that was "
                "trained to call tools or to write, such as Qwen/Qwen2.5-7B-Instruct"
            )

    def _forced_call_option(self) -> dict[str, Any]:
        """Return the option that forces a tool call.

        The base class requires calls in its streams of objects, but does not tell the model.
        """
        self._require_writer()
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

    def _respond(self, prepared: Callable[[], Call], make: Callable[..., Response]) -> Response:
        self._model.load()
        reply = prepared().reply()
        return final_response(make(reply.text), reply, self._model.label)

    def _stream(
        self, prepared: Callable[[], Call], make: Callable[..., Response]
    ) -> Generator[Response, None, None]:
        """Check the request now, and return a generator of responses."""
        self._model.load()
        parts, as_response = prepared().pieces(), _Responses(make, self._model.label)

        def generate() -> Generator[Response, None, None]:
            with closing(parts):
                yield from map(as_response, parts)

        return generate()

    async def _arespond(
        self, prepared: Callable[[], Call], make: Callable[..., Response]
    ) -> Response:
        """Return the complete response; cancelling the caller cancels the answer."""
        reply = await (await self._aprepare(prepared)).areply()
        return final_response(make(reply.text), reply, self._model.label)

    async def _astream(
        self, prepared: Callable[[], Call], make: Callable[..., Response]
    ) -> AsyncGenerator[Response, None]:
        """Check the request now, and return a generator; closing it ends the answer."""
        parts = await (await self._aprepare(prepared)).apieces()
        as_response = _Responses(make, self._model.label)

        async def generate() -> AsyncGenerator[Response, None]:
            async with aclosing(parts):
                async for part in parts:
                    yield as_response(part)

        return generate()

    async def _aprepare(self, prepared: Callable[[], Call]) -> Call:
        """Load the model and prepare the call in threads, off the event loop.

        Loading has a thread of its own, so that waiting calls do not occupy those that prepare.
        """
        await self._model.aload()
        return await asyncio.to_thread(prepared)

    def _completion_call(
        self, prompt: str, formatted: bool, kwargs: dict[str, Any]
    ) -> Callable[[], Call]:
        if not isinstance(prompt, str):
            raise ConfigurationError(
                f"a prompt to complete must be a str, not {type(prompt).__name__}: pass messages "
                "to chat"
            )
        render = (lambda: prompt) if formatted else partial(self._render_completion, prompt)
        return self._call(render, kwargs)

    def _chat_call(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> Callable[[], Call]:
        own = dict(kwargs)
        tools, choice, parallel = (own.pop(name, None) for name in TOOL_NAMES)
        toolbox = Toolbox.of([as_tool(tool) for tool in tools or ()], choice, parallel)
        shown = None if toolbox is None else toolbox.tools
        render = partial(render_messages, messages, self.messages_to_prompt, self._model, shown)
        return self._call(render, own, toolbox)

    def _render_completion(self, prompt: str) -> str | list[TemplateMessage]:
        """Render a text to complete: as a user message for a chat model, else unchanged."""
        to_prompt = self.completion_to_prompt or default_completion_to_prompt
        if to_prompt is not default_completion_to_prompt or not self._model.is_chat_model:
            return self._extend_prompt(to_prompt(prompt))
        if self.query_wrapper_prompt is not None:
            prompt = self.query_wrapper_prompt.format(query_str=prompt)
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]

    def _call(
        self,
        render: Callable[[], str | list[TemplateMessage]],
        kwargs: dict[str, Any],
        toolbox: Toolbox | None = None,
    ) -> Callable[[], Call]:
        """Check a call's arguments before anything is loaded; return what prepares the call."""
        own = dict(kwargs)
        references = as_references(own.pop("references", None))
        defaults = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "namespace": self.namespace,
            **({} if self.remember else {"remember": False}),
        }
        settings = call_settings({**defaults, **self.generate_kwargs}, own)
        root = current_root()
        visible = searched_references(
            self.registry,
            settings["namespace"],
            () if root is None else (root.scope,),
            enabled=self.auto_references,
        )
        return lambda: prepare(
            self._model,
            render(),
            settings,
            Sources(references, (), visible, self.adjacent_chunks),
            toolbox=toolbox,
            is_verbatim=True,
            context_window=self.context_window,
            read=None if toolbox is None else append_invalid_calls,
        )
