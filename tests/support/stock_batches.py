"""Batches that transformers' generate answers with our loop and with its own."""

import torch
from tiny_models import make_tiny_model, random_prompt

from ragaccel import custom_generate

PAD = 0
PROMPT_TEXT = "The lamp burns oil. Its keeper trims the wick. Who trims the wick?"


def padded(prompts, pad=PAD):
    """Prompts of different lengths as a batch, padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def some_prompts(*lengths, seed=0):
    return [random_prompt(length, seed + i) for i, length in enumerate(lengths)]


def assert_same(model, prompts, custom=custom_generate, given=None, **kwargs):
    """Generate with and without; returns what both gave."""
    kwargs = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, **kwargs}
    batch = padded(prompts)
    expected = model.generate(**batch, **kwargs)
    got = model.generate(**batch, custom_generate=custom, **(given or {}), **kwargs)
    assert got.tolist() == expected.tolist()
    assert (got.dtype, got.device) == (expected.dtype, expected.device)
    return expected


def text_model():
    model = make_tiny_model("llama", vocab_size=400, max_position_embeddings=512)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 1
    return model
