"""Latencies: the estimate for a width, the profiles, and the file that stores them."""

import json
import os
import random
import threading
from itertools import pairwise

import pytest
import torch
from damaged_files import DAMAGE
from hypothesis import given, strategies as st
from space_models import adapted_model, masks_of
from tiny_models import make_tiny_model

from ragaccel.decoding import DraftTree, Request, Sampling, select_drafts_jointly
from ragaccel.drafting import path_probs
from ragaccel.engine import (
    Engine,
    LatencyProfile,
    PassCost,
    PassProfile,
    measure_passes,
    measure_threads,
    sampling_mode,
)
from ragaccel.models import HuggingFaceModel

TABLE = {1: 0.010, 16: 0.012, 64: 0.020}


# The seconds of a pass by its rows.


def test_estimates_follow_what_was_measured():
    cost = PassCost(0.05)
    assert cost.seconds(1) == 1.0
    assert cost.seconds(1) < cost.seconds(7) < cost.seconds(64) < cost.seconds(400)
    for _ in range(9):
        cost.observe(1, 0.010)
        cost.observe(16, 0.015)
    assert cost.seconds(1) == pytest.approx(0.010, rel=0.05)
    assert cost.seconds(16) == pytest.approx(0.015, rel=0.05)
    assert 0.010 < cost.seconds(4) < 0.015


def test_slow_passes_do_not_count_for_ever():
    cost = PassCost(0.05)
    cost.observe(1, 3.0)
    for _ in range(40):
        cost.observe(1, 0.010)
    assert cost.seconds(1) == pytest.approx(0.010), "one slow pass does not count"
    for _ in range(64):
        cost.observe(1, 0.030)
    assert cost.seconds(1) == pytest.approx(0.030), "old passes are forgotten"
    cost = PassCost(0.05)
    cost.observe(32, 5.0)
    for _ in range(70):
        assert cost.seconds(1) <= cost.seconds(32)
        cost.observe(1, 0.010)
    assert cost.seconds(32) < 0.05, "a width that was slow once is tried again"


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10)), max_size=40))
def test_more_rows_never_cost_less(passes):
    cost = PassCost(0.02)
    for rows, seconds in passes:
        cost.observe(rows, seconds)
    table = [cost.seconds(rows) for rows in range(1, 320)]
    assert all(seconds > 0 for seconds in table)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(table))


def disturbances(rng):
    """Slow-down factors of passes on a busy machine, in bursts."""
    burst = 0
    while True:
        burst = burst - 1 if burst else rng.choice([0] * 30 + [rng.randrange(5, 40)])
        yield max(1.0, rng.lognormvariate(0.3, 0.8)) * (6.0 if burst else 1.0)


def widths_chosen(seed, row_share, disturbed, passes=300, cost=None):
    """The draft tokens verified in each pass of an answer that is mostly a long copy."""
    rng = random.Random(seed)
    slower = disturbances(random.Random(seed))
    cost = cost or PassCost(0.04)
    widths = []
    for _ in range(passes):
        copies = rng.random() < 0.8
        tree = DraftTree.chain(range(32), path_probs(8, 31)) if copies else DraftTree.chain([0])
        (kept,) = select_drafts_jointly([tree], cost.seconds, [1])
        pass_seconds = 0.003 * (1.0 + row_share * (len(kept) - 1))
        cost.observe(len(kept), pass_seconds * (next(slower) if disturbed else 1.0))
        if copies:
            widths.append(kept.num_drafts)
    return widths


def test_a_busy_machine_does_not_make_drafts_narrow_but_expensive_rows_do():
    for seed in range(10):
        for row_share in (0.02, 0.04):
            quiet = widths_chosen(seed, row_share, disturbed=False)
            busy = widths_chosen(seed, row_share, disturbed=True)
            assert sum(width < 4 for width in busy) <= 0.05 * len(busy), seed
            assert sum(busy) > 0.6 * sum(quiet)
        widths = widths_chosen(seed, 0.8, disturbed=False)
        assert sum(width > 3 for width in widths) < 0.15 * len(widths)
    slow = PassCost(0.04)
    for _ in range(15):
        slow.observe(16, 0.100)
    assert min(widths_chosen(0, 0.04, disturbed=False, passes=1000, cost=slow)[-100:]) >= 4


# Profiles.


def test_sampling_modes_are_distinct():
    def mode(**settings):
        sampling = Sampling(**settings.pop("sampling", {}))
        return sampling_mode(Request((1,), sampling=sampling, **settings))

    modes = [
        mode(), mode(sampling={"temperature": 1.0}),
        mode(sampling={"temperature": 1.0, "top_p": 0.9}), mode(repetition_penalty=1.2),
        mode(processors=(str,)),
    ]  # fmt: skip
    assert len(set(modes)) == len(modes)
    assert mode(sampling={"top_p": 0.5}) == "greedy"  # filters nothing that would be taken


def test_a_new_profile_starts_from_the_nearest():
    profile = LatencyProfile(0.04)
    profile.replace("greedy", TABLE)
    for attended, sequences in ((0, 1), (5000, 1), (100, 8), (5000, 8)):
        assert profile.of("sampled", attended, sequences).seconds(16) == pytest.approx(0.012)
    profile.of("sampled").observe(16, 0.050)
    profile.of("greedy", 5000).observe(16, 0.090)
    assert profile.of("greedy", 9000).seconds(16) == pytest.approx(0.090, rel=0.2)
    assert profile.of("greedy", 1024).seconds(16) == pytest.approx(0.012)
    assert profile.of("greedy", 4097) is profile.of("greedy", 8192)
    assert profile.of("greedy", 1, 3) is profile.of("greedy", 1000, 4)
    assert PassProfile.of("greedy", 1025, 5).name == "greedy, 2048 tokens, x8"


def test_models_on_one_device_have_distinct_keys():
    keys = {
        HuggingFaceModel(make_tiny_model(family, **config)).latency_key
        for family, config in (("llama", {}), ("mistral", {}), ("llama", {"hidden_size": 64}))
    }
    assert len(keys) == 3
    assert all(key.isascii() and " " not in key and "/" not in key for key in keys)


# The file.


@pytest.fixture
def path(tmp_path):
    profile = LatencyProfile(0.04, tmp_path / "new" / "costs.json")
    profile.replace("greedy", TABLE)
    profile.threads = 1
    assert profile.save()
    return profile.path


def test_measurements_are_there_in_the_next_run_until_passes_correct_them(path):
    profile = LatencyProfile(0.04, path)
    cost = profile.of("greedy")
    assert {rows: cost.seconds(rows) for rows in TABLE} == pytest.approx(TABLE)
    assert 0.010 < cost.seconds(8) < 0.012
    assert cost.seconds(128) > 0.020
    assert os.listdir(path.parent) == ["costs.json"]
    for _ in range(40):
        cost.observe(16, 0.030)
        cost.observe(1, 0.010)
    assert cost.seconds(16) == pytest.approx(0.030, rel=0.05)
    profile.of("greedy, processed").observe(4, 0.01)
    profile.save()
    assert LatencyProfile(0.04, path).of("greedy").seconds(16) == pytest.approx(0.030, rel=0.1)
    assert list(json.loads(path.read_text())["seconds"]) == ["greedy"], "not a caller's processors"


BAD = [
    {"format": "other"}, {"seconds": []}, {"seconds": None},
    *({"seconds": {"greedy": rows}} for rows in (
        {"1": -1}, {"1": float("nan")}, {"0": 1.0}, {"1e9": 1.0}, {"1": "x"}, {"1": 10**400}
    )),
    *({"threads": threads} for threads in ("2", 0, -1, 1.5, [1])),
]  # fmt: skip


@pytest.mark.parametrize("damage", [*DAMAGE, *map(str, BAD)])
def test_a_damaged_file_is_ignored_and_replaced(path, damage):
    if damage in DAMAGE:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    else:
        changes = BAD[[*map(str, BAD)].index(damage)]
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    profile = LatencyProfile(0.04, path)
    assert (profile.of("greedy").seconds(1), profile.threads) == (1.0, None)
    assert profile.save()
    assert json.loads(path.read_text())["seconds"] == {}


def test_a_write_that_fails_does_no_harm_and_leaves_the_old_file(path, monkeypatch):
    before = path.read_text()
    profile, nowhere = LatencyProfile(0.04, path), LatencyProfile(0.04, path / "costs.json")
    profile.replace("greedy", {1: 1.0})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert not any(one.save() for one in (profile, nowhere, LatencyProfile(0.04)))
    assert path.read_text() == before
    assert len(list(path.parent.iterdir())) == 1


def test_the_file_is_written_after_some_hundred_passes_by_any_thread(tmp_path):
    profile = LatencyProfile(0.04, tmp_path / "costs.json")

    def work(passes=100):
        for _ in range(passes):
            profile.of("greedy").observe(4, 0.01)
            profile.save_if_due()

    work(255)
    assert not profile.path.exists()
    work(1)
    assert profile.path.exists()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert profile.of("greedy").num_passes == 656
    assert json.loads(profile.path.read_text())["seconds"]["greedy"]["4"] == pytest.approx(0.01)


# Measured through the engine.


def test_passes_and_threads_are_measured_through_the_engine(path):
    engine = Engine(HuggingFaceModel(make_tiny_model("llama")), latency_file=path)
    assert engine.latency_profile.threads == 1
    usual, seen, calls, forward = torch.get_num_threads(), [], [], engine.model.forward

    def watched(rows, keep):
        seen.append(torch.get_num_threads())
        return forward(rows, keep)

    engine.model.forward = watched
    torch.set_num_threads(2)
    try:
        assert list(measure_threads(engine, context=20, repeats=1)) == [2, 1]
        assert set(seen) == {1, 2}
        seen.clear()
        before = engine.latency_profile.of("greedy").num_passes
        seconds = measure_passes(
            engine, context=20, repeats=2, rows=(1, 4, 64), advance=lambda: calls.append(1)
        )
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
    assert list(seconds) == [1, 4, 64]
    assert all(value > 0 for value in seconds.values())
    assert len(calls) == 9
    assert engine.latency_profile.of("greedy").num_passes == before + 9


def test_what_mask_tokens_add_is_learned_apart_and_forgotten_slowly():
    cost = PassCost(0.02)
    cost.observe(8, 0.011, has_masks=True)  # nothing to compare with: it counts as any other
    assert (cost.mask_seconds, cost.num_passes) == (0.0, 1)
    for _ in range(3):
        cost.observe(8, 0.010)
    before = cost.by_rows()
    cost.observe(8, 0.014, has_masks=True)
    assert cost.mask_seconds == pytest.approx(0.004)
    for _ in range(20):
        cost.observe(8, 0.012, has_masks=True)
    assert cost.mask_seconds == pytest.approx(0.002, rel=0.01)
    assert cost.by_rows() == before
    for _ in range(400):
        cost.observe(1, 0.009)
    assert cost.mask_seconds < 0.0001, "they are tried again"


@pytest.mark.parametrize("first", ["plain", "masks"])
def test_passes_with_mask_tokens_cost_as_much_as_they_take(first):
    engine = Engine(adapted_model("llama", hidden_size=256))
    ids, request = masks_of(engine.model), Request((1, 2), max_new_tokens=4)
    ways = {"plain": (), "masks": ids}
    for way in (first, *ways, *ways):
        measure_passes(engine, context=20, repeats=4, rows=(8,), mask_ids=ways[way])
    verifier = engine.open(request)
    assert verifier.mask_seconds() == engine.latency_profile.of("greedy").mask_seconds > 0
    assert verifier.mask_seconds() < 20 * verifier.cost_seconds(8)
    verifier.close()
