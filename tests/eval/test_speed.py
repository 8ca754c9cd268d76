from __future__ import annotations

import json

import pytest
from recorded import make_job, make_target, write_inputs

from eval.decoders import DEFAULT, Ours, make_decoder
from eval.experiments import cost, speed
from eval.runner import ResultsLog
from ragaccel.drafting import TrieDrafter

ARGUMENTS = ["--max-new-tokens=40", "--threads=1"]
COSTS = "--cost-repeats=1"


def test_a_run_ends_in_one_document_of_all_decoders(tmp_path, capsys):
    out = f"--out={tmp_path / 'r' / 'x.json'}"
    speed.run_speed([*write_inputs(tmp_path), *ARGUMENTS, COSTS, out])
    printed = capsys.readouterr()
    decoders = json.loads(printed.out.splitlines()[-1])
    assert list(decoders) == list(DEFAULT)
    for figures in decoders.values():
        assert figures["tokens_per_second"] > 0
        assert figures["ratio"] > 0
        assert figures["ratio_generate"] > 0
        assert figures["end_to_end"]["ratio"] > 0
        assert figures["examples"] == 3
        assert figures["identical_to_generate"] == 1.0
    assert decoders["ours_plain"]["ratio"] == decoders["generate"]["ratio_generate"] == 1.0
    assert decoders["ours_paper"]["acceptance_length"] > 2
    drafting = [name for name, figures in decoders.items() if "efficiency" in figures]
    assert drafting == ["ours", "ours_paper"]
    assert all(decoders[name]["efficiency"] > 0 for name in drafting)
    assert "3/3" in printed.err
    document = json.loads((tmp_path / "r" / "x.json").read_text())
    assert document["decoders"] == decoders
    assert list(document["milliseconds"]) == [str(rows) for rows in cost.ROW_COUNTS]
    assert document["settings"]["forced"] is True
    assert {"processor", "cores", "torch", "transformers"} <= document["machine"].keys()
    assert {"command", "commit", "date"} <= document["run"].keys()


def test_a_stopped_run_goes_on_and_a_changed_one_is_refused(tmp_path, capsys, monkeypatch):
    arguments = [*write_inputs(tmp_path), *ARGUMENTS, COSTS, f"--out={tmp_path / 'x.json'}"]
    run_once, calls = speed.run_once, []

    def stopping(*args, **kwargs):
        calls.append(1)
        if len(calls) > 12:  # the warm-up, one example whole, the next begun
            raise KeyboardInterrupt
        return run_once(*args, **kwargs)

    monkeypatch.setattr(speed, "run_once", stopping)
    with pytest.raises(KeyboardInterrupt):
        speed.run_speed(arguments)
    rows = (tmp_path / "x.rows.jsonl").read_text().splitlines()
    assert len(rows) == 1 + 1 + len(DEFAULT)  # settings, costs of passes
    monkeypatch.setattr(speed, "run_once", run_once)
    speed.run_speed(arguments)
    assert (tmp_path / "x.rows.jsonl").read_text().splitlines()[: len(rows)] == rows
    (resumed,) = json.loads((tmp_path / "x.json").read_text())["resumed"]
    assert resumed == {"round": 0, "example": "1"}
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"other settings .*repeats"):
        speed.run_speed([*arguments, "--repeats=2"])


def test_a_group_that_was_cut_short_is_measured_anew(tmp_path, capsys):
    some = ["--decoders=ours_plain,generate", f"--out={tmp_path / 'x.json'}"]
    arguments = [*write_inputs(tmp_path), *ARGUMENTS, COSTS, *some]
    speed.run_speed(arguments)
    path = tmp_path / "x.rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))  # of the last example, the last decoder
    speed.run_speed(arguments)
    assert "1/1 round 1 example 2" in capsys.readouterr().err
    document = json.loads((tmp_path / "x.json").read_text())
    assert [one["runs"] for one in document["decoders"].values()] == [3, 3]
    again = path.read_text().splitlines(keepends=True)
    assert again[: len(lines) - 2] == lines[:-2]
    assert len(again) == len(lines) + 1  # and that it was resumed


def test_no_round_knows_the_answers_of_the_one_before(tmp_path):
    target, made = make_target(), []

    class Noted(TrieDrafter):
        def draft(self, context, budget):
            made[-1] += 1
            return super().draft(context, budget)

    def make():
        made.append(0)
        return Noted()

    learning = Ours("learning", target, make, token_budget=12)
    results_log = ResultsLog(None, {})
    jobs = [make_job(job_id="a"), make_job(job_id="b")]
    speed.run_rounds(target, jobs, [learning], results_log, repeats=2, forced=True)
    assert len(made) == 1 + 2  # for the warm-up, then for each round
    assert all(made)
    passes = {(row["round"], row["example"]): row["passes"] for row in results_log.rows}
    assert passes[0, "a"] == passes[1, "a"]


def test_as_published_twenty_tokens_are_fed_at_most():
    job = make_job((*range(20, 60), 1))
    paper = make_decoder("ours_paper", make_target())
    with paper.teacher_forced(job):
        assert max(paper.run(job).rows_of_each) == 20


def test_every_decoder_is_first_and_follows_every_other():
    orders = ["".join(speed.in_turn("abc", number)) for number in range(7)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac", "abc"]


def test_examples_of_the_same_id_are_refused(tmp_path):
    arguments = write_inputs(tmp_path, 2)
    task = tmp_path / "task.jsonl"
    task.write_text(task.read_text().replace('"id": "1"', '"id": "0"'))
    with pytest.raises(SystemExit, match="2 examples have the id '0'"):
        speed.run_speed(arguments)


def test_real_answers_are_compared_too(tmp_path, capsys):
    some = ["--real", "--dtype=float64", "--limit=1", "--decoders=ours,generate"]
    speed.run_speed([*write_inputs(tmp_path), *ARGUMENTS, *some])
    decoders = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert decoders["ours"]["identical_to_generate"] == 1.0


def test_missing_things_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    with pytest.raises(SystemExit, match="no task 'poems': take one of chat, clapnq, code, demo"):
        speed.run_speed(["--task=poems"])
    with pytest.raises(SystemExit, match="RAGACCEL_DATA"):
        speed.run_speed(["--task=llma"])
    with pytest.raises(SystemExit, match=r"holds no rag/llma"):
        speed.run_speed(["--task=llma", f"--data={tmp_path}"])
    with pytest.raises(SystemExit, match="no shape 'gpt-9': take one of"):
        speed.run_speed([*write_inputs(tmp_path), "--model=random:gpt-9"])
    with pytest.raises(SystemExit, match="no decoder 'luck'"):
        speed.run_speed([*write_inputs(tmp_path), "--decoders=luck"])


def test_a_decoder_that_leaves_the_recording_is_caught(tmp_path, monkeypatch):
    def forget(*_args, **_kwargs):
        return None

    monkeypatch.setattr("eval.measure._force", forget)
    with pytest.raises(RuntimeError, match="left the recording"):
        speed.run_speed([*write_inputs(tmp_path), *ARGUMENTS, COSTS])


def test_rows_cost_grows_a_table(tmp_path, capsys):
    arguments = [a for a in write_inputs(tmp_path) if not a.startswith("--task")]
    cost.run_rows_cost([*arguments, "--context=20", "--repeats=1", "--threads=1"])
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(table) == [str(rows) for rows in cost.ROW_COUNTS]
    assert min(table.values()) > 0
