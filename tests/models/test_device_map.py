"""Models that accelerate spreads over devices: the same tokens, with some weights on a disk."""

import importlib.util

import pytest
import torch
from decoding import OracleDrafter, decode
from fakes import RandomDrafter
from small_tokenizers import byte_level
from space_models import masks_of, random_adapter
from tiny_models import VOCAB, generate, make_tiny_model, random_prompt, tiny_model

from ragaccel.decoding import Request
from ragaccel.drafting import SpaceDrafter
from ragaccel.engine import Engine
from ragaccel.models import load_model, make_shared_copy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="the extra multi-gpu is not installed"
)

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
ON_CPU = dict.fromkeys((*PARTS, "model.rotary_emb"), "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    for family in ("llama", "gemma3"):
        make_tiny_model(family).save_pretrained(path / family)
        byte_level().save_pretrained(path / family)
    return path


def spread(folder, family, on_disk, **settings):
    device_map = {"": "disk"} if on_disk == "all" else {**ON_CPU, **dict.fromkeys(on_disk, "disk")}
    offloaded = folder / f"offloaded-{family}"
    settings = {"dtype": "float64", "device_map": device_map, **settings}
    return load_model(folder / family, offload_folder=offloaded, **settings)[0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "on_disk",
    [(), ("model.layers.1",), ("model.embed_tokens",), ("lm_head",), "all"],
    ids=["none", "layer", "embedding", "head", "all"],
)
def test_the_same_tokens_as_in_one_place(folder, family, on_disk):
    target = spread(folder, family, on_disk)
    assert target.device.type == "cpu"
    prompt = random_prompt(40)
    expected = generate(tiny_model(family), prompt, 30)
    request, engine = Request(prompt, max_new_tokens=30), Engine(target, prefill_chunk=16)
    assert decode(engine, request, token_budget=0) == expected
    assert decode(engine, request, RandomDrafter(1, VOCAB)) == expected
    assert decode(engine, request, OracleDrafter(prompt, expected)) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("on_disk", [("model.layers.1",), ("model.embed_tokens",), "all"])
def test_weights_offloaded_to_disk_take_an_adapter(folder, family, on_disk, caplog):
    target, prompt = spread(folder, family, on_disk), random_prompt(40)
    target.attach_space(random_adapter(tiny_model(family)))
    assert "other weights" not in caplog.text
    request, drafter = Request(prompt, max_new_tokens=30), SpaceDrafter(masks_of(target))
    expected = generate(tiny_model(family), prompt, 30)
    assert decode(Engine(target), request, drafter, token_budget=None) == expected


def test_a_shared_copy_holds_no_weights(folder):
    model = spread(folder, "llama", "all", self_check=False).model
    copy = make_shared_copy(model)
    hooks = [
        (own._hf_hook, other._hf_hook)
        for own, other in zip(model.modules(), copy.modules(), strict=True)
        if getattr(getattr(own, "_hf_hook", None), "weights_map", None) is not None
    ]
    assert len(hooks) > 10
    assert all(own is not other for own, other in hooks)
    assert all(own.weights_map is other.weights_map for own, other in hooks)
    ids = torch.tensor([random_prompt(20)])
    assert torch.equal(copy(ids).logits, model(ids).logits)


def test_latency_keys_differ(folder):
    keys = {spread(folder, "llama", on_disk).latency_key for on_disk in ((), ("lm_head",), "all")}
    assert len(keys) == 3
