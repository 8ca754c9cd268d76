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
    [([1.5, 1.8, 1.95, 2.0], 3), ([1.5, 1.6, 1.7, 1.8], 4), ([2.0, 1.9, 1.9, 1.9], 1), ([], 4)],
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
    for dtype in (torch.bfloat16, torch.float16):  # another precision is no other model
        adapter.check(make_tiny_model("llama").to(dtype))
    assert not caplog.records
    adapter.check(make_tiny_model("llama", seed=1))
    assert "other weights" in caplog.text


CONFIG, WEIGHTS = "space_config.json", "space.safetensors"
LAYER = "model.layers.0.self_attn.q_proj"


def written(text):
    return lambda folder: (folder / CONFIG).write_text(text)


def without(name):
    return lambda folder: (folder / name).unlink()


def described(**changes):
    """Replace fields of the config; a base that is a dict replaces fields of the base."""

    def change(folder):
        fields = json.loads((folder / CONFIG).read_text())
        if isinstance(base := changes.get("base"), dict) and base:
            changes["base"] = fields["base"] | base
        (folder / CONFIG).write_text(json.dumps(fields | changes))

    return change


def a_folder_in_place_of_the_config(folder):
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


def tensor(name, change):
    def write(folder):
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {name: change(tensors[name])}, folder / WEIGHTS)

    return write


INCOMPLETE, RATE = (
    "no complete SPACE adapter",
    "no complete SPACE adapter: .*learning rate too high",
)
DAMAGE = [
    (without(CONFIG), "holds no space_config.*ragaccel train space"),
    (a_folder_in_place_of_the_config, "not a SPACE adapter config"),
    *((written(text), "not a SPACE adapter config") for text in ("{", "[]", "[" * 10**5)),
    (described(format=9), "update ragaccel"),
    (without(WEIGHTS), INCOMPLETE),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"12345678"), INCOMPLETE),
    *((described(num_masks=number), f"{INCOMPLETE}: num_masks must be")
      for number in ("5", True, 3.0, None, 0, 10**12)),
    *((described(base=base), INCOMPLETE)
      for base in ([], {}, "llama", {"sample": None}, {"sample": ["a"]}, {"x": 1})),
    (tensor("mask_embeddings", lambda x: x.fill_(float("nan"))), RATE),
    (tensor("mask_embeddings", lambda x: x.long()), "NaN, infinite or far too large"),
    (tensor(f"{LAYER}.up", lambda x: x.fill_(float("inf"))), RATE),
    (tensor(f"{LAYER}.up", lambda x: x.fill_(1e20)), RATE),
    (tensor(f"{LAYER}.down", lambda x: x.fill_(float("nan"))), RATE),
    (tensor(f"{LAYER}.down", lambda x: x[0].clone()), rf"{INCOMPLETE}: .*must be \[R, in\]"),
    (tensor(f"{LAYER}.down", lambda x: torch.cat((x, x))), rf"{INCOMPLETE}: .*be \[R, in\]"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused_and_not_called_missing(tmp_path, damage, message):
    new_adapter(tiny_model("llama"), 3, 2).save(tmp_path / "space")
    damage(tmp_path / "space")
    for load in (lambda: SpaceAdapter.load(tmp_path / "space"),
                 lambda: SpaceAdapter.load_for_model(tmp_path)):  # fmt: skip
        with pytest.raises(ConfigurationError, match=message):
            load()


@pytest.mark.parametrize(
    ("down", "up"), [((2, 32), (32, 3)), ((32,), (32, 2)), ((2, 32), (32,)), ((2, 32, 1), (32, 2))]
)
def test_invalid_changes_are_refused_before_any_is_attached(down, up):
    adapter = new_adapter(tiny_model("llama"), 2, 2)
    name = "model.layers.1.self_attn.o_proj"
    with pytest.raises(ConfigurationError, match=r"layers\.1"):
        replace(adapter, changes=adapter.changes | {name: (torch.zeros(down), torch.zeros(up))})


@pytest.mark.parametrize(
    "training",
    [[], 5, None, {"held_out": 5}, *({"held_out": {"tokens_per_pass": x}} for x in (5, {}, ["a"]))],
)
def test_training_metadata_may_be_anything(tmp_path, training):
    new_adapter(tiny_model("llama"), 3, 2).save(tmp_path)
    described(training=training)(tmp_path)
    assert SpaceAdapter.load(tmp_path).num_useful == 3


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


def test_a_missing_adapter_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new_adapter(tiny_model("llama"), 2, 2).save(tmp_path / "space")
    assert SpaceAdapter.load_for_model(tmp_path).num_masks == 2
    with pytest.raises(ModelNotFoundError, match="has no SPACE adapter"):
        SpaceAdapter.load_for_model("")  # a model without a name
    with pytest.raises(ModelNotFoundError, match="no SPACE adapter 'someone/nothing'"):
        SpaceAdapter.load("someone/nothing")
    for path in (tmp_path, tmp_path / "space" / WEIGHTS):
        with pytest.raises(ConfigurationError, match="holds no space_config"):
            SpaceAdapter.load(path)


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
