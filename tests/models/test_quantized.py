"""Quantized weights: drafted answers equal plain ones, up to near ties by rounding."""

import importlib.util

import pytest
import torch
from decoding import OracleDrafter, decode
from fakes import RandomDrafter
from small_tokenizers import byte_level
from tiny_models import VOCAB, generate, make_tiny_model, random_prompt

from ragaccel.decoding import Request
from ragaccel.engine import Engine
from ragaccel.models import load_model

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, on a processor

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", torch.float32, **SIZES).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


def torchao(name, **settings):
    import torchao.quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(torchao.quantization, name)(**settings))


def four_bits(**settings):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)


def quantized(folder, config):
    settings = {"dtype": "float32", "device": "cpu", "quantization_config": config}
    return load_model(folder, **settings)[0]


def gap_where_they_part(target, request, plain, drafted):
    """How far apart the two tokens were, as a share of the spread of the logits; 0 if none."""
    for at, pair in enumerate(zip(plain, drafted, strict=True)):
        if len(set(pair)) > 1:
            ids = torch.tensor([[*request.prompt_ids, *plain[:at]]])
            with torch.inference_mode():
                logits = target.model(ids).logits[0, -1].double()
            return float((logits[pair[0]] - logits[pair[1]]).abs() / logits.std())
    return 0.0


@needs("torchao")
def test_weights_of_8_bits_give_the_same_tokens(folder):
    target = quantized(folder, torchao("Int8WeightOnlyConfig"))
    engine = Engine(target)
    assert target.latency_key != quantized(folder, None).latency_key
    for seed in range(6):
        prompt = random_prompt(24, seed)
        request = Request(prompt, max_new_tokens=40)
        plain = decode(engine, request, token_budget=0)
        assert plain == generate(target.model, prompt, 40)
        assert decode(engine, request, OracleDrafter(prompt, plain)) == plain
        assert decode(engine, request, RandomDrafter(seed, VOCAB)) == plain


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(torchao, {"name": "IntxWeightOnlyConfig"}, marks=needs("torchao")),
        pytest.param(
            torchao, {"name": "Int8DynamicActivationInt8WeightConfig"}, marks=needs("torchao")
        ),
        pytest.param(four_bits, {}, marks=needs("bitsandbytes")),
        pytest.param(four_bits, {"bnb_4bit_use_double_quant": True}, marks=needs("bitsandbytes")),
    ],
    ids=["weights", "activations", "nf4", "nf4-twice"],
)
def test_only_near_ties_differ(folder, make, settings):
    target = quantized(folder, make(**settings))
    engine = Engine(target)
    for seed in range(6):
        prompt = random_prompt(24, seed)
        request = Request(prompt, max_new_tokens=40)
        plain = decode(engine, request, token_budget=0)
        drafted = decode(engine, request, OracleDrafter(prompt, plain))
        assert gap_where_they_part(target, request, plain, drafted) < 0.1
