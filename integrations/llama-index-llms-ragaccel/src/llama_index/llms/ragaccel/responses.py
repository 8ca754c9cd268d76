"""Responses: an answer as the framework's responses, with token counts where it looks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from llama_index.llms.ragaccel.citing import citations

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
    usage = {
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
        "total_tokens": answer.usage.total_tokens,
    }
    report = _report(answer)
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


def _report(answer: Answer) -> dict[str, Any]:
    """How an answer was made and where its words stand, ready for JSON."""
    stats = answer.stats
    return {
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "forward_passes": stats.verify_passes,
        "acceptance_length": stats.acceptance_length,
        "seconds": stats.total_seconds,
        "citations": citations(answer.text, answer.copied_spans, answer.passages),
        "dropped_passages": [passage.passage_id for passage in answer.dropped_passages],
    }
