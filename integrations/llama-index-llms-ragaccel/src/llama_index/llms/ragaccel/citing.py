"""Citing: which words of an answer stand in which retrieved node."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.llms import ChatResponse, CompletionResponse

from llama_index.llms.ragaccel.nodes import as_passage
from ragaccel import ConfigurationError, citations

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

    from ragaccel import Passage


def citations_of(response: Any, text: str | None = None) -> list[dict[str, Any]]:
    """Find which runs of a response its source nodes hold word for word.

    Each citation has the ``text``, where it stands in the response (``out_start``, ``out_end``)
    and in the node (``start``, ``end``), the node's id as ``passage_id``, and ``citation``, the
    place for people.

    Args:
        response: what an engine answered; if it is a stream, it is read to its end. Or what the
            model itself answered, which brings its citations, as does the last piece of a stream.
        text: what was answered, where a stream has been read already.

    Raises:
        ConfigurationError: a stream of which something was read and ``text`` is not given, one
            for asyncio or of a chat that has not been read, or no answer that has sources.
    """
    if isinstance(response, ChatResponse | CompletionResponse):
        return _own(response)
    if not hasattr(response, "source_nodes"):
        raise ConfigurationError(
            f"citations are found in an answer and its source nodes: a {type(response).__name__} "
            "has none"
        )
    passages = [as_passage(node) for node in _sources(response)]
    text = _text(response) if text is None else text
    return citations(text, passages, place=place_of)


def place_of(passage: Passage) -> str:
    """Where a passage stands, for people; a document's own id tells them little."""
    if not passage.title:
        return passage.citation
    return passage.title if passage.page is None else f"{passage.title}:{passage.page}"


def _own(response: ChatResponse | CompletionResponse) -> list[dict[str, Any]]:
    raw = response.raw
    if not isinstance(raw, dict) or "ragaccel" not in raw:
        raise ConfigurationError(
            "this answer brings no citations: Ragaccel's do, and the last piece of its streams"
        )
    found: list[dict[str, Any]] = raw["ragaccel"]["citations"]
    return found


def _sources(response: Any) -> list[NodeWithScore]:
    """Its nodes; where a chat asked an engine, and the framework left them there, that engine's."""
    answers = [source.raw_output for source in getattr(response, "sources", ())]
    return response.source_nodes or [
        node for answer in answers for node in getattr(answer, "source_nodes", ())
    ]


def _text(response: Any) -> str:
    if isinstance(response, StreamingResponse):
        if response.response_txt is None and _is_begun(response.response_gen):
            raise ConfigurationError(
                "this stream has been read and keeps no text: citations_of(response, text)"
            )
        return response.get_response().response or ""
    if isinstance(response, AsyncStreamingResponse):
        if response.response_txt is None:
            raise ConfigurationError(
                "a stream for asyncio is read first: citations_of(await response.get_response())"
            )
        return response.response_txt
    is_chat_stream = isinstance(response, StreamingAgentChatResponse)
    if is_chat_stream and not (response.is_done or response.response):
        raise ConfigurationError(
            "a chat's stream is read to its end first, then citations_of(response)"
        )
    return str(response)


def _is_begun(stream: Any) -> bool:
    return inspect.isgenerator(stream) and inspect.getgeneratorstate(stream) != inspect.GEN_CREATED
