"""Citing: which words of an answer stand in which retrieved node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse

from llama_index.llms.ragaccel.nodes import as_passage
from ragaccel import ConfigurationError, citations

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

    from ragaccel import Passage


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
    return citations(text, passages, place=place_of)


def place_of(passage: Passage) -> str:
    """Where a passage stands, for people; a document's own id tells them little."""
    if not passage.title:
        return passage.citation
    return passage.title if passage.page is None else f"{passage.title}:{passage.page}"


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
