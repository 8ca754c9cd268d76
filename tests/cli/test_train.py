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

from ragaccel.models import SpaceAdapter

SMALL = ("--masks", 3, "--steps", 4, "--row-tokens", 200, "--device", "cpu")
TEXTS = ["wind north-west, sea rough", "the keeper keeps the light", "ships go out tonight"]


def save_model(folder, *seed):
    tokenizer = byte_level()
    made = make_tiny_model("llama", torch.float32, *seed, vocab_size=len(tokenizer), eos_token_id=1)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny model with a tokenizer."""
    return save_model(tmp_path / "tiny")


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [{"prompt": f"{i} lights:", "answer": f" {TEXTS[i % 3]} {i}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_from_samples_to_an_adapter(cli, model, samples, tmp_path):
    arguments = ["train", "space", samples, "--model", model, "--out", "there", *SMALL]
    ended = cli(*arguments, "--rank", 2, "--json", "--evaluate-every", 2)
    told = ended.json
    assert told["steps"] == 4
    assert len(told["held_out"]["tokens_per_pass"]) == 3
    assert "step 4 of 4: loss" in ended.err
    assert "tokens a pass" in ended.err
    assert {path.name for path in (tmp_path / "work" / "there").iterdir()} == {
        "space_config.json",
        "space.safetensors",
    }
    adapter = SpaceAdapter.load("there")
    adapter.check(AutoModelForCausalLM.from_pretrained(model))
    assert adapter.training["recipe"]["rank"] == adapter.rank == 2
    assert adapter.training["held_out"] == told["held_out"]
    again = cli(*arguments, "--rank", 2, "--json", "--evaluate-every", 2, "-q")
    assert again.json["held_out"] == told["held_out"]
    assert again.err == ""
    other = cli(*arguments, "--rank", 3)
    assert other.code == 2
    assert "recipe.rank 2 there, 3 here" in other.err


def test_all_weights(cli, model, samples):
    ended = cli(
        *["train", "space", samples, "--model", model, "--out", "there", *SMALL],
        *["--paper", "--learning-rate", 0.01, "--precision", "bfloat16"],
    )
    assert ended.code == 0, ended.err
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, "there"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    adapter = SpaceAdapter.load("there/space")
    adapter.check(after)
    assert (adapter.rank, len(adapter.mask_embeddings)) == (0, 1)
    assert os.path.exists("there/tokenizer.json")
    names = [name for _, _, files in os.walk("there") for name in files]
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]


def test_own_answers_are_what_is_learned(cli, model, samples):
    arguments = ["train", "space", samples, "--model", model, "--out", "there", *SMALL]
    ended = cli(*arguments, "--own-answers", "--answer-tokens", 12, "--json")
    assert ended.json["held_out"]["own"] == 1.0
    assert "answered" in ended.err
    lines = Path("there-run/answers.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    assert all(2 <= len(row["answer_ids"]) <= 12 for row in kept)


def test_another_models_own_answers_are_not_learned(cli, model, samples, tmp_path, monkeypatch):
    other = save_model(tmp_path / "other", 5)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    line = ["train", "space", samples, "--out", "there", *SMALL, "--own-answers"]
    with monkeypatch.context() as patch:
        patch.setattr("ragaccel.training.trainer.SpaceNetwork", interrupted)
        assert cli(*line, "--model", model, "--answer-tokens", 6).code == 130
    ended = cli(*line, "--model", other, "--answer-tokens", 6)
    assert ended.code == 2
    assert "model.sample" in ended.err
    ended = cli(*line, "--model", model, "--answer-tokens", 9)
    assert "answer_tokens 6 there, 9 here" in ended.err


def test_prompts_without_room_are_told(cli, model, samples):
    long = {"prompt": "the light " * 300, "answer": "is on tonight"}
    samples.write_text("\n".join([json.dumps(long), samples.read_text()]))
    line = ["train", "space", samples, "--model", model, "--out", "there", *SMALL]
    assert "1 left out" in cli(*line).err
    samples.write_text(json.dumps(long))
    ended = cli(*line, "--out", "elsewhere")
    assert ended.code == 2
    assert "take a larger row_tokens" in ended.err


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_run_says_how_it_goes_on(cli, model, samples, monkeypatch):
    from ragaccel.cli.train import TrainingProgress

    def interrupt(self, *_, **__):
        os.kill(os.getpid(), signal.SIGINT)

    arguments = ["train", "space", samples, "--model", model, "--out", "there", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "on_step_end", interrupt)
        ended = cli(*arguments)
    assert ended.code == 130
    assert "run the same command again to go on" in ended.err
    assert not os.path.exists("there")
    assert cli(*arguments).code == 0
    log = json.loads(Path("there-run/log.json").read_text())
    assert [row["step"] for row in log if "figures" in row] == [4]
    assert os.listdir("there-run").count("checkpoint-4") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--paper", "--rank", 2], "do not give a rank"),
        (["--held-out", "none.jsonl"], "none.jsonl cannot be read"),
        (["--device", "cuda:7"], "CUDA_VISIBLE_DEVICES"),
        (["--masks", 0], "num_masks must be 1"),
        (["--answer-tokens", 0], "answer_tokens must be 2"),
        (["--out", "../tiny"], "the model's own folder"),
        (["--out", "../samples.jsonl/x"], "samples.jsonl is a file"),
        (["--out", "there", "--run", "there"], "another folder for the run"),
        (["--out", "/"], "name a folder"),
    ],
)
def test_what_cannot_work_is_refused(cli, model, samples, arguments, message):
    line = ["train", "space", samples, "--model", model, "--out", "there", *SMALL]
    ended = cli(*line, *arguments)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert not os.path.exists("there")


def test_a_folder_that_cannot_be_written_is_told_first(cli, model, samples, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != os.getcwd())
    line = ["train", "space", samples, "--model", model, *SMALL]
    for places in (["--out", "there"], ["--out", "there", "--run", "/tmp/elsewhere"]):
        ended = cli(*line, *places)
        assert ended.code == 2, ended.err
        assert "cannot be written" in ended.err


def test_the_current_folder_may_be_the_output(cli, model, samples, tmp_path):
    os.mkdir("here")
    os.chdir("here")
    ended = cli("train", "space", samples, "--model", model, "--out", ".", *SMALL)
    assert ended.code == 0, ended.err
    assert os.path.exists("space_config.json")
    assert os.path.exists("../here-run/log.json")
