"""SPACE adapters: folders without a pickle, refused where they do not fit."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model, tiny_model

from ragaccel.errors import ConfigurationError, ModelNotFoundError
from ragaccel.models import SpaceAdapter, new_adapter

SOME = ["llama", "qwen3", "gemma3", "gpt2", "opt"]


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_saved_is_loaded(tmp_path, family, shared):
    model = tiny_model(family)
    adapter = new_adapter(model, 3, 2, shared_mask=shared)
    adapter.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"space_config.json", "space.safetensors"}
    found = SpaceAdapter.load(tmp_path)
    assert found.base == adapter.base
    assert (found.num_masks, found.rank) == (3, 2)
    assert len(found.mask_embeddings) == (1 if shared else 3)
    assert torch.equal(found.mask_embeddings, adapter.mask_embeddings)
    assert found.changes.keys() == adapter.changes.keys()
    for name, (down, up) in adapter.changes.items():
        assert torch.equal(found.changes[name][0], down)
        assert torch.equal(found.changes[name][1], up)
    found.check(model)


def test_every_layer_but_the_head_is_changed():
    adapter = new_adapter(tiny_model("llama"), 2, 4)
    assert len(adapter.changes) == 14
    assert "lm_head" not in adapter.changes
    assert not new_adapter(tiny_model("llama"), 2, 0).changes


def test_fewer_masks_are_the_first_ones():
    adapter = new_adapter(tiny_model("llama"), 4, 2)
    fewer = adapter.with_masks(2)
    assert torch.equal(fewer.mask_embeddings, adapter.mask_embeddings[:2])
    for number in (0, 5):
        with pytest.raises(ConfigurationError, match="from 1 to 4"):
            adapter.with_masks(number)


@pytest.mark.parametrize(
    ("tokens_per_pass", "useful"),
    [([1.5, 1.9, 1.99, 2.0], 3), ([1.5, 1.6, 1.7, 1.8], 4), ([2.0, 1.9, 1.9, 1.9], 1), ([], 4)],
)
def test_masks_that_add_next_to_nothing_are_left_out(tokens_per_pass, useful):
    adapter = new_adapter(tiny_model("llama"), 4, 2)
    assert adapter.num_useful == 4
    adapter.training["held_out"] = {"tokens_per_pass": tokens_per_pass}
    assert adapter.num_useful == useful
    assert adapter.with_masks(2).num_useful <= 2


def test_another_model_is_refused_by_what_differs(caplog):
    adapter = new_adapter(tiny_model("llama"), 2, 2)
    with pytest.raises(ConfigurationError, match="model_type llama, not qwen2"):
        adapter.check(tiny_model("qwen2"))
    with pytest.raises(ConfigurationError, match="num_layers 2, not 3"):
        adapter.check(make_tiny_model("llama", num_hidden_layers=3))
    with pytest.raises(ConfigurationError, match=", but the model has"):
        adapter.check(make_tiny_model("llama", intermediate_size=128))
    assert not caplog.records
    adapter.check(make_tiny_model("llama", seed=1))
    assert "other weights" in caplog.text


def test_another_precision_is_no_other_model(caplog):
    adapter = new_adapter(make_tiny_model("llama", torch.float32), 2, 2)
    for dtype in (torch.bfloat16, torch.float16):
        adapter.check(make_tiny_model("llama", torch.float32).to(dtype))
    assert not caplog.records


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "space_config.json").unlink(), "ragaccel train space"),
        (
            lambda folder: (folder / "space_config.json").write_text("{"),
            "not a SPACE adapter config",
        ),
        (
            lambda folder: (folder / "space_config.json").write_text("[]"),
            "not a SPACE adapter config",
        ),
        (
            lambda folder: (folder / "space_config.json").write_text("[" * 10**5),
            "not a SPACE adapter",
        ),
        (lambda folder: (folder / "space.safetensors").unlink(), "no complete SPACE adapter"),
        (lambda folder: (folder / "space.safetensors").write_bytes(b"12345678"), "no complete"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, message):
    new_adapter(tiny_model("llama"), 2, 2).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        SpaceAdapter.load(tmp_path)


@pytest.mark.parametrize(
    ("down", "up"), [((2, 32), (32, 3)), ((32,), (32, 2)), ((2, 32), (32,)), ((2, 32, 1), (32, 2))]
)
def test_invalid_changes_are_refused_before_any_is_attached(down, up):
    adapter = new_adapter(tiny_model("llama"), 2, 2)
    name = "model.layers.1.self_attn.o_proj"
    with pytest.raises(ConfigurationError, match=r"layers\.1"):
        replace(adapter, changes=adapter.changes | {name: (torch.zeros(down), torch.zeros(up))})


def described(folder, **changes):
    path = folder / "space_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("number", ["5", True, 3.0, None, 0, 10**12])
def test_an_invalid_number_of_masks_is_refused(tmp_path, number):
    adapter = new_adapter(tiny_model("llama"), 3, 2, shared_mask=isinstance(number, int))
    adapter.save(tmp_path)
    described(tmp_path, num_masks=number)
    with pytest.raises(ConfigurationError, match="no complete SPACE adapter: num_masks must be"):
        SpaceAdapter.load(tmp_path)


@pytest.mark.parametrize("base", [[], {}, "llama", {"sample": None}, {"sample": ["a"]}, {"x": 1}])
def test_an_invalid_base_model_is_refused(tmp_path, base):
    new_adapter(tiny_model("llama"), 3, 2).save(tmp_path)
    if isinstance(base, dict) and base:
        base = json.loads((tmp_path / "space_config.json").read_text())["base"] | base
    described(tmp_path, base=base)
    with pytest.raises(ConfigurationError, match="no complete SPACE adapter"):
        SpaceAdapter.load(tmp_path)


@pytest.mark.parametrize(
    "training",
    [[], 5, None, {"held_out": 5}, *({"held_out": {"tokens_per_pass": x}} for x in (5, {}, ["a"]))],
)
def test_training_metadata_may_be_anything(tmp_path, training):
    new_adapter(tiny_model("llama"), 3, 2).save(tmp_path)
    described(tmp_path, training=training)
    assert SpaceAdapter.load(tmp_path).num_useful == 3


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mask_embeddings", lambda x: x.fill_(float("nan")), "learning rate too high"),
        ("mask_embeddings", lambda x: x.long(), "NaN, infinite or far too large"),
        (f"{LAYER}.up", lambda x: x.fill_(float("inf")), "learning rate too high"),
        (f"{LAYER}.up", lambda x: x.fill_(1e20), "learning rate too high"),
        (f"{LAYER}.down", lambda x: x.fill_(float("nan")), "learning rate too high"),
        (f"{LAYER}.down", lambda x: x[0].clone(), r"must be \[R, in\]"),
        (f"{LAYER}.down", lambda x: torch.cat((x, x)), r"must be \[R, in\]"),
    ],
)
def test_tensors_that_would_spoil_a_pass_are_refused(tmp_path, name, change, message):
    new_adapter(tiny_model("llama"), 3, 2).save(tmp_path)
    tensors = load_file(tmp_path / "space.safetensors")
    save_file(tensors | {name: change(tensors[name])}, tmp_path / "space.safetensors")
    with pytest.raises(ConfigurationError, match=f"no complete SPACE adapter: .*{message}"):
        SpaceAdapter.load(tmp_path)


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path, monkeypatch):
    adapter = new_adapter(tiny_model("llama"), 3, 2)
    adapter.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(handle):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        new_adapter(tiny_model("llama"), 3, 2, seed=1).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_later_format_is_refused(tmp_path):
    new_adapter(tiny_model("llama"), 2, 2).save(tmp_path)
    path = tmp_path / "space_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    with pytest.raises(ConfigurationError, match="update ragaccel"):
        SpaceAdapter.load(tmp_path)


def test_a_file_of_the_folder_is_not_the_folder(tmp_path):
    new_adapter(tiny_model("llama"), 2, 2).save(tmp_path)
    with pytest.raises(ConfigurationError, match="holds no space_config"):
        SpaceAdapter.load(tmp_path / "space.safetensors")
    (tmp_path / "space_config.json").unlink()
    (tmp_path / "space_config.json").mkdir()
    with pytest.raises(ConfigurationError, match="not a SPACE adapter config"):
        SpaceAdapter.load(tmp_path)


def test_a_missing_adapter_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no SPACE adapter 'someone/nothing'"):
        SpaceAdapter.load("someone/nothing")
    with pytest.raises(ConfigurationError, match="holds no space_config"):
        SpaceAdapter.load(tmp_path)


READER = Path(__file__).parents[2] / "ragaccel" / "models" / "reader"


@pytest.mark.skipif(not (READER / "space").is_dir(), reason="the reader's adapter is not here")
def test_the_readers_own_adapter_is_small_and_safe():
    files = list((READER / "space").iterdir())
    assert {file.name for file in files} == {"space_config.json", "space.safetensors"}
    assert sum(file.stat().st_size for file in files) <= 3_000_000
    adapter = SpaceAdapter.load_for_model(READER)
    assert adapter.num_masks >= 5
    assert adapter.base.num_layers == 6
    assert adapter.training["recipe"]["mode"] == "gated"


def test_a_model_without_a_name_brings_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new_adapter(tiny_model("llama"), 2, 2).save(tmp_path / "space")
    with pytest.raises(ModelNotFoundError, match="has no SPACE adapter"):
        SpaceAdapter.load_for_model("")
    assert SpaceAdapter.load_for_model(tmp_path).num_masks == 2


def test_a_damaged_adapter_of_a_model_is_not_called_missing(tmp_path):
    new_adapter(tiny_model("llama"), 2, 2).save(tmp_path / "space")
    (tmp_path / "space" / "space.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="no complete SPACE adapter"):
        SpaceAdapter.load_for_model(tmp_path)
