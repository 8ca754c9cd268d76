"""Fitting: guesses come right, runs go on bit for bit, other runs' folders are refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from space_runs import HELD_OUT, SAMPLES, SMALL, fit_of, network_of, weights_of
from tiny_models import make_tiny_model

from ragaccel.errors import ConfigurationError, MissingExtraError
from ragaccel.train.space.evaluate import evaluate
from ragaccel.train.space.fit import Fit, make_accelerator, rate
from ragaccel.train.space.network import SpaceNetwork
from ragaccel.train.space.recipe import make_recipe
from ragaccel.train.space.run_folder import RunFolder
from ragaccel.train.space.samples import Samples

MODES = [
    ("gated", {"rank": 8, "learning_rate": 1e-2, "steps": 100, "mask_decay": 1.0}),
    ("lora", {"rank": 8, "learning_rate": 1e-2, "steps": 60, "num_cuts": 3}),
    ("full", {"learning_rate": 5e-3, "steps": 60}),
]


@pytest.mark.parametrize(("mode", "changes"), MODES)
def test_guesses_come_right(tmp_path, mode, changes):
    standings = []
    fit = fit_of(tmp_path, mode, standings.append, evaluate_every=50, **changes)
    before = evaluate(fit.network, HELD_OUT).tokens_per_pass
    figures = fit.run().figures
    assert before[-1] < 1.5
    assert figures.tokens_per_pass[-1] > 2.2  # 8 tokens in 3 passes are the most: 2.67
    assert list(figures.tokens_per_pass) == sorted(figures.tokens_per_pass)
    assert figures.right[0] > 0.85
    assert figures.own > 0.95
    steps = changes["steps"]
    assert [s.step for s in standings] == list(range(1, steps + 1))
    assert [s.step for s in standings if s.figures] == list(range(50, steps + 1, 50))
    assert standings[-1].guessed > standings[0].guessed


def test_the_plain_variant_learns_too(tmp_path):
    fit = fit_of(
        tmp_path, "full", variant="plain", num_cuts=1, learning_rate=5e-3, steps=60, accumulate=2
    )
    assert fit.run().figures.right[0] > 0.6


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(("mode", "changes"), MODES)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, mode, changes):
    settings = {**changes, "steps": 8, "accumulate": 2, "evaluate_every": 3}
    whole = fit_of(tmp_path / "whole", mode, **settings)
    expected = whole.run()

    def interrupt(standing):
        if standing.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = fit_of(tmp_path / "parts", mode, interrupt, **settings)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    torch.rand(3)
    going_on = fit_of(tmp_path / "parts", mode, **settings)
    assert going_on.progress.steps == 5
    found = going_on.run()
    assert weights_of(whole.network).keys() == weights_of(going_on.network).keys()
    for name, weight in weights_of(whole.network).items():
        assert torch.equal(weight, weights_of(going_on.network)[name]), name
    assert found.log == expected.log
    assert found.figures.as_dict() == expected.figures.as_dict()
    assert found.progress.tokens == expected.progress.tokens


def test_dropout_draws_the_same_after_a_stop(tmp_path):
    def run(folder, stop=None):
        model = make_tiny_model("gpt2", torch.float32)
        assert model.config.resid_pdrop > 0
        recipe = make_recipe("full", **SMALL, steps=4, save_every=2)

        def report(standing):
            if standing.step == stop:
                raise RuntimeError("the machine went off")

        fit = Fit(SpaceNetwork(model, recipe), SAMPLES, RunFolder(folder), report=report)
        fit.run()
        return weights_of(fit.network)

    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError):
        run(tmp_path / "parts", stop=3)
    again = run(tmp_path / "parts")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_finished_run_trains_no_further(tmp_path):
    first = fit_of(tmp_path, steps=3).run()
    standings = []
    again = fit_of(tmp_path, report=standings.append, steps=3).run()
    assert not standings
    assert again.figures.as_dict() == first.figures.as_dict()
    log = json.loads((tmp_path / "log.json").read_text())
    assert log == first.log == again.log
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "checkpoint.pt", "log.json"}


def test_other_held_out_samples_are_evaluated_anew(tmp_path):
    """Not told the figures of those before."""
    first = fit_of(tmp_path, steps=3).run()
    fewer = Fit(network_of(steps=3), SAMPLES, RunFolder(tmp_path), held_out=HELD_OUT[:4]).run()
    assert (first.figures.samples, fewer.figures.samples) == (20, 4)
    none = Fit(network_of(steps=3), SAMPLES, RunFolder(tmp_path)).run()
    assert none.figures is None


def test_an_interrupted_evaluation_loses_no_step(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ragaccel.train.space.fit.evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit_of(tmp_path, steps=3).run()
    assert fit_of(tmp_path, steps=3).progress.steps == 3


def test_another_runs_folder_is_refused_by_what_differs(tmp_path):
    fit_of(tmp_path, steps=2).run()
    with pytest.raises(ConfigurationError, match=r"recipe\.rank 32 there, 8 here"):
        fit_of(tmp_path, steps=2, rank=8)
    with pytest.raises(ConfigurationError, match=r"samples\.count 20 there, 19 here"):
        Fit(network_of(steps=2), Samples(SAMPLES.rows[1:]), RunFolder(tmp_path))
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="damaged: delete"):
        fit_of(tmp_path, steps=2)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigurationError, match="unknown run"):
        fit_of(tmp_path, steps=2)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    fit_of(tmp_path, steps=2).run()
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="no checkpoint: delete"):
        fit_of(tmp_path, steps=2)


def test_a_run_without_hope_ends_early(tmp_path):
    fit = fit_of(tmp_path, "full", steps=50, learning_rate=1e30)
    with pytest.raises(ConfigurationError, match="take a lower learning rate"):
        fit.run()
    assert fit.progress.steps < 50


def test_epochs_decide_the_steps(tmp_path):
    fit = fit_of(tmp_path, epochs=3, accumulate=2)
    rows = fit.rows.first_of(3)
    assert fit.steps == -(-rows // 2)
    assert fit.run().progress.steps == fit.steps


def test_rows_of_two_halves_teach_as_their_sum(tmp_path):
    """Gradients of a step's rows are averaged."""
    fit = fit_of(tmp_path, steps=1, accumulate=3, max_gradient=1e9, learning_rate=1e-30)
    fit._optimizer.zero_grad = lambda: None
    fit._step()
    found = {name: weight.grad.clone() for name, weight in fit.network.trained().items()}
    for weight in fit.network.trained().values():
        weight.grad = None
    for number in range(3):
        fit._learn(number)
    for name, weight in fit.network.trained().items():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-7)


def test_bfloat16_trains(tmp_path):
    figures = fit_of(tmp_path, precision="bfloat16", rank=8, learning_rate=1e-2, steps=120).run()
    assert figures.figures.right[0] > 0.8


def test_the_rate_rises_and_falls():
    recipe = make_recipe(warmup=0.1)
    rates = [rate(step, 100, recipe) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001
    constant = make_recipe(warmup=0.1, schedule="constant")
    assert {rate(step, 100, constant) for step in range(10, 100)} == {1.0}


def test_devices_that_are_not_there(monkeypatch):
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES"):
        make_accelerator("cuda:1")
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"ragaccel\[train\]"):
        make_accelerator()


def test_two_processes_learn_what_one_does(tmp_path):
    """The same rows a step, half of them in each process."""
    script = Path(__file__).parents[1] / "space_spread.py"
    spread = tmp_path / "spread"
    command = [sys.executable, str(script), str(spread)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    alone = fit_of(tmp_path / "alone", steps=4, accumulate=4)
    expected = alone.run()
    assert told["tokens"] == expected.progress.tokens
    assert told["samples"] == expected.figures.samples
    weights = RunFolder(spread).load()[0]["weights"]
    for name, weight in weights_of(alone.network).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)
    with pytest.raises(ConfigurationError, match="num_processes 2 there, 1 here"):
        fit_of(spread, steps=4, accumulate=2)
