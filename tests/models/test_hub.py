"""A name is found in a folder, in the cache, or on a local hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT

from ragaccel.errors import ModelNotFoundError
from ragaccel.models import EMBEDDER, LANGUAGE_MODEL, cached_folder, find_folder, read_model_info

SERVED = (
    "config.json", "modules.json", "tokenizer.json", "vocab.txt", "chat_template.jinja", "code.py",
    "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "README.md",
    "2_Dense/model.safetensors", "space/space_config.json", "space/space.safetensors",
    "empty/config.json",
)  # fmt: skip
MODEL = {"config.json", "modules.json", "tokenizer.json", "vocab.txt", "chat_template.jinja",
         "model.safetensors", "empty/config.json", "space/space_config.json"}  # fmt: skip


def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


@pytest.mark.slow
def test_names_are_looked_up_on_a_hub(tmp_path):
    """Run fake_hub.py, which looks names up in many ways and prints what it found and asked."""
    served = fill(tmp_path / "served", SERVED)
    tests = Path(__file__).parents[1]
    command = [sys.executable, tests / "support" / "fake_hub.py", served, tmp_path / "cache"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(done.stdout)
    # config, tokenizer and safetensors are downloaded, and nothing that runs
    dense = {"2_Dense/model.safetensors"}
    assert set(found["first"]["files"]) == MODEL
    assert dense <= set(found["embedder"]["files"]) <= MODEL | dense | {"space/space.safetensors"}
    assert set(found["adapter"]["files"]) == {"space_config.json", "space.safetensors"}
    # what is in the cache is not asked for again
    assert found["cached"]["files"] == found["first"]["files"]
    assert found["cached"]["asked"] == []
    # token and revision are passed on
    assert "Private and gated models need a token" in found["no token"]["error"]
    assert any("/revision/v2" in one for one in found["revision"]["asked"])
    assert not any("main" in one for one in found["revision"]["asked"])
    # what is not there is one error
    assert "no model 'someone/nothing'" in found["missing"]["error"]
    assert "the hub answers" in found["missing"]["error"]
    assert "no config.json or no safetensors" in found["no weights"]["error"]
    # a hub that cannot be reached costs five seconds at most
    for how in ("gone", "no name server"):
        assert "the hub cannot be reached" in found[how]["error"]
        assert found[how]["seconds"] < 6


def cached(cache, names, name="someone/tiny", revision="main"):
    top = cache / f"models--{name.replace('/', '--')}"
    (top / "refs").mkdir(parents=True, exist_ok=True)
    (top / "refs" / revision).write_text(COMMIT)
    return fill(top / "snapshots" / COMMIT, names)


def test_weights_of_several_parts_are_in_the_cache_when_all_are(tmp_path):
    snapshot = cached(tmp_path, ["config.json", "model-1.safetensors"])
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    hub = {"cache_dir": tmp_path}
    assert cached_folder("someone/tiny", LANGUAGE_MODEL, hub) is None
    fill(snapshot, ["model-2.safetensors"])
    assert cached_folder("someone/tiny", LANGUAGE_MODEL, hub) == snapshot


def test_an_index_that_cannot_be_read_is_left_to_who_loads_it(tmp_path):
    snapshot = cached(tmp_path, ["config.json", "model.safetensors.index.json", "a.safetensors"])
    for text in ("{}", "[]", "{", '{"weight_map": {"a": 1}}', '{"weight_map": []}'):
        (snapshot / "model.safetensors.index.json").write_text(text)
        assert cached_folder("someone/tiny", LANGUAGE_MODEL, {"cache_dir": tmp_path}) == snapshot


def test_the_cache_is_asked_for_the_revision_and_the_folder_below(tmp_path):
    snapshot = cached(tmp_path, ["below/config.json", "below/model.safetensors"], revision="v2")
    hub = {"cache_dir": tmp_path, "revision": "v2", "subfolder": "below"}
    assert find_folder("someone/tiny", LANGUAGE_MODEL, hub) == snapshot / "below"
    for other in ({"revision": "main"}, {"subfolder": ""}):
        assert cached_folder("someone/tiny", LANGUAGE_MODEL, {**hub, **other}) is None


def test_an_embedding_model_may_have_no_config_at_its_top(tmp_path):
    snapshot = cached(tmp_path, ["modules.json", "model.safetensors"])
    assert cached_folder("someone/tiny", EMBEDDER, {"cache_dir": tmp_path}) == snapshot
    assert cached_folder("someone/tiny", LANGUAGE_MODEL, {"cache_dir": tmp_path}) is None
    with pytest.raises(ModelNotFoundError, match=r"without a config\.json: give the folder"):
        find_folder(snapshot, LANGUAGE_MODEL, {})


def test_parts_without_an_index_are_a_download_that_broke_off(tmp_path):
    cached(tmp_path, ["config.json", "model-00001-of-00030.safetensors"])
    assert cached_folder("someone/tiny", LANGUAGE_MODEL, {"cache_dir": tmp_path}) is None


def test_code_that_is_asked_for_must_be_in_the_cache(tmp_path):
    snapshot = cached(tmp_path, ["config.json", "model.safetensors"])
    names = {"AutoConfig": "own.Config", "AutoModel": "someone/else--other.Model"}
    (snapshot / "config.json").write_text(json.dumps({"auto_map": names}))
    hub = {"cache_dir": tmp_path}
    assert cached_folder("someone/tiny", LANGUAGE_MODEL, hub) == snapshot
    assert cached_folder("someone/tiny", LANGUAGE_MODEL, hub, ("*.py",)) is None
    fill(snapshot, ["own.py"])
    assert cached_folder("someone/tiny", LANGUAGE_MODEL, hub, ("*.py",)) == snapshot


def test_local_files_only_asks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("ragaccel.models.hub._ask_hub", lambda *_: pytest.fail("asked"))
    with pytest.raises(ModelNotFoundError, match="local_files_only forbids asking the hub"):
        read_model_info("someone/tiny", cache_dir=tmp_path, local_files_only=True)


def test_a_full_disk_is_not_called_a_network_that_is_down(tmp_path, monkeypatch):
    def fill_up(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("ragaccel.models.hub._ask_hub", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fill_up)
    with pytest.raises(ModelNotFoundError, match="cannot be stored there"):
        find_folder("someone/tiny", LANGUAGE_MODEL, {"cache_dir": tmp_path})
