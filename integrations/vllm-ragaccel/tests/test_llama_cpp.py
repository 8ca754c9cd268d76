"""The draft model against llama-cpp-python's loop, as recorded."""

import random

import numpy as np
import pytest
from ragaccel.errors import ConfigurationError

from vllm_ragaccel import RagaccelDraft


def generate(draft_model, prompt, target, n_ctx=512):
    """``Llama.generate``: the tokens of one request, and how many times the model ran."""
    input_ids = np.zeros(n_ctx, np.intc)
    said, tokens, n_tokens, num_runs = [], list(prompt), 0, 0
    sample_idx = len(prompt) - 1
    while True:
        input_ids[n_tokens : n_tokens + len(tokens)] = tokens
        n_tokens, num_runs = n_tokens + len(tokens), num_runs + 1
        while sample_idx < n_tokens:
            token, sample_idx = target[len(said)], sample_idx + 1
            said.append(token)
            if len(said) == len(target):
                return said, num_runs
            tokens = [token]
            if sample_idx < n_tokens and token != input_ids[sample_idx]:
                n_tokens = sample_idx
                break
        input_ids[n_tokens] = token
        drafted = draft_model(input_ids[: n_tokens + 1])
        assert drafted.dtype == np.intc
        assert drafted.ndim == 1
        tokens += drafted.astype(int)[: n_ctx - n_tokens - 1].tolist()


def text_of(seed, length):
    return random.Random(seed).choices(range(10, 32_000), k=length)


@pytest.mark.usefixtures("equal_steps")
def test_quoted_text_takes_few_steps_and_stays_the_same():
    draft_model = RagaccelDraft(num_pred_tokens=8)
    for seed in range(3):
        prompt = text_of(seed, 100)
        target = [*prompt[20:60], *text_of(seed + 9, 5), *prompt[70:90]]
        said, num_runs = generate(draft_model, prompt, target)
        assert said == target
        assert num_runs < len(target) / 2


@pytest.mark.usefixtures("equal_steps")
def test_a_second_request_is_drafted_from_the_first_only_if_asked():
    prompt, target = text_of(3, 40), text_of(4, 60)
    steps = {}
    for history in (False, True):
        draft_model = RagaccelDraft(8, history=history)
        for _ in range(2):
            said, steps[history] = generate(draft_model, prompt, target)
            assert said == target
    assert steps[False] > 50
    assert steps[True] < 30


def test_a_number_of_draft_tokens_below_one_is_refused():
    with pytest.raises(ConfigurationError, match="num_pred_tokens must be 1 or more, not 0"):
        RagaccelDraft(0)
