"""Tiny random models of every family, built from their configs: nothing is downloaded."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ragaccel.engine import bfloat16

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # wide, so that choices have clear gaps
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 12, "layer_types": MIXED}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 12, "layer_types": MIXED}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gpt2": ("gpt2", {"n_inner": 64, "attn_pdrop": 0.0}),
    "gpt-neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2}),
}


def tiny_config(family: str, **changes):
    """Make the config of a tiny model; ``changes`` override its fields."""
    kind, extra = FAMILIES[family]
    return CONFIG_MAPPING[kind](**{**SIZES, **extra, **changes})


def make_tiny_model(family: str, dtype=torch.float64, seed: int = 0, **changes):
    """Build a fresh model of a family with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval().to(dtype)
    # An answer that follows one token for ever tests little; larger weights make it wander.
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("bias", "wpe.weight", "embed_positions.weight")):
                weights.normal_(0.0, 0.3)
    return model


@cache
@torch.inference_mode(mode=False)  # it is shared, and may first be asked for where that is on
def tiny_model(family: str, dtype=torch.float64, seed: int = 0):
    """Return a shared model of a family; do not change it."""
    return make_tiny_model(family, dtype, seed)


def generate(model, prompt, max_new_tokens=40, **kwargs):
    """Return what transformers' own ``generate`` answers, new tokens only."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **kwargs}
    ids = torch.tensor([list(prompt)], device=model.device)
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **settings)
    return output[0, ids.shape[1] :].tolist()


def random_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Draw a prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def skip_without_products_of(dtype):
    """Skip a test of packed weights of a type that this processor cannot multiply quickly."""
    has_products = torch.ops.mkldnn._is_mkldnn_bf16_supported() or bfloat16.is_supported()
    if dtype == torch.bfloat16 and not has_products:
        pytest.skip("this processor has no products of bfloat16: its weights are not packed")
