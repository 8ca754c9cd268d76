import random

import pytest
from eval_replayed import COPIED

from eval.reliability import Watched, bins_of, figures
from eval.replay import Contender, Tally
from ragaccel.draft.trie import TrieDrafter


def guesses(bias=0.0, num=20_000):
    rng = random.Random(1)
    probs = [rng.random() for _ in range(num)]
    return [(min(1.0, prob + bias), rng.random() < prob) for prob in probs]


def test_honest_chances_have_no_error_and_others_have_theirs():
    honest, boastful = figures(guesses()), figures(guesses(bias=0.2))
    assert honest["calibration_error"] < 0.02
    assert boastful["calibration_error"] == pytest.approx(0.18, abs=0.03)
    assert honest["below_constant"] > 0.2
    assert boastful["log_loss"] > honest["log_loss"]


def test_bins_hold_as_many_each_and_all_together():
    bins = bins_of(guesses(num=1003))
    assert sum(num for _, _, num in bins) == 1003
    assert max(num for _, _, num in bins) - min(num for _, _, num in bins) <= 1
    assert [estimate for estimate, _, _ in bins] == sorted(estimate for estimate, _, _ in bins)
    assert bins_of([(0.5, True)]) == [(0.5, 1.0, 1)]


def test_outcomes_are_those_of_the_verify_passes():
    watched, tally = Watched(TrieDrafter()), Tally()
    Contender(lambda: watched, 16).replay(COPIED, tally)
    seen = [guess for source in watched.guesses.values() for guess in source]
    assert 0 < sum(came for _, came in seen) <= sum(tally.by_source.values())
    assert all(0.0 <= prob <= 1.0 for prob, _ in seen)
