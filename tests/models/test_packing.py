"""Packed weights: the same products but for rounding, over weights as they are now."""

import gc
import weakref
from copy import deepcopy
from itertools import product

import pytest
import torch
from decoding import decode
from safetensors.torch import load_file
from tiny_models import generate, make_tiny_model, random_prompt
from torch import nn

from ragaccel.decoding import Request
from ragaccel.engine import Engine
from ragaccel.models import HuggingFaceModel, PackedLinear, pack_linears, packed_bytes, packing

BIG = {"hidden_size": 256, "intermediate_size": 512}
DTYPES = [torch.float32, torch.bfloat16]
PROMPT = random_prompt(20)


@pytest.fixture(autouse=True)
def products(request):
    """Skip a test of a type that this processor does not multiply quickly."""
    given = getattr(request.node, "callspec", None)
    is_bfloat16 = given is not None and given.params.get("dtype") == torch.bfloat16
    if is_bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch packs no weights in bfloat16 here")


def make_model(dtype=torch.float32, family="llama", **changes):
    return make_tiny_model(family, dtype, **{**BIG, **changes})


def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits


def assert_close(found, expected):
    share = 64 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=share)


def large_weights(model):
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    return [weakref.ref(one.weight) for one in layers if one.weight.numel() >= packing._MIN_WEIGHTS]


def packed_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, PackedLinear)]


def answer(target, new=20, **settings):
    return decode(Engine(target, **settings), Request(PROMPT, max_new_tokens=new))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_the_stock_ones_but_for_rounding(dtype):
    shapes = [(300,), (1, 300), (1, 1, 300), (1, 16, 300), (2, 700, 300)]
    for shape, bias in product(shapes, (False, True)):
        linear = nn.Linear(300, 230, bias=bias).to(dtype)
        inputs = torch.randn(shape, dtype=dtype)
        with torch.inference_mode():
            found = PackedLinear(linear, keep=True)(inputs)
            expected = linear.double()(inputs.double())
        assert found.dtype == dtype
        share = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=share, atol=share)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_given_model_stays_as_it_is(dtype):
    model = make_model(dtype)
    attention, kinds = model.config._attn_implementation, [type(m) for m in model.modules()]
    before, expected = logits_of(model), generate(model, PROMPT, 10)
    target = HuggingFaceModel(model, pack=True)
    answer(target)
    assert len(target._packed) == 14  # of two layers: four of attention and three of the MLP
    assert_close(logits_of(target.network), before)
    assert target.model is model
    assert torch.equal(logits_of(model), before)
    assert generate(model, PROMPT, 10) == expected
    assert [type(module) for module in model.modules()] == kinds
    assert model.config._attn_implementation == attention == "sdpa"


def double(weights):
    weights.mul_(2.0)


def replace_data(weights):
    weights.data = weights.data * 2.0


@pytest.mark.parametrize("change", [double, replace_data])
@pytest.mark.parametrize("pack", [False, True])
def test_changed_weights_are_followed(pack, change):
    model = make_model()
    target = HuggingFaceModel(model, pack=pack)
    assert bool(target._packed) == pack
    engine = Engine(target)
    request = Request(PROMPT, max_new_tokens=20)
    before, other = decode(engine, request), Engine(target)
    assert decode(other, request) == before
    still_open = engine.open(request)
    still_open.prefill(request)
    with torch.no_grad():
        change(model.model.layers[0].mlp.down_proj.weight)
        change(model.model.layers[1].input_layernorm.weight)
    found = decode(engine, request)
    assert found == decode(other, request) == answer(HuggingFaceModel(model, pack=pack))
    assert found != before
    still_open.close()  # states of the old weights serve nobody
    assert engine.prefix_cache.num_idle == 1
    assert decode(engine, request) == found


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2-sliding"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_owned_model_is_packed_in_place_and_its_weights_are_freed(
    dtype, family, tmp_path, monkeypatch
):
    model = make_model(dtype, family)
    expected = answer(HuggingFaceModel(make_model(dtype, family), pack=True))
    before = logits_of(model)
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights, alive, pack = large_weights(model), [], packing._pack

    def count(weight, *kind):
        alive.append(sum(each() is not None for each in weights))
        return pack(weight, *kind)

    monkeypatch.setattr(packing, "_is_correct", lambda layers, **kind: True)
    monkeypatch.setattr(packing, "_pack", count)
    target = HuggingFaceModel(model, owned=True)
    gc.collect()
    assert target._packed
    assert alive[0] == len(weights)
    assert alive[-1] <= 2  # they are freed one after another
    assert all(weight() is None for weight in weights)
    assert target.model is model
    assert model.config._attn_implementation != "ragaccel"
    assert all(layer.weight is layer.packed for layer in target._packed)
    assert answer(target) == expected
    assert_close(logits_of(model), before)
    if dtype == torch.float32:
        assert generate(model, PROMPT, 20) == expected
    model.save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in found.items())
    assert saved.keys() - found.keys() <= set(model.all_tied_weights_keys)
    copied = deepcopy(model)
    assert torch.equal(logits_of(copied), logits_of(model))
    assert not {id(weight) for weight in copied.parameters()} & {id(w) for w in model.parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_owned_model_serves_a_second_time_over_the_same_packed_weights(dtype):
    model = make_model(dtype)
    first = HuggingFaceModel(model, owned=True)
    second = HuggingFaceModel(model)
    assert second.batchable
    assert second.unbatchable_reason == ""
    ours, theirs = packed_layers(second.network), packed_layers(model)
    assert len(ours) == len(theirs) == len(first._packed) == 14
    assert all(own.packed is other.packed for own, other in zip(ours, theirs, strict=True))
    assert not set(ours) & set(theirs)
    assert (second.latency_key, second.weight_bytes) == (first.latency_key, first.weight_bytes)
    for settings in ({}, {"exact": True}):
        assert answer(second, **settings) == answer(first, **settings)


def test_tied_weights_stay_in_the_embedding():
    model = make_model(tie_word_embeddings=True, vocab_size=400)
    expected = generate(model, PROMPT, 20)
    target = HuggingFaceModel(model, owned=True)
    assert isinstance(target.network.lm_head, PackedLinear)
    embedding = target.network.get_input_embeddings().weight
    assert embedding is model.get_input_embeddings().weight
    assert answer(target) == expected


class Odd(torch.Tensor):
    pass


class Derived(nn.Linear):
    pass


UNPACKED = {
    "hook": lambda one: one.register_forward_hook(lambda module, inputs, output: output * 2.0),
    "hook before": lambda one: one.register_forward_pre_hook(lambda module, inputs: inputs),
    "forward": lambda one: setattr(one, "forward", one.forward),
    "meta": lambda one: one.to("meta"),
    "float64": lambda one: one.double(),
    "subclass": lambda one: setattr(one, "__class__", Derived),
    "odd weights": lambda one: setattr(
        one, "weight", nn.Parameter(one.weight.detach().as_subclass(Odd))
    ),
    "sparse weights": lambda one: setattr(
        one, "weight", nn.Parameter(one.weight.detach().to_sparse())
    ),
}


@pytest.mark.parametrize("change", UNPACKED)
def test_only_stock_layers_with_stock_weights_are_packed(change):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(8, 8))
    assert packed_bytes(model) == 2 * 300 * 300 * 4
    UNPACKED[change](model[0])
    given = model[0]
    packed = pack_linears([model], keep=True)
    assert packed_bytes(model) == 0
    assert model[0] is given
    assert model[1] is packed[0]
    assert type(model[2]) is nn.Linear
    assert len(packed) == 1


def test_one_layer_in_several_places_is_packed_once():
    shared = nn.Linear(300, 300)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared), nn.Linear(300, 300)])
    packed = pack_linears([model], keep=True)
    assert len(packed) == 2
    assert model[0][0] is model[1][0]


def missing(weight, *kind):
    raise AttributeError("no such operator")


def wrong(weight, *kind, own=packing._pack):
    return own(weight * 1.01, *kind)


@pytest.mark.parametrize("pack", [missing, wrong])
def test_a_build_of_torch_without_right_kernels_packs_nothing(monkeypatch, pack):
    monkeypatch.setattr(packing, "_pack", pack)
    assert HuggingFaceModel(make_model(), pack=True)._packed == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("owner", [torch.backends.mkldnn, torch.ops.mkldnn, torch._C])
def test_dtypes_that_torch_would_not_pack_stay(monkeypatch, owner, dtype):
    no = {
        torch.backends.mkldnn: ("is_available", lambda: False),
        torch.ops.mkldnn: ("_is_mkldnn_bf16_supported", lambda: False),
        torch._C: ("has_mkl", False),
    }[owner]
    packs = {torch.ops.mkldnn: torch.float32, torch._C: torch.bfloat16}.get(owner)
    monkeypatch.setattr(owner, *no)
    assert bool(packed_bytes(nn.Linear(300, 300).to(dtype))) == (dtype == packs)


@pytest.mark.parametrize(("free", "packs"), [(0, False), (1 << 40, True)])
def test_copies_are_made_where_memory_is_free(monkeypatch, free, packs):
    monkeypatch.setattr("ragaccel.models.hf_model.free_bytes", lambda: free)
    assert bool(HuggingFaceModel(make_model())._packed) == packs
    assert HuggingFaceModel(make_model(), pack=False)._packed == []
