"""The fuzzers run, draw the same cases each time, and tell what breaks a promise."""

import random

from eval.robustness import model_folders, settings
from eval.robustness.stand_ins import save_tiny_model


def test_settings_are_fuzzed(run_trial):
    code, document = run_trial("fuzz_settings", "--count", "40", "--seed", "3")
    assert (code, document["broken"]) == (0, [])
    assert sum(document["counts"].values()) == 40


def test_a_broken_promise_is_told(monkeypatch, run_trial):
    def cases(llm, rng, folder):
        yield "fine", lambda: None
        yield "raw", lambda: [][1]

    monkeypatch.setattr(settings, "wild_cases", cases)
    code, document = run_trial("fuzz_settings", "--count", "2")
    assert code == 1
    assert document["counts"] == {"answered": 1, "raw IndexError": 1}


def test_model_folders_are_fuzzed(run_trial):
    code, document = run_trial("fuzz_model_folders", "--count", "4", "--seed", "1")
    assert (code, document["broken"]) == (0, [])
    assert sum(document["counts"].values()) == 4


def test_damage_is_the_same_for_the_same_numbers(tmp_path):
    files = {p.name: p.read_bytes() for p in sorted(save_tiny_model(tmp_path).iterdir())}
    first, again = (
        [model_folders.damage(files, rng) for _ in range(200)]
        for rng in (random.Random(5), random.Random(5))
    )
    assert first == again
    assert sum(data != files[file] for file, data in first) > 190
    assert {file for file, _ in first} == set(files)


def test_a_floor_loses_no_more_than_it_may():
    from eval.experiments.answers import fit_floor, share_below

    scores = [n / 100 for n in range(1, 101)]
    assert share_below(scores, 0.05) == 0.04
    assert fit_floor([scores], 0.05) == 0.06
    assert fit_floor([scores, [0.03] * 10], 0.05) == 0.03
