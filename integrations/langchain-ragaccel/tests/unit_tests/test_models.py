"""What holds for the chat model and the LLM alike."""

import asyncio
import copy
import pickle
from contextlib import aclosing
from inspect import signature

import pytest
from framework_llms import tiny_llm
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, dumps, load
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from ragaccel import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry

from langchain_ragaccel import ChatRagaccel, RagaccelLLM

PROMPTS = ["Who trims the wick?", "What rises at the mole?", "What does the lamp burn?"]
NEW = 24


@pytest.fixture(params=[ChatRagaccel, RagaccelLLM])
def kind(request):
    return request.param


@pytest.fixture
def model(kind):
    return kind(llm=tiny_llm(), max_tokens=NEW)


@pytest.fixture
def texts(kind):
    """The answers of the LLM without LangChain."""
    asked = [one if kind is RagaccelLLM else [_said(one)] for one in PROMPTS]
    return [tiny_llm().generate(one, max_new_tokens=NEW).text for one in asked]


def _said(prompt):
    return {"role": "user", "content": prompt}


def as_input(kind, prompt):
    return prompt if kind is RagaccelLLM else [HumanMessage(prompt)]


def text_of(answer):
    return answer if isinstance(answer, str) else answer.text


def texts_of(answers):
    return list(map(text_of, answers))


def joined(pieces):
    return "".join(map(text_of, pieces))


class RecordingHandler(BaseCallbackHandler):
    """Keeps the events it receives."""

    def __init__(self):
        self.tokens, self.ends = [], []

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)

    def on_llm_end(self, response, **kwargs):
        self.ends.append(response)


def test_all_ways_of_asking_answer_alike(model, texts):
    async def read(prompt):
        return joined([piece async for piece in model.astream(prompt)])

    async def ask():
        awaited = await asyncio.gather(*map(model.ainvoke, PROMPTS))
        streamed = await asyncio.gather(*map(read, PROMPTS))
        return texts_of(awaited), streamed, texts_of(await model.abatch(PROMPTS))

    assert texts_of(map(model.invoke, PROMPTS)) == texts
    assert [joined(model.stream(prompt)) for prompt in PROMPTS] == texts
    assert texts_of(model.batch(PROMPTS)) == texts
    assert texts_of(model.batch(PROMPTS, {"max_concurrency": 2})) == texts
    assert [list(each) for each in asyncio.run(ask())] == [texts] * 3
    patient = model.model_copy(update={"timeout": 300})
    assert texts_of(patient.batch(PROMPTS)) == texts


def test_settings_of_a_call_override_the_objects(model, texts):
    short = text_of(model.model_copy(update={"max_tokens": 3}).invoke(PROMPTS[0]))
    assert texts[0].startswith(short) != texts[0]
    for name in ("max_tokens", "max_new_tokens", "num_predict"):
        assert text_of(model.invoke(PROMPTS[0], **{name: 3})) == short
        assert text_of(model.bind(**{name: 3}).invoke(PROMPTS[0])) == short
        assert joined(model.stream(PROMPTS[0], **{name: 3})) == short
        assert text_of(asyncio.run(model.ainvoke(PROMPTS[0], **{name: None}))) == texts[0]
    sampled = model.model_copy(update={"temperature": 2.0, "seed": 3}).invoke(PROMPTS[0])
    assert text_of(model.invoke(PROMPTS[0], temperature=2.0, seed=3)) == text_of(sampled)
    assert text_of(sampled) != texts[0]
    with pytest.raises(ConfigurationError, match="cannot switch from"):
        model.invoke(PROMPTS[0], model="other")


def test_stop_strings_of_a_call_override_the_objects_and_are_part_of_the_cache_key(kind, texts):
    first, second = texts[0][3:6], texts[0][8:11]
    expected = {stop: texts[0][: texts[0].index(stop)] for stop in (first, second)}
    cache = InMemoryCache()
    plain = kind(llm=tiny_llm(), max_tokens=NEW, cache=cache)
    stopping = kind(llm=tiny_llm(), max_tokens=NEW, cache=cache, stop=first)
    assert text_of(plain.invoke(PROMPTS[0])) == texts[0]
    assert text_of(stopping.invoke(PROMPTS[0])) == expected[first]
    assert text_of(plain.invoke(PROMPTS[0], stop=first)) == expected[first]
    assert text_of(asyncio.run(plain.ainvoke(PROMPTS[0], stop=[first]))) == expected[first]
    assert text_of(stopping.invoke(PROMPTS[0], stop=[second])) == expected[second]
    assert text_of(stopping.bind(stop=[second]).invoke(PROMPTS[0])) == expected[second]
    assert text_of(stopping.invoke(PROMPTS[0], stop=[])) == texts[0]
    assert (
        stopping.identity_params
        == kind(llm=tiny_llm(), max_tokens=NEW, stop=[first]).identity_params
    )
    assert stopping.identity_params != plain.identity_params


def test_the_cache_key_depends_on_settings_but_not_on_speculation(kind, texts):
    cache = InMemoryCache()
    model = kind(llm=tiny_llm(), max_tokens=NEW, cache=cache)
    quiet = {"namespace": "n", "remember": False, "timeout": 100.0, "adjacent_chunks": False}
    same = kind(llm=tiny_llm(), max_tokens=NEW, cache=cache, auto_references=False, **quiet)
    heard = RecordingHandler()
    assert text_of(model.invoke(PROMPTS[0])) == texts[0]
    assert text_of(same.invoke(PROMPTS[0], {"callbacks": [heard]}, references=["a b"])) == texts[0]
    assert text_of(model.invoke(PROMPTS[0], **quiet)) == texts[0]
    assert len(cache._cache) == 1
    assert not heard.tokens  # nothing ran
    model.bind(max_tokens=2).invoke(PROMPTS[0])
    model.invoke(PROMPTS[0], max_new_tokens=2)
    model.invoke(PROMPTS[0], stop=["x"])
    kind(llm=tiny_llm(), max_tokens=NEW, cache=cache, temperature=1.0).invoke(PROMPTS[0])
    assert len(cache._cache) == 4
    other = kind(llm=tiny_llm(name="other"), max_tokens=NEW, cache=cache)
    other.invoke(PROMPTS[0])
    assert len(cache._cache) == 5
    sizes = [kind(model="m", capacity=size).identity_params for size in (100, 200)]
    assert sizes[0] != sizes[1]


def test_answers_with_custom_processors_are_never_cached(kind):
    model = kind(llm=tiny_llm(), max_tokens=4, cache=InMemoryCache())
    first = model.invoke(PROMPTS[0], logits_processors=[lambda ids, scores: scores])
    second = model.invoke(PROMPTS[0], logits_processors=[lambda ids, scores: -scores])
    assert text_of(first) != text_of(second)


async def test_invoke_streams_to_handlers_that_take_tokens(kind, model, texts):
    sync, awaited, quiet = (RecordingHandler() for _ in range(3))
    answer = model.invoke(PROMPTS[0], {"callbacks": [sync]})
    later = await model.ainvoke(PROMPTS[0], {"callbacks": [awaited]})
    silent = model.model_copy(update={"streaming": False})
    assert text_of(silent.invoke(PROMPTS[0], {"callbacks": [quiet]})) == texts[0]
    assert text_of(answer) == text_of(later) == texts[0]
    assert "".join(sync.tokens) == "".join(awaited.tokens) == texts[0]
    assert len([token for token in sync.tokens if token]) > 1
    assert quiet.tokens == []


def test_handlers_see_a_chunk_before_it_is_yielded(model, texts):
    heard = RecordingHandler()
    counts = [len(heard.tokens) for _ in model.stream(PROMPTS[0], {"callbacks": [heard]})]
    assert counts == list(range(1, len(counts) + 1))
    assert "".join(heard.tokens) == texts[0]
    assert len(heard.ends) == 1


async def test_invoke_streams_under_astream_events(kind, model, texts):
    configured = model.configurable_fields(max_tokens=ConfigurableField(id="length"))
    length = {"configurable": {"length": NEW}}
    chain = RunnableLambda(lambda prompt: configured.invoke(prompt, length))
    events = [event async for event in chain.astream_events(PROMPTS[0], version="v2")]
    name = "on_llm" if kind is RagaccelLLM else "on_chat_model"
    named = [event["event"] for event in events if event["event"].startswith(name)]
    assert named == [f"{name}_start", *[f"{name}_stream"] * (len(named) - 2), f"{name}_end"]
    pieces = [e["data"]["chunk"] for e in events if e["event"] == f"{name}_stream"]
    assert len(pieces) > 2
    assert joined(pieces) == texts[0]


async def test_leaving_a_stream_or_cancelling_a_task_frees_the_request(model, texts):
    async with aclosing(model.astream(PROMPTS[0], max_tokens=3000)) as pieces:
        async for _ in pieces:
            break
    for _ in model.stream(PROMPTS[0], max_tokens=3000):
        break
    held = tiny_llm().engine.prefix_cache
    assert not held._open
    for prompts in (PROMPTS[:1], PROMPTS):
        task = asyncio.create_task(model.abatch(prompts, max_tokens=3000))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert text_of(await model.ainvoke(PROMPTS[0])) == texts[0]
    for _ in range(200):
        if not held._open:
            break
        await asyncio.sleep(0.05)
    assert not held._open


async def test_the_event_loop_is_not_blocked(model):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await model.ainvoke(PROMPTS[0], max_tokens=200)
    async for _ in model.astream(PROMPTS[0], max_tokens=200):
        pass
    ticking.cancel()
    assert ticks > 10


def test_n_answers_use_consecutive_seeds(kind):
    model = kind(llm=tiny_llm(), temperature=0.9, max_tokens=8, seed=3)
    asked = as_input(kind, PROMPTS[0])
    (found,) = model.generate([asked], n=3).generations
    alone = [model.invoke(PROMPTS[0], seed=seed) for seed in (3, 4, 5)]
    assert texts_of(found) == texts_of(alone)
    assert len(set(texts_of(found))) == 3
    done = asyncio.run(model.agenerate([asked, asked], num_return_sequences=2))
    assert [texts_of(some) for some in done.generations] == [texts_of(found)[:2]] * 2


def test_invalid_n_is_refused(kind):
    model = kind(llm=tiny_llm(), max_tokens=4)
    asked = as_input(kind, "Who?")
    with pytest.raises(ConfigurationError, match="n=2 answers with temperature=0"):
        model.generate([asked], n=2)
    with pytest.raises(ConfigurationError, match="n must be a whole number"):
        model.generate([asked], n=1.5, temperature=1.0)
    with pytest.raises(ConfigurationError, match="a stream gives one answer, not n=2"):
        next(iter(model.stream("Who?", n=2, temperature=1.0)))


def test_copies_share_the_llm_and_a_ready_one_is_not_pickled(kind, model):
    assert copy.deepcopy(model).llm is copy.copy(model).llm is tiny_llm()
    assert model.with_config(tags=["x"]).bound.llm is tiny_llm()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    named = kind(model="/models/some", temperature=0.5)
    assert pickle.loads(pickle.dumps(named)) == named


@pytest.mark.filterwarnings("ignore:The function .load. is in beta")
def test_objects_made_from_plain_values_are_serializable(kind):
    named = kind(model="/models/some", max_tokens=7, stop=["x"], api_key="sk-secret")
    written = dumpd(named)
    assert written["id"][0] == "langchain_ragaccel"
    assert written["kwargs"]["model"] == "/models/some"
    assert "sk-secret" not in dumps(named) + repr(named) + str(named._identifying_params)
    keyless = kind(model="/models/some", max_tokens=7, stop=["x"])
    allowed = {"allowed_objects": [kind]}  # which older versions of langchain-core do not know
    known = {name: allowed[name] for name in signature(load).parameters.keys() & allowed.keys()}
    assert load(dumpd(keyless), valid_namespaces=["langchain_ragaccel"], **known) == keyless
    for given in ({"llm": tiny_llm()}, {"registry": ReferenceRegistry()}):
        assert '"not_implemented"' in dumps(kind(**given))


def test_traces_name_the_provider_and_the_model(model):
    params = model._get_ls_params(stop=["x"])
    assert (params["ls_provider"], params["ls_model_name"]) == ("ragaccel", "tiny")
    assert params["ls_max_tokens"] == NEW
    if hasattr(model, "_add_version"):  # which older versions of langchain-core have not
        assert model.metadata["lc_versions"]["langchain-ragaccel"]


def test_tokens_are_counted_by_the_models_own_tokenizer(kind, model):
    ids = tiny_llm().tokenizer.encode(PROMPTS[2])
    assert model.get_token_ids(PROMPTS[2]) == ids
    assert model.get_num_tokens(PROMPTS[2]) == len(ids)
    own = kind(llm=tiny_llm(), custom_get_token_ids=lambda text: [7])
    assert own.get_token_ids("x") == [7]
