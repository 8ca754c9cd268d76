"""Citing: which words of an answer stand in which retrieved node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse

from llama_index.llms.ragaccel.nodes import as_passage
from ragaccel import ConfigurationError, copied_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.schema import NodeWithScore

    from ragaccel import CopiedSpan, Passage


class Sourced(Protocol):
    """An answer with its sources: a response of a query engine or of a chat engine."""

    source_nodes: list[NodeWithScore]


def citations_of(response: Sourced, text: str | None = None) -> list[dict[str, Any]]:
    """Find which runs of a response its source nodes hold word for word.

    Each citation has the ``text``, where it stands in the response (``out_start``, ``out_end``)
    and in the node (``start``, ``end``), the node's id as ``passage_id``, and ``citation``, the
    place for people.

    Args:
        response: what an engine answered. If it is a stream, it is read to its end.
        text: what was answered, where a stream has been read already.

    Raises:
        ConfigurationError: a stream for asyncio that has not been read.
    """
    passages = [as_passage(node) for node in response.source_nodes]
    text = _text(response) if text is None else text
    return citations(text, copied_spans(text, passages), passages)


def citations(
    text: str, spans: Sequence[CopiedSpan], passages: Sequence[Passage]
) -> list[dict[str, Any]]:
    """Copied spans as plain values, ready for JSON."""
    return [
        {
            "text": text[span.start : span.end],
            "passage_id": span.passage_id,
            "citation": _place(passages[span.passage_number - 1]),
            "start": span.passage_start,
            "end": span.passage_end,
            "out_start": span.start,
            "out_end": span.end,
        }
        for span in spans
    ]


def _text(response: Any) -> str:
    if isinstance(response, StreamingResponse):
        return response.get_response().response or ""
    if isinstance(response, AsyncStreamingResponse):
        if response.response_txt is None:
            raise ConfigurationError(
                "a stream for asyncio is read first: citations_of(await response.get_response())"
            )
        return response.response_txt
    return str(response)


def _place(passage: Passage) -> str:
    """Where a passage stands, for people; a document's own id tells them little."""
    if not passage.title:
        return passage.citation
    return passage.title if passage.page is None else f"{passage.title}:{passage.page}"
