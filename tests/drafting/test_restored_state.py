import numpy as np
import pytest

from ragaccel.drafting import Calibration, checked_array


def test_an_array_is_checked_and_copied():
    state = {"a": np.array([1, 2, 3], np.int32)}
    state["a"].flags.writeable = False
    found = checked_array(state, "a", np.int32, (None,), low=1, high=3)
    found[0] = 9
    assert state["a"][0] == 1
    for shape, low, high in [((3,), 2, 3), ((3,), 1, 2), ((2,), 1, 3), ((3, None), 1, 3)]:
        with pytest.raises(ValueError, match=r"^a "):
            checked_array(state, "a", np.int32, shape, low=low, high=high)
    with pytest.raises(ValueError, match="the array b is missing"):
        checked_array(state, "b", np.int32, (None,), low=0, high=9)
    with pytest.raises(ValueError, match="a holds int32, not int64"):
        checked_array(state, "a", np.int64, (None,), low=0, high=9)


def test_a_state_does_not_change_later():
    calibration = Calibration()
    state = calibration.state()
    calibration._by_source += 1
    assert not state["by_source"].any()


def test_what_is_refused_leaves_all_as_it_was():
    calibration = Calibration()
    state = calibration.state()
    state["by_depth"][0, 0] = 4
    with pytest.raises(ValueError, match="by_depth"):
        calibration.restore(state)
    assert np.all(calibration.odds == 1)


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
