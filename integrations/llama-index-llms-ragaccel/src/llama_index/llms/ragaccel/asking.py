"""Asking: one call of the framework as what ragaccel.LLM takes, and its answer as it comes."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llama_index.llms.ragaccel.messages import text_of
from llama_index.llms.ragaccel.responses import Response, finished
from llama_index.llms.ragaccel.windows import check_window, room_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence

    from llama_index.llms.ragaccel.messages import Turn
    from llama_index.llms.ragaccel.references import AnyReference
    from ragaccel import LLM, AsyncStream, ReferenceRegistry, SharedModel, Stream

_PREPARING = 4  # threads: matching and tokenizing long prompts takes tens of milliseconds


@dataclass(frozen=True, slots=True)
class Call:
    """One call whose names are checked; ``prepare`` does what needs the model to be loaded."""

    model: SharedModel
    prepare: Callable[[], Ask]


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
    context_window: int | None,
) -> Ask:
    """Lay out a prompt and find what its answer may be copied from.

    Raises:
        CapacityError: prompt and answer are more than ``context_window``.
    """
    from ragaccel import acceptable_turns, gather_references, take_apart

    llm, namespace = model.load(), settings["namespace"]
    references: Sequence[Any] = gather_references(
        prompt if isinstance(prompt, str) else text_of(prompt),
        given,
        registry=registry,
        namespace=namespace,
        tokenizer=llm.tokenizer,
        neighbours=neighbours,
    )
    if isinstance(prompt, str):
        asked: Any = prompt
    elif not model.reads_apart:
        asked = acceptable_turns(prompt, llm.tokenizer.chat_text)
    else:
        room = room_of(llm, settings, context_window)
        asked = take_apart(
            prompt, llm.tokenizer, registry, given=given, namespace=namespace, max_tokens=room
        )
        references = [one for one in references if one not in asked.passages]
    check_window(asked, llm, settings, context_window)
    return Ask(llm, asked, references, settings, model.label)


def whole(call: Call, respond: Callable[..., Response]) -> Response:
    """Answer at once."""
    call.model.load()
    ask = call.prepare()
    answer = ask.stream().finish()
    return finished(respond(answer.text), answer, ask.model_name)


def pieces(call: Call, respond: Callable[..., Response]) -> Generator[Response, None, None]:
    """Answer piece by piece; what is asked is settled now, and not when the first is taken."""
    call.model.load()
    ask = call.prepare()
    stream = ask.stream()

    def generate() -> Generator[Response, None, None]:
        text = ""
        with stream:
            for piece in stream:
                text += piece
                yield respond(text, piece)
        yield finished(respond(text, ""), stream.answer, ask.model_name)

    return generate()


async def awhole(call: Call, respond: Callable[..., Response]) -> Response:
    """Answer without holding up the event loop; if the caller is cancelled, so is the answer."""
    ask, stream = await _beside(call)
    answer = await stream.finish()
    return finished(respond(answer.text), answer, ask.model_name)


async def apieces(call: Call, respond: Callable[..., Response]) -> AsyncGenerator[Response, None]:
    """Answer piece by piece without holding up the event loop; leaving ends it."""
    ask, stream = await _beside(call)

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


async def _beside(call: Call) -> tuple[Ask, AsyncStream]:
    """Do beside the event loop what goes before an answer.

    The model is loaded first, in a thread of its own: calls that wait for it take none of the
    few that prepare the prompts of others.
    """
    await call.model.aload()
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), _asked, call)


def _asked(call: Call) -> tuple[Ask, AsyncStream]:
    ask = call.prepare()
    return ask, ask.astream()


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(_PREPARING, thread_name_prefix=f"ragaccel-asking-{process}")
