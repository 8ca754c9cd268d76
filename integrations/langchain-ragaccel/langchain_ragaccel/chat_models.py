"""ChatRagaccel: a local chat model that answers from the documents that a chain found."""

from __future__ import annotations

import warnings
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, model_validator
from ragaccel import Prompt

from langchain_ragaccel.calls import OTHER_NAMES, cache_key, check_names
from langchain_ragaccel.generating import Ask, aanswer, answer, apieces, beside, pieces
from langchain_ragaccel.messages import as_turns, text_of
from langchain_ragaccel.metadata import PROVIDER, response, usage
from langchain_ragaccel.options import ModelOptions
from langchain_ragaccel.profiles import profile_of
from langchain_ragaccel.prompting import Conversation, count_tokens, write_prompt
from langchain_ragaccel.references import as_passages, gather, references_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.language_models.model_profile import ModelProfile
    from ragaccel import Answer

_OF_CHAT = frozenset({"documents", "chat_template_kwargs"})


class ChatRagaccel(ModelOptions, BaseChatModel):
    """A local chat model; what its answers repeat of documents is copied, and cited."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other names that the model's chat template reads, such as ``enable_thinking``."""

    @model_validator(mode="before")
    @classmethod
    def _tell_of_what_is_ignored(cls, values: Any) -> Any:
        known = cls.model_fields.keys() | OTHER_NAMES.keys()
        for name in sorted(values.keys() - known) if isinstance(values, dict) else ():
            warnings.warn(f"{cls.__name__} takes no {name}: it is ignored", stacklevel=2)
        return values

    @property
    def _llm_type(self) -> str:
        return "ragaccel-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        options = self.chat_template_kwargs
        return {**self.identifying, **({"chat_template_kwargs": options} if options else {})}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return cache_key(self._identifying_params, stop, kwargs)

    def _resolve_model_profile(self) -> ModelProfile | None:
        return profile_of(self.model, self.loaded_llm)

    def bind(self, **kwargs: Any) -> Any:
        """Set what every call sets; TypeError for what no call can."""
        check_names(kwargs, type(self).__name__, _OF_CHAT)
        return super().bind(**kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text by the model's own tokenizer."""
        counted = self.custom_get_token_ids
        return self.count_token_ids(text) if counted is None else counted(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Count the tokens of the prompt that the chat template makes of messages and tools."""
        made = [convert_to_openai_tool(tool) for tool in tools or ()]
        asked = Conversation(as_turns(messages), (), made, self.chat_template_kwargs)
        return count_tokens(self.ready_llm, asked)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(answer(self._ask(messages, stop, run_manager, kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask = await beside(lambda: self._ask(messages, stop, run_manager, kwargs))
        return self._result(await aanswer(ask))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for part in pieces(self._ask(messages, stop, run_manager, kwargs)):
            chunk = self._chunk(part)
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
        ask = await beside(lambda: self._ask(messages, stop, run_manager, kwargs))
        async with aclosing(apieces(ask)) as parts:
            async for part in parts:
                chunk = self._chunk(part)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _ask(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: Any,
        given: dict[str, Any],
    ) -> Ask:
        """Check what is asked, lay it out, and find what the answer may be copied from."""
        check_names(given, type(self).__name__, _OF_CHAT)
        call, llm = self.call(stop, given), self.ready_llm
        options = {**self.chat_template_kwargs, **(given.get("chat_template_kwargs") or {})}
        documents = as_passages(given.get("documents"))
        asked = Conversation(as_turns(messages), documents, None, options)
        prompt = write_prompt(llm, asked, call.settings.get("max_new_tokens"))
        run_id = None if run_manager is None else run_manager.run_id
        carried = [*references_of(messages), *(() if isinstance(prompt, Prompt) else documents)]
        references = gather(llm, call, text_of(messages), carried, run_id=run_id)
        return Ask(llm, prompt, references, call.settings, call.timeout)

    def _result(self, made: Answer) -> ChatResult:
        message = AIMessage(
            content=made.text,
            usage_metadata=usage(made),
            response_metadata=response(made, self.model_name),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunk(self, part: str | Answer) -> ChatGenerationChunk:
        """A piece; or, after the last one, all there is to tell of the answer: in one chunk only.

        Chunks are put together by adding up what they tell.
        """
        if isinstance(part, str):
            return ChatGenerationChunk(message=AIMessageChunk(content=part))
        message = AIMessageChunk(
            content="",
            chunk_position="last",
            usage_metadata=usage(part),
            response_metadata=response(part, self.model_name),
        )
        return ChatGenerationChunk(message=message)
