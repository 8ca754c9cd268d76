"""The two commands that make all results: whether every step could start, and what they leave."""

from __future__ import annotations

import json
import sys

import pytest

from eval import runner, suites
from eval.__main__ import find_run


def parsed(step):
    """Have the step's own run read its arguments, as its process would."""
    module = sys.modules[find_run(step.run).__module__]
    parse = getattr(module, f"parse_{step.run}", None) or module.parse
    return parse(list(step.arguments))


SUITES = ("quick", "full")


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("with_data", [True, False])
def test_every_step_is_a_command_that_there_is(suite, with_data, tmp_path, monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    (tmp_path / "data" / "rag").mkdir(parents=True)
    asked = [f"--out={tmp_path}", *[f"--data={tmp_path / 'data'}"] * with_data]
    made = list(getattr(suites, f"{suite}_steps")(getattr(suites, f"parse_{suite}")(asked)))
    assert len({step.out for step in made}) == len(made) > 5
    for step in made:
        options = parsed(step)
        assert (options.json if step.run == "replay" else options.out) == step.out
        assert step.out.parent == tmp_path
        if "registry" not in step.run:
            assert options.data == (tmp_path / "data" if with_data else None)


def test_without_data_the_full_run_says_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    names = {step.out.stem for step in suites.full_steps(suites.parse_full([f"--out={tmp_path}"]))}
    assert "reader-demo" in names
    assert not names & {name for name, _, _ in suites.WITH_DATA}
    assert "left out" in capsys.readouterr().err


@pytest.mark.parametrize("suite", SUITES)
def test_a_data_folder_that_is_none_is_an_error_before_anything_is_timed(
    suite, tmp_path, monkeypatch
):
    ran = []
    monkeypatch.setattr(runner, "run_process", lambda *given: ran.append(given[0]) or 1)
    with pytest.raises(SystemExit, match="holds no rag"):
        find_run(suite)([f"--out={tmp_path}", f"--data={tmp_path / 'nowhere'}"])
    assert "speed" not in ran


def test_only_what_is_named_is_made(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(runner, "run_process", lambda *_given: made.append(_given) or 1)
    with pytest.raises(SystemExit, match=r"no reader-demo\.json, quality\.json: run"):
        suites.run_full([f"--out={tmp_path}", "--only=reader-demo,quality"])
    assert [run for run, *_ in made] == ["speed", "quality", "report"]


def test_the_quick_run_times_three_rows_of_the_smallest_shape(tmp_path):
    timed = [
        one
        for one in suites.quick_steps(suites.parse_quick([f"--out={tmp_path}"]))
        if one.run == "speed"
    ]
    (asked,) = [one.arguments for one in timed]
    assert {"--limit=3", "--model=random:llama-135m", "--max-new-tokens=64"} <= set(asked)


def test_a_report_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_process", lambda *_given: 1)
    with pytest.raises(SystemExit, match="the report failed"):
        runner.run_and_report([], "eval quick", tmp_path)


def test_what_was_cut_short_is_made_again(tmp_path, monkeypatch, capsys):
    step = runner.Step("quality", (), tmp_path / "quality.json")
    monkeypatch.setattr(runner, "run_process", lambda *_given: step.out.write_text("{}") and 0)
    step.out.write_text('{"kind": "qua')
    assert runner.done(step)
    assert step.out.read_text() == "{}"
    assert "skipped" not in capsys.readouterr().err
    assert runner.done(step)
    assert "skipped" in capsys.readouterr().err


def test_a_report_is_written_even_where_a_step_failed(tmp_path, monkeypatch):
    reported = []

    def run_process(module, arguments, _seconds):
        if module == "report":
            reported.extend(arguments)
            return 0
        (out,) = [one.partition("=")[2] for one in arguments if one.startswith("--out=")]
        if module == "llma_sweep":
            return 1
        with open(out, "w") as file:
            json.dump({}, file)
        return 0

    monkeypatch.setattr(runner, "run_process", run_process)
    with pytest.raises(SystemExit, match=r"no llma-sweep\.json: run the same command again"):
        suites.run_quick([f"--out={tmp_path}"])
    assert reported == [f"--results={tmp_path}"]
