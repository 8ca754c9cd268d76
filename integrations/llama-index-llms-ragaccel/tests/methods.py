"""The eight methods of an LLM, called alike."""

import asyncio

from llama_index.core.llms import ChatMessage

PROMPT = "Who trims the wick?"
MESSAGES = [ChatMessage(content=PROMPT)]
TURNS = [{"role": "user", "content": PROMPT}]
METHODS = [
    prefix + kind for kind in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")
]
ASYNC_METHODS = [method for method in METHODS if method.startswith("a")]


def call(llm, method, **settings):
    """Return what a method returns for one question."""
    return getattr(llm, method)(MESSAGES if method.endswith("chat") else PROMPT, **settings)


async def aread(llm, method, **settings):
    """Return the complete response of an async method, or the last piece of its stream."""
    response = await call(llm, method, **settings)
    return [piece async for piece in response][-1] if method.startswith("astream") else response


def read(llm, method, **settings):
    """Return the complete response of a method, or the last piece of its stream."""
    if method.startswith("a"):
        return asyncio.run(aread(llm, method, **settings))
    response = call(llm, method, **settings)
    return list(response)[-1] if method.startswith("stream") else response


def text_of(response):
    """Return the text of a completion or a chat."""
    return response.text if hasattr(response, "text") else response.message.content
