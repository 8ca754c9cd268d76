import numpy as np
import pytest

from ragaccel.drafting import CONTEXT, History, order_positions


def filled(max_bytes=1 << 20, num=40, vocabulary=7, seed=0):
    """A history of requests with many equal contexts, some of them with an empty part."""
    history, rng = History(max_bytes), np.random.default_rng(seed)
    for number in range(num):
        prompt = rng.integers(0, vocabulary, 0 if number % 9 == 0 else 25).tolist()
        answer = rng.integers(0, vocabulary, 0 if number % 6 == 0 else 12).tolist()
        history.add(prompt, answer)
    return history


def restored(history, max_bytes=1 << 20):
    other = History(max_bytes)
    other.restore(history.state())
    return other


def flat(history):
    return [*history.suffix_array(), history.counts(), *history.bigrams()]


def test_a_rebuilt_history_equals_one_filled_step_by_step():
    history = filled()
    for one, other in zip(flat(history), flat(restored(history)), strict=True):
        assert np.array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        if isinstance(other, np.ndarray):
            assert other.flags.writeable, "compiled functions are compiled for such arrays"


def test_a_rebuilt_history_grows_like_the_original():
    history = filled()
    other = restored(history)
    for one in (history, other):
        one.add([1, 2, 3, 4], [5, 6])
    assert all(np.array_equal(a, b) for a, b in zip(flat(history), flat(other), strict=True))


def test_a_rebuilt_history_is_the_same_after_eviction():
    history = filled(8192, num=200)
    assert history.stats().evicted_requests > 0
    other = restored(history, 8192)
    assert other.num_requests == history.num_requests
    for one, another in zip(history.suffix_array(), other.suffix_array(), strict=True):
        assert np.array_equal(one, another)
    assert np.array_equal(history.counts(), other.counts())


def test_bigram_rows_go_to_the_same_tokens_when_there_are_too_few():
    history = filled(1 << 14, num=10, vocabulary=100)
    other = restored(history, 1 << 14)
    assert 0 < len(history.bigrams().totals) < 100, "not every token has a row"
    for one, another in zip(history.bigrams(), other.bigrams(), strict=True):
        assert np.array_equal(one, another)


def test_an_empty_history_is_restored_empty():
    other = restored(History())
    assert other.num_requests == 0
    assert other.suffix_array().num_positions == 0
    other.add([1, 2], [3])
    assert other.num_requests == 1


@pytest.mark.parametrize("max_bytes", [1024, 4096, 8192])
def test_a_restored_history_keeps_the_newest_requests_that_fit(max_bytes):
    history = filled(num=100)
    small, again = restored(history, max_bytes), restored(history, max_bytes)
    assert small.num_bytes <= max_bytes
    assert 0 < small.num_requests < 100
    stats = small.stats()
    assert stats.requests + stats.evicted_requests == 100
    kept = small.state()["token_ids"]
    assert np.array_equal(kept, history.state()["token_ids"][-len(kept) :])
    assert all(np.array_equal(a, b) for a, b in zip(flat(small), flat(again), strict=True))


def test_requests_that_just_fit_are_restored_whole():
    room = History(1024)._max_tokens - CONTEXT
    history = History()
    history.add([1] * 9, [])
    history.add([2] * (room - 11), [])
    assert restored(history, 1024).num_requests == 2
    history.add([], [3])
    assert restored(history, 1024).num_requests == 2, "one more, and the oldest is left out"


def test_the_end_of_a_request_that_is_too_large_is_restored():
    history = History()
    history.add(range(400), range(400, 420))
    small = restored(history, 1024)
    assert small.num_requests == 1
    assert small.state()["token_ids"][-20:].tolist() == list(range(400, 420))
    assert small.state()["answer_lengths"].tolist() == [20]
    assert small.num_bytes <= 1024


def test_equal_contexts_are_ordered_latest_first():
    tokens = np.array([-1] * 25 + [7, 8, 9] * 40 + [-1] + [7, 8, 9, -1] * 3, np.int32)
    positions = order_positions(tokens).tolist()

    def context(position):
        before = tokens[position - 8 : position][::-1].tolist()
        return before[: before.index(-1) + 1] if -1 in before else before

    keys = [(context(position), -position) for position in positions]
    assert keys == sorted(keys)
    assert len(set(map(str, map(context, positions)))) < len(positions)
