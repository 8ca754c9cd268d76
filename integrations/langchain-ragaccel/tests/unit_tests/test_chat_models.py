import asyncio
import copy
import pickle
from contextlib import aclosing

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.load import dumpd, dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda
from ragaccel import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry
from serialized import loaded_again
from tiny_llm import ALTERNATING, tiny_folder_of, tiny_llm

from langchain_ragaccel import ChatRagaccel, RagaccelLLM

QUESTIONS = ["Who trims the wick?", "What rises at the mole?", "What does the lamp burn?"]
NEW = 24


def said(question):
    return [{"role": "user", "content": question}]


@pytest.fixture
def bare():
    return tiny_llm()


@pytest.fixture
def folder(tmp_path):
    return tiny_folder_of(str(tmp_path / "model"))


@pytest.fixture
def chat(bare):
    return ChatRagaccel(llm=bare, max_tokens=NEW)


@pytest.fixture
def texts(bare):
    return [bare.generate(said(one), max_new_tokens=NEW).text for one in QUESTIONS]


def test_all_ways_of_asking_answer_alike(chat, texts):
    async def read(question):
        return "".join([chunk.text async for chunk in chat.astream(question)])

    async def ask():
        one = await asyncio.gather(*map(chat.ainvoke, QUESTIONS))
        return one, await asyncio.gather(*map(read, QUESTIONS)), await chat.abatch(QUESTIONS)

    assert [chat.invoke(one).content for one in QUESTIONS] == texts
    assert ["".join(chunk.text for chunk in chat.stream(one)) for one in QUESTIONS] == texts
    assert [message.content for message in chat.batch(QUESTIONS)] == texts
    awaited, streamed, batched = asyncio.run(ask())
    assert [message.content for message in awaited] == texts
    assert streamed == texts
    assert [message.content for message in batched] == texts


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


def test_messages_are_merged_for_templates_that_need_alternating_roles(bare):
    strict = tiny_llm(ALTERNATING)
    chat = ChatRagaccel(llm=strict, max_tokens=NEW)
    told = [SystemMessage("a"), HumanMessage("b"), HumanMessage("c"), AIMessage("d"), ("user", "e")]
    turns = [
        {"role": "user", "content": "a\n\nb\n\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert chat.invoke(told).content == strict.generate(turns, max_new_tokens=NEW).text
    with pytest.raises(ConfigurationError, match="must alternate"):
        chat.invoke([("ai", "a"), ("user", "b")])


def test_metadata_is_on_the_last_chunk_only(chat, texts):
    chunks = list(chat.stream(QUESTIONS[0]))
    assert all(not chunk.response_metadata.get("ragaccel") for chunk in chunks[:-1])
    assert all(chunk.usage_metadata is None for chunk in chunks[:-1])
    assert [chunk.chunk_position for chunk in chunks] == [*[None] * (len(chunks) - 1), "last"]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    message = chat.invoke(QUESTIONS[0])
    assert whole.content == message.content == texts[0]
    assert whole.usage_metadata == message.usage_metadata
    for found in (whole.response_metadata, message.response_metadata):
        assert found["model_name"] == "tiny"
        assert found["finish_reason"] == "length"
        report = found["ragaccel"]
        assert report["forward_passes"] * report["acceptance_length"] == pytest.approx(NEW)
        assert report["accepted_tokens"] <= report["draft_tokens"]


def test_a_single_stop_string_equals_a_list_of_one(bare, texts):
    stop = texts[0][4:7]
    before = texts[0][: texts[0].index(stop)]
    chat = ChatRagaccel(llm=bare, max_tokens=NEW, cache=InMemoryCache())
    assert chat.invoke(QUESTIONS[0], stop=stop).content == before
    assert chat.invoke(QUESTIONS[0], stop=[stop]).content == before
    assert len(chat.cache._cache) == 1
    plain = ChatRagaccel(llm=bare, max_tokens=NEW)
    letters = list(stop)
    expected = plain.invoke(QUESTIONS[0], stop=letters).content
    assert chat.invoke(QUESTIONS[0], stop=letters).content == expected
    one = ChatRagaccel(llm=bare, stop=stop)
    assert one.identity_params == ChatRagaccel(llm=bare, stop=[stop]).identity_params
    assert one.identity_params != ChatRagaccel(llm=bare).identity_params


@pytest.mark.parametrize("kind", [ChatRagaccel, RagaccelLLM])
def test_an_empty_stop_list_in_a_call_overrides_the_objects(bare, kind):
    whole = kind(llm=bare, max_tokens=NEW).invoke(QUESTIONS[0])
    text = getattr(whole, "content", whole)
    stopping = kind(llm=bare, max_tokens=NEW, stop=text[4:7])
    assert stopping.invoke(QUESTIONS[0]) != whole
    again = stopping.invoke(QUESTIONS[0], stop=[])
    assert getattr(again, "content", again) == text


def test_usage_is_seen_by_the_usage_callback(chat):
    with get_usage_metadata_callback() as seen:
        message = chat.invoke(QUESTIONS[0])
        chat.invoke(QUESTIONS[1])
    assert seen.usage_metadata["tiny"]["output_tokens"] == 2 * NEW
    assert message.usage_metadata["output_tokens"] == NEW


def test_settings_of_a_call_override_the_objects(bare, chat, texts):
    short = bare.generate(said(QUESTIONS[0]), max_new_tokens=3).text
    assert chat.invoke(QUESTIONS[0], max_tokens=3).content == short
    assert chat.bind(max_new_tokens=3).invoke(QUESTIONS[0]).content == short
    stop = texts[0][4:7]
    assert chat.invoke(QUESTIONS[0], stop=[stop]).content == texts[0][: texts[0].index(stop)]
    with pytest.raises(TypeError, match="a call of ChatRagaccel takes no foo"):
        chat.bind(foo=1)
    with pytest.raises(TypeError, match="a call of ChatRagaccel takes no foo"):
        chat.invoke(QUESTIONS[0], foo=1)
    with pytest.raises(ConfigurationError, match="cannot switch from"):
        chat.invoke(QUESTIONS[0], model="other")


def test_the_cache_key_depends_on_settings_but_not_on_speculation(bare, texts):
    cache = InMemoryCache()
    chat = ChatRagaccel(llm=bare, max_tokens=NEW, cache=cache)
    assert chat.invoke(QUESTIONS[0]).content == texts[0]
    quiet = {"references": ["a b c"], "namespace": "n", "remember": False, "timeout": 100.0}
    assert chat.invoke(QUESTIONS[0], **quiet).content == texts[0]
    other = ChatRagaccel(llm=bare, max_tokens=NEW, cache=cache, auto_references=False, timeout=9)
    assert other.invoke(QUESTIONS[0]).content == texts[0]
    assert len(cache._cache) == 1
    chat.invoke(QUESTIONS[0], max_tokens=2)
    chat.invoke(QUESTIONS[0], max_new_tokens=2)
    chat.invoke(QUESTIONS[0], stop=["x"])
    chat.invoke(QUESTIONS[0], documents=["The lamp."])
    ChatRagaccel(llm=bare, max_tokens=NEW, cache=cache, temperature=1.0).invoke(QUESTIONS[0])
    ChatRagaccel(llm=tiny_llm(None), max_tokens=NEW, cache=cache)._get_llm_string()
    assert len(cache._cache) == 5


def test_models_of_different_capacity_share_no_cached_answers(folder):
    documents = [f"word{number} " * 60 for number in range(12)]
    cache = InMemoryCache()
    long, short = (
        ChatRagaccel(model=folder, max_tokens=2, capacity=capacity, cache=cache)
        for capacity in (4000, 900)
    )
    read = [one.invoke("Who?", documents=documents).usage_metadata for one in (long, short)]
    assert read[0]["input_tokens"] > 900 > read[1]["input_tokens"]


def test_answers_with_custom_processors_are_never_cached(bare):
    chat = ChatRagaccel(llm=bare, max_tokens=4, cache=InMemoryCache())
    said_first = chat.invoke(QUESTIONS[0], logits_processors=[lambda ids, scores: scores])
    said_then = chat.invoke(QUESTIONS[0], logits_processors=[lambda ids, scores: -scores])
    assert said_first.content != said_then.content


def test_an_event_loop_may_close_before_a_stream_ends(chat, caplog):
    left = []

    async def begin():
        left.append(chat.astream(QUESTIONS[0], max_tokens=300))
        return await anext(left[0])

    assert asyncio.run(begin()).id
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_leaving_a_stream_or_cancelling_a_task_frees_the_request(bare, chat):
    async with aclosing(chat.astream(QUESTIONS[0], max_tokens=3000)) as chunks:
        async for _ in chunks:
            break
    assert not bare.engine.prefix_cache._open
    task = asyncio.create_task(chat.ainvoke(QUESTIONS[0], max_tokens=3500))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not bare.engine.prefix_cache._open:
            break
        await asyncio.sleep(0.05)
    assert not bare.engine.prefix_cache._open


async def test_time_is_up(chat):
    with pytest.raises(TimeoutError):
        chat.invoke(QUESTIONS[0], max_tokens=3500, timeout=0.05)
    with pytest.raises(TimeoutError):
        await chat.ainvoke(QUESTIONS[0], max_tokens=3500, timeout=0.05)


async def test_invoke_streams_to_handlers_that_take_tokens(bare, texts):
    class Hears(BaseCallbackHandler):
        def __init__(self):
            self.tokens = []

        def on_llm_new_token(self, token, **kwargs):
            self.tokens.append(token)

    def hears(handler):
        return {"callbacks": [handler]}

    chat = ChatRagaccel(llm=bare, max_tokens=NEW)
    sync, awaited, quiet = Hears(), Hears(), Hears()
    message = chat.invoke(QUESTIONS[0], hears(sync))
    later = await chat.ainvoke(QUESTIONS[0], hears(awaited))
    ChatRagaccel(llm=bare, max_tokens=NEW, streaming=False).invoke(QUESTIONS[0], hears(quiet))
    assert message.content == later.content == texts[0]
    assert "".join(sync.tokens) == "".join(awaited.tokens) == texts[0]
    assert len([token for token in sync.tokens if token]) > 1
    assert quiet.tokens == []
    for one in (message, later):
        assert one.usage_metadata["output_tokens"] == NEW
        assert one.response_metadata["ragaccel"]["forward_passes"]


async def test_invoke_streams_under_astream_events(chat, texts):
    chain = RunnableLambda(lambda question: chat.invoke(question))
    events = [event async for event in chain.astream_events(QUESTIONS[0], version="v2")]
    pieces = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert len(pieces) > 2
    assert "".join(pieces) == texts[0]


async def test_configurable_fields_keep_automatic_streaming(chat, texts):
    model = chat.configurable_fields(max_tokens=ConfigurableField(id="length"))
    length = {"configurable": {"length": NEW}}
    chain = RunnableLambda(lambda question: model.invoke(question, length))
    events = [event async for event in chain.astream_events(QUESTIONS[0], version="v2")]
    told = [e["data"]["chunk"] for e in events if e["event"] == "on_chat_model_stream"]
    assert len(told) > 2
    assert "".join(chunk.content for chunk in told) == texts[0]


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


def test_only_the_given_registry_is_searched(bare):
    own = ReferenceRegistry()
    seen = []
    chat = ChatRagaccel(llm=bare, max_tokens=4, registry=own)
    own.match = lambda text, namespace="": seen.append((text, namespace)) or []
    chat.invoke("What rises at the mole?", namespace="b")
    assert seen == [("What rises at the mole?", "b")]
    ChatRagaccel(llm=bare, max_tokens=4, registry=own, auto_references=False).invoke("What?")
    assert len(seen) == 1


def test_the_profile_lists_the_models_abilities(bare):
    profile = ChatRagaccel(llm=bare).profile
    assert profile["max_input_tokens"] == 4096
    assert not profile["tool_calling"]
    assert not profile["image_inputs"]
    assert ChatRagaccel(model="/nowhere").profile is None


def test_copies_share_the_llm_and_a_ready_one_is_not_pickled(bare, chat):
    assert copy.deepcopy(chat).llm is bare
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(chat)
    named = ChatRagaccel(model="/models/some", temperature=0.5)
    assert pickle.loads(pickle.dumps(named)) == named
    assert (ChatPromptTemplate.from_template("{x}") | chat).invoke({"x": QUESTIONS[0]}).content


@pytest.mark.filterwarnings("ignore:The function .load. is in beta")
def test_objects_made_from_plain_values_are_serializable(bare):
    named = ChatRagaccel(model="/models/some", max_tokens=7, stop=["x"])
    written = dumpd(named)
    assert written["id"] == ["langchain_ragaccel", "chat_models", "ChatRagaccel"]
    assert written["kwargs"]["model"] == "/models/some"
    assert loaded_again(named) == named
    assert '"not_implemented"' in dumps(ChatRagaccel(llm=bare))
    assert '"not_implemented"' in dumps(ChatRagaccel(registry=ReferenceRegistry()))


def test_api_keys_are_not_serialized(bare):
    chat = ChatRagaccel(model="/models/some", api_key="sk-secret")
    assert "sk-secret" not in dumps(chat) + repr(chat) + str(chat._identifying_params)


def test_a_base_model_is_refused_with_advice():
    with pytest.raises(ConfigurationError, match="no chat template"):
        ChatRagaccel(llm=tiny_llm(None)).invoke("x")
