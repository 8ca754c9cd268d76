import random
from itertools import pairwise
from time import perf_counter

import pytest
from hypothesis import given, strategies as st

from ragaccel.decoding import DraftTree, select_drafts
from ragaccel.drafting import path_probs
from ragaccel.engine import PassCost


def test_before_any_pass_more_rows_cost_a_little_more():
    cost = PassCost(0.05)
    assert cost.seconds(1) == 1.0
    assert cost.seconds(1) < cost.seconds(7) < cost.seconds(64) < cost.seconds(400)


def test_it_follows_what_was_measured():
    cost = PassCost(0.05)
    for _ in range(9):
        cost.observe(1, 0.010)
        cost.observe(16, 0.015)
    assert cost.seconds(1) == pytest.approx(0.010, rel=0.05)
    assert cost.seconds(16) == pytest.approx(0.015, rel=0.05)
    assert 0.010 < cost.seconds(4) < 0.015


def test_one_slow_pass_does_not_count():
    cost = PassCost(0.05)
    cost.observe(1, 3.0)
    for _ in range(5):
        cost.observe(1, 0.010)
    assert cost.seconds(1) == pytest.approx(0.010)


def test_old_passes_are_forgotten():
    cost = PassCost(0.05)
    for seconds in [0.010] * 40 + [0.030] * 64:
        cost.observe(1, seconds)
    assert cost.seconds(1) == pytest.approx(0.030)


def test_a_width_that_was_slow_once_is_tried_again():
    cost = PassCost(0.05)
    cost.observe(32, 5.0)
    for _ in range(70):
        assert cost.seconds(1) <= cost.seconds(32)
        cost.observe(1, 0.010)
    assert cost.seconds(32) < 0.05


def disturbances(rng):
    """Slow-down factors of passes on a busy machine, in bursts."""
    burst = 0
    while True:
        burst = burst - 1 if burst else rng.choice([0] * 30 + [rng.randrange(5, 40)])
        yield max(1.0, rng.lognormvariate(0.3, 0.8)) * (6.0 if burst else 1.0)


def widths_chosen(seed, row_share, disturbed, passes=300):
    """The draft tokens verified in each pass of an answer that is mostly a long copy."""
    rng = random.Random(seed)
    slower = disturbances(random.Random(seed))
    cost = PassCost(0.04)
    widths = []
    for _ in range(passes):
        copies = rng.random() < 0.8
        tree = DraftTree.chain(range(32), path_probs(8, 31)) if copies else DraftTree.chain([0])
        kept = select_drafts(tree, cost.seconds)
        pass_seconds = 0.003 * (1.0 + row_share * (len(kept) - 1))
        cost.observe(len(kept), pass_seconds * (next(slower) if disturbed else 1.0))
        if copies:
            widths.append(kept.num_drafts)
    return widths


@pytest.mark.parametrize("row_share", [0.02, 0.04])
def test_a_busy_machine_does_not_make_drafts_narrow(row_share):
    for seed in range(20):
        quiet = widths_chosen(seed, row_share, disturbed=False)
        busy = widths_chosen(seed, row_share, disturbed=True)
        assert sum(width < 4 for width in busy) <= 0.05 * len(busy), seed
        assert sum(busy) > 0.6 * sum(quiet)


def test_expensive_rows_make_drafts_narrow():
    for seed in range(10):
        widths = widths_chosen(seed, 0.8, disturbed=False)
        assert sum(width > 3 for width in widths) < 0.15 * len(widths)


def test_a_width_that_became_cheap_is_found_again():
    cost = PassCost(0.04)
    for _ in range(15):
        cost.observe(16, 0.100)
    tree = DraftTree.chain(range(32), path_probs(8, 31))
    widths = []
    for _ in range(1000):
        kept = select_drafts(tree, cost.seconds)
        cost.observe(len(kept), 0.003 * (1.0 + 0.04 * (len(kept) - 1)))
        widths.append(kept.num_drafts)
    assert min(widths[-100:]) >= 4


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10)), max_size=40))
def test_more_rows_never_cost_less(passes):
    cost = PassCost(0.02)
    for rows, seconds in passes:
        cost.observe(rows, seconds)
    table = [cost.seconds(rows) for rows in range(1, 320)]
    assert all(seconds > 0 for seconds in table)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(table))


def test_asking_is_cheap():
    cost = PassCost(0.02)
    cost.observe(3, 0.01)
    cost.seconds(1)
    started = perf_counter()
    for rows in range(1000):
        cost.seconds(rows % 64 + 1)
    assert perf_counter() - started < 0.1
