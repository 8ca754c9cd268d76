"""Asking: one call of the framework as what ragaccel.LLM takes, and its answer as it comes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_index.llms.ragaccel.messages import text_of
from llama_index.llms.ragaccel.responses import Response, finished
from llama_index.llms.ragaccel.tools import with_broken
from llama_index.llms.ragaccel.windows import check_window, room_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence

    from llama_index.llms.ragaccel.messages import Turn
    from llama_index.llms.ragaccel.references import AnyReference
    from llama_index.llms.ragaccel.tools import Toolbox
    from ragaccel import (
        LLM,
        Answer,
        AsyncStream,
        SharedModel,
        Stream,
        ToolCall,
        ToolCalling,
        VisibleReferences,
    )

_LONG = 256  # tokens of an answer that may call tools: fewer are read on the event loop
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
    calling: ToolCalling | None = None

    def next(self, piece: str, told: str, stream: Stream | AsyncStream) -> str:
        """What may be told now that a piece more is there: nothing that may be a call."""
        if self.calling is None:
            return piece
        return self.calling.told_next(told, stream.token_ids)

    def read(self, answer: Answer) -> tuple[str, list[ToolCall]]:
        """The answer's content, and the calls in it if it may hold some."""
        if self.calling is None:
            return answer.text, []
        content, calls = self.calling.read(answer.text, answer.token_ids)
        return with_broken(content, calls), calls

    def last(self, told: str, answer: Answer, respond: Callable[..., Response]) -> Response:
        """The last piece of a stream, with what was held back and all that is known."""
        content, calls = self.read(answer)
        rest = content[len(told) :] if content.startswith(told) else ""
        return finished(respond(content, rest), answer, self.model_name, calls)

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
    registry: VisibleReferences | None,
    neighbours: bool,
    context_window: int | None,
    toolbox: Toolbox | None = None,
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
    calling = None
    if isinstance(prompt, str):
        asked: Any = prompt
    elif toolbox is not None:
        calling = toolbox.calling(llm, settings.get("stop"))
        lay_out = partial(llm.tokenizer.chat_text, tools=toolbox.tools)
        ids = llm.tokenizer.chat(acceptable_turns(prompt, lay_out), tools=toolbox.tools)
        asked = [*ids, *calling.opening_ids]
    elif not model.reads_apart:
        asked = acceptable_turns(prompt, llm.tokenizer.chat_text)
    else:
        room = room_of(llm, settings, context_window)
        asked = take_apart(
            prompt, llm.tokenizer, registry, given=given, namespace=namespace, max_tokens=room
        )
        references = [one for one in references if one not in asked.passages]
    check_window(asked, llm, settings, context_window)
    return Ask(llm, asked, references, settings, model.label, calling)


def whole(call: Call, respond: Callable[..., Response]) -> Response:
    """Answer at once."""
    call.model.load()
    ask = call.prepare()
    answer = ask.stream().finish()
    content, calls = ask.read(answer)
    return finished(respond(content), answer, ask.model_name, calls)


def pieces(call: Call, respond: Callable[..., Response]) -> Generator[Response, None, None]:
    """Answer piece by piece; what is asked is settled now, and not when the first is taken."""
    call.model.load()
    ask = call.prepare()
    stream = ask.stream()

    def generate() -> Generator[Response, None, None]:
        text = ""
        with stream:
            for piece in stream:
                if told := ask.next(piece, text, stream):
                    text += told
                    yield respond(text, told)
        yield ask.last(text, stream.answer, respond)

    return generate()


async def awhole(call: Call, respond: Callable[..., Response]) -> Response:
    """Answer without holding up the event loop; if the caller is cancelled, so is the answer."""
    ask, stream = await _beside(call)
    answer = await stream.finish()
    content, calls = ask.read(answer)
    return finished(respond(content), answer, ask.model_name, calls)


async def apieces(call: Call, respond: Callable[..., Response]) -> AsyncGenerator[Response, None]:
    """Answer piece by piece without holding up the event loop; leaving ends it."""
    ask, stream = await _beside(call)

    async def generate() -> AsyncGenerator[Response, None]:
        text = ""
        try:
            async for piece in stream:
                if told := await _told(ask, piece, text, stream):
                    text += told
                    yield respond(text, told)
        finally:
            await stream.aclose()
        yield ask.last(text, stream.answer, respond)

    return generate()


async def _told(ask: Ask, piece: str, told: str, stream: AsyncStream) -> str:
    """What may be told, found in a thread where that takes long: a whole answer is read again."""
    if ask.calling is None or len(stream.token_ids) < _LONG:
        return ask.next(piece, told, stream)
    return await asyncio.to_thread(ask.next, piece, told, stream)


async def _beside(call: Call) -> tuple[Ask, AsyncStream]:
    """Do beside the event loop what goes before an answer.

    The model is loaded first, in a thread of its own: calls that wait for it take none of the
    few that prepare the prompts of others.
    """
    await call.model.aload()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _asked, call)


def _asked(call: Call) -> tuple[Ask, AsyncStream]:
    ask = call.prepare()
    return ask, ask.astream()


_THREADS = ThreadPoolExecutor(_PREPARING, thread_name_prefix="ragaccel-asking")
