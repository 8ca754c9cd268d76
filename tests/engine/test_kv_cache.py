import pytest
import torch
from hypothesis import given, settings, strategies as st

from ragaccel.engine import FIRST_CAPACITY, KVCache
from ragaccel.errors import CapacityError


def states(values, heads=2, size=3):
    """Make states of a run of rows whose every number is the row's value."""
    return torch.tensor(values, dtype=torch.float64)[None, None, :, None].expand(1, heads, -1, size)


def feed(cache, values, layers=2):
    cache.begin(len(values))
    for layer in range(layers):
        keys, kept = cache.write(layer, states(values), states([-value for value in values]))
    keys, kept = keys[0, 0, :, 0].tolist(), kept[0, 0, :, 0].tolist()
    assert kept == [-value for value in keys]
    return keys


@settings(max_examples=60, deadline=None)
@given(st.data())
@torch.inference_mode()
def test_the_rows_that_are_kept_come_first_in_the_next_pass(data):
    """Chains, branches, several commits before the next pass, truncation, growth and copies."""
    caches, lists = [KVCache(), KVCache()], [[], []]
    for step in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 1))
        cache, kept = caches[at], lists[at]
        size = data.draw(st.sampled_from([1, 2, 7, FIRST_CAPACITY]))
        block = [1000 * (step + 1) + number for number in range(size)]
        assert feed(cache, block) == [*kept, *block]
        path = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=9).map(sorted))
        cache.keep(path)
        kept += [block[row] for row in path]
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, len(kept)))
            cache.truncate(length)
            del kept[length:]
        if not lists[1 - at] and cache.num_in_place:
            caches[1 - at].copy_from(cache, cache.num_in_place)
            lists[1 - at] = kept[: cache.num_in_place]
        assert (cache.length, cache.capacity % FIRST_CAPACITY) == (len(kept), 0)
    for cache, kept in zip(caches, lists, strict=True):
        assert feed(cache, [7]) == [*kept, 7]


def test_rows_that_were_not_in_the_pass_cannot_be_kept():
    cache = KVCache()
    feed(cache, [1, 2])
    for path in ([0, 2], [-1]):
        with pytest.raises(ValueError, match="are not among the 2 of the last pass"):
            cache.keep(path)


def test_reserved_capacity_is_rounded_up():
    capacities = set()
    for wanted in range(100, 4 * FIRST_CAPACITY, 37):
        cache = KVCache()
        cache.reserve(wanted)
        assert cache.capacity >= wanted
        capacities.add(cache.capacity)
    assert len(capacities) == 4
    narrow = KVCache(limit=FIRST_CAPACITY + 5)
    narrow.reserve(FIRST_CAPACITY + 1)
    assert narrow.capacity == FIRST_CAPACITY + 5
    grown = KVCache()
    for _ in range(2):
        feed(grown, [1] * FIRST_CAPACITY)
        grown.keep(range(FIRST_CAPACITY))
    assert grown.capacity == 2 * FIRST_CAPACITY


def test_growth_ends_at_the_limit_with_an_error_that_says_what_to_do():
    cache = KVCache(limit=6)
    assert cache.capacity == 6
    feed(cache, [1, 2, 3])
    cache.keep([0, 1, 2])
    with pytest.raises(CapacityError, match="load with capacity=7"):
        cache.begin(4)
    given_at_once = KVCache(capacity=4)
    feed(given_at_once, [1])
    assert [buffer.shape for buffer in given_at_once.buffers] == [(1, 2, 4, 3)] * 4
    with pytest.raises(CapacityError):
        given_at_once.begin(5)


def test_views_share_memory_with_the_buffers():
    cache = KVCache()
    cache.begin(2)
    keys, _ = cache.write(0, states([1, 2]), states([1, 2]))
    again, _ = cache.write(0, states([3, 4]), states([3, 4]))
    assert keys.data_ptr() == again.data_ptr()
    assert keys[0, 0, :, 0].tolist() == [3, 4]


@pytest.mark.parametrize(("device", "slots"), [("cpu", 7), ("meta", 64)])
def test_on_a_cpu_slots_take_memory_once_they_are_written(device, slots):
    cache = KVCache(capacity=64)
    cache.begin(7)
    rows = states([1] * 7).to(device)
    cache.write(0, rows, rows)
    cache.keep([0])
    cache.truncate(0)
    assert cache.used_bytes == 2 * 2 * slots * 3 * 8  # keys and values, heads, slots, size


def test_only_rows_in_place_are_copied():
    first, second = KVCache(), KVCache()
    feed(first, [1, 2, 3, 4])
    first.keep([0, 2, 3])
    with pytest.raises(ValueError, match="only the first 1 of"):  # it is only read
        second.copy_from(first, 2)
