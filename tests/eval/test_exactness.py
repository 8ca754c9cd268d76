"""Which modes give the same answers, and what they cost."""

import json

import pytest
from recorded import make_job, make_target, write_inputs

from eval.experiments import generation, speed
from eval.experiments.generation import EXACTNESS_DECODERS, MUST, cost, identical
from eval.report import build


def test_a_run_compares_all_modes_and_is_reported(tmp_path, capsys):
    out = tmp_path / "r" / "x.json"
    arguments = [*write_inputs(tmp_path, 2), "--max-new-tokens=24", "--threads=1"]
    generation.run_exactness([*arguments, "--dtype=float64", f"--out={out}"])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads(out.read_text())
    assert document["pairs"] == shown["pairs"]
    assert [(pair["answers"], pair["identical"]) for pair in shown["pairs"]] == [(2, 2)] * 5
    assert list(document["decoders"]) == list(EXACTNESS_DECODERS)
    assert all(one["decode_seconds"] > 0 and one["passes"] > 0 for one in shown["costs"])
    assert {"processor", "torch"} <= document["machine"].keys()
    assert str(tmp_path) not in out.read_text()
    assert "| ours, exact | ours, exact and plain | 2 | 2 |" in build.all_results(tmp_path / "r")
    rows = out.with_suffix(".rows.jsonl").read_text()
    generation.run_exactness([*arguments, "--dtype=float64", f"--out={out}"])
    assert out.with_suffix(".rows.jsonl").read_text() == rows


def test_a_stopped_run_goes_on_with_the_next_example(tmp_path, monkeypatch, capsys):
    out = tmp_path / "x.json"
    arguments = [*write_inputs(tmp_path, 2), "--max-new-tokens=6", "--threads=1", f"--out={out}"]
    run_once, calls = speed.run_once, []

    def stopping(*given, **kwargs):
        calls.append(1)
        if (
            len(calls) > 2 * len(EXACTNESS_DECODERS) + 1
        ):  # the warm-up, one example whole, the next begun
            raise KeyboardInterrupt
        return run_once(*given, **kwargs)

    monkeypatch.setattr(speed, "run_once", stopping)
    with pytest.raises(KeyboardInterrupt):
        generation.run_exactness(arguments)
    path = out.with_suffix(".rows.jsonl")
    rows = path.read_text().splitlines()
    assert len(rows) == 1 + len(EXACTNESS_DECODERS)
    monkeypatch.setattr(speed, "run_once", run_once)
    generation.run_exactness(arguments)
    assert path.read_text().splitlines()[: len(rows)] == rows
    assert "1/1 round 1 example 1" in capsys.readouterr().err
    assert all(pair["answers"] == 2 for pair in json.loads(out.read_text())["pairs"])


def test_an_exact_answer_that_differs_is_an_error(tmp_path, monkeypatch):
    def differing(target, answers):
        return identical(target, [(job, found[:3], wanted) for job, found, wanted in answers])

    monkeypatch.setattr(generation, "identical", differing)
    with pytest.raises(SystemExit, match="2 exact answers differ"):
        generation.run_exactness([*write_inputs(tmp_path, 2), "--max-new-tokens=8", "--threads=1"])


def test_differences_have_place_and_gap():
    target, job = make_target(), make_job(eos_ids=frozenset(), max_new_tokens=6)
    rows = {MUST[0]: {("1", 0): {"token_ids": [3, 4]}}, MUST[1]: {("1", 0): {"token_ids": [3, 5]}}}
    figures = generation.compare(target, [job], rows, *MUST)
    (difference,) = figures["differences"]
    assert (figures["identical"], difference["place"], difference["found"]) == (0, 1, 4)
    assert difference["top_2_gap"] > 0


def test_costs_are_by_token():
    def row(tokens, decode, passes, prefill):
        seconds = {"decode_seconds": decode, "prefill_seconds": prefill}
        return {"tokens": tokens, "passes": passes, **seconds}

    rows = {
        "ours_exact": {("a", 0): row(10, 6.0, 6, 1.0), ("b", 0): row(20, 9.0, 9, 3.0)},
        "ours_tree": {("a", 0): row(20, 8.0, 10, 1.0), ("b", 0): row(20, 6.0, 5, 1.0)},
    }
    figures = cost(rows, "ours_exact", "ours_tree")
    assert figures["decode_seconds"] == pytest.approx(1.5)
    assert figures["prefill_seconds"] == pytest.approx(2.0)
    assert figures["passes"] == pytest.approx((15 / 30) / (15 / 40))
