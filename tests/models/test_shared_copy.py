"""The weight-sharing copy: own modules over the model's tensors, or none if that fails."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoding import OracleDrafter, decode
from tiny_models import FAMILIES, SIZES, generate, make_tiny_model, random_prompt, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ragaccel.decoding import Request
from ragaccel.engine import AttentionMasks, Engine, KVCache, PassAttention, causal_rows
from ragaccel.models import (
    ATTENTION_NAME,
    HuggingFaceModel,
    attention_forward,
    attention_of_pass,
    enter_layer,
    hf_model as huggingface,
    make_shared_copy,
    self_check as length_check,
)

PROMPT = random_prompt(20)


@pytest.fixture(autouse=True)
def findings_of_its_own(monkeypatch):
    """Findings about code that a test replaces are not kept for other tests."""
    monkeypatch.setattr(length_check, "_KNOWN_FINDINGS", {})


def answer(target, new=20):
    engine = Engine(target, prefill_chunk=8)
    request = Request(PROMPT, max_new_tokens=new)
    found = decode(engine, request)
    assert decode(engine, request, OracleDrafter(PROMPT, found)) == found
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_copy_shares_every_tensor_and_no_module(family):
    model = make_tiny_model(family, tie_word_embeddings=family == "llama")
    attention = model.config._attn_implementation
    copy = make_shared_copy(model)
    assert copy.config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation == attention
    for kind in ("named_parameters", "named_buffers"):
        theirs, ours = dict(getattr(model, kind)()), dict(getattr(copy, kind)())
        assert theirs.keys() == ours.keys()
        assert all(ours[name] is tensor for name, tensor in theirs.items())
        assert all(ours[name].data_ptr() == tensor.data_ptr() for name, tensor in theirs.items())
    assert not {id(module) for module in model.modules()} & {id(m) for m in copy.modules()}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_whose_attention_cannot_be_exchanged_decode_by_themselves(family, monkeypatch):
    monkeypatch.setattr(huggingface, "make_shared_copy", lambda model: None)
    model = tiny_model(family)
    target = HuggingFaceModel(model)
    assert target.network is model
    assert not target.batchable
    assert answer(target) == generate(model, PROMPT, 20)


class Uncopied(nn.Module):
    def __deepcopy__(self, memo):
        raise TypeError("holds a lock")


def test_modules_that_cannot_be_copied_have_no_shared_copy():
    model = make_tiny_model("llama")
    model.held = Uncopied()
    assert make_shared_copy(model) is None
    assert make_shared_copy(nn.Linear(2, 2)) is None
    assert answer(HuggingFaceModel(model)) == generate(model, PROMPT, 20)


def test_a_shared_copy_that_fails_its_self_check_is_not_used(monkeypatch, caplog):
    class Deaf(PassAttention):
        def attend(self, layer, states, **settings):
            return super().attend(layer, states, **{**settings, "window": 2})

    model = tiny_model("llama")
    HuggingFaceModel(model)  # what its small copy shows is known: the model itself is checked
    monkeypatch.setattr(huggingface, "PassAttention", Deaf)
    with caplog.at_level(logging.DEBUG, logger="ragaccel"):
        target = HuggingFaceModel(model)
    assert "the model keeps its own attention: LlamaForCausalLM deviates" in caplog.text
    assert target.network is model
    assert answer(target) == generate(model, PROMPT, 20)


def test_a_shared_copy_outside_of_our_passes_is_the_stock_model():
    model = tiny_model("llama")
    target = HuggingFaceModel(model)
    answer(target)
    assert generate(target.network, PROMPT, 20) == generate(model, PROMPT, 20)


def test_the_given_model_can_be_trained_further():
    model = make_tiny_model("llama", attention_dropout=0.5)
    expected = generate(model, PROMPT, 20)
    target = HuggingFaceModel(model)
    model.train()
    ids = torch.tensor([PROMPT])
    model(ids, labels=ids).loss.backward()
    assert all(weights.grad is not None for weights in model.parameters())
    assert answer(target) == expected
    assert model.training


def test_hooks_registered_before_loading_run_in_the_shared_copy():
    model = make_tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, output: -output)
    target = HuggingFaceModel(model)
    assert target.batchable
    assert answer(target) == generate(model, PROMPT, 20)


def test_scores_that_are_changed_in_unknown_ways_are_refused():
    rows = causal_rows([1, 2], KVCache(), torch.device("cpu"))
    states = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    passing = PassAttention(rows, AttentionMasks(torch.float64, torch.device("cpu")))
    with attention_of_pass(passing, [None]):
        enter_layer(0)
        found, weights = attention_forward(None, states, states, states, None)
        assert weights is None
        assert found.shape == (1, 2, 1, 4)
        with pytest.raises(NotImplementedError, match="does not support s_aux"):
            attention_forward(None, states, states, states, None, s_aux=torch.zeros(1))


def test_attention_sinks_are_decoded_by_the_model_itself():
    torch.manual_seed(0)
    sizes = {**SIZES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = CONFIG_MAPPING["gpt_oss"](**sizes, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).double().eval()
    target = HuggingFaceModel(model)
    assert not target.batchable
    assert answer(target, 10) == generate(model, PROMPT, 10)


@pytest.mark.slow
def test_passes_of_two_models_in_two_threads_do_not_meet():
    families = ("llama", "mistral", "gemma2", "qwen3")
    targets = [HuggingFaceModel(tiny_model(family)) for family in families]
    with ThreadPoolExecutor(len(families)) as threads:
        found = list(threads.map(answer, targets))
    assert found == [generate(tiny_model(family), PROMPT, 20) for family in families]
