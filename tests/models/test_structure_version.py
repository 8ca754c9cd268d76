"""Changes of adapters, buffers, modules and hooks: followed or refused at the next request."""

import copy

import pytest
import torch
from tiny_llm import tiny_tokenizer
from tiny_models import generate, make_tiny_model, random_prompt
from torch import nn

from ragaccel.errors import ConfigurationError
from ragaccel.llm import LLM

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

PROMPT = random_prompt(30, vocab=380)
NEW = 16
WAYS = {"shared copy": {}, "own attention": {"attn_implementation": "eager"}}


def make_model(way="shared copy", **changes):
    # Their own attention computes in float32, whatever the model does.
    dtype = torch.float64 if way == "shared copy" else torch.float32
    return make_tiny_model("llama", dtype, vocab_size=380, **WAYS[way], **changes)


def make_llm(model):
    return LLM(model, tiny_tokenizer(), save_measurements=False)


def adapted_model(way="shared copy", dtype=None):
    """A model with two adapters, the first of them in use."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(make_model(way), config, adapter_name="first")
    model.add_adapter("second", config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.mul_(3.0)
    return model.to(dtype or torch.float64).eval()


def answers(model, llm):
    """The answers of LLM and ``generate``."""
    found = llm.generate(PROMPT, max_new_tokens=NEW).token_ids
    return list(found), generate(model, PROMPT, NEW)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("way", WAYS)
def test_adapters_that_are_switched_are_followed(way, dtype):
    if way == "own attention" and dtype == torch.float64:
        pytest.skip("PEFT computes in float32 there")
    model = adapted_model(way, dtype)
    llm = make_llm(model)
    seen = []

    def same():
        found, expected = answers(model, llm)
        assert found == expected
        seen.append(tuple(found))
        return seen[-1]

    first = same()
    with model.disable_adapter():
        assert same() != first
    assert same() == first
    model.set_adapter("second")
    assert same() not in seen[:3]
    model.base_model.disable_adapter_layers()
    assert same() == seen[1]
    model.base_model.enable_adapter_layers()
    model.set_adapter("first")
    assert same() == first
    for layer in model.modules():
        if hasattr(layer, "scaling") and hasattr(layer, "lora_A"):
            layer.scaling["first"] *= 4.0
    assert same() not in seen[:-1]
    model.merge_adapter()
    same()
    with pytest.raises(ConfigurationError, match="unmerge_adapter"), model.disable_adapter():
        answers(model, llm)
    model.unmerge_adapter()
    same()


def in_place(model):
    model.model.rotary_emb.inv_freq.mul_(0.2)


def replaced(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.2


@pytest.mark.parametrize("change", [in_place, replaced])
@pytest.mark.parametrize("way", WAYS)
def test_buffers_that_are_written_to_are_followed(way, change):
    model = make_model(way)
    llm = make_llm(model)
    before, _ = answers(model, llm)
    change(model)
    found, expected = answers(model, llm)
    assert found == expected != before


def new_layer(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)
    return lambda mlp: setattr(model.model.layers[1], "mlp", mlp)


def one_layer_more(model):
    model.model.layers.append(nn.Identity())


def hook(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: -output)


def other_hook(model):
    model.model.norm._forward_hooks.clear()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output.flip(-1))


def before_hook(model):
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (-inputs[0],))


def one_adapter_more(model):
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)


MODULES = [new_layer, one_layer_more, one_adapter_more]
HOOKS = [hook, other_hook, before_hook]


def hooked(way):
    model = make_model(way)
    model.model.norm.register_forward_hook(lambda module, inputs, output: output)
    llm = make_llm(model)
    return model, llm, answers(model, llm)[0]


def assert_refused(llm, what):
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"{what} of this model were .* make a new"):
            llm.generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize("change", MODULES)
@pytest.mark.parametrize("way", WAYS)
def test_other_modules_are_refused_at_every_request(way, change):
    model, llm, _ = hooked(way)
    change(model)
    assert_refused(llm, "modules")


@pytest.mark.parametrize("change", HOOKS)
def test_hooks_are_refused_when_passes_run_through_a_shared_copy(change):
    model, llm, _ = hooked("shared copy")
    change(model)
    assert_refused(llm, "hooks")


@pytest.mark.parametrize("change", HOOKS)
def test_hooks_are_followed_when_passes_run_through_the_model(change):
    model, llm, before = hooked("own attention")
    change(model)
    found, expected = answers(model, llm)
    assert found == expected != before


def test_undoing_a_refused_change_helps():
    model = make_model()
    llm = make_llm(model)
    before, _ = answers(model, llm)
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(ConfigurationError, match="hooks"):
        llm.generate(PROMPT, max_new_tokens=2)
    handle.remove()
    assert answers(model, llm)[0] == before


def test_training_mode_is_refused_when_passes_run_through_the_model():
    model = make_model("own attention", attention_dropout=0.5)
    llm = make_llm(model)
    before, _ = answers(model, llm)
    for part in (model, model.model.layers[1].self_attn):
        part.train()
        with pytest.raises(ConfigurationError, match=r"training mode: call model.eval\(\)"):
            llm.generate(PROMPT, max_new_tokens=2)
        model.eval()
        assert answers(model, llm)[0] == before
