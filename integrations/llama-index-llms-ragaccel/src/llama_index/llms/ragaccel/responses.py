"""Responses: an answer as the framework's responses, with token counts where it looks for them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from llama_index.llms.ragaccel.citing import place_of

if TYPE_CHECKING:
    from ragaccel import Answer


Response = TypeVar("Response", CompletionResponse, ChatResponse)


def completion(text: str, delta: str | None = None) -> CompletionResponse:
    """A completion, or as much of it as there is."""
    return CompletionResponse(text=text, delta=delta)


def chat(text: str, delta: str | None = None) -> ChatResponse:
    """An assistant's message, or as much of it as there is.

    Nothing is put beside its text: the framework writes what stands there into later prompts.
    """
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def finished(response: Response, answer: Answer, model_name: str) -> Response:
    """A response with what is known at the end: token counts, statistics, citations."""
    usage, report = asdict(answer.usage), answer.report(place=place_of)
    response.raw = {
        "model": model_name,
        "finish_reason": answer.finish_reason,
        "usage": usage,
        "ragaccel": report,
    }
    response.additional_kwargs = {
        **usage,
        "finish_reason": answer.finish_reason,
        "citations": report["citations"],
    }
    return response
