"""Mask predictions become right, runs resume bit for bit, checkpoints are never partial."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from space_runs import HELD_OUT, SAMPLES, SMALL, network_of, trainer_of, weights_of
from tiny_models import make_tiny_model
from transformers import TrainerCallback

from ragaccel.errors import ConfigurationError, MissingExtraError
from ragaccel.training import (
    SpaceNetwork,
    claim_run_folder,
    make_arguments,
    make_recipe,
    plan_epoch,
)
from ragaccel.training.evaluate import evaluate

GATED = {"rank": 8, "learning_rate": 1e-2, "steps": 100}
MODES = [("gated", GATED), ("paper", {"learning_rate": 5e-3, "steps": 120, "accumulate": 2})]


class RecordingCallback(TrainerCallback):
    """Records the steps of a run and calls a function after one of them."""

    def __init__(self, at=None, act=None):
        self.steps, self.evaluated, self.saved = [], [], []
        self.at, self.act = at, act

    def on_step_end(self, args, state, control, **_):
        self.steps.append(state.global_step)
        if state.global_step == self.at:
            self.act()

    def on_evaluate(self, args, state, control, **_):
        self.evaluated.append(state.global_step)

    def on_save(self, args, state, control, **_):
        self.saved.append(state.global_step)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def crash():
    raise RuntimeError("the machine went off")


def rows_of(log):
    """Return the rows of a log without times, which differ from run to run."""
    timed = ("seconds", "train_")
    kept = ({k: v for k, v in row.items() if not k.startswith(timed)} for row in log)
    return [row for row in kept if {"loss", "figures"} & row.keys()]


@pytest.mark.parametrize(
    ("mode", "changes"), [*MODES, ("gated", {**GATED, "precision": "bfloat16"})]
)
def test_mask_predictions_become_right(tmp_path, mode, changes):
    recorded = RecordingCallback()
    trainer = trainer_of(tmp_path, mode, recorded, evaluate_every=50, **changes)
    before = evaluate(trainer.model, HELD_OUT).tokens_per_pass
    metrics, steps = trainer.fit(), changes["steps"]
    assert before[-1] < 1.5
    assert metrics.tokens_per_pass[-1] > 2.2  # 8 tokens in 3 passes are the most: 2.67
    assert list(metrics.tokens_per_pass) == sorted(metrics.tokens_per_pass)
    assert metrics.right[0] > 0.8
    assert metrics.own > 0.95
    assert recorded.steps == list(range(1, steps + 1))
    assert recorded.evaluated == [50, 100, 120][: len(recorded.evaluated)]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    assert recorded.saved == [100, steps][-len(recorded.saved) :]


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(("mode", "changes"), MODES)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, mode, changes):
    settings = {**changes, "steps": 8, "accumulate": 2, "evaluate_every": 3, "save_every": 4}
    whole = trainer_of(tmp_path / "whole", mode, **settings)
    expected = whole.fit()
    recorded = RecordingCallback(5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "parts", mode, recorded, **settings).fit()
    assert recorded.saved == [4, 5]
    torch.rand(3)
    recorded = RecordingCallback()
    going_on = trainer_of(tmp_path / "parts", mode, recorded, **settings)
    assert going_on.fit() == expected
    assert recorded.steps == [6, 7, 8]
    assert weights_of(whole.model).keys() == weights_of(going_on.model).keys()
    for name, weight in weights_of(whole.model).items():
        assert torch.equal(weight, weights_of(going_on.model)[name]), name
    steps = [row["step"] for row in rows_of(going_on.state.log_history) if "figures" in row]
    assert steps == [3, 6, 8]
    assert rows_of(going_on.state.log_history)[:2] == rows_of(whole.state.log_history)[:2]


def test_dropout_draws_the_same_after_a_crash(tmp_path):
    def run(folder, *callbacks):
        model = make_tiny_model("gpt2", torch.float32)
        assert model.config.resid_pdrop > 0
        network = SpaceNetwork(model, make_recipe("paper", **SMALL, steps=4, save_every=2))
        trainer_of(folder, "paper", *callbacks, network=network, held_out=()).fit()
        return weights_of(network)

    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError):
        run(tmp_path / "parts", RecordingCallback(3, crash))
    recorded = RecordingCallback()
    again = run(tmp_path / "parts", recorded)
    assert recorded.steps == [3, 4]
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_finished_run_trains_no_further(tmp_path):
    first = trainer_of(tmp_path, steps=3).fit()
    recorded = RecordingCallback()
    assert trainer_of(tmp_path, "gated", recorded, steps=3).fit() == first
    assert not recorded.steps
    assert trainer_of(tmp_path, steps=3, held_out=HELD_OUT[:4]).fit().samples == 4
    assert trainer_of(tmp_path, steps=3, held_out=()).fit() is None


def test_checkpoints_hold_what_is_learned_and_the_last_one_stays(tmp_path):
    (tmp_path / "checkpoint-1-kept").mkdir()  # a user's copy, which is left alone
    trainer = trainer_of(tmp_path, steps=3, save_every=1)
    trainer.fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1-kept", "checkpoint-3"]
    weights = tmp_path / "checkpoint-3" / "model.safetensors"
    assert load_file(weights).keys() == weights_of(trainer.model).keys()
    assert not (tmp_path / "checkpoint-3" / "training_args.bin").exists()
    weights.write_bytes(b"half")
    with pytest.raises(ConfigurationError, match=r"checkpoint-3 is damaged: delete"):
        trainer_of(tmp_path, steps=3).fit()


def test_a_checkpoint_that_was_being_written_is_not_gone_on_from(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ragaccel.training.trainer._publish_checkpoint", lambda *_: crash())
        with pytest.raises(RuntimeError):
            trainer_of(tmp_path, steps=3, save_every=2).fit()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.part"]
    recorded = RecordingCallback()
    trainer_of(tmp_path, "gated", recorded, steps=3, save_every=2).fit()
    assert recorded.steps == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_an_interrupted_evaluation_loses_no_step(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ragaccel.training.trainer.evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer_of(tmp_path, steps=3).fit()
    recorded = RecordingCallback()
    trainer_of(tmp_path, "gated", recorded, steps=3).fit()
    assert not recorded.steps


def test_another_runs_folder_is_refused_by_what_differs(tmp_path):
    file = tmp_path / "deep" / "run.json"
    for _ in range(2):
        claim_run_folder(file, {"recipe": {"rank": 8, "steps": None}, "seed": 1})
    with pytest.raises(ConfigurationError, match=r"\(recipe\.rank 8 there, 9 here; seed 1 th"):
        claim_run_folder(file, {"recipe": {"rank": 9, "steps": None}, "seed": 2})
    file.write_text("[")
    with pytest.raises(ConfigurationError, match="damaged: delete"):
        claim_run_folder(file, {})
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ConfigurationError, match="holds checkpoints of another training"):
        claim_run_folder(tmp_path / "run.json", {"seed": 1})
    assert not (tmp_path / "run.json").exists()


def test_a_diverging_run_ends_early(tmp_path):
    trainer = trainer_of(tmp_path, "paper", steps=50, learning_rate=1e30)
    with pytest.raises(ConfigurationError, match="take a lower learning rate"):
        trainer.fit()
    assert trainer.state.global_step < 50


def test_epochs_decide_the_steps(tmp_path):
    trainer = trainer_of(tmp_path, epochs=3, accumulate=2)
    rows = sum(len(plan_epoch(SAMPLES.rows, trainer.recipe, epoch)) for epoch in range(3))
    assert trainer.args.max_steps == -(-rows // 2)


def test_rows_of_a_step_are_averaged(tmp_path):
    """Compare with the gradients of each row alone."""
    found = {}

    class Looking(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            trained = network.trained_parameters().items()
            found.update({name: weight.grad.clone() for name, weight in trained})

    network = network_of(steps=1, accumulate=3, learning_rate=1e-30)
    trainer = trainer_of(tmp_path, "gated", Looking(), network=network, held_out=())
    trainer.args.max_grad_norm = 1e9
    trainer.fit()
    network.zero_grad()
    for number in range(3):
        batch = trainer.data_collator([trainer.rows[number]])
        torch.autograd.backward(trainer.compute_loss(network, batch) / 3)
    for name, weight in network.trained_parameters().items():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-7)


def test_devices_precision_and_packages_are_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as accelerate's launcher sets it
    assert trainer_of(tmp_path).accelerator.mixed_precision == "no"
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES"):
        make_arguments(make_recipe(), tmp_path, "cuda:1")
    monkeypatch.setattr("transformers.training_args.is_accelerate_available", lambda *_: False)
    with pytest.raises(MissingExtraError, match=r"ragaccel\[train\]"):
        make_arguments(make_recipe(), tmp_path)


def in_two_processes(folder, way):
    script = Path(__file__).parents[1] / "support" / "space_spread.py"
    command = [sys.executable, str(script), str(folder), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    """Each process takes half of the rows of a step; both resume after one was interrupted."""
    told = in_two_processes(tmp_path / "spread", "ddp")
    alone = trainer_of(tmp_path / "alone", steps=4, accumulate=4)
    expected = alone.fit()
    assert told == {"stopped": True, "steps": [3, 4], "samples": expected.samples}
    assert [path.name for path in (tmp_path / "spread").iterdir()] == ["checkpoint-4"]
    saved = load_file(tmp_path / "spread" / "checkpoint-4" / "model.safetensors")
    for name, weight in weights_of(alone.model).items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_network_in_two_shards_has_the_same_gradients(tmp_path):
    """Shard the network as FSDP does, on CPUs."""
    told = in_two_processes(tmp_path, "fsdp")
    for mode in ("gated", "paper"):
        assert told[mode]["loss"] == pytest.approx(0, abs=1e-6)
        assert told[mode]["gradients"] == pytest.approx(0, abs=1e-5)
