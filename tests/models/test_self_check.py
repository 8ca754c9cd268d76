"""Models that cannot be decoded exactly are refused at loading, by name and cause."""

import pytest
import torch
from tiny_models import SIZES, make_tiny_model
from transformers import AttentionInterface, AutoModelForCausalLM, BitsAndBytesConfig, LlamaModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ragaccel.errors import UnsupportedModelError
from ragaccel.models import HuggingFaceModel, refuse_by_config


def deaf_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attend causally by slot, whatever the mask says."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    before = key.shape[2] - query.shape[2]
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(before)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None


def build(kind, **fields):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **fields})).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sound_models_pass_in_every_type(dtype):
    for family in ("llama", "gemma2", "qwen2-sliding", "gpt2"):
        HuggingFaceModel(make_tiny_model(family, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_that_ignores_the_mask(dtype):
    AttentionInterface.register("deaf", deaf_attention)
    model = make_tiny_model("llama", dtype)
    model.set_attn_implementation("deaf")
    with pytest.raises(UnsupportedModelError, match=r"a tree \(does its attention ignore"):
        HuggingFaceModel(model)


def test_a_model_that_places_rows_by_itself():
    model = make_tiny_model("llama")
    forward = model.forward

    def by_count(*args, position_ids=None, past_key_values=None, attention_mask=None, **kwargs):
        return forward(
            *args, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
        )

    model.forward = by_count
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM deviates from plain"):
        HuggingFaceModel(model)


def test_a_state_beside_keys_and_values(monkeypatch):
    """A layer that keeps the last row of the previous pass, as convolutions and recurrences do."""
    model = make_tiny_model("llama")
    last_row = torch.zeros(1, 1, 32, dtype=torch.float64)
    norm = model.model.norm.forward

    def leak(hidden):
        nonlocal last_row
        output = norm(hidden)
        before = torch.cat((last_row, output[:, :-1]), dim=1)
        last_row = output[:, -1:]
        return output + before

    monkeypatch.setattr(model.model.norm, "forward", leak)
    with pytest.raises(UnsupportedModelError):
        HuggingFaceModel(model)


def test_a_model_that_reads_what_follows():
    with pytest.raises(UnsupportedModelError, match="not a causal model"):
        HuggingFaceModel(build("bert"))


def test_a_quantized_model_that_deviates_from_itself():
    model = make_tiny_model("llama")
    model.model.norm.register_forward_hook(lambda *given: given[-1] + given[-1].shape[1])
    model.quantization_method = "torchao"
    with pytest.raises(UnsupportedModelError, match=r"its quantization rounds a row differently"):
        HuggingFaceModel(model)


@pytest.mark.parametrize(
    ("kind", "fields", "cause"),
    [
        ("mamba", {}, "recurrent"),
        ("bloom", {}, "does not take position_ids"),
        ("llama4_text", {"head_dim": 8, "attention_chunk_size": 16}, "chunked_attention layers"),
        ("minimax", {}, "linear_attention layers"),
    ],
)
def test_kinds_of_models_that_cannot_be_rolled_back(kind, fields, cause):
    with pytest.raises(UnsupportedModelError, match=cause):
        HuggingFaceModel(build(kind, **fields))


def test_models_without_a_language_head():
    with pytest.raises(UnsupportedModelError, match="no language model head"):
        HuggingFaceModel(LlamaModel(CONFIG_MAPPING["llama"](**SIZES)))


def test_encoder_decoders():
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        refuse_by_config(CONFIG_MAPPING["t5"](), {})


def test_llm_int8_by_checkpoint_or_by_argument():
    config = CONFIG_MAPPING["llama"](**SIZES)
    eight, four = (BitsAndBytesConfig(**{f"load_in_{bits}bit": True}) for bits in (8, 4))
    refuse_by_config(config, {"quantization_config": four})
    for kwargs in ({"quantization_config": eight}, {"load_in_8bit": True}):
        with pytest.raises(UnsupportedModelError, match=r"LLM\.int8.*load it in 4 bits"):
            refuse_by_config(config, kwargs)
    config.quantization_config = eight.to_dict()
    with pytest.raises(UnsupportedModelError, match=r"LLM\.int8"):
        refuse_by_config(config, {})


def test_attention_that_takes_no_tree_masks():
    model = make_tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        HuggingFaceModel(model)


def test_frequencies_that_change_with_length_are_not_outgrown():
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert HuggingFaceModel(make_tiny_model("llama", rope_parameters=dynamic)).max_positions == 256
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = make_tiny_model("phi3", original_max_position_embeddings=64, rope_parameters=long)
    assert HuggingFaceModel(model).max_positions == 64
