"""Responses: an answer as the framework's responses, with token counts where it looks for them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from llama_index.llms.ragaccel.citing import place_of
from llama_index.llms.ragaccel.tools import as_kwargs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel import Answer, ToolCall


Response = TypeVar("Response", CompletionResponse, ChatResponse)


def completion(text: str, delta: str | None = None) -> CompletionResponse:
    """A completion, or as much of it as there is."""
    return CompletionResponse(text=text, delta=delta)


def chat(text: str, delta: str | None = None) -> ChatResponse:
    """An assistant's message, or as much of it as there is.

    Nothing but calls is put beside its text: the framework writes that into later prompts.
    """
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def finished(
    response: Response, answer: Answer, model_name: str, calls: Sequence[ToolCall] = ()
) -> Response:
    """A response with what is known at the end: calls, token counts, statistics, citations."""
    text = response.message.content if isinstance(response, ChatResponse) else response.text
    usage, report = asdict(answer.usage), answer.report(text or "", place=place_of)
    if calls and isinstance(response, ChatResponse):
        response.message.additional_kwargs = as_kwargs(calls)
    calls_tools = any(call.is_valid for call in calls)
    finish_reason = "tool_calls" if calls_tools else answer.finish_reason
    response.raw = {
        "model": model_name,
        "finish_reason": finish_reason,
        "usage": usage,
        "ragaccel": report,
    }
    response.additional_kwargs = {
        **usage,
        "finish_reason": finish_reason,
        "citations": report["citations"],
    }
    return response
