"""``RagaccelLLM``: a local text-completion model for LangChain."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, PrivateAttr
from ragaccel.frameworks import prepare, sampled_calls

from langchain_ragaccel.base import (
    CallOptions,
    ModelOptions,
    as_stop_list,
    response_metadata,
    token_usage,
)
from langchain_ragaccel.callbacks import (
    caller_from_callbacks,
    callers_for_prompts,
    use_prompt_callers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from langchain_core.language_models.base import LanguageModelInput
    from langchain_core.runnables import RunnableConfig
    from ragaccel.frameworks import Call, Reply
    from typing_extensions import Self


class RagaccelLLM(ModelOptions, BaseLLM):  # type: ignore[misc]  # names of arguments differ
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
        with use_prompt_callers(prompts, args, kwargs):
            model, stops = self._for_call(kwargs), as_stop_list(self.stop if stop is None else stop)
            return super(RagaccelLLM, model).generate(prompts, stops, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | str | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Complete prompts; see :meth:`generate`."""
        with use_prompt_callers(prompts, args, kwargs):
            model = await asyncio.to_thread(self._for_call, kwargs)
            stops = as_stop_list(self.stop if stop is None else stop)
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

    def _for_call(self, kwargs: dict[str, Any]) -> Self:
        """Return a copy with a call's settings, so that the base class's cache key has them."""
        model = self.with_settings(kwargs)
        if model.uses_cache and (known := self.prompt_dependencies(kwargs)):
            model = model.model_copy()
            model._prompt_dependencies = known
        return model

    def _calls(self, asked: list[str] | str, options: CallOptions, run_manager: Any) -> list[Call]:
        prompts = [asked] if isinstance(asked, str) else asked
        if run_manager is not None and len(prompts) == 1:
            callers = [caller_from_callbacks(run_manager)]
        else:  # the base class passes only the first prompt's run manager
            callers = callers_for_prompts(prompts)
        calls = [
            prepare(
                self.shared,
                prompt,
                options.settings,
                options.sources(caller),
                timeout=options.options["timeout"],
                started=options.started,
            )
            for prompt, caller in zip(prompts, callers, strict=True)
        ]
        return [one for call in calls for one in sampled_calls(call, options.count)]

    def _chunks(self, part: str | Reply, options: CallOptions) -> Iterator[GenerationChunk]:  # noqa: ARG002
        """Yield the chunk of a piece; for a ``Reply``, the last chunk, with all metadata.

        Only one chunk has metadata, since LangChain adds up the metadata of all chunks.
        """
        if isinstance(part, str):
            yield GenerationChunk(text=part)
        else:
            yield GenerationChunk(text="", generation_info=self._generation_info(part))

    def _generation_info(self, reply: Reply) -> dict[str, Any]:
        metadata = response_metadata(reply, self.model_name)
        return {**metadata, "token_usage": token_usage([reply])}

    def _result(self, replies: Sequence[Reply], options: CallOptions) -> LLMResult:
        count = options.count
        found = [
            Generation(text=reply.text, generation_info=self._generation_info(reply))
            for reply in replies
        ]
        generations = [found[at : at + count] for at in range(0, len(found), count)]
        output = {"token_usage": token_usage(replies), "model_name": self.model_name}
        return LLMResult(generations=generations, llm_output=output)
