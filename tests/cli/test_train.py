"""``ragaccel train space`` trains a tiny model and writes folders that can be loaded."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from small_tokenizers import byte_level
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from ragaccel.cli.train import TrainingProgress
from ragaccel.models import SpaceAdapter

TEXTS = ["wind north-west, sea rough", "the keeper keeps the light", "ships go out tonight"]


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny model with a tokenizer."""
    folder, tokenizer = tmp_path / "tiny", byte_level()
    made = make_tiny_model("llama", torch.float32, vocab_size=len(tokenizer), eos_token_id=1)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [{"prompt": f"{i} lights:", "answer": f" {TEXTS[i % 3]} {i}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def train(cli, model, samples):
    """Train for four steps, into the folder ``there`` unless the options say otherwise."""
    small = ("--masks", 3, "--steps", 4, "--row-tokens", 200, "--device", "cpu", "--out", "there")
    return lambda *options: cli("train", "space", samples, "--model", model, *small, *options)


def test_from_samples_to_an_adapter(train, model):
    options = ("--json", "--evaluate-every", 2)
    ended = train("--rank", 2, *options)
    told = ended.json
    assert told["steps"] == 4
    assert len(told["held_out"]["tokens_per_pass"]) == 3
    assert "step 4 of 4: loss" in ended.err
    assert "tokens a pass" in ended.err
    assert set(os.listdir("there")) == {"space_config.json", "space.safetensors"}
    adapter = SpaceAdapter.load("there")
    adapter.check(AutoModelForCausalLM.from_pretrained(model))
    assert adapter.training["recipe"]["rank"] == adapter.rank == 2
    assert adapter.training["held_out"] == told["held_out"]
    again = train("--rank", 2, *options, "-q")
    assert (again.json["held_out"], again.err) == (told["held_out"], "")
    other = train("--rank", 3)
    assert other.code == 2
    assert "recipe.rank 2 there, 3 here" in other.err


def test_all_weights_of_own_answers_into_the_current_folder(train, model):
    os.mkdir("here")
    os.chdir("here")
    paper = ("--paper", "--learning-rate", 0.01, "--precision", "bfloat16", "--out", ".")
    assert "answered" in train(*paper, "--own-answers", "--answer-tokens", 12).err
    assert os.path.exists("../here-run/log.json")
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, "."))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    adapter = SpaceAdapter.load("space")
    adapter.check(after)
    assert (adapter.rank, len(adapter.mask_embeddings)) == (0, 1)
    assert os.path.exists("tokenizer.json")


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_run_says_how_it_goes_on(train, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        patch.setattr(TrainingProgress, "on_step_end", interrupt)
        ended = train()
    assert ended.code == 130
    assert "run the same command again to go on" in ended.err
    assert not os.path.exists("there")
    assert train().code == 0
    log = json.loads(Path("there-run/log.json").read_text())
    assert [row["step"] for row in log if "figures" in row] == [4]
    assert os.listdir("there-run").count("checkpoint-4") == 1


REFUSED = {
    "--paper --rank 2": "do not give a rank",
    "--held-out none.jsonl": "there is no file 'none.jsonl'",
    "--device cuda:7": "CUDA_VISIBLE_DEVICES",
    "--masks 0": "num_masks must be 1",
    "--answer-tokens 0": "answer_tokens must be 2",
    "--out ../tiny": "the model's own folder",
    "--out ../samples.jsonl/x": "samples.jsonl is a file",
    "--out there --run there": "another folder for the run",
    "--out /": "name a folder",
    "": "cannot be written",
    "--run /tmp/elsewhere": "cannot be written",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_work_is_refused(train, monkeypatch, options):
    if REFUSED[options] == "cannot be written":
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != os.getcwd())
    ended = train(*options.split())
    assert ended.code == 2, ended.err
    assert REFUSED[options] in ended.err
    assert not os.path.exists("there")
