"""Citations: which words of an engine's answer come from which source node."""

import asyncio
from itertools import islice

import pytest
from framework_llms import RecordingLLM
from llama_index.core import get_response_synthesizer
from llama_index.core.base.response.schema import Response
from llama_index.core.chat_engine import CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.llms import ChatMessage, CompletionResponse
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from ragaccel import ConfigurationError

from llama_index.llms.ragaccel import Ragaccel, citations_of

WICK = "The keeper trims the wick at dusk and again at midnight."
TIDE = "The tide rises four metres at the mole in spring."
NODES = [
    NodeWithScore(node=TextNode(text=f"First. {TIDE}", id_="tide"), score=0.9),
    NodeWithScore(
        node=TextNode(
            text=WICK, id_="wick", metadata={"file_name": "keepers.pdf", "page_label": "7"}
        ),
        score=0.5,
    ),
]
ANSWER = f"It is known: {WICK} And {TIDE}"
EXPECTED = [
    {
        "text": WICK,
        "passage_id": "wick",
        "citation": "keepers.pdf:7",
        "start": 0,
        "end": len(WICK),
        "out_start": 13,
        "out_end": 13 + len(WICK),
    },
    {
        "text": TIDE,
        "passage_id": "tide",
        "citation": "tide",
        "start": 7,
        "end": 7 + len(TIDE),
        "out_start": ANSWER.index(TIDE),
        "out_end": len(ANSWER),
    },
]


class FakeRetriever(BaseRetriever):
    def _retrieve(self, query_bundle):
        return NODES


def engine(**options):
    llm = Ragaccel(llm=RecordingLLM(say=lambda text: ANSWER))
    return RetrieverQueryEngine(FakeRetriever(), get_response_synthesizer(llm=llm, **options))


def test_an_engines_answer():
    assert citations_of(engine().query("?")) == EXPECTED


def test_a_streamed_answer_is_read_to_its_end():
    response = engine(streaming=True).query("?")
    assert citations_of(response) == EXPECTED
    assert citations_of(response) == EXPECTED
    read = engine(streaming=True).query("?")
    assert citations_of(read, "".join(read.response_gen)) == EXPECTED


def test_a_stream_that_was_read_wants_its_text():
    for pieces in (1, 100):
        response = engine(streaming=True).query("?")
        read = "".join(islice(response.response_gen, pieces))
        with pytest.raises(ConfigurationError, match=r"citations_of\(response, text\)"):
            citations_of(response)
        assert read
        response.response_gen.close()


def test_a_chats_stream_is_read_first():
    with pytest.raises(ConfigurationError, match="to its end first"):
        citations_of(StreamingAgentChatResponse(source_nodes=NODES))
    llm = Ragaccel(llm=RecordingLLM(say=lambda text: ANSWER))
    response = ContextChatEngine.from_defaults(retriever=FakeRetriever(), llm=llm).stream_chat("?")
    assert "".join(response.response_gen) == ANSWER
    assert citations_of(response) == EXPECTED


def test_model_responses_carry_citations():
    llm = Ragaccel(llm=RecordingLLM(say=lambda text: ANSWER))
    given = {"references": NODES}
    for response in (
        llm.complete("?", **given),
        llm.chat([ChatMessage(content="?")], **given),
        [*llm.stream_complete("?", **given)][-1],
        [*llm.stream_chat([ChatMessage(content="?")], **given)][-1],
    ):
        found = citations_of(response)
        assert found == response.raw["ragaccel"]["citations"]
        assert [{key: cited[key] for key in EXPECTED[0]} for cited in found] == EXPECTED
    for without in (CompletionResponse(text="?"), CompletionResponse(text="?", raw={"model": "m"})):
        with pytest.raises(ConfigurationError, match="has no citations"):
            citations_of(without)
    with pytest.raises(ConfigurationError, match="a str has none"):
        citations_of(ANSWER)


def test_a_stream_for_asyncio_is_read_first():
    async def ask():
        unread = await engine(streaming=True, use_async=True).aquery("?")
        with pytest.raises(ConfigurationError, match="read an async stream first"):
            citations_of(unread)
        return await unread.get_response()

    response = asyncio.run(ask())
    assert citations_of(response) == EXPECTED


def test_a_chat_that_asks_an_engine():
    llm = Ragaccel(llm=RecordingLLM(say=lambda text: ANSWER))

    def chat(**options):
        return CondenseQuestionChatEngine.from_defaults(engine(**options), llm=llm)

    async def read():
        response = await chat(streaming=True, use_async=True).astream_chat("?")
        said = "".join([piece async for piece in response.async_response_gen()])
        return response, said

    assert citations_of(chat().chat("?")) == EXPECTED
    response, said = asyncio.run(read())
    assert said == ANSWER
    assert citations_of(response) == EXPECTED
    assert citations_of(response, said) == EXPECTED


def test_an_answer_without_copied_text_has_no_citations():
    assert citations_of(Response("Who knows?", source_nodes=NODES)) == []
    assert citations_of(Response(None, source_nodes=NODES)) == []
