"""The prefix cache alone: entries kept once, truncated, copied and evicted."""

import signal
import threading

import pytest
import torch
from decoding import OracleDrafter, decode
from static_passes import static_target
from tiny_models import generate, random_prompt, tiny_model

from ragaccel.decoding import Request
from ragaccel.engine import (
    Engine,
    KVCache,
    KVPool,
    PrefixCache,
    StateLayout,
    kv_cache,
)

SLOT_BYTES = 2 * 4 * 8


@torch.inference_mode()
def write(cache, length):
    cache.begin(length)
    states = torch.arange(length, dtype=torch.float64)[None, None, :, None].expand(1, 1, -1, 4)
    cache.write(0, states, states)


def fill(cache, length):
    write(cache, length)
    cache.keep(range(length))


def put(pool, tokens, namespace=""):
    entry = pool.acquire(tokens, namespace)
    fill(entry.cache, len(tokens) - len(entry.token_ids))
    entry.token_ids = list(tokens)
    return entry


@pytest.fixture
def pool():
    return PrefixCache(KVCache, max_kept=5, max_bytes=1 << 30)


@pytest.fixture
def kv_pool(monkeypatch):
    """A KV pool of 100 slots, with caches of 20 at first."""
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 20)
    return KVPool(StateLayout(1, 1, 4, torch.float64, torch.device("cpu")), 101)


def test_equal_prompts_are_kept_once_and_few_tokens_in_common_are_not_worth_a_copy(pool):
    for entry in [put(pool, range(20)), put(pool, range(30)), put(pool, range(25))]:
        pool.release(entry)
    assert pool.num_idle == 1
    assert pool.acquire([*range(7), 99, 98], "").token_ids == []
    assert pool.acquire([*range(8), 99, 98], "").token_ids == list(range(8))
    assert len(pool.acquire(range(30), "").token_ids) == 30


def test_a_cache_is_truncated_if_most_of_it_matches_and_copied_otherwise(pool):
    kept = put(pool, range(40))
    pool.release(kept)
    copied, cut = pool.acquire([*range(15), 99], ""), pool.acquire([*range(30), 99], "")
    assert (copied.cache is kept.cache, cut.cache is kept.cache) == (False, True)
    assert (copied.token_ids, cut.token_ids) == (list(range(15)), list(range(30)))


@pytest.mark.parametrize("in_pool", [False, True])
def test_only_tokens_in_place_are_copied_from_an_open_request(kv_pool, in_pool):
    new_cache = kv_pool.new_cache if in_pool else KVCache
    pool = PrefixCache(new_cache, max_kept=5, max_bytes=1 << 30)
    open_one = pool.acquire(range(20), "")
    write(open_one.cache, 20)
    open_one.token_ids = list(range(12))
    open_one.cache.keep([*range(9), 15, 16, 17])  # rows that a branch left behind others
    other = pool.acquire([*range(12), 99], "")
    assert other.token_ids == list(range(9))
    assert open_one.cache.num_in_place == 9  # nothing was moved for somebody else
    pool.release(open_one)
    assert len(pool.acquire([*range(12), 98], "").token_ids) == 12


def test_an_entry_released_during_a_change_is_kept_after_it():
    made, pool = [], None

    def new_cache():
        if pool is not None and len(made) == 2:  # as when garbage is collected there
            pool.release(made[0])
            assert pool.num_idle == 0
        return KVCache()

    pool = PrefixCache(new_cache, max_kept=5, max_bytes=1 << 30)
    for start in (0, 100):
        made.append(put(pool, range(start, start + 20)))  # noqa: PERF401 - each looks at made
    pool.acquire([*range(500, 520)], "")
    assert pool.num_idle == 1
    assert len(pool.acquire([*range(20)], "").token_ids) == 20


def test_release_never_blocks():
    def new_cache():
        if held:
            other = threading.Thread(target=pool.release, args=(held.pop(),))
            other.start()
            other.join(30)
            assert not other.is_alive()
            assert pool.num_idle == 0
        return KVCache()

    held = []
    pool = PrefixCache(new_cache, max_kept=5, max_bytes=1 << 30)
    held.append(put(pool, range(20)))
    pool.acquire([*range(100, 120)], "")
    assert pool.num_idle == 1


# Idle caches make room before a KV pool grows.


def kept(pool):
    return [entry.token_ids[0] // 100 for entry in pool._idle]


def full(kv_pool, kept_slots, max_kept=8, number=4):
    """A prefix cache with some prompts of 20 tokens that have nothing in common."""
    pool = PrefixCache(kv_pool.new_cache, max_kept=max_kept, max_bytes=kept_slots * SLOT_BYTES)
    for i in range(number):
        pool.release(put(pool, range(100 * i, 100 * i + 20)))
    assert pool.num_idle == number
    return pool


@pytest.mark.parametrize("prompt", [[7, 7, 7], [0, 7, 7]], ids=["nothing shared", "its first"])
@pytest.mark.parametrize(
    ("kept_slots", "room", "version", "left"),
    [
        (90, 20, 0, [0, 1, 2, 3]),
        (90, 21, 0, [2, 3]),
        (90, 60, 0, [3]),
        (200, 40, 1, [0, 1, 2, 3]),  # kept states need a larger pool
        (90, 150, 1, [0, 1, 2, 3]),  # evicting would be in vain
    ],
)
def test_as_few_idle_caches_as_possible_are_evicted(
    kv_pool, prompt, kept_slots, room, version, left
):
    pool = full(kv_pool, kept_slots)
    entry = pool.acquire(prompt, "", room=room)
    assert (entry.token_ids, entry.num_block_aligned) == ([], 0)
    assert (kv_pool.version, entry.cache.capacity) == (version, room)
    assert kept(pool) == left


def test_the_source_of_a_copy_is_not_evicted(kv_pool):
    pool = full(kv_pool, 90)
    copied = pool.acquire([*range(8), 500], "", room=40)
    assert copied.token_ids == list(range(8))
    assert copied.cache.buffers[0][0, 0, :8, 0].tolist() == list(range(8))
    assert 0 in kept(pool)
    assert kv_pool.version == 0


def test_an_answer_that_outgrows_its_room_and_a_reused_cache_free_slots_first(kv_pool):
    pool = full(kv_pool, 90)
    entry = put(pool, [*range(900, 920)])
    fill(entry.cache, 20)
    assert (kv_pool.version, entry.cache.capacity) == (0, 40)
    assert len(kept(pool)) == 2


def test_a_cache_that_is_used_again_gives_its_slots_back_first(kv_pool):
    pool = full(kv_pool, 90, max_kept=1, number=1)
    entry = pool.acquire([7, 7, 7], "", room=100)
    assert (kv_pool.version, entry.cache.capacity) == (0, 100)


def test_tokens_are_the_same_in_a_kv_pool_that_is_short_of_room(monkeypatch):
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 16)
    target = static_target()
    target.kv_pool.__dict__.update(KVPool(target.kv_pool.layout, 400).__dict__)
    engine = Engine(target, prefill_chunk=16, kept_bytes=300 * target.kv_pool.layout.slot_bytes)
    start, idle = random_prompt(30, 1), []
    for index in range(12):
        prompt = [*start[index % 3 :], *random_prompt(40, 2 + index % 5)]
        expected = generate(tiny_model("llama"), prompt, 20)
        request = Request(prompt, max_new_tokens=20)
        assert decode(engine, request, OracleDrafter(prompt, expected, index)) == expected
        idle.append(engine.prefix_cache.num_idle)
    assert target.kv_pool.version == 0
    assert max(idle) > 1


def test_a_kv_pool_whose_growth_is_interrupted_has_grown_for_all_caches(
    kv_pool, monkeypatch, interrupts
):
    caches = [kv_pool.new_cache() for _ in range(3)]
    for cache in caches:
        write(cache, 20)
    kind = type(caches[0])
    bind = kind.bind

    def interrupted_bind(cache):
        signal.raise_signal(signal.SIGINT)
        bind(cache)

    monkeypatch.setattr(kind, "bind", interrupted_bind)
    with pytest.raises(KeyboardInterrupt):
        kv_pool.allocate(80)
    pointer = kv_pool.states.untyped_storage().data_ptr()
    assert [one.buffers[0].untyped_storage().data_ptr() for one in caches] == [pointer] * 3
    assert kv_pool.num_free == kv_pool.num_slots - 1 - 3 * 20
