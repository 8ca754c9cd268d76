import pytest
import torch

from ragaccel.engine import FIRST_CAPACITY, KVCache
from ragaccel.errors import CapacityError


def states(values, heads=2, size=3):
    """Make states of a run of rows whose every number is the row's value."""
    return torch.tensor(values, dtype=torch.float64)[None, None, :, None].expand(1, heads, -1, size)


def feed(cache, values, layers=2):
    cache.begin(len(values))
    for layer in range(layers):
        keys, kept = cache.write(layer, states(values), states([-value for value in values]))
    return keys[0, 0, :, 0].tolist(), kept[0, 0, :, 0].tolist()


def test_a_chain_is_kept_where_it_lies():
    cache = KVCache()
    feed(cache, [1, 2, 3, 4])
    cache.keep([0, 1, 2])
    assert cache.length == 3
    assert feed(cache, [5])[0] == [1, 2, 3, 5]


def test_a_branch_is_moved_to_the_front_at_the_next_pass():
    cache = KVCache()
    feed(cache, [1, 2])
    cache.keep([0, 1])
    feed(cache, [10, 11, 12, 13, 14])
    cache.keep([0, 2, 4])
    keys, values = feed(cache, [20])
    assert keys == [1, 2, 10, 12, 14, 20]
    assert values == [-1, -2, -10, -12, -14, -20]


def test_moves_of_several_commits_are_done_in_order():
    cache = KVCache()
    for block, path in (([1, 2, 3], [0, 2]), ([4, 5, 6, 7], [0, 1, 3]), ([8, 9], [0])):
        feed(cache, block)
        cache.keep(path)
    assert feed(cache, [0])[0] == [1, 3, 4, 5, 7, 8, 0]


def test_rows_that_were_not_in_the_pass_cannot_be_kept():
    cache = KVCache()
    feed(cache, [1, 2])
    with pytest.raises(ValueError, match="are not among the 2 of the last pass"):
        cache.keep([0, 2])


def test_capacity_doubles_and_keeps_what_is_committed():
    cache = KVCache()
    values = list(range(FIRST_CAPACITY))
    feed(cache, values)
    cache.keep(range(len(values)))
    assert feed(cache, [7, 8])[0] == [*values, 7, 8]
    assert cache.capacity == 2 * FIRST_CAPACITY


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


def test_growth_ends_at_the_limit_with_an_error_that_says_what_to_do():
    cache = KVCache(limit=6)
    assert cache.capacity == 6
    feed(cache, [1, 2, 3])
    cache.keep([0, 1, 2])
    with pytest.raises(CapacityError, match="load with capacity=7"):
        cache.begin(4)


def test_a_given_capacity_is_taken_at_once_and_never_grows():
    cache = KVCache(capacity=4)
    feed(cache, [1])
    assert [buffer.shape for buffer in cache.buffers] == [(1, 2, 4, 3)] * 4
    with pytest.raises(CapacityError):
        cache.begin(5)


def test_truncating_forgets_the_end():
    cache = KVCache()
    feed(cache, [1, 2, 3, 4])
    cache.keep([0, 3])
    cache.truncate(1)
    assert feed(cache, [9])[0] == [1, 9]


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


def test_a_copy_holds_what_the_original_kept():
    first, second = KVCache(), KVCache()
    feed(second, [9] * 5)
    second.keep(range(5))
    feed(first, [1, 2, 3, 4])
    first.keep([0, 2, 3])
    with pytest.raises(ValueError, match="only the first 1 of"):  # it is only read
        second.copy_from(first, 2)
    assert feed(first, [8])[0] == [1, 3, 4, 8]
    second.copy_from(first, 2)
    assert feed(second, [7])[0] == [1, 3, 7]
    assert feed(first, [9])[0] == [1, 3, 4, 9]
