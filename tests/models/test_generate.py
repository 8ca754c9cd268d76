"""Processors, stop rules and limits against transformers' own generate, in float64."""

import threading

import pytest
import torch
from decoding import OracleDrafter, decode
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, make_tiny_model, random_prompt, tiny_model
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from ragaccel import custom_generate
from ragaccel.decoding import Request, Sampling, Session
from ragaccel.engine import Engine
from ragaccel.errors import CapacityError, ConfigurationError
from ragaccel.models import (
    HuggingFaceModel,
    StatefulProcessor,
    logits_processors,
    make_criterion_rules,
)

SEVEN = ("llama", "mistral", "qwen2-sliding", "qwen3", "gemma2", "gemma3", "gpt2")
PROCESSING = {
    "repetition": {"repetition_penalty": 1.4},
    "ngrams": {"no_repeat_ngram_size": 2},
    "unigrams": {"no_repeat_ngram_size": 1},
    "both": {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3},
}


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


@pytest.fixture(params=SEVEN)
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("kind", PROCESSING)
def test_built_in_processors(model, kind):
    prompt = random_prompt(24, 2)
    expected = generate(model, prompt, 30, **PROCESSING[kind])
    engine = Engine(HuggingFaceModel(model, self_check=False))
    request = Request(prompt, max_new_tokens=30, **PROCESSING[kind])
    assert decode(engine, request, OracleDrafter(prompt, expected)) == expected
    assert decode(engine, request) == expected


def test_the_callers_processors(model):
    processors = LogitsProcessorList(
        [Rotate(), SuppressTokensLogitsProcessor([3, 5]), RepetitionPenaltyLogitsProcessor(1.2)]
    )
    prompt = random_prompt(20, 4)
    expected = generate(model, prompt, 30, logits_processor=processors, no_repeat_ngram_size=2)
    engine = Engine(HuggingFaceModel(model, self_check=False))
    request = Request(
        prompt,
        max_new_tokens=30,
        processors=logits_processors(processors),
        no_repeat_ngram_size=2,
    )
    assert decode(engine, request, OracleDrafter(prompt, expected)) == expected


@pytest.mark.parametrize("of", [3, 7])
def test_the_callers_stopping_criteria(model, of):
    criteria = StoppingCriteriaList([EndsWithMultiple(of), MaxLengthCriteria(45)])
    prompt = random_prompt(20, 6)
    unstopped = generate(model, prompt, 40)
    expected = generate(model, prompt, 40, stopping_criteria=criteria)
    engine = Engine(HuggingFaceModel(model, self_check=False))
    request = Request(prompt, max_new_tokens=40, stop_rules=make_criterion_rules(criteria, prompt))
    assert decode(engine, request, OracleDrafter(prompt, unstopped)) == expected
    assert len(expected) < 40


@pytest.mark.parametrize("min_new_tokens", [0, 8])
def test_several_end_tokens_and_a_shortest_answer(model, min_new_tokens):
    prompt = random_prompt(20, 8)
    unstopped = generate(model, prompt, 30)
    ends = {unstopped[4], unstopped[9], 96}
    kwargs = {"min_new_tokens": min_new_tokens} if min_new_tokens else {}
    expected = generate(model, prompt, 30, eos_token_id=sorted(ends), **kwargs)
    engine = Engine(HuggingFaceModel(model, self_check=False))
    request = Request(prompt, max_new_tokens=30, min_new_tokens=min_new_tokens, eos_ids=ends)
    assert decode(engine, request, OracleDrafter(prompt, unstopped)) == expected
    assert decode(engine, request) == expected


def test_sampling_with_processors_does_not_depend_on_drafting(model):
    prompt = random_prompt(20, 9)
    request = Request(
        prompt,
        max_new_tokens=25,
        sampling=Sampling(1.1, top_p=0.95, seed=5),
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
        processors=(Rotate(),),
    )
    engine = Engine(HuggingFaceModel(model, self_check=False))
    plain = decode(engine, request, token_budget=0)
    assert decode(engine, request) == plain
    assert decode(engine, request, OracleDrafter(prompt, plain)) == plain


def test_a_stateful_processor_sees_each_token_once():
    seen = []

    def remember(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return scores

    prompt = random_prompt(10)
    request = Request(prompt, max_new_tokens=8, processors=(StatefulProcessor(remember),))
    engine = Engine(HuggingFaceModel(tiny_model("llama")))
    answer = decode(engine, request)
    assert seen == [[*prompt, *answer[:i]] for i in range(8)]


def test_a_growing_cache_changes_no_answer():
    model = make_tiny_model("llama", max_position_embeddings=4096)
    prompt = random_prompt(500)
    expected = generate(model, prompt, 60)
    target = HuggingFaceModel(model)
    for engine in (Engine(target), Engine(target, capacity=600), Engine(target, max_rows=9)):
        request = Request(prompt, max_new_tokens=60)
        assert decode(engine, request, OracleDrafter(prompt, expected), 100) == expected


@pytest.mark.parametrize(("window", "length"), [(4, 3), (4, 40), (16, 3), (16, 40)])
def test_far_beyond_the_sliding_window(window, length):
    model = make_tiny_model("mistral", sliding_window=window)
    prompt = random_prompt(length)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=7)
    expected = generate(model, prompt, 60)
    found = decode(engine, Request(prompt, max_new_tokens=60), OracleDrafter(prompt, expected), 30)
    assert found == expected


def test_threads_share_an_engine():
    model = tiny_model("qwen3")
    engine = Engine(HuggingFaceModel(model))
    prompts = [random_prompt(10 + 7 * i, i) for i in range(6)]
    expected = [generate(model, prompt, 25) for prompt in prompts]
    found = [None] * len(prompts)

    def work(i):
        request = Request(prompts[i], max_new_tokens=25)
        found[i] = decode(engine, request, RandomDrafter(i, VOCAB))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


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


def test_gradients_and_training_state_are_left_alone():
    model = make_tiny_model("llama", torch.float32)
    decode(Engine(HuggingFaceModel(model)), Request(random_prompt(10), max_new_tokens=5))
    loss = model(torch.tensor([random_prompt(8)]), labels=torch.tensor([random_prompt(8)])).loss
    loss.backward()
    assert all(weights.grad is not None for weights in model.parameters())


def test_alternatives_come_with_the_sampled_tokens():
    engine = Engine(HuggingFaceModel(tiny_model("llama")))
    request = Request(random_prompt(12), max_new_tokens=5)
    verifier = engine.open(request)
    verifier.prefill(request)
    tree = RandomDrafter(0, VOCAB).draft(_Context(request.prompt_ids), 6)
    sampled = verifier.verify(tree, num_alternatives=3)
    with torch.inference_mode():
        logits = engine.model.model(torch.tensor([request.prompt_ids])).logits[0, -1]
    best = logits.topk(4).indices.tolist()
    assert [sampled.next_ids[0], *sampled.alternatives[0]] == best
    assert all(len(row) == 3 for row in sampled.alternatives)
    assert engine.latency_profile.of("greedy").seconds(len(tree)) > 0
    verifier.close()


class _Context:
    def __init__(self, token_ids):
        self.token_ids = list(token_ids)


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
