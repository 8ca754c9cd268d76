import json
import os
import threading

import pytest
import torch
from tiny_models import make_tiny_model

from ragaccel.decoding import Request, Sampling
from ragaccel.engine import (
    Engine,
    LatencyProfile,
    PassProfile,
    measure_passes,
    measure_threads,
    sampling_mode,
)
from ragaccel.models import HuggingFaceModel

TABLE = {1: 0.010, 16: 0.012, 64: 0.020}


def test_measurements_are_there_in_the_next_run(tmp_path):
    path = tmp_path / "new" / "costs.json"
    costs = LatencyProfile(0.04, path)
    costs.replace("greedy", TABLE)
    assert costs.save()
    again = LatencyProfile(0.04, path).of("greedy")
    assert {rows: again.seconds(rows) for rows in TABLE} == pytest.approx(TABLE)
    assert 0.010 < again.seconds(8) < 0.012
    assert again.seconds(128) > 0.020
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def test_passes_correct_what_was_kept(tmp_path):
    path = tmp_path / "costs.json"
    first = LatencyProfile(0.04, path)
    first.replace("greedy", TABLE)
    cost = first.of("greedy")
    for _ in range(40):
        cost.observe(16, 0.030)
        cost.observe(1, 0.010)
    assert cost.seconds(16) == pytest.approx(0.030, rel=0.05)
    first.save()
    assert LatencyProfile(0.04, path).of("greedy").seconds(16) == pytest.approx(0.030, rel=0.1)


def test_a_new_sampling_mode_begins_with_the_cost_of_greedy_passes(tmp_path):
    costs = LatencyProfile(0.04)
    costs.replace("greedy", TABLE)
    assert costs.of("sampled").seconds(16) == pytest.approx(0.012)
    costs.of("sampled").observe(16, 0.050)
    assert costs.of("greedy").seconds(16) == pytest.approx(0.012)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", "null", '{"format": "other", "seconds": {}}',
        '{"format": "ragaccel pass costs 1"}',
        '{"format": "ragaccel pass costs 1", "seconds": []}',
        '{"format": "ragaccel pass costs 1", "seconds": {"greedy": {"1": -1}}}',
        '{"format": "ragaccel pass costs 1", "seconds": {"greedy": {"1": NaN}}}',
        '{"format": "ragaccel pass costs 1", "seconds": {"greedy": {"0": 1.0}}}',
        '{"format": "ragaccel pass costs 1", "seconds": {"greedy": {"1e9": 1.0}}}',
        '{"format": "ragaccel pass costs 1", "seconds": {"greedy": {"1": "x"}}}', "\udcff",
        '{"format": "ragaccel pass costs 1", "seconds": {"greedy": {"1": 1%s}}}' % ("0" * 400),
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_profile_file_is_ignored(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    costs = LatencyProfile(0.04, path)
    assert costs.of("greedy").seconds(1) == 1.0
    assert costs.save()
    assert json.loads(path.read_text())["seconds"] == {}


def test_an_unwritable_path_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    costs = LatencyProfile(0.04, tmp_path / "file" / "costs.json")
    costs.replace("greedy", TABLE)
    assert not costs.save()
    assert not LatencyProfile(0.04).save()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    costs = LatencyProfile(0.04, path)
    costs.replace("greedy", TABLE)
    costs.save()
    before = path.read_text()

    def full(*names):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "replace", full)
    costs.replace("greedy", {1: 1.0})
    assert not costs.save()
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_the_file_is_written_after_some_hundred_passes_by_any_thread(tmp_path):
    path = tmp_path / "costs.json"
    costs = LatencyProfile(0.04, path)

    def work():
        for _ in range(100):
            costs.of("greedy").observe(4, 0.01)
            costs.save_if_due()

    work()
    assert not path.exists()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert costs.of("greedy").num_passes == 500
    assert json.loads(path.read_text())["seconds"]["greedy"]["4"] == pytest.approx(0.01)


def test_sampling_modes_are_distinct():
    def mode(**settings):
        sampling = Sampling(**settings.pop("sampling", {}))
        return sampling_mode(Request((1,), sampling=sampling, **settings))

    ways = [
        mode(), mode(sampling={"temperature": 1.0}),
        mode(sampling={"temperature": 1.0, "top_p": 0.9}), mode(repetition_penalty=1.2),
        mode(processors=(str,)),
    ]  # fmt: skip
    assert len(set(ways)) == len(ways)
    assert mode(sampling={"top_p": 0.5}) == "greedy"  # filters nothing that would be taken


def test_latencies_with_callers_processors_are_not_stored(tmp_path):
    path = tmp_path / "costs.json"
    costs = LatencyProfile(0.04, path)
    costs.of("greedy, processed").observe(4, 0.01)
    costs.of("greedy").observe(4, 0.01)
    costs.save()
    assert list(json.loads(path.read_text())["seconds"]) == ["greedy"]


def test_passes_are_measured_through_the_engine(tmp_path):
    engine = Engine(
        HuggingFaceModel(make_tiny_model("llama")), latency_file=tmp_path / "costs.json"
    )
    calls = []
    seconds = measure_passes(
        engine, context=20, repeats=2, rows=(1, 4, 64), advance=lambda: calls.append(1)
    )
    assert list(seconds) == [1, 4, 64]
    assert all(value > 0 for value in seconds.values())
    assert len(calls) == 9
    assert engine.latency_profile.of("greedy").num_passes == 9


def test_models_on_one_device_have_distinct_keys():
    keys = {
        HuggingFaceModel(make_tiny_model(family, **config)).latency_key
        for family, config in (("llama", {}), ("mistral", {}), ("llama", {"hidden_size": 64}))
    }
    assert len(keys) == 3
    assert all(key.isascii() and " " not in key and "/" not in key for key in keys)


def test_pass_profiles_are_distinct_and_start_from_the_nearest():
    costs = LatencyProfile(0.04)
    costs.replace("greedy", TABLE)
    for attended, sequences in ((5000, 1), (100, 8), (5000, 8)):
        assert costs.of("sampled", attended, sequences).seconds(16) == pytest.approx(0.012)
    costs.of("greedy", 5000).observe(16, 0.090)
    assert costs.of("greedy", 9000).seconds(16) == pytest.approx(0.090, rel=0.2)
    assert costs.of("greedy", 1024).seconds(16) == pytest.approx(0.012)
    assert costs.of("greedy", 4097) is costs.of("greedy", 8192)
    assert costs.of("greedy", 1, 3) is costs.of("greedy", 1000, 4)
    assert PassProfile.of("greedy", 1025, 5).name == "greedy, 2048 tokens, x8"


def test_the_number_of_threads_is_kept_and_used(tmp_path):
    path = tmp_path / "costs.json"
    costs = LatencyProfile(0.04, path)
    costs.threads = 1
    costs.save()
    engine = Engine(HuggingFaceModel(make_tiny_model("llama")), latency_file=path)
    assert engine.latency_profile.threads == 1
    usual, seen, forward = torch.get_num_threads(), [], engine.model.forward

    def watched(rows, keep):
        seen.append(torch.get_num_threads())
        return forward(rows, keep)

    engine.model.forward = watched
    torch.set_num_threads(2)
    try:
        seconds = measure_threads(engine, context=20, repeats=1)
        assert list(seconds) == [2, 1]
        assert set(seen) == {1, 2}
        del seen[:]
        measure_passes(engine, context=20, repeats=1, rows=(1,))
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("threads", ["2", 0, -1, 1.5, [1]])
def test_an_invalid_number_of_threads_is_ignored(tmp_path, threads):
    path = tmp_path / "costs.json"
    costs = LatencyProfile(0.04, path)
    costs.replace("greedy", TABLE)
    costs.save()
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "threads": threads}))
    assert LatencyProfile(0.04, path).threads is None
