import numpy as np
import pytest

from ragaccel.draft.calibration import Calibration
from ragaccel.draft.recycling import Adjacency
from ragaccel.draft.restoring import checked
from ragaccel.draft.successors import ROW_BYTES, WIDTH


def learned(max_bytes=1 << 20, num=200):
    adjacency, rng = Adjacency(max_bytes), np.random.default_rng(0)
    for _ in range(num // 20):
        tokens = rng.integers(0, 90, 20, dtype=np.int32)
        adjacency.learn(tokens, rng.integers(0, 90, (20, 8), dtype=np.int32))
    return adjacency


def test_an_array_is_checked_and_copied():
    state = {"a": np.array([1, 2, 3], np.int32)}
    state["a"].flags.writeable = False
    found = checked(state, "a", np.int32, (None,), low=1, high=3)
    found[0] = 9
    assert state["a"][0] == 1
    for shape, low, high in [((3,), 2, 3), ((3,), 1, 2), ((2,), 1, 3), ((3, None), 1, 3)]:
        with pytest.raises(ValueError, match=r"^a "):
            checked(state, "a", np.int32, shape, low=low, high=high)
    with pytest.raises(ValueError, match="lacks the array b"):
        checked(state, "b", np.int32, (None,), low=0, high=9)
    with pytest.raises(ValueError, match="a holds int32, not int64"):
        checked(state, "a", np.int64, (None,), low=0, high=9)


def test_an_adjacency_goes_on_as_if_it_had_never_been_away():
    adjacency, other = learned(), Adjacency(1 << 20)
    other.restore(adjacency.state())
    for one in (adjacency, other):
        one.learn(np.array([3, 95], np.int32), np.array([[7, 8], [1, 2]], np.int32))
    for one, another in zip(adjacency.table, other.table, strict=True):
        assert np.array_equal(one, another)
        assert one.dtype == another.dtype


def test_a_state_does_not_change_later():
    adjacency = learned()
    state = adjacency.state()
    before = {name: array.copy() for name, array in state.items()}
    adjacency.learn(np.arange(90, dtype=np.int32), np.full((90, 8), 5, np.int32))
    assert all(np.array_equal(state[name], before[name]) for name in state)
    calibration = Calibration()
    state = calibration.state()
    calibration._by_source += 1
    assert not state["by_source"].any()


def test_of_too_many_rows_the_first_are_taken_in():
    adjacency, small = learned(), Adjacency(10 * ROW_BYTES)
    small.restore(adjacency.state())
    assert small.num_rows == 10
    assert small.table.token_ids.shape == (10, WIDTH)
    for name in ("tokens", "counts", "totals"):
        assert np.array_equal(small.state()[name], adjacency.state()[name][:10])


def test_what_is_refused_leaves_all_as_it_was():
    adjacency = learned()
    table = adjacency.table
    with pytest.raises(ValueError, match="from 0 to 49"):
        adjacency.restore(adjacency.state(), vocab_size=50)
    assert adjacency.table is table
    calibration = Calibration()
    state = calibration.state()
    state["by_depth"][0, 0] = 4
    with pytest.raises(ValueError, match="by_depth"):
        calibration.restore(state)
    assert np.all(calibration.odds == 1)


def test_rows_that_no_learning_makes_are_refused():
    adjacency = learned()
    for change in (lambda counts: counts[:, ::-1], lambda counts: counts * 1.01):
        state = adjacency.state()
        state["counts"] = change(state["counts"])
        with pytest.raises(ValueError, match="not in order, or more"):
            adjacency.restore(state)


def test_odds_follow_from_the_corrections():
    calibration, state = Calibration(), Calibration().state()
    state["by_source"][1], state["by_length"][1, 2], state["by_depth"][1, 3] = 2.0, 0.5, -0.25
    state["by_depth"][1, 4] = 3.0
    calibration.restore(state)
    assert calibration.odds[1, 2, 3] == pytest.approx(np.exp(2.25))
    assert calibration.odds[1, 2, 4] == pytest.approx(np.exp(3)), "bounded"
    assert calibration.odds[0, 2, 3] == 1
    assert {name: a.tolist() for name, a in calibration.state().items()} == {
        name: a.tolist() for name, a in state.items()
    }
