"""Replying: an answer as LangChain's message, whole or in chunks."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from pydantic import BaseModel, Field, PrivateAttr, model_validator
from ragaccel import ConfigurationError, choose_tool, resolve_tool_calling

from langchain_ragaccel.base import (
    Ask,
    ModelOptions,
    aanswers,
    answers,
    apieces,
    cache_key,
    check_streamed,
    in_thread,
    is_cached,
    is_heard,
    pieces,
    profile_of,
    response,
    samples_of,
    usage,
    what_is_read,
)
from langchain_ragaccel.callbacks import (
    PiecesFor,
    callbacks_in,
    called_by,
    caller_by,
    caller_of,
    pieces_for,
)
from langchain_ragaccel.convert import (
    Conversation,
    as_passages,
    as_turns,
    beside,
    count_tokens,
    gather,
    given_in,
    retrieved_in,
    text_of,
    write_prompt,
)
from langchain_ragaccel.tools import as_calls, as_chunks, as_tools, parsed, parser_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models.base import LanguageModelInput
    from langchain_core.runnables import Runnable, RunnableConfig
    from langchain_core.tools import BaseTool
    from typing_extensions import Self

    from langchain_ragaccel.base import Call


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from ragaccel import Answer

    from langchain_ragaccel.base import Ask

    Part = tuple[ChatGenerationChunk, str | Answer]


def reply(ask: Ask, made: Sequence[Answer], model: str) -> ChatResult:
    """The messages of whole answers; ``model`` is what to call who made them."""
    return ChatResult(generations=[_generation(ask, one, model) for one in made])


def _generation(ask: Ask, made: Answer, model: str) -> ChatGeneration:
    content, calls = ask.read(made)
    valid, invalid = as_calls(calls)
    message = AIMessage(
        content=content,
        tool_calls=valid,
        invalid_tool_calls=invalid,
        usage_metadata=usage(made),
        response_metadata=response(made, model, content, calls_tools=bool(valid)),
    )
    return ChatGeneration(message=message)


def parts(ask: Ask, model: str) -> Iterator[Part]:
    """An answer's chunks, each with what it was made of: the last with the whole answer."""
    told = ""
    for part in pieces(ask):
        for chunk in _chunks(ask, part, told, model):
            yield chunk, part
        told += part if isinstance(part, str) else ""


async def aparts(ask: Ask, model: str) -> AsyncGenerator[Part, None]:
    """The same for asyncio; calls are read in a thread."""
    told = ""
    async with aclosing(apieces(ask)) as made:
        async for part in made:
            for chunk in await _chunks_of(ask, part, told, model):
                yield chunk, part
            told += part if isinstance(part, str) else ""


async def _chunks_of(
    ask: Ask, part: str | Answer, told: str, model: str
) -> list[ChatGenerationChunk]:
    if isinstance(part, str):
        return list(_chunks(ask, part, told, model))
    return await in_thread(lambda: list(_chunks(ask, part, told, model)))


def _chunks(ask: Ask, part: str | Answer, told: str, model: str) -> Iterator[ChatGenerationChunk]:
    """A piece; or, after the last one, the calls and all there is to tell of the answer.

    That is in one chunk only: chunks are put together by adding up what they tell.
    """
    if isinstance(part, str):
        yield ChatGenerationChunk(message=AIMessageChunk(content=part))
        return
    content, calls = ask.read(part)
    if content.startswith(told) and content != told:
        yield ChatGenerationChunk(message=AIMessageChunk(content=content[len(told) :]))
    for chunk in as_chunks(calls):
        message = AIMessageChunk(content="", tool_call_chunks=[chunk])
        yield ChatGenerationChunk(message=message)
    called = any(call.is_valid for call in calls)
    message = AIMessageChunk(
        content="",
        chunk_position="last",
        usage_metadata=usage(part) if ask.tells_usage else None,
        response_metadata=response(part, model, content, calls_tools=called),
    )
    yield ChatGenerationChunk(message=message)


class ChatRagaccel(ModelOptions, BaseChatModel):
    """A local chat model; what its answers repeat of documents is copied, and cited."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other names that the model's chat template reads, such as ``enable_thinking``."""

    settable: ClassVar[frozenset[str]] = ModelOptions.settable | {
        "documents", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls",
        "response_format",
    }  # fmt: skip

    _is_made: bool = PrivateAttr(default=False)

    @property
    def _llm_type(self) -> str:
        return "ragaccel-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        options = self.chat_template_kwargs
        return {**self.identifying, **({"chat_template_kwargs": options} if options else {})}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        known = {**self._identifying_params, **what_is_read(self, kwargs)}
        return cache_key(known, stop, kwargs)

    @model_validator(mode="after")
    def _let_it_be_known(self) -> Self:
        self._is_made = True
        return self

    if not TYPE_CHECKING:  # it would tell type checkers that any attribute is there

        def __getattribute__(self, name: str) -> Any:
            """Find out the profile when it is asked for, and not while the object is made.

            It takes the model's config and tokenizer, which take longer to read than making a chat
            model may, and no validator of the framework's shall wait for it.
            """
            found = super().__getattribute__(name)
            if name == "profile" and found is None and self._is_made:
                return profile_of(self.shared)
            return found

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Count the tokens of the prompt that the chat template makes of messages and tools."""
        asked = Conversation(
            as_turns(messages), (), as_tools(tools or ()), self.chat_template_kwargs
        )
        return count_tokens(self.shared, asked)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,  # noqa: ARG002 - nothing enforces a schema
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools, as its chat template and its training have it.

        ``tool_choice`` is ``"auto"``, ``"none"``, ``"any"`` or a tool's name; a call is forced by
        beginning the answer with what calls begin with. With ``parallel_tool_calls=False`` the
        first call of an answer counts.

        Raises:
            ConfigurationError: ``tool_choice`` names no tool.
        """
        made = as_tools(tools)
        choose_tool(made, tool_choice)
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
        """Answer with an object of a schema.

        The schema is a tool that the model is made to call; with ``"json_mode"`` the answer is
        read as JSON, which the prompt has to ask for. Nothing keeps a model from writing what does
        not fit, lacks something or is cut off: that is a ``ValueError`` of the parser's that says
        what, or ``parsing_error`` with ``include_raw``; never None.
        """
        told = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        if method == "json_mode":
            asking = self.bind(ls_structured_output_format=told, **kwargs)
        elif method in ("function_calling", "json_schema"):
            asking = self.bind_tools(
                [schema], tool_choice="any", ls_structured_output_format=told, **kwargs
            )
        else:
            raise ConfigurationError(
                f"method={method!r}: there are function_calling, json_schema and json_mode"
            )
        parser = parser_of(schema, from_call=method != "json_mode")
        return parsed(asking, parser, include_raw=include_raw)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations; arguments are those of the base class.

        That asks for the cache's key on the event loop, so what takes long of it is done before.
        """
        with called_by(caller_of(callbacks_in(args, kwargs))):
            if is_cached(self):
                await in_thread(lambda: what_is_read(self, {}))
            return await super().agenerate(messages, stop, *args, **kwargs)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations; arguments are those of the base class.

        Who asks is noted, since that does not tell those who stream.
        """
        with called_by(caller_of(callbacks_in(args, kwargs))):
            return super().generate(messages, stop, *args, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002 - the base class's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece; arguments are those of the base class."""
        yield from pieces_for(caller_by(config), super().stream(input, config, **kwargs))

    def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Answer piece by piece, for asyncio; arguments are those of the base class."""
        pieces: Any = super().astream(input, config, **kwargs)  # a generator, though it says less
        return PiecesFor(caller_by(config), pieces)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self.call(stop, kwargs)
        ask = self._ask(messages, call, run_manager, kwargs)
        if call.count > 1 or run_manager is None or not is_heard(self, run_manager):
            return reply(ask, answers(samples_of(ask, call.count)), self.model_name)
        made: Any = None
        for chunk, part in parts(ask, self.model_name):
            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            made = part
        return reply(ask, [made], self.model_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await self.acall(stop, kwargs)
        ask = await in_thread(lambda: self._ask(messages, call, run_manager, kwargs))
        made: list[Any] = []
        if call.count > 1 or run_manager is None or not is_heard(self, run_manager):
            made = await aanswers(samples_of(ask, call.count))
        else:
            async for chunk, part in aparts(ask, self.model_name):
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                made = [part]
        return await in_thread(lambda: reply(ask, made, self.model_name))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self.call(stop, kwargs)
        check_streamed(call)
        ask = self._ask(messages, call, run_manager, kwargs)
        for chunk, _ in parts(ask, self.model_name):
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
        call = await self.acall(stop, kwargs)
        check_streamed(call)
        ask = await in_thread(lambda: self._ask(messages, call, run_manager, kwargs))
        async with aclosing(aparts(ask, self.model_name)) as chunks:
            async for chunk, _ in chunks:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _ask(
        self, messages: list[BaseMessage], call: Call, run_manager: Any, given: dict[str, Any]
    ) -> Ask:
        """Lay out what is asked, and find what the answer may be copied from."""
        model, call = self.shared, call.of(run_manager)
        llm = model.load()
        tools = as_tools(given.get("tools") or ())
        choice = choose_tool(tools, given.get("tool_choice"))
        tools = [] if choice == "none" else tools
        wanted = call.response_format
        if wanted is not None and wanted.tool is not None and choice in (None, "none"):
            tools = as_tools([*tools, wanted.tool])  # one of them is called: a tool, or the answer
            choice = choose_tool(tools, "any")
        options = {**self.chat_template_kwargs, **(given.get("chat_template_kwargs") or {})}
        documents = as_passages(given.get("documents"))
        calls = None
        if tools:
            parallel = given.get("parallel_tool_calls") is not False
            stop = call.settings.get("stop")
            calls = resolve_tool_calling(llm.tokenizer, tools, choice, stop=stop, parallel=parallel)
        prompt = write_prompt(
            model, call, Conversation(as_turns(messages), documents, tools, options)
        )
        if calls is not None and calls.opening:
            prompt = [*prompt, *calls.opening_ids]
        text, given_too = text_of(messages), [*given_in(messages), *documents]
        retrieved = retrieved_in(messages)
        found = gather(llm, call, text, given_too, retrieved=retrieved)
        return Ask(
            llm,
            prompt,
            beside(prompt, found),
            call.settings,
            call.timeout,
            call.began,
            calls,
            wanted,
            call.tells_usage,
        )
