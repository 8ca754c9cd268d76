"""Curves over an adapter's training: what is read of a run's folder, told and drawn."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from eval.papers import space
from eval.report import build
from eval.report.plots import pictures_of

RUN = {
    "recipe": {
        "mode": "gated",
        "rank": 32,
        "num_masks": 3,
        "shared_mask": False,
        "num_cuts": 24,
        "distill": True,
        "learning_rate": 2e-3,
    },
    "model": {"model_type": "llama", "hidden_size": 256},
    "samples": {"count": 3000, "digest": "ab"},
    "num_processes": 1,
}


def figures(*lengths):
    sooner = [length + 0.1 for length in lengths]
    told = {"samples": 40, "right": [0.5, 0.25, 0.1], "own": 0.987}
    return {"tokens_per_pass": lengths, **told, "with_prompt": sooner}


LOG = [
    {"step": 10, "loss": 5.0, "drafted": 0.1},
    {"step": 20, "figures": figures(1.2, 1.3, 1.31)},
    {"step": 40, "loss": 3.0, "drafted": 0.3},
    {"step": 40, "figures": figures(1.7, 1.9, 1.95)},
    {"step": 40, "figures": figures(1.71, 1.91, 1.96)},
]


def write_run(folder, log=LOG):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(RUN))
    (folder / "log.json").write_text(json.dumps(log))
    return folder


def test_a_runs_evaluations_are_kept_told_and_drawn(tmp_path, capsys):
    run = write_run(tmp_path / "adapter-run")
    space.run_space_curves([f"--run={run}", f"--out={tmp_path}"])
    document = json.loads((tmp_path / space.CURVES_FILE).read_text())
    assert [one["step"] for one in document["curve"]] == [20, 40]
    assert document["curve"][-1]["tokens_per_pass"] == [1.71, 1.91, 1.96]
    assert [one["step"] for one in document["losses"]] == [10, 40]
    assert str(tmp_path) not in json.dumps(document)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document["curve"][-1]
    text = str(build.result_tables("any", document))
    assert "| 20 | 1.20 | 1.30 | 1.31 |" in text
    assert "| right draft tokens of the k-th mask token | 50 % | 25 % | 10 % |" in text
    assert (
        "| tokens a pass, the first draft tokens read with the prompt | 1.81 | 2.01 | 2.06 |"
        in text
    )
    assert "40 held-out answers" in text
    assert "3,000 samples" in text
    (picture,) = pictures_of({"space-curves": document})
    drawn = ElementTree.fromstring(picture.svg)
    said = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"k = 1", "k = 3", "steps of training", "after 40 steps"} <= said


def test_one_evaluation_is_told_but_makes_no_curve(tmp_path):
    run = write_run(tmp_path / "run", LOG[:2])
    space.run_space_curves([f"--run={run}", f"--out={tmp_path / 'one.json'}"])
    document = json.loads((tmp_path / "one.json").read_text())
    assert "| 20 | 1.20 |" in str(build.result_tables("any", document))
    assert not pictures_of({"one": document})


def test_a_folder_that_tells_nothing_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match=r"holds no whole log\.json"):
        space.run_space_curves([f"--run={tmp_path}"])
    run = write_run(tmp_path / "run", LOG[:1])
    with pytest.raises(SystemExit, match="train with --evaluate-every"):
        space.run_space_curves([f"--run={run}"])
