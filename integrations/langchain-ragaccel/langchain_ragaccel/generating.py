"""Generating: answers within their time, whole or in pieces, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Timer
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.runnables.config import run_in_executor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    from ragaccel import LLM, Answer, AsyncStream, Stream, ToolCall, ToolCalling

    from langchain_ragaccel.structured import ResponseFormat

_LONG = 256  # tokens of an answer with calls: fewer are read at once
_BESIDE = 16  # answers at one time, as many as a pass takes unless told otherwise

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, with all that its answer is made from."""

    llm: LLM
    prompt: Any
    references: Sequence[Any]
    settings: dict[str, Any]
    timeout: float | None
    began: float = field(default_factory=monotonic)
    """When it was asked; finding its references and loading the model are part of its time."""
    calling: ToolCalling | None = None
    """What the answer may call, if anything."""
    response_format: ResponseFormat | None = None
    """What its text has to be, if anything."""
    tells_usage: bool = True
    """Whether the last chunk of a stream has the token counts."""

    @property
    def left(self) -> float | None:
        """The seconds that are left of its time; TimeoutError if none are."""
        if self.timeout is None:
            return None
        left = self.began + self.timeout - monotonic()
        if left <= 0:
            raise _too_late(self.timeout)
        return left

    def read(self, answer: Answer) -> tuple[str, list[ToolCall]]:
        """The answer's content, and the calls in it if it may hold some."""
        content: str = answer.text
        calls: list[ToolCall] = []
        if self.calling is not None:
            content, calls = self.calling.read(answer.text, answer.token_ids)
        if self.response_format is None:
            return content, calls
        return self.response_format.read(content, calls, answer.finish_reason)

    def stream(self) -> Stream:
        """Check it; it is answered while this is read."""
        return self.llm.stream(self.prompt, references=self.references, **self.settings)

    def astream(self) -> AsyncStream:
        """Check it; it is answered while this is awaited."""
        return self.llm.astream(self.prompt, references=self.references, **self.settings)


class _Telling:
    """What of an answer in progress may be told already: no text that turns out to be a call."""

    def __init__(self, ask: Ask) -> None:
        self._calling, self._told = ask.calling, ""
        self._is_held = ask.response_format is not None  # only a whole object can be checked
        self.is_plain = self._is_held or ask.calling is None

    def next(self, piece: str, stream: Stream | AsyncStream) -> str:
        """What may be told now that a piece more is there."""
        if self._is_held:
            return ""
        if self._calling is None:
            return piece
        piece = self._calling.told_next(self._told, stream.token_ids)
        self._told += piece
        return piece


def answer(ask: Ask) -> Answer:
    """Answer one prompt.

    Raises:
        TimeoutError: its time is over; so with all of these.
    """
    stream = ask.stream()
    with _within(ask, stream.close):
        return stream.finish()


def answers(asks: Sequence[Ask]) -> list[Answer]:
    """Answer several prompts of one LLM, within one time, in passes that they share."""
    if len(asks) <= 1:
        return [answer(ask) for ask in asks]
    first = asks[0]
    if first.timeout is None and _are_set_alike(asks):
        prompts, references = _of_each(asks)
        return first.llm.generate(prompts, references=references, **first.settings)
    streams = [ask.stream() for ask in asks]

    def close() -> None:
        for stream in streams:
            stream.close()

    with _within(first, close), ThreadPoolExecutor(min(len(asks), _BESIDE)) as pool:
        return list(pool.map(lambda stream: stream.finish(), streams))


def pieces(ask: Ask) -> Iterator[str | Answer]:
    """Answer one prompt piece by piece, and at the end give the answer; leaving ends it."""
    with ask.stream() as stream, _within(ask, stream.close):
        telling = _Telling(ask)
        for piece in stream:
            if text := telling.next(piece, stream):
                yield text
        yield stream.answer


async def in_thread(work: Callable[[], Result]) -> Result:
    """Do in a thread what goes before an answer: texts are matched and tokenized."""
    return await run_in_executor(None, work)


async def aanswer(ask: Ask) -> Answer:
    """Answer one prompt; if the caller is cancelled, so is the answer."""
    left, stream = ask.left, await in_thread(ask.astream)
    return await _in_time(stream.finish(), left, ask.timeout)


async def aanswers(asks: Sequence[Ask]) -> list[Answer]:
    """Answer several prompts of one LLM, within one time, in passes that they share."""
    if len(asks) <= 1:
        return [await aanswer(ask) for ask in asks]
    if not _are_set_alike(asks):
        return list(await asyncio.gather(*map(aanswer, asks)))
    first = asks[0]
    prompts, references = _of_each(asks)
    left = first.left
    work = first.llm.agenerate(prompts, references=references, **first.settings)
    found: list[Answer] = await _in_time(work, left, first.timeout)
    return found


async def apieces(ask: Ask) -> AsyncGenerator[str | Answer, None]:
    """Answer one prompt piece by piece, and at the end give the answer; leaving ends it."""
    stream, telling = await in_thread(ask.astream), _Telling(ask)
    try:
        while True:
            left = ask.left
            piece = await _in_time(_next(stream), left, ask.timeout)
            if piece is None:
                break
            if text := await _told(telling, piece, stream):
                yield text
        yield stream.answer
    finally:
        await stream.aclose()


async def _told(telling: _Telling, piece: str, stream: AsyncStream) -> str:
    """What may be told, found in a thread where that takes long: a whole answer is read again."""
    if telling.is_plain or len(stream.token_ids) < _LONG:
        return telling.next(piece, stream)
    return await in_thread(lambda: telling.next(piece, stream))


def samples_of(ask: Ask, count: int) -> list[Ask]:
    """The same prompt ``count`` times, each with a seed of its own; the first with its own."""
    if count == 1:
        return [ask]
    seed = ask.settings.get("seed") or 0
    return [
        replace(ask, settings={**ask.settings, "seed": seed + number}) for number in range(count)
    ]


def _are_set_alike(asks: Sequence[Ask]) -> bool:
    return all(ask.settings == asks[0].settings for ask in asks)


def _of_each(asks: Sequence[Ask]) -> tuple[list[Any], list[Sequence[Any]]]:
    return [ask.prompt for ask in asks], [ask.references for ask in asks]


async def _next(stream: AsyncStream) -> str | None:
    return await anext(stream, None)


async def _in_time(work: Awaitable[Result], seconds: float | None, allowed: float | None) -> Result:
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError as error:
        raise _too_late(allowed) from error


@contextmanager
def _within(ask: Ask, close: Callable[[], None]) -> Iterator[None]:
    """Close a request when its time is over, whatever thread computes it; tell it in this one."""
    seconds = ask.left
    if seconds is None:
        yield
        return
    is_over = Event()

    def end() -> None:
        is_over.set()
        close()

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:  # which asking a closed stream for its answer raises
        if is_over.is_set():
            raise _too_late(ask.timeout) from error
        raise
    finally:
        timer.cancel()


def _too_late(seconds: float | None) -> TimeoutError:
    return TimeoutError(f"there was no whole answer within timeout={seconds} seconds")
