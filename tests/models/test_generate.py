"""Every family, alone, drafted and sampled, against transformers' own generate, in float64."""

from types import SimpleNamespace

import pytest
import torch
from decoding import OracleDrafter, decode
from fakes import RandomDrafter
from tiny_models import FAMILIES, VOCAB, generate, make_tiny_model, random_prompt, tiny_model
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from ragaccel import custom_generate
from ragaccel.decoding import NoDrafter, Request, Sampling, Session
from ragaccel.engine import Engine
from ragaccel.errors import CapacityError, ConfigurationError
from ragaccel.models import (
    HuggingFaceModel,
    StatefulProcessor,
    logits_processors,
    make_criterion_rules,
)


class Rotate:
    """Pure, and dependent on all ids: prefers the token after the sum of those so far."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, int(input_ids.sum()) % VOCAB] += 5.0
        return scores


class EndsWithMultiple(StoppingCriteria):
    def __init__(self, of):
        self.of = of

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), bool(input_ids[0, -2:].sum() % self.of == 0))


PROMPT = random_prompt(20, 4)
OWN = [Rotate(), SuppressTokensLogitsProcessor([3, 5]), RepetitionPenaltyLogitsProcessor(1.2)]


def stopping(of):
    criteria = StoppingCriteriaList([EndsWithMultiple(of), MaxLengthCriteria(45)])
    return ({"stopping_criteria": criteria}, {"stop_rules": make_criterion_rules(criteria, PROMPT)})


# What generate is given, and what a request is given.
SETTINGS = {
    "plain": ({}, {}),
    "repetition": ({"repetition_penalty": 1.4},) * 2,
    "ngrams": ({"no_repeat_ngram_size": 2},) * 2,
    "unigrams": ({"no_repeat_ngram_size": 1},) * 2,
    "both": ({"repetition_penalty": 0.8, "no_repeat_ngram_size": 3},) * 2,
    "processors": (
        {"logits_processor": LogitsProcessorList(OWN), "no_repeat_ngram_size": 2},
        {"processors": logits_processors(OWN), "no_repeat_ngram_size": 2},
    ),
    "criteria 3": stopping(3),
    "criteria 7": stopping(7),
}


def ending(ends, **least):
    return ({"eos_token_id": ends, **least}, {"eos_ids": ends, **least})


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    model = tiny_model(family)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=16)
    unstopped = generate(model, PROMPT, 30)
    ends = [unstopped[4], unstopped[9], 96]
    settings = {"ends": ending(ends), "late ends": ending(ends, min_new_tokens=8), **SETTINGS}
    for name, (theirs, ours) in settings.items():
        expected = generate(model, PROMPT, 30, **theirs)
        request = Request(PROMPT, max_new_tokens=30, **ours)
        for drafter in (None, OracleDrafter(PROMPT, unstopped)):
            assert decode(engine, request, drafter) == expected, name
        if "criteria" in name or name == "ends":
            assert len(expected) < 30


@pytest.mark.parametrize("family", FAMILIES)
def test_any_length_and_the_last_position_equal_generate(family):
    model = tiny_model(family)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=16)
    for length, new in ((1, 40), (2, 40), (17, 40), (70, 40), (230, 26)):
        prompt = random_prompt(length, length)
        expected = generate(model, prompt, new)
        request = Request(prompt, max_new_tokens=new)
        assert decode(engine, request) == expected
        assert decode(engine, request, OracleDrafter(prompt, expected), 60) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_gives_the_same(family):
    model = make_tiny_model(family, attn_implementation="eager")
    prompt = random_prompt(30, 5)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=8)
    assert decode(engine, Request(prompt, max_new_tokens=30)) == generate(model, prompt, 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_only_near_ties_differ(family):
    model = tiny_model(family, torch.float32)
    engine = Engine(HuggingFaceModel(model))
    for seed in range(3):
        prompt = random_prompt(25, seed)
        expected = generate(model, prompt, 40)
        found = decode(engine, Request(prompt, max_new_tokens=40), OracleDrafter(prompt, expected))
        pairs = enumerate(zip(found, expected, strict=True))
        at = next((i for i, (one, other) in pairs if one != other), None)
        if at is None:
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_do_not_depend_on_drafting(family):
    engine = Engine(HuggingFaceModel(tiny_model(family)))
    ruled = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "processors": (Rotate(),)}
    for sampling, rules in (
        (Sampling(1.0, seed=1), {}),
        (Sampling(1.4, top_k=20, top_p=0.9, seed=2), {}),
        (Sampling(0.7, min_p=0.02, seed=3), {}),
        (Sampling(1.1, top_p=0.95, seed=5), ruled),
    ):
        prompt = random_prompt(20, sampling.seed)
        request = Request(prompt, sampling=sampling, max_new_tokens=30, **rules)
        plain = decode(engine, request, NoDrafter())
        assert decode(engine, request) == plain
        assert decode(engine, request, OracleDrafter(prompt, plain)) == plain
        assert len(set(plain)) > 3


def test_a_stateful_processor_sees_each_token_once():
    seen = []

    def remember(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return scores

    prompt = random_prompt(10)
    request = Request(prompt, max_new_tokens=8, processors=(StatefulProcessor(remember),))
    answer = decode(Engine(HuggingFaceModel(tiny_model("llama"))), request)
    assert seen == [[*prompt, *answer[:i]] for i in range(8)]


def test_a_growing_cache_changes_no_answer():
    model = make_tiny_model("llama", max_position_embeddings=4096)
    prompt = random_prompt(500)
    expected = generate(model, prompt, 60)
    target = HuggingFaceModel(model)
    for engine in (Engine(target), Engine(target, capacity=600), Engine(target, max_rows=9)):
        request = Request(prompt, max_new_tokens=60)
        assert decode(engine, request, OracleDrafter(prompt, expected), 100) == expected


@pytest.mark.parametrize("window", [4, 16])
def test_far_beyond_the_sliding_window(window):
    model = make_tiny_model("mistral", sliding_window=window)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=7)
    for prompt in (random_prompt(3), random_prompt(40)):
        expected = generate(model, prompt, 60)
        request = Request(prompt, max_new_tokens=60)
        assert decode(engine, request, OracleDrafter(prompt, expected), 30) == expected


def test_a_cancelled_request_gives_its_cache_to_the_next():
    engine = Engine(HuggingFaceModel(tiny_model("llama")))
    prompt = random_prompt(30)
    request = Request(prompt, max_new_tokens=20)
    verifier = engine.open(request)
    with pytest.raises(RuntimeError, match="has no cache yet"):
        _ = verifier.cache
    session = Session(verifier, RandomDrafter(1, VOCAB), request)
    next(iter(session))
    cache = verifier.cache
    session.close()
    verifier.close()
    verifier.close()
    again = engine.open(request)
    again.prefill(request)
    assert again.cache is cache
    with pytest.raises(RuntimeError, match="closed"):
        verifier.prefill(request)
    again.close()
    assert decode(engine, request) == generate(tiny_model("llama"), prompt, 20)


def test_what_cannot_fit_is_refused_before_anything_is_computed():
    target = HuggingFaceModel(tiny_model("gpt2"))
    with pytest.raises(CapacityError, match=r"prompt \(200\).*the model reads at most 256"):
        Engine(target).open(Request(random_prompt(200), max_new_tokens=100))
    with pytest.raises(CapacityError, match="load with capacity=130 or more"):
        Engine(target, capacity=100).open(Request(random_prompt(100), max_new_tokens=30))
    with pytest.raises(ConfigurationError, match="exceeds the 256 tokens"):
        Engine(target, capacity=1000)


def test_alternatives_come_with_the_sampled_tokens():
    engine = Engine(HuggingFaceModel(tiny_model("llama")))
    request = Request(random_prompt(12), max_new_tokens=5)
    verifier = engine.open(request)
    verifier.prefill(request)
    tree = RandomDrafter(0, VOCAB).draft(SimpleNamespace(token_ids=[*request.prompt_ids]), 6)
    sampled = verifier.verify(tree, num_alternatives=3)
    with torch.inference_mode():
        logits = engine.model.model(torch.tensor([request.prompt_ids])).logits[0, -1]
    best = logits.topk(4).indices.tolist()
    assert [sampled.next_ids[0], *sampled.alternatives[0]] == best
    assert all(len(row) == 3 for row in sampled.alternatives)
    assert engine.latency_profile.of("greedy").seconds(len(tree)) > 0
    verifier.close()


@pytest.mark.parametrize("share", [1e-10, 1e-7, 1e-6])
def test_scores_of_float64_equal_in_float32_are_ties(share):
    """``generate`` rounds them first, and takes the first of equal ones."""
    model = make_tiny_model("llama")
    with torch.no_grad():
        half = VOCAB // 2
        model.lm_head.weight[half : 2 * half] = model.lm_head.weight[:half] * (1 + share)
    prompt = random_prompt(20)
    expected = generate(model, prompt, 30)
    engine = Engine(HuggingFaceModel(model))
    assert decode(engine, Request(prompt, max_new_tokens=30)) == expected
    assert (
        decode(engine, Request(prompt, max_new_tokens=30), OracleDrafter(prompt, expected))
        == expected
    )
    assert generate(model, prompt, 30, custom_generate=custom_generate) == expected
