"""The same engine on a CUDA device; skips itself where there is none."""

import pytest
import torch
from decoding import Cheat, decode
from tiny_models import FAMILIES, generate, make_tiny_model, random_prompt

from ragaccel.decode.request import Request, Sampling
from ragaccel.engine.engine import Engine
from ragaccel.engine.noise import TokenNoise
from ragaccel.models.huggingface import HuggingFaceModel

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    model = make_tiny_model(family).cuda()
    prompt = random_prompt(40)
    expected = generate(model, prompt, 40, repetition_penalty=1.2)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=16)
    request = Request(prompt, max_new_tokens=40, repetition_penalty=1.2)
    assert decode(engine, request) == expected
    assert decode(engine, request, Cheat(prompt, expected)) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_type_passes_its_self_check(dtype):
    for family in FAMILIES:
        HuggingFaceModel(make_tiny_model(family, dtype).cuda())


def test_sampling_does_not_depend_on_drafting_nor_on_the_device():
    model = make_tiny_model("llama")
    prompt = random_prompt(30)
    request = Request(prompt, max_new_tokens=40, sampling=Sampling(0.9, top_p=0.95, seed=3))
    on_cpu = decode(Engine(HuggingFaceModel(model)), request)
    engine = Engine(HuggingFaceModel(model.cuda()))
    assert decode(engine, request, token_budget=0) == on_cpu
    assert decode(engine, request, Cheat(prompt, on_cpu)) == on_cpu


def test_noise_is_the_same_on_every_device():
    here, there = (TokenNoise(1000, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert torch.allclose(here.gumbel(5, range(9)), there.gumbel(5, range(9)).cpu(), atol=1e-12)


def test_one_synchronization_a_step():
    model = make_tiny_model("llama", torch.float32).cuda()
    engine = Engine(HuggingFaceModel(model))
    request = Request(random_prompt(30), max_new_tokens=10)
    verifier = engine.open(request)
    verifier.prefill(request)
    tree = Cheat(list(request.prompt_ids), random_prompt(9)).draft
    from ragaccel.decode.context import Context

    drafted = tree(Context(request.prompt_ids), 8)
    verifier.verify(drafted)
    verifier.commit([0])
    with torch.profiler.profile() as profile:
        verifier.verify(drafted)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) <= 1
