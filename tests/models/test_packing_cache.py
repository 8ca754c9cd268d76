"""Packing decisions are measured once per machine and kept for the next run."""

import json

import pytest
import torch
from tiny_llm import tiny_tokenizer
from tiny_models import make_tiny_model
from torch import nn

from ragaccel.llm import LLM
from ragaccel.models import (
    HuggingFaceModel,
    PackingCache,
    clear_packing_cache,
    pack_linears,
    packing,
    packing_cache_path,
)

SHAPES = {"256 x 256 float32", "512 x 256 float32", "256 x 512 float32"}


def make_model():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 128}
    return make_tiny_model("llama", torch.float32, **sizes)


@pytest.fixture
def measured(monkeypatch):
    """Counts what is measured; packing pays for layers that are wider than high."""
    counted = []

    def fastest(inputs, packed, layer):
        counted.append(layer)
        return [1.0, 2.0 if layer.in_features > layer.out_features else 0.0]

    monkeypatch.setattr(packing, "_time_layers", fastest)
    return counted


def test_the_next_run_decides_the_same_without_measuring(measured, tmp_path):
    path = tmp_path / "new" / "packing.json"
    first = HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)
    assert len(measured) == 9  # three shapes, of three numbers of rows each
    del measured[:]
    second = HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)
    assert measured == []
    shapes = [[layer.weight.shape for layer in each._packed] for each in (first, second)]
    assert shapes[0] == shapes[1] == [torch.Size([256, 512])] * 2
    pays = json.loads(path.read_text())["pays"]
    assert pays == {name: name.startswith("256 x 512") for name in SHAPES}
    assert [file.name for file in path.parent.iterdir()] == ["packing.json"]


def test_without_a_file_it_is_measured_each_time(measured):
    for _ in range(2):
        del measured[:]
        HuggingFaceModel(make_model(), pack=True)
        assert len(measured) == 9


def test_decisions_are_kept_by_dtype(measured, tmp_path):
    path = tmp_path / "packing.json"
    for dtype in (torch.float32, torch.bfloat16):
        del measured[:]
        model = nn.Sequential(nn.Linear(512, 256)).to(dtype)
        assert pack_linears([model], keep=True, cache=PackingCache(path))
        assert len(measured) == 3
    assert PackingCache(path).get(model[0].weight) is True


def test_a_cached_decision_is_verified_before_use(measured, tmp_path, monkeypatch):
    path = tmp_path / "packing.json"
    HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)
    pack = packing._pack
    monkeypatch.setattr(packing, "_pack", lambda weight: pack(weight * 1.01))
    assert HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)._packed == []

    def missing(weight):
        raise AttributeError("no such operator")

    monkeypatch.setattr(packing, "_pack", missing)
    assert HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)._packed == []


def test_failed_packing_is_not_cached(measured, tmp_path, monkeypatch):
    path = tmp_path / "packing.json"
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_is_close", lambda *_: False)
        HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)
    assert not path.exists()
    assert HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)._packed


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", '{"format": "other", "pays": {"256 x 512 float32": false}}',
        '{"format": "ragaccel packing 1"}', '{"format": "ragaccel packing 1", "pays": []}',
        '{"format": "ragaccel packing 1", "pays": {"256 x 512 float32": "no"}}', "\udcff",
    ],
)  # fmt: skip
def test_an_invalid_file_is_ignored_and_measured_anew(measured, tmp_path, text):
    path = tmp_path / "packing.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)._packed
    assert json.loads(path.read_text())["pays"].keys() == SHAPES


def test_an_unwritable_path_does_no_harm(measured, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "packing.json"
    assert HuggingFaceModel(make_model(), pack=True, packing_cache_path=path)._packed


def test_entries_of_another_process_are_kept(tmp_path):
    path, narrow, wide = tmp_path / "packing.json", torch.ones(2, 3), torch.ones(2, 30)
    mine, theirs = PackingCache(path), PackingCache(path)
    theirs.put(wide, True)
    theirs.put(narrow, False)
    theirs.save()
    mine.put(narrow, True)
    mine.save()
    again = PackingCache(path)
    assert (again.get(narrow), again.get(wide), again.get(torch.ones(9, 9))) == (False, True, None)


def test_machines_threads_and_versions_have_their_own_cache(monkeypatch):
    files = [packing_cache_path()]
    monkeypatch.setattr(torch, "__version__", "9.9")
    files.append(packing_cache_path())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    files.append(packing_cache_path())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    files.append(packing_cache_path())
    assert len(set(files)) == 4
    assert all(file.parent.name == "measurements" and " " not in file.name for file in files)


@pytest.mark.parametrize("keep", [False, True])
def test_the_cache_lies_beside_the_latency_profile_or_nowhere(
    measured, monkeypatch, tmp_path, keep
):
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ragaccel.models.hf_model.free_bytes", lambda: 1 << 40)
    model = make_model()
    model.resize_token_embeddings(400)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for make in (
        lambda: LLM(model, tiny_tokenizer(), save_measurements=keep),
        lambda: LLM.load(tmp_path / "model", device="cpu", save_measurements=keep),
    ):
        del measured[:]
        assert make().model._packed
        assert (tmp_path / "home").exists() == keep
    if keep:
        assert measured == []
        assert packing_cache_path().exists()


def test_the_cache_can_be_cleared(monkeypatch, tmp_path):
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path))
    cache = PackingCache(packing_cache_path())
    cache.put(torch.ones(3, 4), True)
    cache.save()
    assert PackingCache(packing_cache_path()).get(torch.ones(3, 4)) is True
    for _ in range(2):
        clear_packing_cache()
        assert PackingCache(packing_cache_path()).get(torch.ones(3, 4)) is None
