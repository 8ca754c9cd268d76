"""Tests of the LLM interface, for which LangChain has no standard tests."""

import asyncio
import copy
import pickle
import threading
from contextlib import aclosing

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumps
from langchain_core.runnables import ConfigurableField, RunnableLambda
from ragaccel import CapacityError
from serialized import loaded_again
from tiny_llm import tiny_llm

from langchain_ragaccel import RagaccelLLM

PROMPTS = [
    "The lamp burns",
    "Its keeper trims the wick at dusk, and",
    "The tide rises four metres at the mole. What rises at the mole?",
    "Quote their words",
]
NEW = 24


class RecordingHandler(BaseCallbackHandler):
    """Keeps the events it receives."""

    def __init__(self):
        self.tokens, self.chunks, self.ends, self.errors = [], [], [], []

    def on_llm_new_token(self, token, *, chunk=None, **kwargs):
        self.tokens.append(token)
        self.chunks.append(chunk)

    def on_llm_end(self, response, **kwargs):
        self.ends.append(response)

    def on_llm_error(self, error, **kwargs):
        self.errors.append(error)


@pytest.fixture
def bare():
    return tiny_llm()


@pytest.fixture
def llm(bare):
    return RagaccelLLM(llm=bare, max_tokens=NEW)


@pytest.fixture
def texts(bare):
    """The answers of the LLM without LangChain."""
    return [bare.generate(prompt, max_new_tokens=NEW).text for prompt in PROMPTS]


def test_an_answer_is_that_of_the_model_alone(bare, llm, texts):
    import torch

    ids = torch.tensor([bare.tokenizer.encode(PROMPTS[0], add_special_tokens=True)])
    made = bare.model.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    assert llm.invoke(PROMPTS[0]) == bare.tokenizer.decode(made[0, ids.shape[1] :].tolist())
    assert llm.invoke(PROMPTS[0]) == texts[0]


def test_all_ways_of_asking_answer_alike(llm, texts):
    async def read(prompt):
        return "".join([piece async for piece in llm.astream(prompt)])

    async def ask():
        one = await asyncio.gather(*(llm.ainvoke(prompt) for prompt in PROMPTS))
        pieces = await asyncio.gather(*map(read, PROMPTS))
        return one, pieces, await llm.abatch(PROMPTS)

    assert [llm.invoke(prompt) for prompt in PROMPTS] == texts
    assert ["".join(llm.stream(prompt)) for prompt in PROMPTS] == texts
    assert llm.batch(PROMPTS) == texts
    assert llm.batch(PROMPTS, {"max_concurrency": 2}) == texts
    assert llm.batch(PROMPTS, return_exceptions=True) == texts
    assert [list(each) for each in asyncio.run(ask())] == [texts] * 3


def test_one_failure_does_not_affect_other_answers(llm, texts):
    too_long = "wick " * 5000
    inputs = [PROMPTS[0], too_long, PROMPTS[1]]
    for found in (
        llm.batch(inputs, return_exceptions=True),
        asyncio.run(llm.abatch(inputs, return_exceptions=True)),
    ):
        assert [found[0], found[2]] == texts[:2]
        assert isinstance(found[1], CapacityError)
    with pytest.raises(CapacityError):
        llm.batch(inputs)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(llm, texts):
    whole = texts[0]
    for start in range(1, len(whole) - 4):
        stop = whole[start : start + 4]  # spanning several tokens and drafts
        expected = whole[: whole.index(stop)]
        assert llm.invoke(PROMPTS[0], stop=[stop]) == expected
        assert "".join(llm.stream(PROMPTS[0], stop=[stop])) == expected


def test_stop_strings_of_the_object_give_way_to_those_of_the_call(bare, texts):
    first, second = texts[0][3:6], texts[0][8:11]
    llm = RagaccelLLM(llm=bare, max_tokens=NEW, stop=[first])
    assert llm.invoke(PROMPTS[0]) == texts[0][: texts[0].index(first)]
    assert llm.invoke(PROMPTS[0], stop=[second]) == texts[0][: texts[0].index(second)]
    assert llm.bind(stop=[second]).invoke(PROMPTS[0]) == texts[0][: texts[0].index(second)]


def test_handlers_see_a_chunk_before_it_is_yielded(llm, texts):
    heard = RecordingHandler()
    stream = llm.stream(PROMPTS[0], config={"callbacks": [heard]})
    told = [(piece, heard.tokens[-1], len(heard.tokens)) for piece in stream]
    assert [piece for piece, *_ in told] == [token for _, token, _ in told]
    assert [count for *_, count in told] == list(range(1, len(told) + 1))
    assert "".join(heard.tokens) == texts[0]
    (end,) = heard.ends
    info = end.generations[0][0].generation_info
    assert info["finish_reason"] == "length"
    assert info["token_usage"]["completion_tokens"] == NEW
    assert info["model_name"] == "tiny"
    assert info["ragaccel"]["forward_passes"] >= 1


def test_invoke_streams_to_token_handlers(llm, texts):
    heard = RecordingHandler()
    assert llm.invoke(PROMPTS[0], {"callbacks": [heard]}) == texts[0]
    assert "".join(heard.tokens) == texts[0]
    silent = llm.model_copy(update={"streaming": False})
    again = RecordingHandler()
    assert silent.invoke(PROMPTS[0], {"callbacks": [again]}) == texts[0]
    assert again.tokens == []


async def test_events_come_in_order_also_from_within_a_lambda(llm, texts):
    chain = RunnableLambda(lambda prompt: llm.invoke(prompt))
    events = [event async for event in chain.astream_events(PROMPTS[0], version="v2")]
    kinds = [event["event"] for event in events if "llm" in event["event"]]
    assert kinds[0] == "on_llm_start"
    assert kinds[-1] == "on_llm_end"
    assert set(kinds[1:-1]) == {"on_llm_stream"}
    pieces = [e["data"]["chunk"].text for e in events if e["event"] == "on_llm_stream"]
    assert "".join(pieces) == texts[0]


def test_llm_output_has_token_usage_and_model_name(llm):
    result = llm.generate(PROMPTS[:2])
    assert result.llm_output["model_name"] == "tiny"
    usage = result.llm_output["token_usage"]
    assert usage["completion_tokens"] == 2 * NEW
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2 * NEW
    reasons = [one.generation_info["finish_reason"] for (one,) in result.generations]
    assert reasons == ["length", "length"]


def test_tokens_are_counted_by_the_models_own_tokenizer(bare, llm):
    ids = bare.tokenizer.encode(PROMPTS[2])
    assert llm.get_token_ids(PROMPTS[2]) == ids
    assert llm.get_num_tokens(PROMPTS[2]) == len(ids)
    own = RagaccelLLM(llm=bare, custom_get_token_ids=lambda text: [7])
    assert own.get_token_ids("x") == [7]


def test_settings_of_a_call_override_the_objects(bare, llm, texts):
    short = bare.generate(PROMPTS[0], max_new_tokens=3).text
    for name in ("max_tokens", "max_new_tokens", "num_predict"):
        assert llm.invoke(PROMPTS[0], **{name: 3}) == short
        assert llm.bind(**{name: 3}).invoke(PROMPTS[0]) == short
        assert "".join(llm.stream(PROMPTS[0], **{name: 3})) == short
    sampled = bare.generate(PROMPTS[0], max_new_tokens=NEW, temperature=2.0, seed=3).text
    assert llm.invoke(PROMPTS[0], temperature=2.0, seed=3) == sampled != texts[0]
    assert llm.invoke(PROMPTS[0]) == texts[0]


def test_an_unknown_setting_is_refused_early(bare, llm):
    with pytest.raises(TypeError, match="a call of RagaccelLLM takes no foo"):
        llm.bind(foo=1)
    for ask in (llm.invoke, lambda prompt, **given: next(llm.stream(prompt, **given))):
        with pytest.raises(TypeError, match="a call of RagaccelLLM takes no foo"):
            ask("x", foo=1)
    with pytest.raises(TypeError, match="max_tokens twice"):
        RagaccelLLM(llm=bare, max_tokens=3, max_new_tokens=4)


def test_stop_strings_of_the_object_are_part_of_the_cache_key(bare, texts):
    cache = InMemoryCache()
    stop = texts[0][4:7]
    before = texts[0][: texts[0].index(stop)]
    plain = RagaccelLLM(llm=bare, max_tokens=NEW, cache=cache)
    stopping = RagaccelLLM(llm=bare, max_tokens=NEW, cache=cache, stop=stop)
    assert plain.invoke(PROMPTS[0]) == texts[0]
    assert stopping.invoke(PROMPTS[0]) == before
    assert plain.invoke(PROMPTS[0], stop=stop) == before
    assert asyncio.run(plain.ainvoke(PROMPTS[0], stop=[stop])) == before
    assert len(cache._cache) == 2


def test_the_cache_key_depends_on_settings_but_not_on_speculation(bare, texts):
    cache = InMemoryCache()
    llm = RagaccelLLM(llm=bare, max_tokens=NEW, cache=cache)
    assert llm.invoke(PROMPTS[0]) == texts[0]
    assert len(cache._cache) == 1
    same = RagaccelLLM(
        llm=bare, max_tokens=NEW, cache=cache, namespace="b", remember=False, adjacent_chunks=False
    )
    heard = RecordingHandler()
    assert same.invoke(PROMPTS[0], {"callbacks": [heard]}, references=["a b c"]) == texts[0]
    assert len(cache._cache) == 1
    assert not heard.ends  # nothing ran
    assert llm.bind(max_tokens=2).invoke(PROMPTS[0]) != texts[0]
    assert llm.bind(max_tokens=3).invoke(PROMPTS[0]) != llm.bind(max_tokens=2).invoke(PROMPTS[0])
    assert len(cache._cache) == 3
    other = RagaccelLLM(llm=tiny_llm(None), max_tokens=NEW, cache=cache)
    other.invoke(PROMPTS[0])
    assert len(cache._cache) == 4  # another LLM of the same name


async def test_leaving_a_stream_frees_its_request(bare, llm):
    async with aclosing(llm.astream(PROMPTS[0], max_tokens=1500)) as pieces:
        async for _ in pieces:
            break
    assert not bare.engine.prefix_cache._open
    for _ in llm.stream(PROMPTS[0], max_tokens=1500):
        break
    assert not bare.engine.prefix_cache._open


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
async def test_a_cancelled_task_frees_its_request(bare, llm, texts, prompts):
    task = asyncio.create_task(llm.abatch(prompts, max_tokens=3000))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await llm.ainvoke(PROMPTS[0]) == texts[0]
    for _ in range(100):
        if not bare.engine.prefix_cache._open:
            break
        await asyncio.sleep(0.05)
    assert not bare.engine.prefix_cache._open


async def test_the_event_loop_is_not_blocked(llm):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await llm.ainvoke(PROMPTS[0], max_tokens=400)
    async for _ in llm.astream(PROMPTS[0], max_tokens=400):
        pass
    ticking.cancel()
    assert ticks > 10


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_timeouts_of_single_and_batched_answers(bare, llm, prompts):
    hurried = llm.model_copy(update={"timeout": 0.05})
    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        hurried.batch(prompts, max_tokens=3500)
    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        asyncio.run(hurried.abatch(prompts, max_tokens=3500))
    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        list(hurried.stream(prompts[0], max_tokens=3500))
    assert threading.active_count() < 100


async def test_time_is_up_for_an_awaited_stream(llm):
    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        async for _ in llm.astream(PROMPTS[0], max_tokens=3500, timeout=0.05):
            pass


def test_enough_time_changes_nothing(llm, texts):
    patient = llm.model_copy(update={"timeout": 300})
    assert patient.batch(PROMPTS) == texts
    assert patient.invoke(PROMPTS[0]) == "".join(patient.stream(PROMPTS[0])) == texts[0]


def test_copies_share_the_llm_and_a_ready_one_is_not_pickled(bare, llm):
    assert copy.deepcopy(llm).llm is bare
    assert copy.copy(llm).llm is bare
    assert llm.with_config(tags=["x"]).bound.llm is bare
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(llm)
    named = RagaccelLLM(model="/models/some", temperature=0.5)
    assert pickle.loads(pickle.dumps(named)) == named


def test_fields_can_be_configured_at_run_time(llm, texts):
    chain = llm.configurable_fields(max_tokens=ConfigurableField(id="most"))
    assert chain.invoke(PROMPTS[0]) == texts[0]
    assert chain.invoke(PROMPTS[0], {"configurable": {"most": 2}}) == llm.invoke(
        PROMPTS[0], max_tokens=2
    )


@pytest.mark.filterwarnings("ignore:The function .load. is in beta")
def test_objects_made_from_plain_values_are_serializable(bare):
    named = RagaccelLLM(model="/models/some", temperature=0.5, stop=["x"])
    assert loaded_again(named) == named
    assert '"not_implemented"' in dumps(RagaccelLLM(llm=bare))


def test_traces_name_the_provider_and_the_model(llm):
    params = llm._get_ls_params(stop=["x"])
    assert params["ls_provider"] == "ragaccel"
    assert params["ls_model_name"] == "tiny"
    assert params["ls_model_type"] == "llm"
    assert params["ls_max_tokens"] == NEW
    if hasattr(llm, "_add_version"):  # which older versions of langchain-core have not
        assert llm.metadata["lc_versions"]["langchain-ragaccel"]


def test_no_prompts_have_no_answers(llm):
    assert llm.generate([]).generations == []
    assert asyncio.run(llm.agenerate([])).generations == []


def test_none_in_a_call_keeps_the_objects_setting(llm, texts):
    assert llm.invoke(PROMPTS[0], max_tokens=None) == texts[0]
    assert asyncio.run(llm.ainvoke(PROMPTS[0], max_new_tokens=None)) == texts[0]
    assert "".join(llm.stream(PROMPTS[0], max_tokens=None)) == texts[0]
