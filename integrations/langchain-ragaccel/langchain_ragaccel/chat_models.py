"""``ChatRagaccel``: a local chat model for LangChain."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from pydantic import BaseModel, Field, PrivateAttr, model_validator
from ragaccel import ConfigurationError
from ragaccel.frameworks import (
    AsyncIterateWithin,
    Toolbox,
    count_message_tokens,
    iterate_within,
    prepare,
    sampled_calls,
    use_context,
)
from ragaccel.models import resolve_tool_choice

from langchain_ragaccel.base import (
    CallOptions,
    ModelOptions,
    cache_key,
    model_profile,
    response_metadata,
    usage_metadata,
)
from langchain_ragaccel.callbacks import (
    CURRENT_CALLER,
    as_caller,
    caller_from_arguments,
    caller_from_callbacks,
)
from langchain_ragaccel.convert import (
    as_passages,
    as_template_messages,
    explicit_references,
    tool_references,
)
from langchain_ragaccel.tools import (
    ResponseFormat,
    as_tool_call_chunks,
    as_tool_calls,
    as_tools,
    with_parser,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from langchain_core.language_models.base import LanguageModelInput
    from langchain_core.runnables import Runnable, RunnableConfig
    from langchain_core.tools import BaseTool
    from ragaccel.frameworks import Call, Reply
    from typing_extensions import Self


class ChatRagaccel(ModelOptions, BaseChatModel):  # type: ignore[misc]  # names of arguments differ
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
        known = {**self._identifying_params, **self.prompt_dependencies(kwargs)}
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
        return count_message_tokens(
            self.shared,
            as_template_messages(messages),
            as_tools(tools or ()),
            self.chat_template_kwargs,
        )

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
        wanted = ResponseFormat.of_schema(schema, from_call=method != "json_mode")
        return with_parser(bound, wanted, include_raw=include_raw)

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
        with use_context(CURRENT_CALLER, caller_from_arguments(args, kwargs)):
            if self.uses_cache:
                await asyncio.to_thread(self.prompt_dependencies, {})
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
        with use_context(CURRENT_CALLER, caller_from_arguments(args, kwargs)):
            return super().generate(messages, stop, *args, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002 - the base class's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Yield the answer in chunks; take the arguments of the base class."""
        pieces = super().stream(input, config, **kwargs)
        yield from iterate_within(as_caller(config), pieces)

    def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Yield the answer in chunks; take the arguments of the base class."""
        pieces: Any = super().astream(input, config, **kwargs)
        return AsyncIterateWithin(as_caller(config), pieces)

    def _calls(
        self, asked: list[BaseMessage], options: CallOptions, run_manager: Any
    ) -> list[Call]:
        # LangChain passes no run manager to streams.
        caller = CURRENT_CALLER.get() if run_manager is None else caller_from_callbacks(run_manager)
        given, response_format = options.options, options.response_format
        tools, choice = as_tools(given["tools"] or ()), given["tool_choice"]
        if response_format is not None and response_format.tool is not None:
            chosen = resolve_tool_choice(tools, choice)
            if chosen in (None, "none"):  # the model calls a tool or gives the final object
                kept = [] if chosen == "none" else tools
                tools, choice = as_tools([*kept, response_format.tool]), "any"
        call = prepare(
            self.shared,
            as_template_messages(asked),
            options.settings,
            options.sources(caller, explicit_references(asked), tool_references(asked)),
            documents=as_passages(given["documents"]),
            toolbox=Toolbox.of(tools, choice, given["parallel_tool_calls"]),
            template_options={**self.chat_template_kwargs, **given["chat_template_kwargs"]},
            timeout=given["timeout"],
            started=options.started,
            read=None if response_format is None else response_format.read,
            is_buffered=response_format is not None,
        )
        return sampled_calls(call, options.count)

    def _chunks(self, part: str | Reply, options: CallOptions) -> Iterator[ChatGenerationChunk]:
        """Yield the chunk of a piece, or for a ``Reply`` its tool calls and then all metadata.

        Only one chunk has metadata, since LangChain adds up the metadata of all chunks.
        """
        if isinstance(part, str):
            yield ChatGenerationChunk(message=AIMessageChunk(content=part))
            return
        for chunk in as_tool_call_chunks(part.calls):
            message = AIMessageChunk(content="", tool_call_chunks=[chunk])
            yield ChatGenerationChunk(message=message)
        message = AIMessageChunk(
            content="",
            chunk_position="last",
            usage_metadata=None
            if options.options["stream_usage"] is False
            else usage_metadata(part),
            response_metadata=response_metadata(part, self.model_name),
        )
        yield ChatGenerationChunk(message=message)

    def _result(self, replies: Sequence[Reply], options: CallOptions) -> ChatResult:  # noqa: ARG002
        return ChatResult(generations=[self._generation(reply) for reply in replies])

    def _generation(self, reply: Reply) -> ChatGeneration:
        valid, invalid = as_tool_calls(reply.calls)
        message = AIMessage(
            content=reply.text,
            tool_calls=valid,
            invalid_tool_calls=invalid,
            usage_metadata=usage_metadata(reply),
            response_metadata=response_metadata(reply, self.model_name),
        )
        return ChatGeneration(message=message)
