"""Arguments that custom_generate refuses."""

import pytest
import torch
from stock_batches import PAD, assert_same, padded, some_prompts
from tiny_models import make_tiny_model, random_prompt, tiny_model
from transformers import DynamicCache

from ragaccel import ConfigurationError, custom_generate


@pytest.fixture
def model():
    return tiny_model("llama")


def filled_cache():
    cache = DynamicCache()
    cache.update(*torch.zeros(2, 1, 2, 4, 8, dtype=torch.float64), 0)
    return cache


REFUSED = {
    "beams": ({"num_beams": 2}, "beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "drafts by itself"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "states": (
        {"return_dict_in_generate": True, "output_hidden_states": True},
        "output_hidden_states",
    ),
    "cache": ({"past_key_values": filled_cache()}, "past_key_values"),
    "positions": ({"position_ids": torch.arange(5, 15)[None]}, "position_ids"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 10, 32, dtype=torch.float64)}, "inputs_embeds"),
    "too long": ({"max_new_tokens": 500}, "exceed"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_done_is_refused(model, name):
    kwargs, words = REFUSED[name]
    kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, **kwargs}
    batch = padded([random_prompt(10)])
    if name == "embeddings":
        batch = {}
    with pytest.raises(ConfigurationError, match=words):
        model.generate(**batch, custom_generate=custom_generate, **kwargs)


def test_a_mask_with_holes_is_refused(model):
    batch = padded([random_prompt(10), random_prompt(8)])
    for broken in ([1] * 9 + [0], [1, 0] + [1] * 8, [0] * 10):
        batch["attention_mask"][1] = torch.tensor(broken)
        with pytest.raises(ConfigurationError, match="padded on the left only"):
            model.generate(
                **batch, max_new_tokens=5, pad_token_id=PAD, custom_generate=custom_generate
            )


def test_a_model_in_training_and_autocast_are_refused():
    model = make_tiny_model("llama")
    model.train()
    with pytest.raises(ConfigurationError, match=r"model.eval\(\)"):
        assert_same(model, some_prompts(5))
    assert model.training
    model.eval()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigurationError, match="autocast"):
        assert_same(model, some_prompts(5))


def test_guidance_is_followed_for_one_prompt_and_refused_for_several(model):
    kwargs = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[4, 5, 6]])}
    guided = assert_same(model, some_prompts(12), **kwargs)
    assert not guided.equal(assert_same(model, some_prompts(12)))
    with pytest.raises(ConfigurationError, match="keeps state between calls"):
        model.generate(
            **padded(some_prompts(12, 9)),
            guidance_scale=1.5,
            max_new_tokens=5,
            pad_token_id=PAD,
            custom_generate=custom_generate,
        )


def test_an_assistant_model_changes_nothing(model):
    """Transformers does not pass it on to a custom loop."""
    assert_same(model, some_prompts(12), assistant_model=model)
