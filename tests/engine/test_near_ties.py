"""Choices that rounding might decide otherwise are made again by one row in a pass of its own."""

from contextlib import closing
from itertools import pairwise

import pytest
import torch
from decoding import Cheat, decode, run_together
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, make_tiny_model, random_prompt, tiny_model

from ragaccel.decode.interfaces import NoDrafter
from ragaccel.decode.request import Request, Sampling
from ragaccel.decode.tree import DraftTree
from ragaccel.engine.engine import Engine
from ragaccel.engine.select import Chooser, read_choices
from ragaccel.models.caller_rules import StatefulProcessor
from ragaccel.models.huggingface import HuggingFaceModel

PROMPT = random_prompt(20)
NEW = 24


@pytest.fixture(scope="module")
def tied():
    """A model that cannot tell some tokens of its own answer from their neighbours."""
    model = make_tiny_model("llama")
    answer = generate(model, PROMPT, NEW)
    with torch.no_grad():
        for token in sorted(set(answer))[::3]:
            model.lm_head.weight[(token + 1) % VOCAB] = model.lm_head.weight[token]
    return model


def make_engine(model, **settings):
    return Engine(HuggingFaceModel(model, self_check=False), **settings)


def watch(engine):
    """List the rows and sequences of every pass and whether its first choice was a near tie."""
    passes, forward = [], engine.model.forward

    def watched(rows, keep):
        logits = forward(rows, keep)
        two = logits.topk(2).values
        near = (two[:, 0] - two[:, 1]) < 1e-9
        passes.append((rows.num_rows, len(rows.spans), near.tolist()))
        return logits

    engine.model.forward = watched
    return passes


def test_they_are_uncertain_and_the_others_are_not(tied):
    engine = make_engine(tied, near_ties=True)
    expected = generate(tied, PROMPT, NEW)
    with torch.inference_mode():
        logits = tied(torch.tensor([[*PROMPT, *expected]])).logits[0, len(PROMPT) - 1 : -1]
    two = logits.topk(2).values
    ties = ((two[:, 0] - two[:, 1]) < 1e-9).tolist()
    assert 0 < sum(ties) < len(ties)
    request = Request(PROMPT, max_new_tokens=NEW)
    with closing(engine.open(request)) as verifier:
        verifier.prefill(request)
        choices = verifier.verify(DraftTree.chain([PROMPT[-1], *expected[:-1]]), 2)
        assert list(choices.next_ids) == expected
        assert list(choices.uncertain) == ties
        assert all(len(others) == 2 for others in choices.runner_ups)


def test_without_the_setting_nothing_is_uncertain(tied):
    engine = make_engine(tied)
    request = Request(PROMPT, max_new_tokens=NEW)
    with closing(engine.open(request)) as verifier:
        verifier.prefill(request)
        assert verifier.verify(DraftTree.chain([PROMPT[-1], 1, 2])).uncertain == ()


@pytest.mark.parametrize("budget", [6, None])
def test_they_are_chosen_again_by_one_row(tied, budget):
    engine = make_engine(tied, near_ties=True)
    expected = generate(tied, PROMPT, NEW)
    passes = watch(engine)
    request = Request(PROMPT, max_new_tokens=NEW)
    assert decode(engine, request, Cheat(PROMPT, expected), budget) == expected
    verified = [near for rows, _, near in passes if rows == len(near) and rows != len(PROMPT) - 1]
    assert any(len(near) > 1 and near[0] for near in verified)
    for near, following in pairwise(verified):
        if len(near) > 1 and near[0]:
            assert following == [True]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_no_answer_changes(family):
    model = tiny_model(family)
    engine = make_engine(model, near_ties=True)
    for seed in range(3):
        prompt = random_prompt(15, seed)
        expected = generate(model, prompt, NEW)
        request = Request(prompt, max_new_tokens=NEW)
        assert decode(engine, request, Cheat(prompt, expected)) == expected
        assert decode(engine, request, RandomDrafter(seed, VOCAB), None) == expected


def test_beside_others_they_are_chosen_again_alone(tied):
    engine = make_engine(tied, near_ties=True)
    prompts = [PROMPT, random_prompt(9), random_prompt(30, 1)]
    expected = [generate(tied, prompt, NEW) for prompt in prompts]
    requests = [Request(prompt, max_new_tokens=NEW) for prompt in prompts]
    decode(engine, Request([1, *PROMPT], max_new_tokens=1))
    passes = watch(engine)
    drafters = [NoDrafter(), RandomDrafter(1, VOCAB), Cheat(prompts[2], expected[2])]
    assert run_together(engine, requests, drafters, 6) == expected
    assert any(sequences > 1 for _, sequences, _ in passes)
    asked_again = [near for rows, sequences, near in passes if (rows, sequences) == (1, 1)]
    plain = expected[0]
    with torch.inference_mode():
        logits = tied(torch.tensor([[*PROMPT, *plain]])).logits[0, len(PROMPT) - 1 : -1]
    two = logits.topk(2).values
    assert asked_again.count([True]) >= int(((two[:, 0] - two[:, 1]) < 1e-9).sum()) > 0


def test_a_stateful_processor_sees_each_token_once_beside_others(tied):
    seen = []

    def remember(input_ids, scores):
        seen.append(input_ids.shape[1])
        return scores

    requests = [
        Request(PROMPT, max_new_tokens=NEW, processors=(StatefulProcessor(remember),)),
        Request(random_prompt(9), max_new_tokens=NEW),
    ]
    engine = make_engine(tied, near_ties=True)
    run_together(engine, requests, [NoDrafter(), RandomDrafter(1, VOCAB)])
    assert seen == list(range(len(PROMPT), len(PROMPT) + NEW))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_near_depends_on_the_precision(dtype):
    eps = torch.finfo(dtype).eps
    best = torch.tensor(20.0, dtype=dtype)
    rows = [[20.0, 20.0, 1.0], [20.0, float(best * (1 - eps)), 1.0], [20.0, 15.0, 20.0]]
    rows += [[20.0, 19.0, 1.0], [20.0, float("-inf"), float("-inf")], [-30.0, -30.0, -40.0]]
    logits = torch.tensor(rows, dtype=dtype)
    chooser = Chooser(Request((1,)), near_ties=True)
    found = chooser.choose(logits, DraftTree.chain([1] * len(rows)), 0, 1)
    choices = read_choices(found.tolist(), 1, near_ties=True)
    assert list(choices.uncertain) == [True, True, True, False, False, True]
    assert list(choices.next_ids) == [0] * len(rows)
    assert [others[0] for others in choices.runner_ups][:4] == [1, 1, 2, 1]


def test_a_vocabulary_of_one_has_no_ties():
    chooser = Chooser(Request((0,)), near_ties=True)
    found = chooser.choose(torch.zeros(2, 1), DraftTree.chain([0, 0]), 0)
    assert list(read_choices(found.tolist(), 0, near_ties=True).uncertain) == [False, False]


def test_noise_parts_what_scores_do_not():
    scores = torch.zeros(50, 30)
    chooser = Chooser(Request((1,), sampling=Sampling(1.0, seed=3)), near_ties=True)
    found = chooser.choose(scores, DraftTree.chain([1] * 50), 0)
    assert not any(read_choices(found.tolist(), 0, near_ties=True).uncertain)
