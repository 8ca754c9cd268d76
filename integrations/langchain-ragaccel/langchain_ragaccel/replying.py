"""Replying: an answer as LangChain's message, whole or in chunks."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_ragaccel.generating import apieces, in_thread, pieces
from langchain_ragaccel.metadata import response, usage
from langchain_ragaccel.tools import as_calls, as_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from ragaccel import Answer

    from langchain_ragaccel.generating import Ask

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
