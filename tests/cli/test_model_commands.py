"""The commands models, models pull and models default."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from cli_documents import QUESTION

from eval.robustness.stand_ins import save_tiny_model
from ragaccel.models import hub, load
from ragaccel.models.hub import (
    HUB_NAMES,
    SUGGESTIONS,
    MemoryAtHand,
    hub_name_of,
    suggested_model,
)

ROOT = Path(__file__).parents[2]
HUB = ROOT / "tests" / "support" / "fake_hub.py"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of huggingface_hub that is empty, on a machine without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def fill_cache(cache, name, **config):
    """Put a tiny model into the cache under a name."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    folder = save_tiny_model(place / "snapshots" / ("a" * 40))
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(read | config))
    return folder


def test_cached_models_that_can_be_loaded_are_listed_before_suggestions(cli, cache, monkeypatch):
    fill_cache(cache, "someone/tiny")
    fill_cache(cache, "someone/encoder", architectures=["LlamaModel"])
    monkeypatch.setattr(hub, "memory_at_hand", lambda: MemoryAtHand(9.5, is_gpu=False))
    cli("models", "default", "someone/tiny")
    listed = cli("models", "--json").json
    rows = {row["name"]: row for row in listed["models"]}
    assert list(rows) == ["someone/tiny", *(one.name for one in SUGGESTIONS)]
    assert rows["someone/tiny"]["cached"]
    assert rows["someone/tiny"]["default"]
    assert [one.name for one in SUGGESTIONS if not rows[one.name]["fits"]] == [
        one.name for one in SUGGESTIONS if one.gigabytes > 8.5
    ]
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = cli("models")
        assert "default, cached" in shown.out
        assert "too large here" in shown.out
        assert max(map(len, shown.out.splitlines())) <= columns
    assert "default, cached, fits" in shown.out


@pytest.mark.parametrize(
    ("gigabytes", "is_gpu", "expansion", "name"),
    [
        (80, True, 1, "Qwen/Qwen2.5-7B-Instruct"),
        (80, False, 1, "Qwen/Qwen2.5-1.5B-Instruct"),
        (10, True, 1, "Qwen/Qwen3-4B-Instruct-2507"),
        (6, False, 2, "Qwen/Qwen2.5-0.5B-Instruct"),
        (0.1, False, 1, "Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_the_suggested_model_fits_the_memory_and_is_quick(gigabytes, is_gpu, expansion, name):
    memory = MemoryAtHand(gigabytes, is_gpu, expansion)
    assert suggested_model(memory)[0] == name


def test_the_default_model_answers_unless_another_setting_names_one(cli, cache, home, monkeypatch):
    fill_cache(cache, "someone/tiny")

    def origin():
        return cli("config", "show", "--json").json["model"]

    assert origin() == {"value": None, "from": "default"}
    assert "models pull someone/other" in cli("models", "default", "someone/other").error
    assert cli("models", "default", "someone/tiny").code == 0
    assert origin() == {"value": "someone/tiny", "from": str(home / "default-model")}
    (home / "ragaccel.toml").write_text('model = "from-file"')
    assert origin()["value"] == "from-file"
    monkeypatch.setenv("RAGACCEL_MODEL", "from-variable")
    assert origin()["value"] == "from-variable"
    monkeypatch.delenv("RAGACCEL_MODEL")
    (home / "ragaccel.toml").unlink()
    (home / "default-model").write_bytes(b"two\nlines")
    damaged = cli("config", "show")
    assert damaged.code == 0
    assert "default-model is damaged" in damaged.err.replace("\n", "")
    assert cli("models", "default", "--clear").code == 0
    assert origin()["value"] is None
    assert "damaged" not in cli("config", "show").err


def test_a_wrong_model_is_told_before_anything_is_indexed(cli, cache, docs):
    gguf = Path("weights")
    gguf.mkdir()
    (gguf / "qwen2.5-7b-instruct-q4_k_m.gguf").touch()
    for name, told in (
        ("no-such/model", "no-such/model"),
        ("weights", "give Qwen/Qwen2.5-7B-Instruct"),
        ("weights/qwen2.5-7b-instruct-q4_k_m.gguf", "GGUF weights run in llama.cpp"),
        ("qwen2.5:7b", "give Qwen/Qwen2.5-7B-Instruct"),
        ("mistral", "give mistralai/Mistral-7B-Instruct-v0.3"),
        ("http://localhost:11434/v1", "cannot accelerate a server"),
    ):
        for command in (("ask", docs, QUESTION), ("chat", docs)):
            ended = cli(*command, "--model", name)
            assert (ended.code, told in ended.error) == (1, True), ended.error
    assert not (docs / ".ragaccel").exists()
    fill_cache(cache, "someone/encoder", architectures=["LlamaModel"])
    assert "not a causal" in cli("ask", docs, QUESTION, "--model", "someone/encoder").error


def test_a_model_that_is_widened_here_takes_twice_the_memory(cli, cache, monkeypatch):
    fill_cache(cache, "someone/tiny")
    monkeypatch.setattr(hub, "memory_at_hand", lambda: MemoryAtHand(9.5, is_gpu=False))
    monkeypatch.setattr(hub, "weight_gigabytes", lambda folder: 3.0)
    for expansion in (1.0, 2.0):
        monkeypatch.setattr(load, "expansion_on_cpu", lambda config, found=expansion: found)
        first = cli("models", "--json").json["models"][0]
        assert (first["name"], first["memory_gb"]) == ("someone/tiny", 3 * expansion + 1)


def test_a_model_too_large_for_the_memory_is_warned_of(cli, cache, docs, monkeypatch):
    fill_cache(cache, "someone/tiny")
    monkeypatch.setattr(hub, "memory_at_hand", lambda: MemoryAtHand(0.5, is_gpu=False))
    asked = cli("ask", docs, QUESTION, "--model", "someone/tiny", "-q")
    assert asked.code in (0, 5)
    assert "needs about 1.0 GB of memory" in asked.err.replace("\n", " ")


def test_names_of_ollama_are_those_in_the_documentation():
    page = (ROOT / "docs" / "coming-from.md").read_text()
    rows = [line.split("`") for line in page.splitlines() if line.startswith("| `")]
    listed = {row[1]: row[3] for row in rows if len(row) == 5 and row[1] in HUB_NAMES}
    assert listed == HUB_NAMES
    assert hub_name_of("qwen2.5:7b-instruct-q4_K_M") == "Qwen/Qwen2.5-7B-Instruct"
    assert hub_name_of("mistral:latest") == hub_name_of("mistral:7b") == HUB_NAMES["mistral"]
    assert hub_name_of("qwen2.5:72b") is None


@pytest.fixture
def served(tmp_path, spawn, monkeypatch):
    """A folder that a local hub serves as someone/tiny, and the hub's process."""
    folder = save_tiny_model(tmp_path / "served")
    process = spawn(HUB, folder)
    monkeypatch.setenv("HF_ENDPOINT", process.stdout.readline().strip())
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    return folder, process


def requests_of(process):
    process.kill()
    return process.stdout.read().splitlines()


@pytest.mark.slow
def test_an_interrupted_pull_goes_on_where_it_stopped(tmp_path, served, spawn):
    folder, process = served
    weights = os.urandom(30 << 20)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "pytorch_model.bin").write_bytes(b"not downloaded")
    (tmp_path / "slow").touch()
    command = ("-m", "ragaccel", "models", "pull", "someone/tiny")
    pulling = spawn(*command)
    blobs = tmp_path / "hf" / "hub" / "models--someone--tiny" / "blobs"
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size for file in blobs.glob("*-part")):
        assert time.monotonic() < deadline
        assert pulling.poll() is None, pulling.stderr.read()
        time.sleep(0.02)
    pulling.send_signal(signal.SIGINT)
    _, told = pulling.communicate(timeout=60)
    assert pulling.returncode == 130, told
    assert "31 MB to " in told
    assert "goes on from there" in told
    (part,) = blobs.glob("*-part")
    had = part.stat().st_size
    assert 0 < had < len(weights)
    (tmp_path / "slow").unlink()
    again = spawn(*command, "-q")
    assert again.communicate(timeout=100) == ("", "")
    assert again.returncode == 0
    (snapshot,) = blobs.parent.glob("snapshots/*")
    assert (snapshot / "model.safetensors").read_bytes() == weights
    assert not (snapshot / "pytorch_model.bin").exists()
    assert not list(blobs.glob("*-part"))
    asked = requests_of(process)
    assert f"GET /someone/tiny/resolve/{'a' * 40}/model.safetensors bytes={had}-" in asked


@pytest.mark.slow
def test_a_model_that_is_not_supported_is_refused_before_its_weights_come(served, spawn):
    folder, process = served
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    pulling = spawn("-m", "ragaccel", "models", "pull", "someone/tiny")
    assert "is not a causal language model, but LlamaModel" in pulling.communicate(timeout=60)[1]
    assert pulling.returncode == 1
    assert not any("safetensors" in line for line in requests_of(process))
