"""The history of earlier requests: what it keeps, in which order, and its state."""

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
    order_positions,
)
from ragaccel.errors import ConfigurationError


def texts(history):
    """The requests of a history, as lists of tokens."""
    found, current = [], []
    for token in history.suffix_array().token_ids[CONTEXT:].tolist():
        if token < 0:
            found.append(current)
            current = []
        else:
            current.append(token)
    return found


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


def parts(history):
    """Everything that drafts are made from."""
    return [*history.suffix_array(), history.counts(), *history.bigrams()]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


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


def test_the_oldest_requests_go_when_it_is_full():
    history, fresh = History(4096), History(4096)
    for number in range(100):
        history.add([number] * 10, [number] * 10)
        assert history.num_bytes <= 4096
        remembered = texts(history)
        assert remembered[-1] == [number] * 20
        firsts = [text[0] for text in remembered]
        assert firsts == list(range(firsts[0], number + 1)), "the newest ones, without a gap"
        counts, stats = history.counts(), history.stats()
        assert counts[number] == 10 + 10 * ANSWER_WEIGHT
        assert counts[: firsts[0]].sum() == 0
        assert stats == HistoryStats(
            len(firsts), 20 * len(firsts), history.num_bytes, number + 1 - len(firsts)
        )
    history.clear()
    assert history.stats() == HistoryStats(0, 0, history.num_bytes, stats.evicted_requests)
    rng = np.random.default_rng(0)
    added = [rng.integers(0, 5, 40).tolist() for _ in range(60)]
    for text in added:
        history.add(text[:25], text[25:])
    for text in added[-history.num_requests :]:
        fresh.add(text[:25], text[25:])
    # Equal but for the bigram table, which also knows what was evicted.
    assert texts(history) == texts(fresh)
    assert equal(contexts(history), contexts(fresh))
    assert history.counts().tolist() == fresh.counts().tolist()


def contexts(history):
    ids = history.suffix_array().token_ids
    return [ids[position - 8 : position] for position in history.suffix_array().positions]


def test_of_a_request_that_is_too_large_the_end_is_kept():
    history, whole = History(1024), History()
    for one in (history, whole):
        one.add(list(range(500)), list(range(1000, 1020)))
    for small in (history, restored(whole, 1024)):
        assert texts(small)[0][-20:] == list(range(1000, 1020))
        assert small.state()["answer_lengths"].tolist() == [20]
        assert small.num_bytes <= 1024
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
    assert equal(suffix_array[:3], before)
    history.clear()
    assert history.num_requests == history.suffix_array().num_positions == 0
    assert suffix_array.num_positions == 3


def test_limits_that_hold_nothing_are_refused():
    for settings in ({"max_bytes": 1023}, *({"vocab_size": n} for n in (0, -5, (1 << 24) + 1))):
        with pytest.raises(ConfigurationError, match=r"1024|vocab_size"):
            History(**settings)
    assert History(1024, 1 << 24).num_requests == 0


def test_requests_with_ids_that_are_no_tokens_are_not_remembered():
    history, unbounded = History(vocab_size=100), History()
    history.add([0, 99], [5])
    for bad in ([100], [-1], [1 << 40], [1 << 80], [1.5], [3, 100, 4]):
        history.add(bad, [1])
        history.add([1], bad)
    assert texts(history) == [[0, 99, 5]]
    assert len(history.counts()) == 100
    unbounded.add([1 << 24], [1])
    unbounded.add([70_000], [1])
    assert texts(unbounded) == [[70_000, 1]]


def test_a_restored_history_equals_the_original_and_grows_like_it():
    history = filled()
    other = restored(history)
    for one, another in zip(parts(history), parts(other), strict=True):
        assert np.array_equal(one, another)
        assert getattr(one, "dtype", None) == getattr(another, "dtype", None)
        if isinstance(another, np.ndarray):
            assert another.flags.writeable, "compiled functions are compiled for such arrays"
    for one in (history, other):
        one.add([1, 2, 3, 4], [5, 6])
    assert equal(parts(history), parts(other))
    evicting = filled(8192, num=200)
    assert evicting.stats().evicted_requests > 0
    assert equal(parts(evicting)[:6], parts(restored(evicting, 8192))[:6])
    few_rows = filled(1 << 14, num=10, vocabulary=100)
    assert 0 < len(few_rows.bigrams().totals) < 100, "not every token has a row"
    assert equal(few_rows.bigrams(), restored(few_rows, 1 << 14).bigrams())
    empty = restored(History())
    empty.add([1, 2], [3])
    assert texts(empty) == [[1, 2, 3]]


def test_a_restored_history_keeps_the_newest_requests_that_fit():
    history = filled(num=100)
    for max_bytes in (1024, 4096, 8192):
        small, again = restored(history, max_bytes), restored(history, max_bytes)
        assert small.num_bytes <= max_bytes
        assert 0 < small.num_requests < 100
        assert small.num_requests + small.stats().evicted_requests == 100
        kept = small.state()["token_ids"]
        assert np.array_equal(kept, history.state()["token_ids"][-len(kept) :])
        assert equal(parts(small), parts(again))
    room = History(1024)._max_tokens - CONTEXT
    just_fits = History()
    just_fits.add([1] * 9, [])
    just_fits.add([2] * (room - 11), [])
    assert restored(just_fits, 1024).num_requests == 2
    just_fits.add([], [3])
    assert restored(just_fits, 1024).num_requests == 2, "the oldest is left out"


def test_equal_contexts_are_ordered_latest_first():
    tokens = np.array([-1] * 25 + [7, 8, 9] * 40 + [-1] + [7, 8, 9, -1] * 3, np.int32)
    positions = order_positions(tokens).tolist()

    def context(position):
        before = tokens[position - 8 : position][::-1].tolist()
        return before[: before.index(-1) + 1] if -1 in before else before

    keys = [(context(position), -position) for position in positions]
    assert keys == sorted(keys)
    assert len(set(map(str, map(context, positions)))) < len(positions)


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
