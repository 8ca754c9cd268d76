import threading

import numpy as np
import pytest
from filled_memory import drafts, teach

from ragaccel.decoding import Context
from ragaccel.drafting import Memory, TrieDrafter
from ragaccel.errors import ConfigurationError


def drafted(namespace_memory):
    """All tokens that are drafted from a namespace after [1, 2, 3]."""
    drafter = TrieDrafter(past=namespace_memory.history, calibration=namespace_memory.calibration)
    return set(drafter.draft(Context([1, 2, 3]), 60).token_ids)


def test_namespaces_share_neither_texts_nor_what_was_learned_of_chances():
    memory = Memory()
    memory.of("mine").remember([1, 2, 3], [40])
    memory.of("theirs").remember([1, 2, 3], [50])
    assert [{40, 50} & drafted(memory.of(name)) for name in ("mine", "theirs", "new")] == [
        {40}, {50}, set(),
    ]  # fmt: skip
    teach(memory.of("taught"), 1)
    assert np.any(memory.of("taught").calibration.odds != 1.0)
    assert np.all(memory.of("theirs").calibration.odds == 1.0)
    assert drafts(memory.of("taught")) != drafts(memory.of("theirs"))


def test_namespaces_are_forgotten_when_asked_and_the_one_used_longest_ago_for_room():
    memory = Memory(max_namespaces=2)
    for name in "ab":
        memory.of(name).remember([1, 2, 3], [40])
    memory.of("a")
    memory.of("c")
    assert memory.namespaces == ["a", "c"]
    kept = memory.of("a")
    assert [kept.history.num_requests, memory.of("b").history.num_requests] == [1, 0]
    memory = Memory()
    kept = memory.of("a")
    kept.remember([1, 2, 3], [40])
    assert memory.num_bytes > 0
    memory.forget("a")
    assert kept.history.num_requests == 0
    memory.of("b").remember([1, 2, 3], [50])
    memory.clear()
    assert (memory.namespaces, memory.num_bytes) == ([], 0)
    memory.forget("never seen")


def test_all_of_it_is_bounded():
    memory = Memory(max_bytes=1 << 16, max_namespaces=4)
    rng = np.random.default_rng(0)
    for number in range(200):
        kept = memory.of(str(number % 6))
        kept.remember(rng.integers(0, 900, 60), rng.integers(0, 900, 40))
        assert memory.num_bytes <= 1 << 16
    assert len(memory.namespaces) == 4
    assert memory.of("0").history.max_bytes == 1 << 14, "an equal share"


def test_what_leaves_no_room_or_is_no_name_is_refused():
    for settings in ({"max_bytes": 64}, {"max_namespaces": 0}, {"vocab_size": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            Memory(**settings)
    with pytest.raises(ConfigurationError, match="max_bytes must be 1024"):
        Memory(4096, 100)
    with pytest.raises(ConfigurationError, match="7"):
        Memory().of(7)
    memory = Memory(vocab_size=100)
    memory.of("a").remember([1, 100], [2])
    assert memory.of("a").history.num_requests == 0


def test_threads_share_one_memory():
    memory = Memory(max_namespaces=8)

    def work(name):
        for _ in range(40):
            memory.of(name).remember([1, 2, 3], [40])

    threads = [threading.Thread(target=work, args=(str(n % 4),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [memory.of(str(n)).history.num_requests for n in range(4)] == [80] * 4
    kept = memory.of("0")
    with kept.history._lock, kept.calibration._lock:  # as while a request is added
        assert memory.stats().requests == 320


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
