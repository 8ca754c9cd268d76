"""RagaccelLLM: a local model that completes texts, for chains that speak to LLMs."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, PrivateAttr

from langchain_ragaccel.base import (
    Ask,
    ModelOptions,
    aanswers,
    answers,
    apieces,
    as_stops,
    check_streamed,
    in_thread,
    is_cached,
    is_heard,
    pieces,
    response,
    samples_of,
    token_usage,
    what_is_read,
)
from langchain_ragaccel.callbacks import callbacks_in, called_by_each, caller_of, callers_of
from langchain_ragaccel.convert import beside, gather, write_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models.base import LanguageModelInput
    from langchain_core.runnables import RunnableConfig
    from ragaccel import Answer, SharedModel
    from typing_extensions import Self

    from langchain_ragaccel.base import Call


class RagaccelLLM(ModelOptions, BaseLLM):
    """A local model that completes texts as they are, without a chat template.

    Several prompts at one time share their passes.
    """

    model_config = ConfigDict(extra="forbid")

    _read: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "ragaccel"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self.identifying, **self._read}

    def generate(
        self, prompts: list[str], stop: list[str] | str | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Complete prompts; arguments are those of the base class and what a call may set.

        What a call sets, and what the object stops at, become part of what an answer is cached
        under, which they are not in the base class.
        """
        with called_by_each(prompts, callbacks_in(args, kwargs)):
            model, stops = self._for_call(kwargs), self._stops(stop)
            return super(RagaccelLLM, model).generate(prompts, stops, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | str | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Complete prompts as ``generate`` does, for asyncio."""
        with called_by_each(prompts, callbacks_in(args, kwargs)):
            model = await in_thread(lambda: self._for_call(kwargs))
            stops = self._stops(stop)
            return await super(RagaccelLLM, model).agenerate(prompts, stops, *args, **kwargs)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Complete inputs in shared passes.

        With ``return_exceptions`` each is a run of its own in a thread, so that one that fails
        leaves the others their answers.
        """
        if return_exceptions:
            return Runnable.batch(self, inputs, config, return_exceptions=True, **kwargs)
        return super().batch(inputs, config, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Complete inputs in shared passes as ``batch`` does, for asyncio."""
        if return_exceptions:
            return await Runnable.abatch(self, inputs, config, return_exceptions=True, **kwargs)
        return await super().abatch(inputs, config, **kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self.call(stop, kwargs)
        asks = self._asks(prompts, call, run_manager)
        if len(asks) > 1 or run_manager is None or not is_heard(self, run_manager):
            return self._result(answers(asks), call.count)
        made = []
        for part in pieces(asks[0]):
            chunk = self._chunk(part)
            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            made += [] if isinstance(part, str) else [part]
        return self._result(made)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = await self.acall(stop, kwargs)
        asks = await in_thread(lambda: self._asks(prompts, call, run_manager))
        if len(asks) > 1 or run_manager is None or not is_heard(self, run_manager):
            return self._result(await aanswers(asks), call.count)
        made = []
        async for part in apieces(asks[0]):
            chunk = self._chunk(part)
            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            made += [] if isinstance(part, str) else [part]
        return self._result(made)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self.call(stop, kwargs)
        check_streamed(call)
        (ask,) = self._asks([prompt], call, run_manager)
        for part in pieces(ask):
            chunk = self._chunk(part)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = await self.acall(stop, kwargs)
        check_streamed(call)
        (ask,) = await in_thread(lambda: self._asks([prompt], call, run_manager))
        async with aclosing(apieces(ask)) as parts:
            async for part in parts:
                chunk = self._chunk(part)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _for_call(self, given: dict[str, Any]) -> Self:
        """This object as the base class caches its answers: all that counts is its own."""
        model = self.with_settings(given)
        if is_cached(model) and (read := what_is_read(self, given)):
            model = model.model_copy()
            model._read = read
        return model

    def _stops(self, stop: list[str] | str | None) -> list[str] | None:
        return as_stops(self.stop if stop is None else stop)

    def _asks(self, prompts: list[str], call: Call, run_manager: Any) -> list[Ask]:
        """Find for each prompt what its answers may be copied from."""
        model = self.shared
        if run_manager is not None and len(prompts) == 1:
            callers = [caller_of(run_manager)]
        else:  # the base class tells of the first one's run only
            callers = callers_of(prompts)
        asks = [
            self._ask(model, call.of(None, caller), prompt)
            for prompt, caller in zip(prompts, callers, strict=True)
        ]
        return [one for ask in asks for one in samples_of(ask, call.count)]

    def _ask(self, model: SharedModel, call: Call, text: str) -> Ask:
        llm, prompt = model.load(), write_prompt(model, call, text)
        found = gather(llm, call, text)
        return Ask(llm, prompt, beside(prompt, found), call.settings, call.timeout, call.began)

    def _chunk(self, part: str | Answer) -> GenerationChunk:
        """A piece; or, after the last one, all there is to tell of the answer: in one chunk only.

        Chunks are put together by adding up what they tell.
        """
        if isinstance(part, str):
            return GenerationChunk(text=part)
        return GenerationChunk(text="", generation_info=self._info(part))

    def _info(self, answer: Answer) -> dict[str, Any]:
        return {**response(answer, self.model_name), "token_usage": token_usage([answer])}

    def _result(self, made: list[Answer], count: int = 1) -> LLMResult:
        found = [
            Generation(text=answer.text, generation_info=self._info(answer)) for answer in made
        ]
        generations = [found[at : at + count] for at in range(0, len(found), count)]
        output = {"token_usage": token_usage(made), "model_name": self.model_name}
        return LLMResult(generations=generations, llm_output=output)
