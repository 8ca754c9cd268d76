from itertools import pairwise
from time import perf_counter

from hypothesis import given
from hypothesis import strategies as st

from ragaccel.engine.cost import PassCost


def test_before_any_pass_more_rows_cost_a_little_more():
    cost = PassCost(0.05)
    assert cost.seconds(1) == 1.0
    assert cost.seconds(1) < cost.seconds(7) < cost.seconds(64) < cost.seconds(400)


def test_it_follows_what_was_measured():
    cost = PassCost(0.05)
    for _ in range(9):
        cost.observe(1, 0.010)
        cost.observe(16, 0.015)
    assert cost.seconds(1) == 0.010
    assert abs(cost.seconds(16) - 0.015) < 1e-9
    assert 0.010 < cost.seconds(4) < 0.015


def test_one_slow_pass_does_not_count():
    cost = PassCost(0.05)
    cost.observe(1, 3.0)
    for _ in range(5):
        cost.observe(1, 0.010)
    assert cost.seconds(1) == 0.010


def test_old_passes_are_forgotten():
    cost = PassCost(0.05)
    for seconds in [0.010] * 40 + [0.030] * 20:
        cost.observe(1, seconds)
    assert cost.seconds(1) == 0.030


def test_a_width_that_was_slow_once_by_chance_is_tried_again():
    cost = PassCost(0.05)
    cost.observe(32, 5.0)
    for _ in range(70):
        assert cost.seconds(1) <= cost.seconds(32)
        cost.observe(1, 0.010)
    assert cost.seconds(32) < 0.03


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
