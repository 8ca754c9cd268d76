"""Metadata: what LangChain is told of an answer besides its text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import UsageMetadata

if TYPE_CHECKING:
    from ragaccel import Answer

PROVIDER = "ragaccel"


def usage(answer: Answer) -> UsageMetadata:
    """Tokens read and written."""
    return UsageMetadata(
        input_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.completion_tokens,
        total_tokens=answer.usage.total_tokens,
    )


def token_usage(answers: list[Answer]) -> dict[str, int]:
    """Tokens read and written by several answers, under the names that LLM outputs have."""
    return {
        name: sum(getattr(answer.usage, name) for answer in answers)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }


def response(
    answer: Answer, model: str, text: str | None = None, *, calls_tools: bool = False
) -> dict[str, Any]:
    """What ``response_metadata`` holds.

    ``text`` is what is left of the answer's text, where tool calls were taken out of it; spans
    are places in that.
    """
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": "tool_calls" if calls_tools else answer.finish_reason,
        "ragaccel": report(answer, answer.text if text is None else text),
    }


def report(answer: Answer, text: str) -> dict[str, Any]:
    """How an answer was made, and where the words of a text that is left of it stand."""
    told = answer.report(text)
    return {"copied_spans": told.pop("citations"), **told}
