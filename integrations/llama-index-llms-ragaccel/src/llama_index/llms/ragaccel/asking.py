"""Asking: one call of the framework as what ragaccel.LLM takes, and its answer as it comes."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.llms.ragaccel.messages import text_of
from llama_index.llms.ragaccel.responses import Response, finished

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence

    from llama_index.llms.ragaccel.messages import Turn
    from llama_index.llms.ragaccel.references import AnyReference
    from ragaccel import LLM, AsyncStream, ReferenceRegistry, SharedModel, Stream

Result = TypeVar("Result")

_PREPARING = 4  # threads: matching and tokenizing long prompts takes tens of milliseconds


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with all that its answer is made from, and what the model is called."""

    llm: LLM
    prompt: Any
    references: Sequence[Any]
    settings: dict[str, Any]
    model_name: str

    def stream(self) -> Stream:
        """Check it; it is answered while this is read."""
        return self.llm.stream(self.prompt, references=self.references, **self.settings)

    def astream(self) -> AsyncStream:
        """Check it; it is answered while this is awaited."""
        return self.llm.astream(self.prompt, references=self.references, **self.settings)


def make_ask(
    model: SharedModel,
    prompt: str | list[Turn],
    given: Sequence[AnyReference],
    settings: dict[str, Any],
    *,
    registry: ReferenceRegistry | None,
    neighbours: bool,
) -> Ask:
    """Lay out a prompt and find what its answer may be copied from."""
    from ragaccel import acceptable_turns, gather_references, take_apart

    llm, namespace = model.load(), settings["namespace"]
    references = gather_references(
        prompt if isinstance(prompt, str) else text_of(prompt),
        given,
        registry=registry,
        namespace=namespace,
        tokenizer=llm.tokenizer,
        neighbours=neighbours,
    )
    if isinstance(prompt, str):
        return Ask(llm, prompt, references, settings, model.label)
    if not model.reads_apart:
        turns = acceptable_turns(prompt, llm.tokenizer.chat_text)
        return Ask(llm, turns, references, settings, model.label)
    length = llm.context_length
    room = None if length is None else length - settings["max_new_tokens"]
    parts = take_apart(prompt, llm.tokenizer, registry, namespace=namespace, max_tokens=room)
    beside = [one for one in references if one not in parts.passages]
    return Ask(llm, parts, beside, settings, model.label)


def whole(ask_now: Callable[[], Ask], respond: Callable[..., Response]) -> Response:
    """Answer at once."""
    ask = ask_now()
    answer = ask.stream().finish()
    return finished(respond(answer.text), answer, ask.model_name)


def pieces(
    ask_now: Callable[[], Ask], respond: Callable[..., Response]
) -> Generator[Response, None, None]:
    """Answer piece by piece; what is asked is settled now, and not when the first is taken."""
    ask = ask_now()
    stream = ask.stream()

    def generate() -> Generator[Response, None, None]:
        text = ""
        with stream:
            for piece in stream:
                text += piece
                yield respond(text, piece)
        yield finished(respond(text, ""), stream.answer, ask.model_name)

    return generate()


async def awhole(ask_now: Callable[[], Ask], respond: Callable[..., Response]) -> Response:
    """Answer without holding up the event loop; if the caller is cancelled, so is the answer."""
    ask, stream = await _beside(lambda: _asked(ask_now))
    answer = await stream.finish()
    return finished(respond(answer.text), answer, ask.model_name)


async def apieces(
    ask_now: Callable[[], Ask], respond: Callable[..., Response]
) -> AsyncGenerator[Response, None]:
    """Answer piece by piece without holding up the event loop; leaving ends it."""
    ask, stream = await _beside(lambda: _asked(ask_now))

    async def generate() -> AsyncGenerator[Response, None]:
        text = ""
        try:
            async for piece in stream:
                text += piece
                yield respond(text, piece)
        finally:
            await stream.aclose()
        yield finished(respond(text, ""), stream.answer, ask.model_name)

    return generate()


def _asked(ask_now: Callable[[], Ask]) -> tuple[Ask, AsyncStream]:
    ask = ask_now()
    return ask, ask.astream()


async def _beside(work: Callable[[], Result]) -> Result:
    """Do beside the event loop what goes before an answer, loading the model included."""
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), work)


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(_PREPARING, thread_name_prefix=f"ragaccel-asking-{process}")
