"""Real models and adapters on the command line, and names of none."""

import shutil
from pathlib import Path

import pytest
from cli_documents import QUESTION
from space_models import random_adapter

from eval.robustness.stand_ins import save_tiny_model
from ragaccel import LLM
from ragaccel.cli import index as index_module
from ragaccel.cli.ask import choose_adapter
from ragaccel.cli.settings import Settings
from ragaccel.models import hf_model
from ragaccel.retrieval import load_embedder


def test_a_model_that_does_not_exist(cli, docs, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("../empty").mkdir()
    for name in ("no-such/model", "./no-such-folder", "no such model", "../empty"):
        ended = cli("ask", docs, QUESTION, "--model", name)
        assert ended.code == 1
        assert name.removeprefix("./") in ended.error
    monkeypatch.setattr(
        index_module, "load_embedder", lambda settings: load_embedder(settings.embedder)
    )
    ended = cli("index", docs, "--embedder", "./none")
    assert (ended.code, "none" in ended.error) == (1, True)


def test_a_prompt_longer_than_the_limit(cli, docs, llm):
    for number in range(5):
        (docs / f"key-{number}.txt").write_text(f"Key {number}. " + "The key hangs. " * 20)
    llm.context_length = 1500
    assert "did not fit" in cli("ask", docs, QUESTION, "--model", "any").err


@pytest.fixture
def model(tmp_path):
    """A folder with a tiny model and its SPACE adapter."""
    folder = save_tiny_model(tmp_path / "model")
    random_adapter(LLM.load(folder).model.model).save(folder / "space")
    return folder


def test_doctor_checks_a_model_that_was_checked_before(cli, model, monkeypatch):
    LLM.load(model)
    monkeypatch.setattr(hf_model, "expected_passes", None)  # an error if the model is checked
    LLM.load(model)
    assert cli("doctor", "--model", model).code == 0
    assert cli("doctor", "--load", "--model", model).code == 1


def test_doctor_tells_whether_a_gpu_replays_passes(cli, model, monkeypatch):
    assert "CUDA graphs" not in cli("doctor", "--load", "--model", model).out
    make = hf_model.HuggingFaceModel.__init__

    def without_kernels(self, *args, **options):
        make(self, *args, **options)
        self.graphs_status = "off: no C compiler"

    monkeypatch.setattr(hf_model.HuggingFaceModel, "__init__", without_kernels)
    assert "; CUDA graphs: off: no C compiler" in cli("doctor", "--load", "--model", model).out


def test_every_drafter_gives_the_same_answer(cli, docs, model):
    assert "4,096 tokens of context" in cli("doctor", "--load", "--model", model).out
    asked = ["ask", docs, QUESTION, "--model", model, "--max-new-tokens", "20", "--json"]
    plain = cli(*asked, "--no-accel").json
    assert plain["acceptance"]["acceptance_length"] == 1.0
    for drafter in ("trees", "copy", "space", "mixed"):
        assert cli(*asked, "--drafter", drafter).json["answer"] == plain["answer"]
    sampling = ("--temperature", "1", "--seed", "3")
    sampled = {cli(*asked, *sampling, *how).json["answer"] for how in ([], ["--no-accel"])}
    assert len(sampled) == 1
    assert sampled != {plain["answer"]}
    ended = cli(*asked[:-1], "--compare")
    assert (ended.code, "same tokens: yes" in ended.err) == (0, True)
    ended = cli(*asked[:-2], "5000")
    assert ended.code == 1
    assert "max_new_tokens" in ended.error


def test_an_adapter_is_attached_where_it_is_used(cli, docs, model):
    for drafter, space, attached in (
        (None, None, None),
        (None, "dir", "dir"),
        ("trees", "dir", None),
        ("space", None, True),
        ("space", "dir", "dir"),
        ("mixed", None, True),
    ):
        assert choose_adapter(Settings(drafter=drafter, space=space)) == attached
    shutil.rmtree(model / "space")
    ended = cli("ask", docs, "Where?", "--model", model, "--drafter", "space")
    assert ended.code == 1
    assert "has no SPACE adapter" in ended.err
    assert "ragaccel train space" in ended.err
