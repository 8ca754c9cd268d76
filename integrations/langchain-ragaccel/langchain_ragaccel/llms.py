"""``RagaccelLLM``: a local text-completion model for LangChain."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, PrivateAttr

from langchain_ragaccel.base import (
    ModelOptions,
    Request,
    agenerate_answers,
    as_stop_list,
    astream_answer,
    check_stream,
    generate_answers,
    prompt_dependencies,
    response_metadata,
    run_in_thread,
    sample_requests,
    should_stream,
    stream_answer,
    token_usage,
    uses_cache,
)
from langchain_ragaccel.callbacks import (
    callbacks_from_arguments,
    caller_from_callbacks,
    callers_for_prompts,
    use_prompt_callers,
)
from langchain_ragaccel.convert import exclude_shown, find_references, render_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models.base import LanguageModelInput
    from langchain_core.runnables import RunnableConfig
    from ragaccel import Answer
    from ragaccel.frameworks import SharedModel
    from typing_extensions import Self

    from langchain_ragaccel.base import CallOptions


class RagaccelLLM(ModelOptions, BaseLLM):
    """A local model that completes text without a chat template.

    Answers are those of the model alone, token for token, and faster: text that repeats retrieved
    documents is copied from them and verified. Several prompts share forward passes.

    >>> RagaccelLLM(model="Qwen/Qwen3-4B").invoke("The tide rises")
    """

    model_config = ConfigDict(extra="forbid")

    _prompt_dependencies: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "ragaccel"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self.identity_params, **self._prompt_dependencies}

    def generate(
        self, prompts: list[str], stop: list[str] | str | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Complete prompts; take the base class's arguments and the settings of a call.

        Cache keys contain the call's settings and the object's stop strings; those of the base
        class do not.
        """
        with use_prompt_callers(prompts, callbacks_from_arguments(args, kwargs)):
            model, stops = self._for_call(kwargs), self._effective_stop(stop)
            return super(RagaccelLLM, model).generate(prompts, stops, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | str | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Complete prompts; see :meth:`generate`."""
        with use_prompt_callers(prompts, callbacks_from_arguments(args, kwargs)):
            model = await run_in_thread(lambda: self._for_call(kwargs))
            stops = self._effective_stop(stop)
            return await super(RagaccelLLM, model).agenerate(prompts, stops, *args, **kwargs)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Complete inputs in shared forward passes.

        With ``return_exceptions`` each input is a run of its own in a thread, so that a failing
        one does not affect the others.
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
        """Complete inputs in shared forward passes; see :meth:`batch`."""
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
        call = self.call_options(stop, kwargs)
        requests = self._requests(prompts, call, run_manager)
        if len(requests) > 1 or run_manager is None or not should_stream(self, run_manager):
            return self._result(generate_answers(requests), call.count)
        made = []
        for part in stream_answer(requests[0]):
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
        call = await self.acall_options(stop, kwargs)
        requests = await run_in_thread(lambda: self._requests(prompts, call, run_manager))
        if len(requests) > 1 or run_manager is None or not should_stream(self, run_manager):
            return self._result(await agenerate_answers(requests), call.count)
        made = []
        async for part in astream_answer(requests[0]):
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
        call = self.call_options(stop, kwargs)
        check_stream(call)
        (request,) = self._requests([prompt], call, run_manager)
        for part in stream_answer(request):
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
        call = await self.acall_options(stop, kwargs)
        check_stream(call)
        (request,) = await run_in_thread(lambda: self._requests([prompt], call, run_manager))
        async with aclosing(astream_answer(request)) as parts:
            async for part in parts:
                chunk = self._chunk(part)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _for_call(self, kwargs: dict[str, Any]) -> Self:
        """Return a copy with a call's settings, so that the base class's cache key has them."""
        model = self.with_settings(kwargs)
        if uses_cache(model) and (read := prompt_dependencies(self, kwargs)):
            model = model.model_copy()
            model._prompt_dependencies = read
        return model

    def _effective_stop(self, stop: list[str] | str | None) -> list[str] | None:
        return as_stop_list(self.stop if stop is None else stop)

    def _requests(self, prompts: list[str], call: CallOptions, run_manager: Any) -> list[Request]:
        """Return the requests for several prompts, each with its references."""
        model = self.shared
        if run_manager is not None and len(prompts) == 1:
            callers = [caller_from_callbacks(run_manager)]
        else:  # the base class passes only the first prompt's run manager
            callers = callers_for_prompts(prompts)
        requests = [
            self._request(model, call.for_run(None, caller), prompt)
            for prompt, caller in zip(prompts, callers, strict=True)
        ]
        return [one for request in requests for one in sample_requests(request, call.count)]

    def _request(self, model: SharedModel, call: CallOptions, text: str) -> Request:
        llm, prompt = model.load(), render_prompt(model, call, text)
        found = find_references(llm, call, text)
        return Request(
            llm, prompt, exclude_shown(prompt, found), call.settings, call.timeout, call.started
        )

    def _chunk(self, part: str | Answer) -> GenerationChunk:
        """Return the chunk of a piece; for an ``Answer``, the last chunk, with all metadata.

        Only one chunk has metadata, since LangChain adds up the metadata of all chunks.
        """
        if isinstance(part, str):
            return GenerationChunk(text=part)
        return GenerationChunk(text="", generation_info=self._generation_info(part))

    def _generation_info(self, answer: Answer) -> dict[str, Any]:
        return {**response_metadata(answer, self.model_name), "token_usage": token_usage([answer])}

    def _result(self, made: list[Answer], count: int = 1) -> LLMResult:
        found = [
            Generation(text=answer.text, generation_info=self._generation_info(answer))
            for answer in made
        ]
        generations = [found[at : at + count] for at in range(0, len(found), count)]
        output = {"token_usage": token_usage(made), "model_name": self.model_name}
        return LLMResult(generations=generations, llm_output=output)
