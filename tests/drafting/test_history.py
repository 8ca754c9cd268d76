import threading

import numpy as np
import pytest

from ragaccel.drafting import (
    ANSWER_WEIGHT,
    BYTES_PER_TOKEN,
    CONTEXT,
    PAST_ANSWER,
    PAST_PROMPT,
    ROW_BYTES,
    History,
    HistoryStats,
)
from ragaccel.errors import ConfigurationError


def texts(history):
    """The requests of a history, as lists of tokens."""
    ids = history.suffix_array().token_ids[CONTEXT:].tolist()
    found, current = [], []
    for token in ids:
        if token < 0:
            found.append(current)
            current = []
        else:
            current.append(token)
    return found


def test_prompts_and_answers_are_remembered_as_different_kinds():
    history = History()
    history.add([1, 2, 3], [4, 5])
    history.add([6], [])
    assert texts(history) == [[1, 2, 3, 4, 5], [6]]
    suffix_array = history.suffix_array()
    assert suffix_array.kinds[CONTEXT:].tolist()[:5] == [PAST_PROMPT] * 3 + [PAST_ANSWER] * 2
    assert suffix_array.num_positions == 4
    assert history.counts().tolist() == [0, 1, 1, 1, ANSWER_WEIGHT, ANSWER_WEIGHT, 1]
    assert history.num_requests == 2


def test_the_oldest_requests_go_when_it_is_full_and_it_never_outgrows_its_limit():
    history = History(4096)
    for number in range(100):
        history.add([number] * 10, [number] * 10)
        assert history.num_bytes <= 4096
        remembered = texts(history)
        assert remembered[-1] == [number] * 20
        firsts = [text[0] for text in remembered]
        assert firsts == list(range(firsts[0], number + 1)), "the newest ones, without a gap"
        assert len(remembered) == history.num_requests
        counts = history.counts()
        assert counts[number] == 10 + 10 * ANSWER_WEIGHT
        assert counts[: firsts[0]].sum() == 0
    again = History(4096)
    for number in range(100):
        again.add([number] * 10, [number] * 10)
    assert np.array_equal(again.suffix_array().token_ids, history.suffix_array().token_ids)
    assert np.array_equal(again.suffix_array().positions, history.suffix_array().positions)


def test_positions_after_eviction_are_those_of_a_fresh_history():
    full, fresh = History(4096), History(4096)
    rng = np.random.default_rng(0)
    added = [rng.integers(0, 5, 40).tolist() for _ in range(60)]
    for text in added:
        full.add(text[:25], text[25:])
    for text in added[-full.num_requests :]:
        fresh.add(text[:25], text[25:])

    def contexts(history):
        ids = history.suffix_array().token_ids
        return [
            ids[position - 8 : position].tolist() for position in history.suffix_array().positions
        ]

    assert contexts(full) == contexts(fresh)
    assert full.counts().tolist() == fresh.counts().tolist()


def test_of_a_request_that_is_too_large_the_end_is_kept():
    history = History(1024)
    history.add(list(range(500)), list(range(1000, 1020)))
    assert texts(history)[0][-20:] == list(range(1000, 1020))
    history.add([1], list(range(5000)))
    assert texts(history)[-1][-1] == 4999
    assert history.num_bytes <= 1024


def test_what_was_handed_out_does_not_change():
    history = History(4096)
    history.add([1, 2, 3], [4])
    suffix_array = history.suffix_array()
    before = [array.copy() for array in suffix_array[:3]]
    for _ in range(50):
        history.add(list(range(30)), [9])
    assert all(np.array_equal(a, b) for a, b in zip(suffix_array[:3], before, strict=True))
    history.clear()
    assert history.num_requests == 0
    assert history.suffix_array().num_positions == 0
    assert suffix_array.num_positions == 3


def test_threads_share_it():
    history = History()
    threads = [
        threading.Thread(target=lambda n=n: [history.add([n], [n + 1]) for _ in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert history.num_requests == 200
    expected = sorted((n, n + 1) for n in range(4) for _ in range(50))
    assert sorted(map(tuple, texts(history))) == expected


def test_a_limit_that_holds_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="1024"):
        History(100)


def test_requests_with_ids_that_are_no_tokens_are_not_remembered():
    history = History(vocab_size=100)
    history.add([0, 99], [5])
    for bad in ([100], [-1], [1 << 40], [1 << 80], [1.5], [3, 100, 4]):
        history.add(bad, [1])
        history.add([1], bad)
    assert texts(history) == [[0, 99, 5]]
    assert len(history.counts()) == 100


def test_without_a_vocabulary_ids_are_bounded_all_the_same():
    history = History()
    history.add([1 << 24], [1])
    assert history.num_requests == 0
    history.add([70_000], [1])
    assert history.num_requests == 1


@pytest.mark.parametrize("size", [0, -5, (1 << 24) + 1])
def test_a_vocabulary_that_cannot_be_is_refused(size):
    with pytest.raises(ConfigurationError, match="vocab_size"):
        History(vocab_size=size)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("token_ids", np.array([1, 2, 100], np.int32)),
        ("token_ids", np.array([1, -1, 3], np.int32)),
        ("token_ids", np.array([1, 2], np.int32)),
        ("token_ids", np.array([1, 2, 3], np.int64)),
        ("token_ids", np.array([[1, 2, 3]], np.int32)),
        ("prompt_lengths", np.array([-2], np.int32)),
        ("prompt_lengths", np.array([3], np.int32)),
        ("prompt_lengths", np.array([2, 0], np.int32)),
        ("answer_lengths", np.array([2**31 - 1], np.int32)),
        ("answer_lengths", None),
    ],
)
def test_arrays_that_are_no_texts_are_not_taken_in(name, array):
    history = History(vocab_size=100)
    history.add([1, 2], [3])
    state = {key: value for key, value in history.state().items() if key != name}
    if array is not None:
        state[name] = array
    before = history.suffix_array()
    with pytest.raises(ValueError, match=r"token_ids|lengths"):
        history.restore(state)
    assert history.suffix_array() is before


def test_stats_do_not_wait_for_a_request_that_is_being_added():
    history = History(4096)
    history.add([1, 2, 3], [4])
    with history._lock:  # as while a request is added
        assert history.stats() == HistoryStats(1, 4, history.num_bytes, 0)
    for _ in range(100):
        history.add([1] * 10, [2] * 10)
    stats = history.stats()
    assert stats.requests + stats.evicted_requests == 101
    assert stats.tokens == 20 * stats.requests
    history.clear()
    assert history.stats().evicted_requests == stats.evicted_requests
    assert history.stats().tokens == 0


@pytest.mark.slow
def test_a_hundred_thousand_inserts_stay_under_the_cap():
    history = History(1 << 20)
    rng = np.random.default_rng(1)
    for _ in range(100_000):
        history.add(rng.integers(0, 32_000, 150), rng.integers(0, 32_000, 50))
        assert history.num_bytes <= 1 << 20
    assert history.num_bytes > (1 << 20) // 2
    pairs = len(history.bigrams().totals) * ROW_BYTES
    assert BYTES_PER_TOKEN * len(history.suffix_array().token_ids) + pairs == history.num_bytes
