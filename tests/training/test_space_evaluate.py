"""The passes that SPACE's decoding takes, counted for given and for real predictions."""

import pytest
import torch
from space_networks import MASKS, alone, network_of
from tiny_models import generate, random_prompt

from ragaccel.training import Sample, count_passes, predict_masks
from ragaccel.training.evaluate import evaluate

ANSWER = [5, 6, 7, 8, 9]
RIGHT = [[6, 7, 8], [7, 8, 9], [8, 9, 0], [9, 0, 0]]
WRONG = [[0, 0, 0]] * 4


@pytest.mark.parametrize(
    ("predictions", "num_masks", "prompt_predictions", "passes"),
    [
        (WRONG, 3, (), 5),  # a token each
        (RIGHT, 1, (), 3),  # 5 | 6 7 | 8 9
        (RIGHT, 2, (), 3),  # 5 | 6 7 8 | 9
        (RIGHT, 3, (), 2),  # 5 | 6 7 8 9
        ([[6, 0, 0], [0] * 3, [0, 9, 0], [0] * 3], 3, (), 4),  # 5 | 6 7 | 8 | 9, not 9 for 8
        ([[0, 7, 8], [7, 0, 0], [0] * 3, [9, 0, 0]], 3, (), 4),  # 5 | 6 | 7 8 | 9
        ([[0, 7, 8], [0] * 3, [8, 0, 0], [0] * 3], 3, (), 4),  # 5 | 6 | 7 | 8 9
        ([[0] * 3, [0] * 3, [8, 9, 0], [0] * 3], 2, (), 4),  # 5 | 6 | 7 | 8 9, the end accepted
        (WRONG, 3, [5, 6, 0], 3),  # 5 6 7 | 8 | 9
        (WRONG, 3, [0, 6, 7], 5),
        (RIGHT, 3, [5, 6, 7], 2),  # 5 6 7 8 | 9
        (RIGHT, 3, [5, 0, 0], 2),  # 5 6 | 7 8 9
    ],
)
def test_number_of_passes(predictions, num_masks, prompt_predictions, passes):
    assert count_passes(ANSWER, predictions, num_masks, prompt_predictions) == passes


def mask_choices(network, seen):
    """Return what the masks after visible tokens predict, nothing packed."""
    with torch.no_grad():
        return alone(network, seen, MASKS)[len(seen) :].argmax(-1).tolist()


def count_by_decoding(network, sample, num_masks):
    """Count passes in the simplest way: run every pass over visible tokens and masks."""
    prompt, answer = list(sample.prompt_ids), list(sample.answer_ids)
    known, predictions, passes = 0, [], 0
    while known < len(answer):
        accepted = 0
        rest = answer[known:]
        while (
            accepted < min(len(predictions), len(rest)) and predictions[accepted] == rest[accepted]
        ):
            accepted += 1
        seen = prompt + answer[: known + accepted]
        predictions = mask_choices(network, seen)[:num_masks]
        known += accepted + 1
        passes += 1
    return passes


def trained_network(seed):
    """Return a network, and an answer of which its mask tokens predict a part."""
    network = network_of("llama", num_masks=MASKS)
    sample = Sample(tuple(random_prompt(9, seed)), tuple(random_prompt(12, seed + 100)))
    answer = list(sample.answer_ids)
    for place in range(1, len(answer)):  # most predictions are right by construction
        made = Sample(sample.prompt_ids, tuple(answer))
        predictions, _, _ = predict_masks(network, made, 500)
        if place % 4:
            answer[place] = predictions[place - 1][0]
    return network, Sample(sample.prompt_ids, tuple(answer))


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_predicts_what_step_by_step_decoding_does(seed):
    network, sample = trained_network(seed)
    predictions, own, prompt_predictions = predict_masks(network, sample, 500)
    assert len(predictions) == len(sample.answer_ids) - 1
    assert len(own) == len(sample.answer_ids)
    metrics = evaluate(network, [sample])
    for count in range(1, MASKS + 1):
        passes = count_by_decoding(network, sample, count)
        assert count_passes(sample.answer_ids, predictions, count) == passes
        assert metrics.tokens_per_pass[count - 1] == len(sample.answer_ids) / passes
    length = len(sample.answer_ids)
    fewer = [
        length / count_passes(sample.answer_ids, predictions, n, prompt_predictions)
        for n in (1, 2, 3)
    ]
    assert list(metrics.with_prompt) == fewer
    assert metrics.tokens_per_pass[0] > 1.2, "no mask prediction is right"


def test_prompt_predictions_follow_the_prompts_last_token_but_one():
    network, sample = trained_network(0)
    prompt_predictions = predict_masks(network, sample, 500)[2]
    assert prompt_predictions == mask_choices(network, sample.prompt_ids[:-1])
    paper = network_of("llama", "paper", num_masks=MASKS)
    assert predict_masks(paper, sample, 500)[2] == []
    assert evaluate(paper, [sample]).with_prompt == ()


def test_long_answers_take_several_passes_and_say_the_same():
    network, sample = trained_network(0)
    whole = predict_masks(network, sample, 500)
    assert predict_masks(network, sample, len(sample) + 2 * MASKS) == whole
    assert predict_masks(network, sample, 5) == whole


def test_metrics_are_summed_over_samples_and_processes():
    network, one = trained_network(0)
    _, two = trained_network(1)
    both = evaluate(network, [one, two])
    apart = [evaluate(network, [sample]) for sample in (one, two)]
    length = len(one.answer_ids)
    passes = [length / metrics.tokens_per_pass[1] for metrics in apart]
    assert both.tokens_per_pass[1] == pytest.approx(2 * length / sum(passes))
    assert both.samples == 2
    doubled = evaluate(network, [one], reduce=lambda counts: counts * 2)
    assert doubled.samples == 2
    assert doubled.right == apart[0].right


def test_own_is_the_share_of_the_models_choices():
    network = network_of("llama").train()
    prompt = random_prompt(6)
    answer = generate(network.model, prompt, 8)
    own = Sample(tuple(prompt), tuple(answer))
    assert evaluate(network, [own]).own == 1.0
    assert network.training
    other = Sample(tuple(prompt), (*answer[:-1], (answer[-1] + 1) % 97))
    assert evaluate(network, [other]).own == 7 / 8
    assert evaluate(network, [own]).as_dict()["own"] == 1.0
