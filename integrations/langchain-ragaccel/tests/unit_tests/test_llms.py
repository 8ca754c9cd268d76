"""Tests of the LLM interface, for which LangChain has no standard tests."""

import asyncio

import pytest
import torch
from framework_llms import tiny_llm
from ragaccel import CapacityError

from langchain_ragaccel import RagaccelLLM

PROMPTS = ["The lamp burns", "Its keeper trims the wick at dusk, and"]
NEW = 24


@pytest.fixture
def bare():
    return tiny_llm()


@pytest.fixture
def llm(bare):
    return RagaccelLLM(llm=bare, max_tokens=NEW)


def test_an_answer_is_that_of_the_model_alone(bare, llm):
    ids = torch.tensor([bare.tokenizer.encode(PROMPTS[0], add_special_tokens=True)])
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    made = bare.model.model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    assert llm.invoke(PROMPTS[0]) == bare.tokenizer.decode(made[0, ids.shape[1] :].tolist())


def test_one_failure_does_not_affect_other_answers(llm):
    too_long = "wick " * 10_000
    inputs = [PROMPTS[0], too_long, PROMPTS[1]]
    texts = list(map(llm.invoke, PROMPTS))
    for found in (
        llm.batch(inputs, return_exceptions=True),
        asyncio.run(llm.abatch(inputs, return_exceptions=True)),
    ):
        assert [found[0], found[2]] == texts
        assert isinstance(found[1], CapacityError)
    with pytest.raises(CapacityError):
        llm.batch(inputs)


def test_llm_output_has_token_usage_and_model_name(llm):
    result = llm.generate(PROMPTS[:2])
    assert result.llm_output["model_name"] == "tiny"
    usage = result.llm_output["token_usage"]
    assert usage["completion_tokens"] == 2 * NEW
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2 * NEW
    reasons = [one.generation_info["finish_reason"] for (one,) in result.generations]
    assert reasons == ["length", "length"]


def test_no_prompts_have_no_answers(llm):
    assert llm.generate([]).generations == []
    assert asyncio.run(llm.agenerate([])).generations == []
