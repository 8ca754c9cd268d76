import numpy as np

from ragaccel.drafting import empty_bigrams, with_bigrams


def test_a_pair_that_repeats_forever_keeps_a_bounded_share():
    table, pair = empty_bigrams(), np.array([3, 4, 3, 4], np.int32)
    for _ in range(20_000):
        table = with_bigrams(table, pair, np.ones(4) * 0.37, 10)
    assert np.all(table.counts.sum(axis=1) <= table.totals * (1 + 1e-9))
    assert np.all(np.isfinite(table.counts))
