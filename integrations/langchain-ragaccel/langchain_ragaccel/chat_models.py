"""``ChatRagaccel``: a local chat model for LangChain."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from pydantic import BaseModel, Field, PrivateAttr, model_validator
from ragaccel import ConfigurationError
from ragaccel.models import resolve_tool_calling, resolve_tool_choice

from langchain_ragaccel.base import (
    ModelOptions,
    Request,
    agenerate_answers,
    astream_answer,
    cache_key,
    check_stream,
    generate_answers,
    model_profile,
    prompt_dependencies,
    response_metadata,
    run_in_thread,
    sample_requests,
    should_stream,
    stream_answer,
    usage_metadata,
    uses_cache,
)
from langchain_ragaccel.callbacks import (
    CallerGenerator,
    callbacks_from_arguments,
    caller_from_callbacks,
    caller_from_config,
    iterate_as_caller,
    use_caller,
)
from langchain_ragaccel.convert import (
    Conversation,
    as_passages,
    as_template_messages,
    count_tokens,
    exclude_shown,
    explicit_references,
    find_references,
    render_prompt,
    text_of,
    tool_references,
)
from langchain_ragaccel.tools import (
    as_tool_call_chunks,
    as_tool_calls,
    as_tools,
    output_parser_for,
    with_parser,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models.base import LanguageModelInput
    from langchain_core.runnables import Runnable, RunnableConfig
    from langchain_core.tools import BaseTool
    from typing_extensions import Self

    from langchain_ragaccel.base import CallOptions


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from ragaccel import Answer

    from langchain_ragaccel.base import Request

    Part = tuple[ChatGenerationChunk, str | Answer]


def chat_result(request: Request, made: Sequence[Answer], model: str) -> ChatResult:
    """Return complete answers as messages; ``model`` is the name to report."""
    return ChatResult(generations=[_generation(request, one, model) for one in made])


def _generation(request: Request, made: Answer, model: str) -> ChatGeneration:
    content, calls = request.read(made)
    valid, invalid = as_tool_calls(calls)
    message = AIMessage(
        content=content,
        tool_calls=valid,
        invalid_tool_calls=invalid,
        usage_metadata=usage_metadata(made),
        response_metadata=response_metadata(made, model, content, calls_tools=bool(valid)),
    )
    return ChatGeneration(message=message)


def stream_chunks(request: Request, model: str) -> Iterator[Part]:
    """Yield the chunks of an answer, each with its piece; the last ones with the ``Answer``."""
    emitted = ""
    for part in stream_answer(request):
        for chunk in _chunks(request, part, emitted, model):
            yield chunk, part
        emitted += part if isinstance(part, str) else ""


async def astream_chunks(request: Request, model: str) -> AsyncGenerator[Part, None]:
    """Yield what :func:`stream_chunks` does, and parse tool calls in a thread."""
    emitted = ""
    async with aclosing(astream_answer(request)) as made:
        async for part in made:
            for chunk in await _achunks(request, part, emitted, model):
                yield chunk, part
            emitted += part if isinstance(part, str) else ""


async def _achunks(
    request: Request, part: str | Answer, emitted: str, model: str
) -> list[ChatGenerationChunk]:
    if isinstance(part, str):
        return list(_chunks(request, part, emitted, model))
    return await run_in_thread(lambda: list(_chunks(request, part, emitted, model)))


def _chunks(
    request: Request, part: str | Answer, emitted: str, model: str
) -> Iterator[ChatGenerationChunk]:
    """Yield the chunk of a piece, or for an ``Answer`` its tool calls and then all metadata.

    Only one chunk has metadata, since LangChain adds up the metadata of all chunks.
    """
    if isinstance(part, str):
        yield ChatGenerationChunk(message=AIMessageChunk(content=part))
        return
    content, calls = request.read(part)
    if content.startswith(emitted) and content != emitted:
        yield ChatGenerationChunk(message=AIMessageChunk(content=content[len(emitted) :]))
    for chunk in as_tool_call_chunks(calls):
        message = AIMessageChunk(content="", tool_call_chunks=[chunk])
        yield ChatGenerationChunk(message=message)
    called = any(call.is_valid for call in calls)
    message = AIMessageChunk(
        content="",
        chunk_position="last",
        usage_metadata=usage_metadata(part) if request.includes_usage else None,
        response_metadata=response_metadata(part, model, content, calls_tools=called),
    )
    yield ChatGenerationChunk(message=message)


class ChatRagaccel(ModelOptions, BaseChatModel):
    """A local chat model that answers faster by copying from documents, and cites them.

    Answers are those of the model alone, token for token. Text that repeats retrieved documents is
    copied from them and verified in one forward pass; ``response_metadata["ragaccel"]`` says which
    words come from which document. Documents of any LangChain retriever in the same run are used
    automatically. Without ``model`` the small bundled reader answers.

    >>> ChatRagaccel(model="Qwen/Qwen3-4B").invoke("Who keeps the lamp?", documents=[text])

    Calls and ``bind`` also take ``documents`` (shown to the model), ``references`` (only copied
    from and cited), ``tools``, ``tool_choice``, ``parallel_tool_calls`` and ``response_format``.
    """

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the model's chat template, such as ``enable_thinking``."""

    settable: ClassVar[frozenset[str]] = ModelOptions.settable | {
        "documents", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls",
        "response_format",
    }  # fmt: skip

    _is_initialized: bool = PrivateAttr(default=False)

    @property
    def _llm_type(self) -> str:
        return "ragaccel-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        options = self.chat_template_kwargs
        return {**self.identity_params, **({"chat_template_kwargs": options} if options else {})}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        known = {**self._identifying_params, **prompt_dependencies(self, kwargs)}
        return cache_key(known, stop, kwargs)

    @model_validator(mode="after")
    def _mark_initialized(self) -> Self:
        self._is_initialized = True
        return self

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattribute__(self, name: str) -> Any:
            """Read the profile on first access, not in the constructor.

            It needs the model's config and tokenizer, which take too long to read while an object
            is created and validated.
            """
            found = super().__getattribute__(name)
            if name == "profile" and found is None and self._is_initialized:
                return model_profile(self.shared)
            return found

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return the number of tokens of the rendered messages and tools."""
        conversation = Conversation(
            as_template_messages(messages), (), as_tools(tools or ()), self.chat_template_kwargs
        )
        return count_tokens(self.shared, conversation)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,  # noqa: ARG002 - nothing enforces a schema
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return a runnable of this model that may call tools.

        Tools are rendered by the model's chat template, and calls are parsed in its own format.

        Args:
            tools: Functions, classes, LangChain tools or dicts.
            tool_choice: ``"auto"``, ``"none"``, ``"any"`` or a tool's name. A call is forced by
                starting the answer with the text that calls start with.
            strict: Ignored: decoding does not enforce schemas.
            **kwargs: Further settings of the calls. With ``parallel_tool_calls=False`` only the
                first call of an answer counts.

        Raises:
            ConfigurationError: ``tool_choice`` is not the name of a tool.
        """
        made = as_tools(tools)
        resolve_tool_choice(made, tool_choice)
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        bound: Runnable[LanguageModelInput, AIMessage] = self.bind(tools=made, **kwargs)
        return bound

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return a runnable that answers with an object of a schema.

        The schema is sent as a tool that the model must call. With ``"json_mode"`` the answer is
        parsed as JSON, which the prompt must ask for. Decoding is not constrained: an answer that
        does not fit, lacks a key or is cut off raises a ``ValueError`` that says why, or is a
        ``parsing_error`` with ``include_raw``. The result is never None.

        Args:
            schema: A pydantic class, a ``TypedDict`` or a JSON schema.
            method: ``"function_calling"``, ``"json_schema"`` (the same) or ``"json_mode"``.
            include_raw: Return a dict of ``raw``, ``parsed`` and ``parsing_error``.
            strict: Ignored: decoding does not enforce schemas.
            **kwargs: Further settings of the calls.

        Raises:
            ConfigurationError: The method is unknown.
        """
        structured_format = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        if method == "json_mode":
            bound = self.bind(ls_structured_output_format=structured_format, **kwargs)
        elif method in ("function_calling", "json_schema"):
            bound = self.bind_tools(
                [schema], tool_choice="any", ls_structured_output_format=structured_format, **kwargs
            )
        else:
            raise ConfigurationError(
                f"method={method!r} is unknown: use function_calling, json_schema or json_mode"
            )
        parser = output_parser_for(schema, from_call=method != "json_mode")
        return with_parser(bound, parser, include_raw=include_raw)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations; take the arguments of the base class.

        The base class computes cache keys on the event loop. This method first does the slow part
        of that in a thread.
        """
        with use_caller(caller_from_callbacks(callbacks_from_arguments(args, kwargs))):
            if uses_cache(self):
                await run_in_thread(lambda: prompt_dependencies(self, {}))
            return await super().agenerate(messages, stop, *args, **kwargs)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations; take the arguments of the base class.

        Record the caller first, since the base class does not pass it to streams.
        """
        with use_caller(caller_from_callbacks(callbacks_from_arguments(args, kwargs))):
            return super().generate(messages, stop, *args, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002 - the base class's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Yield the answer in chunks; take the arguments of the base class."""
        yield from iterate_as_caller(
            caller_from_config(config), super().stream(input, config, **kwargs)
        )

    def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Yield the answer in chunks; take the arguments of the base class."""
        pieces: Any = super().astream(
            input, config, **kwargs
        )  # a generator, though annotated as an iterator
        return CallerGenerator(caller_from_config(config), pieces)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self.call_options(stop, kwargs)
        request = self._request(messages, call, run_manager, kwargs)
        if call.count > 1 or run_manager is None or not should_stream(self, run_manager):
            return chat_result(
                request, generate_answers(sample_requests(request, call.count)), self.model_name
            )
        made: Any = None
        for chunk, part in stream_chunks(request, self.model_name):
            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            made = part
        return chat_result(request, [made], self.model_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await self.acall_options(stop, kwargs)
        request = await run_in_thread(lambda: self._request(messages, call, run_manager, kwargs))
        made: list[Any] = []
        if call.count > 1 or run_manager is None or not should_stream(self, run_manager):
            made = await agenerate_answers(sample_requests(request, call.count))
        else:
            async for chunk, part in astream_chunks(request, self.model_name):
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                made = [part]
        return await run_in_thread(lambda: chat_result(request, made, self.model_name))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self.call_options(stop, kwargs)
        check_stream(call)
        request = self._request(messages, call, run_manager, kwargs)
        for chunk, _ in stream_chunks(request, self.model_name):
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await self.acall_options(stop, kwargs)
        check_stream(call)
        request = await run_in_thread(lambda: self._request(messages, call, run_manager, kwargs))
        async with aclosing(astream_chunks(request, self.model_name)) as chunks:
            async for chunk, _ in chunks:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _request(
        self,
        messages: list[BaseMessage],
        call: CallOptions,
        run_manager: Any,
        kwargs: dict[str, Any],
    ) -> Request:
        """Render the prompt, find the references and return the request."""
        model, call = self.shared, call.for_run(run_manager)
        llm = model.load()
        tools = as_tools(kwargs.get("tools") or ())
        choice = resolve_tool_choice(tools, kwargs.get("tool_choice"))
        tools = [] if choice == "none" else tools
        response_format = call.response_format
        if (
            response_format is not None
            and response_format.tool is not None
            and choice in (None, "none")
        ):
            tools = as_tools(
                [*tools, response_format.tool]
            )  # the model calls a tool or gives the final object
            choice = resolve_tool_choice(tools, "any")
        options = {**self.chat_template_kwargs, **(kwargs.get("chat_template_kwargs") or {})}
        documents = as_passages(kwargs.get("documents"))
        calls = None
        if tools:
            parallel = kwargs.get("parallel_tool_calls") is not False
            stop = call.settings.get("stop")
            calls = resolve_tool_calling(llm.tokenizer, tools, choice, stop=stop, parallel=parallel)
        prompt = render_prompt(
            model, call, Conversation(as_template_messages(messages), documents, tools, options)
        )
        if calls is not None and calls.opening:
            prompt = [*prompt, *calls.opening_ids]
        text, explicit = text_of(messages), [*explicit_references(messages), *documents]
        retrieved = tool_references(messages)
        found = find_references(llm, call, text, explicit, retrieved=retrieved)
        return Request(
            llm,
            prompt,
            exclude_shown(prompt, found),
            call.settings,
            call.timeout,
            call.started,
            calls,
            response_format,
            call.includes_usage,
        )
