"""The bundled reader answers from documents in every prompt of the framework."""

import pytest
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel
from ragaccel import ConfigurationError, Passage, build_prompt, reference_scope

from llama_index.llms.ragaccel import Ragaccel, citations_of

TOWER = (
    "Isobel Tarrant designed the tower on Gannet Ledge at the age of twenty-nine. "
    "It stands on a rock that is dry for two hours a day."
)
AMITY = "The Amity was carrying 61 people from Bergen to Boston, and 43 of them drowned."
NODES = [
    NodeWithScore(node=TextNode(text=TOWER, id_="tower"), score=0.9),
    NodeWithScore(node=TextNode(text=AMITY, id_="amity"), score=0.4),
]
QUESTION = "Who designed the tower on Gannet Ledge?"


class FakeRetriever(BaseRetriever):
    def _retrieve(self, query_bundle):
        return NODES


@pytest.fixture(scope="module")
def llm():
    return Ragaccel(max_new_tokens=60)


@pytest.fixture(scope="module")
def expected(llm):
    passages = [Passage("tower", TOWER, score=0.9), Passage("amity", AMITY, score=0.4)]
    prompt = build_prompt(llm.load().tokenizer, QUESTION, passages)
    text = llm.load().generate(prompt, max_new_tokens=60).text
    assert (
        text == "Isobel Tarrant designed the tower on Gannet Ledge at the age of twenty-nine. [1]"
    )
    return text


@pytest.mark.parametrize("mode", ["compact", "refine", "simple_summarize", "tree_summarize"])
def test_query_engines(llm, expected, mode):
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode)
    retriever = FakeRetriever()
    if mode == "refine":  # one call for each node: the first of them is asked about
        retriever = OneNode()
    response = RetrieverQueryEngine(retriever, synthesizer).query(QUESTION)
    assert str(response) == expected
    assert [one["passage_id"] for one in citations_of(response)] == ["tower"]


class OneNode(BaseRetriever):
    def _retrieve(self, query_bundle):
        return NODES[:1]


def test_a_streamed_query(llm, expected):
    engine = RetrieverQueryEngine(
        FakeRetriever(), get_response_synthesizer(llm=llm, streaming=True)
    )
    assert "".join(engine.query(QUESTION).response_gen) == expected


def test_chat_engines(llm, expected):
    chat = ContextChatEngine.from_defaults(retriever=FakeRetriever(), llm=llm)
    assert str(chat.chat(QUESTION)) == expected
    assert "".join(chat.stream_chat(QUESTION).response_gen) == expected


def test_messages_with_a_passage_in_them(llm, expected):
    system = ChatMessage(role="system", content=f"Answer from this.\n{TOWER}\n{AMITY}")
    with reference_scope():
        FakeRetriever().retrieve("?")
        response = llm.chat([system, ChatMessage(content=QUESTION)])
    assert response.message.content == expected
    (cited,) = response.raw["ragaccel"]["citations"]
    assert (cited["passage_id"], cited["text"]) == ("tower", TOWER.split(". ")[0] + ".")
    assert response.raw["ragaccel"]["dropped_passages"] == []


class Designer(BaseModel):
    """Who designed it."""

    name: str


async def test_an_object_of_a_schema_is_refused(llm):
    prompt = PromptTemplate("Who designed {tower}?")
    with pytest.raises(ConfigurationError, match="writes no JSON: load one"):
        llm.structured_predict(Designer, prompt, tower="it")
    with pytest.raises(ConfigurationError, match="writes no JSON"):
        await llm.astructured_predict(Designer, prompt, tower="it")
    with pytest.raises(ConfigurationError, match="writes no JSON"):
        llm.stream_structured_predict(Designer, prompt, tower="it")
    with pytest.raises(ConfigurationError, match="writes no JSON"):
        llm.as_structured_llm(Designer).complete("Who designed it?")
