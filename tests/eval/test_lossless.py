"""Is it the same: several tasks and decoders, in several types of numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recorded import make_job, make_target, write_inputs

from eval.decoders import Ours, make_decoder
from eval.experiments import generation
from eval.report import build

SHORT = ["--max-new-tokens=12", "--threads=1"]
WORDS = {"id": "c", "turns": ["Who trims the wick?", "And when?"]}


def inputs(folder):
    """A shape and two tasks: two questions on a passage, and a chat."""
    model, data, task = write_inputs(folder, 2)
    (folder / "words.jsonl").write_text(json.dumps(WORDS) + "\n")
    return [model, data, f"--tasks={task.partition('=')[2]},{folder / 'words.jsonl'}", *SHORT]


def test_every_task_type_and_decoder_is_compared(tmp_path, capsys):
    out = tmp_path / "r" / "same.json"
    some = ["--decoders=ours_full,ours_paper", "--dtypes=float64,float32", f"--out={out}"]
    generation.run_lossless([*inputs(tmp_path), *some])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(one["task"], one["dtype"], one["found"]) for one in shown] == [
        (task, dtype, name)
        for dtype in ("float64", "float32")
        for task in ("task.jsonl", "words.jsonl")
        for name in ("ours_full", "ours_paper")
    ]
    assert [one["answers"] for one in shown] == [2, 2, 1, 1] * 2
    exact = [one for one in shown if one["dtype"] == "float64"]
    assert all(one["identical"] == one["answers"] and not one["differences"] for one in exact)
    assert all(one["acceptance_length"] >= 1 for one in shown)
    document = json.loads(out.read_text())
    assert document["comparisons"] == shown
    assert str(tmp_path) not in out.read_text()
    names = sorted(path.name for path in out.parent.glob("*.rows.jsonl"))
    assert names == ["same-float32.rows.jsonl", "same-float64.rows.jsonl"]
    text = build.all_results(out.parent)
    assert "| task.jsonl | float64 | ours, trees and memory | 2 | 2 |" in text


def test_a_second_run_computes_nothing_again(tmp_path, monkeypatch):
    out = tmp_path / "same.json"
    arguments = [*inputs(tmp_path), "--dtypes=float64", f"--out={out}"]
    generation.run_lossless(arguments)
    first = json.loads(out.read_text())["comparisons"]

    def never(*_args, **_kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr("eval.experiments.speed.run_once", never)
    generation.run_lossless(arguments)
    assert json.loads(out.read_text())["comparisons"] == first


def test_the_former_command_line_still_works(tmp_path, capsys):
    generation.run_lossless(
        [*write_inputs(tmp_path, 1), *SHORT, "--dtypes=float64", "--decoder=ours_paper"]
    )
    (only,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (only["found"], only["wanted"], only["identical"]) == ("ours_paper", "generate", 1)


def test_a_type_that_the_processor_lacks_is_told(tmp_path, monkeypatch, capsys):
    compare_tasks = generation.compare_tasks

    def without_halves(options, dtype, sets):
        if dtype == "float16":
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nmore")
        return compare_tasks(options, dtype, sets)

    monkeypatch.setattr(generation, "compare_tasks", without_halves)
    arguments = [*inputs(tmp_path), "--limit=1"]
    generation.run_lossless([*arguments, "--dtypes=float16,float64"])
    printed = capsys.readouterr().out
    assert {one["dtype"] for one in json.loads(printed.splitlines()[-1])} == {"float64"}
    assert 'float16 cannot be computed here: "addmm_impl_cpu_" not implemented' in printed
    monkeypatch.setattr(generation, "compare_tasks", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generation.run_lossless(arguments)
    with pytest.raises(SystemExit, match="no dtype 'float8'"):
        generation.run_lossless([*arguments, "--dtypes=float8"])


def test_a_wrong_answer_is_found_with_its_place(tmp_path, monkeypatch, capsys):
    run = Ours.run

    def wrong(self, job):
        found = run(self, job)
        tokens = (*found.token_ids[:2], (found.token_ids[2] + 1) % 97, *found.token_ids[3:])
        return replace(found, token_ids=tokens)

    monkeypatch.setattr(Ours, "run", wrong)
    generation.run_lossless([*inputs(tmp_path), "--limit=1", "--dtypes=float64"])
    for one in json.loads(capsys.readouterr().out.splitlines()[-1]):
        assert one["identical"] == 0
        (difference,) = one["differences"]
        assert difference["place"] == 2
        assert difference["gap"] > 0


def test_what_does_not_fit_is_left_out_and_counted(tmp_path, capsys):
    model, data, _ = write_inputs(tmp_path, 2)
    path = tmp_path / "long.jsonl"
    passage = {"title": "", "text": "The wick burns. " * 900}
    long = {"id": "long", "question": "Who?", "passages": [passage], "answer": ""}
    path.write_text(json.dumps(long) + "\n" + json.dumps(WORDS) + "\n")
    generation.run_lossless([model, data, f"--tasks={path}", *SHORT, "--dtypes=float64"])
    (only,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (only["answers"], only["left_out"]) == (1, 1)


def test_a_first_difference_has_its_gap():
    target = make_target()
    job = make_job(eos_ids=frozenset(), max_new_tokens=6)
    wanted = make_decoder("generate", target).run(job).token_ids
    other = (*wanted[:3], (wanted[3] + 1) % 97, *wanted[4:])
    difference = generation.first_difference(target, job, other, wanted)
    assert (difference["place"], difference["wanted"]) == (3, wanted[3])
    assert difference["gap"] >= difference["top_2_gap"] > 0
    assert generation.first_difference(target, job, wanted[:2], wanted)["gap"] is None
