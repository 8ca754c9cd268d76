"""Metadata: what LangChain is told of an answer besides its text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import UsageMetadata
from ragaccel import copied_spans

if TYPE_CHECKING:
    from ragaccel import Answer, CopiedSpan, Passage

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
    """How an answer was made, and where its words stand: ready for JSON.

    Of ``copied_spans``, ``out_start`` and ``out_end`` are characters of the text, ``start`` and
    ``end`` characters of the passage.
    """
    stats = answer.stats
    spans = answer.copied_spans if text == answer.text else copied_spans(text, answer.passages)
    return {
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "forward_passes": stats.verify_passes,
        "acceptance_length": stats.acceptance_length,
        "seconds": stats.total_seconds,
        "copied_spans": [_span(span) for span in spans],
        "passages": _copied_from(spans, answer.passages),
        "dropped_passages": [passage.passage_id for passage in answer.dropped_passages],
    }


def _span(span: CopiedSpan) -> dict[str, Any]:
    return {
        "passage_id": span.passage_id,
        "start": span.passage_start,
        "end": span.passage_end,
        "out_start": span.start,
        "out_end": span.end,
    }


def _copied_from(
    spans: tuple[CopiedSpan, ...], passages: tuple[Passage, ...]
) -> list[dict[str, Any]]:
    """The passages that something was copied from, in the order of the answer."""
    numbers = dict.fromkeys(span.passage_number for span in spans)
    return [_passage(passages[number - 1]) for number in numbers]


def _passage(passage: Passage) -> dict[str, Any]:
    known = {
        "passage_id": passage.passage_id,
        "citation": passage.citation,
        "title": passage.title,
        "source": passage.path,
        "page": passage.page,
        "line": passage.line,
    }
    return {name: value for name, value in known.items() if value not in (None, "")}
