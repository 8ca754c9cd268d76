"""Every family, also with random drafts, against transformers' own generate."""

import pytest
import torch
from decoding import OracleDrafter, decode
from tiny_models import (
    FAMILIES,
    generate,
    make_tiny_model,
    random_prompt,
    tiny_model,
)

from ragaccel.decoding import NoDrafter, Request, Sampling
from ragaccel.engine import Engine
from ragaccel.models import HuggingFaceModel


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_greedy_equals_generate(family):
    model = tiny_model(family)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=16)
    for seed, length in enumerate((1, 2, 17, 70)):
        prompt = random_prompt(length, seed)
        expected = generate(model, prompt, 40)
        request = Request(prompt, max_new_tokens=40)
        assert decode(engine, request) == expected
        assert decode(engine, request, OracleDrafter(prompt, expected)) == expected


def test_eager_attention_gives_the_same(family):
    model = make_tiny_model(family, attn_implementation="eager")
    prompt = random_prompt(30, 5)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=8)
    assert decode(engine, Request(prompt, max_new_tokens=30)) == generate(model, prompt, 30)


def test_in_float32_only_near_ties_differ(family):
    model = tiny_model(family, torch.float32)
    engine = Engine(HuggingFaceModel(model))
    for seed in range(3):
        prompt = random_prompt(25, seed)
        expected = generate(model, prompt, 40)
        found = decode(engine, Request(prompt, max_new_tokens=40), OracleDrafter(prompt, expected))
        if found == expected:
            continue
        at = next(
            i for i, pair in enumerate(zip(found, expected, strict=True)) if len(set(pair)) > 1
        )
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
        best = logits.topk(2).values
        print(f"{family}: token {at} differs, top-2 gap {best[0] - best[1]:.2g}")
        assert best[0] - best[1] < 1e-5


def test_sampled_tokens_do_not_depend_on_drafting(family):
    engine = Engine(HuggingFaceModel(tiny_model(family)))
    for seed, sampling in enumerate(
        (
            Sampling(1.0, seed=1),
            Sampling(1.4, top_k=20, top_p=0.9, seed=2),
            Sampling(0.7, min_p=0.02, seed=3),
        )
    ):
        prompt = random_prompt(20, seed)
        request = Request(prompt, sampling=sampling, max_new_tokens=30)
        plain = decode(engine, request, NoDrafter())
        assert decode(engine, request) == plain
        assert decode(engine, request, OracleDrafter(prompt, plain)) == plain
        assert len(set(plain)) > 3


def test_learned_positions_are_used_to_the_last(family):
    model = tiny_model(family)
    prompt = random_prompt(230, 1)
    engine = Engine(HuggingFaceModel(model))
    expected = generate(model, prompt, 26)
    found = decode(engine, Request(prompt, max_new_tokens=26), OracleDrafter(prompt, expected), 60)
    assert found == expected
