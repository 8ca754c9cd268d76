import threading

import numpy as np
import pytest

from ragaccel.decoding import Context
from ragaccel.drafting import Memory, TrieDrafter
from ragaccel.errors import ConfigurationError


def drafts(namespace_memory, prompt):
    """All tokens that are drafted from a namespace."""
    drafter = TrieDrafter(past=namespace_memory.history, calibration=namespace_memory.calibration)
    return set(drafter.draft(Context(prompt), 60).token_ids)


def teach(namespace_memory, token):
    namespace_memory.history.add([1, 2, 3], [token])


def test_nothing_of_one_namespace_is_drafted_in_another():
    memory = Memory()
    teach(memory.of("mine"), 40)
    teach(memory.of("theirs"), 50)
    assert 40 in drafts(memory.of("mine"), [1, 2, 3])
    assert 50 not in drafts(memory.of("mine"), [1, 2, 3])
    assert 50 in drafts(memory.of("theirs"), [1, 2, 3])
    assert not {40, 50} & drafts(memory.of("new"), [1, 2, 3])


def test_what_is_learned_of_chances_stays_in_its_namespace():
    memory = Memory()
    mine = memory.of("mine")
    drafter = TrieDrafter(past=mine.history, calibration=mine.calibration)
    for _ in range(50):
        context = Context([*range(20), *range(10)])
        drafter.draft(context, 8)
        context.token_ids.append(777)
        drafter.draft(context, 1)
    assert np.any(mine.calibration.odds != 1.0)
    assert np.all(memory.of("theirs").calibration.odds == 1.0)


def test_the_namespace_asked_for_longest_ago_is_forgotten_first():
    memory = Memory(max_namespaces=2)
    teach(memory.of("a"), 40)
    teach(memory.of("b"), 50)
    memory.of("a")
    memory.of("c")
    assert memory.namespaces == ["a", "c"]
    assert memory.of("a").history.num_requests == 1
    assert memory.of("b").history.num_requests == 0


def test_namespaces_can_be_forgotten():
    memory = Memory()
    kept = memory.of("a")
    teach(kept, 40)
    assert memory.num_bytes > 0
    memory.forget("a")
    assert kept.history.num_requests == 0
    teach(memory.of("b"), 50)
    memory.clear()
    assert memory.namespaces == []
    assert memory.num_bytes == 0
    memory.forget("never seen")


def test_all_of_it_is_bounded():
    memory = Memory(max_bytes=1 << 16, max_namespaces=4)
    rng = np.random.default_rng(0)
    for number in range(200):
        kept = memory.of(str(number % 6))
        kept.history.add(rng.integers(0, 900, 60), rng.integers(0, 900, 40))
        assert memory.num_bytes <= 1 << 16
    assert len(memory.namespaces) == 4
    assert memory.of("0").history.max_bytes == 1 << 14, "an equal share"


@pytest.mark.parametrize(("size", "number"), [(64, 1), (1 << 20, 0), (4096, 100)])
def test_bounds_that_leave_no_room_are_refused(size, number):
    with pytest.raises(ConfigurationError):
        Memory(size, number)


def test_threads_share_one_memory():
    memory = Memory(max_namespaces=8)

    def work(name):
        for _ in range(40):
            teach(memory.of(name), 40)

    threads = [threading.Thread(target=work, args=(str(n % 4),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [memory.of(str(n)).history.num_requests for n in range(4)] == [80] * 4


def test_stats_count_hits_misses_and_evictions():
    memory = Memory(max_bytes=1 << 14, max_namespaces=2)
    for _ in range(60):
        memory.of("a").remember([1] * 10, [2] * 10)
    memory.of("b")
    stats = memory.stats()
    own = memory.of("a").stats()
    assert (stats.hits, stats.misses) == (59, 2)
    assert stats.namespaces == 2
    assert stats.requests == own.requests
    assert stats.requests + stats.evicted_requests == 60
    assert stats.evicted_requests > 0
    assert stats.tokens == 20 * stats.requests
    assert stats.num_bytes == memory.num_bytes > own.num_bytes > 0
    memory.of("c"), memory.of("d")
    later = memory.stats()
    assert later.evicted_namespaces == 2
    assert later.requests == 0
    assert later.evicted_requests == stats.evicted_requests, "what was counted stays counted"
    assert (later.hits, later.misses) == (60, 4)


def test_stats_do_not_wait_for_a_request_that_is_being_added():
    memory = Memory()
    kept = memory.of("a")
    kept.remember([1], [2])
    with kept.history._lock, kept.calibration._lock:
        assert memory.stats().requests == 1
        assert kept.stats().tokens == 2


def test_ids_beyond_the_vocabulary_are_not_remembered():
    memory = Memory(vocab_size=100)
    memory.of("a").remember([1, 100], [2])
    assert memory.of("a").history.num_requests == 0
    with pytest.raises(ConfigurationError, match="vocab_size"):
        Memory(vocab_size=0)
