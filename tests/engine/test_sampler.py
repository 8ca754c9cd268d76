"""Processed distributions against transformers' own processors."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragaccel.decoding import DraftTree, Request, Sampling
from ragaccel.engine import Sampler, ScoreProcessing, token_paths

VOCAB = 23


class Bias:
    """A caller's processor that looks at the ids it is given."""

    def __call__(self, input_ids, scores):
        return scores.index_add(
            1, input_ids[0, -2:], scores.new_full((1, input_ids[0, -2:].numel()), 0.7)
        )


def reference(request, ids, scores):
    """Process one row as transformers' generate does."""
    sampling, num_prompt, eos = request.sampling, len(request.prompt_ids), sorted(request.eos_ids)
    least, ngram = request.min_new_tokens, request.no_repeat_ngram_size
    warps = sampling.temperature > 0
    makers = [
        (request.repetition_penalty != 1.0, RepetitionPenaltyLogitsProcessor,
         [request.repetition_penalty]),
        (ngram, NoRepeatNGramLogitsProcessor, [ngram]),
        (least, MinNewTokensLengthLogitsProcessor, [num_prompt, least, eos]),
        *((True, lambda own: own, [own]) for own in request.processors),
        (warps and sampling.temperature != 1.0, TemperatureLogitsWarper, [sampling.temperature]),
        (warps and sampling.top_k, TopKLogitsWarper, [sampling.top_k]),
        (warps and sampling.top_p < 1.0, TopPLogitsWarper, [sampling.top_p]),
        (warps and sampling.min_p, MinPLogitsWarper, [sampling.min_p]),
    ]  # fmt: skip
    chain = LogitsProcessorList(make(*given) for is_used, make, given in makers if is_used)
    return chain(torch.tensor([ids]), scores[None])[0]


tokens = st.integers(0, VOCAB - 1)


@st.composite
def any_request(draw):
    return Request(
        prompt_ids=draw(st.lists(tokens, min_size=1, max_size=12)),
        sampling=Sampling(
            temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
            top_k=draw(st.sampled_from([0, 1, 5, 40])),
            top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
            min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        ),
        max_new_tokens=20,
        min_new_tokens=draw(st.sampled_from([0, 3, 6])),
        eos_ids=draw(st.sets(tokens, max_size=3)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        no_repeat_ngram_size=draw(st.integers(0, 3)),
        processors=draw(st.sampled_from([(), (Bias(),)])),
    )


@st.composite
def any_tree(draw, root):
    n = draw(st.integers(1, 9))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, n))]
    ids = [root, *(draw(tokens) for _ in range(n - 1))]
    return DraftTree(tuple(ids), tuple(parents), (1.0,) * n, ((),) * n)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_row_is_processed_as_transformers_would(data):
    request = data.draw(any_request())
    new = data.draw(st.lists(tokens, max_size=6))
    committed = [*request.prompt_ids, *new]
    tree = data.draw(any_tree(committed[-1]))
    sampler = Sampler(request)
    sampler.commit(request.prompt_ids[:-1])
    rest = committed[len(request.prompt_ids) - 1 : -1]
    half = len(rest) // 2
    sampler.commit(rest[:half])
    sampler.process(torch.zeros(1, VOCAB, dtype=torch.float64), DraftTree.chain([0]))
    sampler.commit(rest[half:])
    logits = torch.randn(
        len(tree),
        VOCAB,
        dtype=data.draw(st.sampled_from([torch.float64, torch.float32])),
        generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))),
    )
    found = sampler.process(logits * 3, tree).softmax(-1)
    for row, path in enumerate(token_paths(tree)):
        scores = (logits[row] * 3).float()  # as generate makes them
        expected = reference(request, [*committed[:-1], *path], scores).softmax(-1)
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-6, equal_nan=True)


def test_the_sampler_draws_from_the_distribution():
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01], dtype=torch.float64)
    num_draws = 20_000
    sampler = Sampler(Request((1,), sampling=Sampling(temperature=1.0, seed=99)))
    tree = DraftTree((1,) * 100, (-1, *range(99)), (1.0,) * 100, ((),) * 100)
    counts = torch.zeros(len(probs))
    for start in range(0, num_draws, 100):
        chosen = sampler.sample(probs.log().expand(100, -1), tree, start)[:, 0]
        counts += torch.bincount(chosen, minlength=len(probs))
    assert stats.chisquare(counts.numpy(), (probs * num_draws).numpy()).pvalue > 1e-3


def test_filtered_tokens_are_never_sampled():
    scores = torch.full((64, 50), -5.0)
    scores[:, 7] = 3.0
    sampler = Sampler(Request((1,), sampling=Sampling(temperature=5.0, top_k=1, seed=1)))
    chosen = sampler.sample(scores, DraftTree.chain([1] * 64), 0)[:, 0]
    assert set(chosen.tolist()) == {7}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_alternatives_are_the_likeliest_tokens(temperature):
    scores = torch.tensor([[0.0, 3.0, 2.0, 1.0], [4.0, 1.0, 2.0, 3.0]])
    sampler = Sampler(Request((1,), sampling=Sampling(temperature=temperature)))
    found = sampler.sample(scores, DraftTree.chain([1, 2]), 3, num_alternatives=2)
    assert found[:, 1:].tolist() == [[1, 2, 3], [0, 3, 2]]


@pytest.mark.parametrize("path", [[9, 0], [0, 9], [0, 9, 9, 9], [9, 9, 0]])
def test_ids_wider_than_the_scores_are_neither_penalized_nor_an_error(path):
    request = Request((90, 3), repetition_penalty=2.0, no_repeat_ngram_size=1, eos_ids={95})
    sampler = Sampler(request)
    sampler.commit([90])
    found = sampler.process(torch.ones(2, VOCAB), DraftTree.chain([3, 91]))
    assert found[:, 3].tolist() == [float("-inf")] * 2
    assert found.eq(1.0).sum(dim=1).tolist() == [VOCAB - 1] * 2
    penalizing = ScoreProcessing(Request([1], repetition_penalty=2.0))
    assert penalizing.apply(torch.ones(1, 4), [path]).tolist() == [[0.5, 1.0, 1.0, 1.0]]
