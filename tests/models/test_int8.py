"""Models whose weights have 8 bits: their own answers, whatever is drafted."""

import pytest
import torch
from decoding import decode
from fakes import RandomDrafter
from safetensors.torch import load_file
from tiny_models import generate, make_tiny_model, random_prompt
from torch import nn
from transformers import AutoModelForCausalLM

from ragaccel import LLM, ConfigurationError, UnsupportedModelError
from ragaccel.decoding import Request, Sampling
from ragaccel.engine import Engine, bfloat16
from ragaccel.models import HuggingFaceModel, bundled_reader_path, load_model, round_to_int8

pytestmark = pytest.mark.skipif(
    not bfloat16.is_supported(), reason="nothing is compiled for bfloat16 here"
)
PROMPT = random_prompt(40)
BIG = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
FUSED = ("llama", "qwen2", "qwen3")
FAMILIES = (*FUSED, "gemma2", "gpt-neox")


def make_model(family):
    sizes = BIG | ({"head_dim": 64} if family == "qwen3" else {})
    return make_tiny_model(family, torch.bfloat16, vocab_size=320, **sizes)


def in_8_bits(model):
    round_to_int8(model)
    return HuggingFaceModel(model, owned=True)


def rounded(weight):
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (torch.round(weight.float() / scales) * scales).to(weight.dtype)


@torch.no_grad()
def rounded_model(model):
    """Round the large linear layers of a stock model, from the documentation alone."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.numel() >= 1 << 16:
            layer.weight.copy_(rounded(layer.weight))
    return model


def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_rounded_weights(family):
    target = in_8_bits(make_model(family))
    found = logits_of(target.model)
    in_bfloat16 = logits_of(rounded_model(make_model(family)))
    exact = logits_of(rounded_model(make_model(family).double()))
    unrounded = logits_of(make_model(family).double())
    error, usual, change = (float((one - exact).norm()) for one in (found, in_bfloat16, unrounded))
    assert error < 1.5 * usual  # of bfloat16
    assert error < change


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True])
def test_drafts_do_not_change_answers(family, exact):
    target = in_8_bits(make_model(family))
    engine = Engine(target, exact=exact)
    sampled = Sampling(temperature=0.8, seed=3)
    for request in (
        Request(PROMPT, max_new_tokens=30),
        Request(PROMPT, max_new_tokens=30, sampling=sampled),
    ):
        expected = decode(engine, request, token_budget=0)
        assert target.is_batch_invariant == (family in FUSED)
        if target.is_batch_invariant or exact:
            for seed in range(3):
                assert decode(engine, request, RandomDrafter(seed, 320)) == expected


@pytest.fixture(scope="module")
def reader():
    return LLM.load(dtype="int8")


def test_the_reader_is_a_quarter_of_its_size_and_saves_its_rounded_weights(reader, tmp_path):
    model = reader.model
    assert model.dtype == torch.bfloat16
    assert model.weight_bytes < 0.27 * 27_669_504
    assert model.is_batch_invariant
    assert "uint8" in model.latency_key
    model.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    stock = AutoModelForCausalLM.from_pretrained(bundled_reader_path(), dtype=torch.bfloat16)
    for name, weight in rounded_model(stock).state_dict().items():
        if "proj" in name:
            assert torch.equal(saved[name], weight), name


def test_generate_of_the_model_gives_the_same_tokens(reader):
    prompt = reader.tokenizer.encode("The keeper lit the lamp at dusk. Who lit the lamp?")
    request = Request(tuple(prompt), max_new_tokens=20)
    assert decode(Engine(reader.model), request) == generate(reader.model.model, prompt, 20)


def test_weights_far_larger_than_the_others_of_their_output_are_no_obstacle():
    model = make_model("llama")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data[::7, 5] = 40.0
    round_to_int8(model)
    kept = [one for one in model.modules() if isinstance(one, nn.Linear)]
    assert [tuple(one.weight.shape) for one in kept] == []


def test_what_cannot_be_rounded_is_refused():
    for given in ({"owned": False}, {"quantization_config": object()}):
        with pytest.raises(ConfigurationError, match="weights of the model itself"):
            load_model(bundled_reader_path(), dtype="int8", **given)
    with pytest.raises(UnsupportedModelError, match="no weights of this model"):
        round_to_int8(make_tiny_model("llama", torch.bfloat16))
    with pytest.raises(UnsupportedModelError, match="only weights in bfloat16"):
        round_to_int8(make_tiny_model("llama", torch.float32, **BIG))
    with pytest.raises(ConfigurationError, match="for a CPU, not for meta"):
        load_model(bundled_reader_path(), dtype=torch.int8, device="meta")


def test_other_processors_are_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr("ragaccel.engine.bfloat16.kernels", lambda name: None)
    for is_supported, told in (
        (False, "Linux, numba, and an x86 CPU"),
        (True, "see the warning before"),
    ):
        monkeypatch.setattr(bfloat16, "is_supported", lambda found=is_supported: found)
        with pytest.raises(ConfigurationError, match=told):
            LLM.load("no/such-model", dtype="int8")


def test_weights_that_stay_in_16_bits_are_told(caplog):
    model = make_model("llama")
    model.lm_head = nn.Linear(256, 1001, bias=False, dtype=torch.bfloat16)
    round_to_int8(model)
    assert "16 % of this model's weights stay in 16 bits" in caplog.text
