import asyncio

import pytest
from framework_llms import tiny_llm
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from ragaccel import ConfigurationError

from langchain_ragaccel import ChatRagaccel

QUESTION = "Who trims the wick?"
NEW = 24


@pytest.fixture
def bare():
    return tiny_llm()


@pytest.fixture
def chat(bare):
    return ChatRagaccel(llm=bare, max_tokens=NEW)


def test_messages_are_laid_out_by_the_chat_template(bare, chat):
    told = [SystemMessage("Be brief."), HumanMessage("Who?"), AIMessage("He."), HumanMessage("He?")]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "He."},
        {"role": "user", "content": "He?"},
    ]
    answer = bare.generate(turns, max_new_tokens=NEW)
    found = chat.invoke(told)
    assert found.content == answer.text
    assert found.usage_metadata["input_tokens"] == answer.usage.prompt_tokens
    assert chat.get_num_tokens_from_messages(told) == answer.usage.prompt_tokens


def test_metadata_is_on_the_last_chunk_only(chat):
    chunks = list(chat.stream(QUESTION))
    assert all(not chunk.response_metadata.get("ragaccel") for chunk in chunks[:-1])
    assert all(chunk.usage_metadata is None for chunk in chunks[:-1])
    assert [chunk.chunk_position for chunk in chunks] == [*[None] * (len(chunks) - 1), "last"]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    message = chat.invoke(QUESTION)
    assert whole.content == message.content
    assert whole.usage_metadata == message.usage_metadata
    for found in (whole.response_metadata, message.response_metadata):
        assert found["model_name"] == "tiny"
        assert found["finish_reason"] == "length"
        report = found["ragaccel"]
        assert report["forward_passes"] * report["acceptance_length"] == pytest.approx(NEW)
        assert report["accepted_tokens"] <= report["draft_tokens"]


def test_an_event_loop_may_close_before_a_stream_ends(chat, caplog):
    left = []

    async def begin():
        left.append(chat.astream(QUESTION, max_tokens=300))
        return await anext(left[0])

    assert asyncio.run(begin()).id
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_documents_go_into_the_prompt_and_come_back_as_citations(bare, chat):
    text = "The tide rises four metres at the mole, and the keeper trims the wick at dusk."
    document = Document(page_content=text, metadata={"source": "tides.md"}, id="t1")
    found = chat.invoke("What rises?", documents=[document], prediction=text)
    prompt = found.usage_metadata["input_tokens"]
    assert prompt > chat.invoke("What rises?").usage_metadata["input_tokens"] + 20
    for alone in (text, document):
        with pytest.raises(ConfigurationError, match="documents must be a list of texts"):
            chat.invoke("What rises?", documents=alone)
    with pytest.raises(ConfigurationError, match="end with a human message"):
        chat.invoke([("user", "a"), ("ai", "b")], documents=[document])


def test_a_base_model_is_refused_with_advice():
    with pytest.raises(ConfigurationError, match="no chat template"):
        ChatRagaccel(llm=tiny_llm(None)).invoke("x")
