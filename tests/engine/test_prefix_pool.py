"""The pool of kept prefixes by itself: what is kept once, cut, copied."""

import threading

import pytest
import torch
from decoding import Cheat, decode
from static_passes import static_target
from tiny_models import generate, random_prompt, tiny_model

from ragaccel.decoding.request import Request
from ragaccel.engine import kv_cache
from ragaccel.engine.cuda_graphs import Arena, StateLayout
from ragaccel.engine.engine import Engine
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.prefix_cache import Holding, PrefixPool


@torch.inference_mode()
def write(cache, length):
    cache.begin(length)
    states = torch.arange(length, dtype=torch.float64)[None, None, :, None].expand(1, 1, -1, 4)
    cache.write(0, states, states)


def fill(cache, length):
    write(cache, length)
    cache.keep(range(length))


def put(pool, tokens, namespace=""):
    holding = pool.take(tokens, namespace)
    fill(holding.cache, len(tokens) - len(holding.token_ids))
    holding.token_ids = list(tokens)
    return holding


def test_what_is_kept_twice_is_kept_once():
    pool = PrefixPool(KVCache, max_kept=5, max_bytes=1 << 30)
    holdings = [put(pool, range(20)), put(pool, range(30)), put(pool, range(25))]
    for holding in holdings:
        pool.give_back(holding)
    assert pool.num_idle == 1
    assert len(pool.take(range(30), "").token_ids) == 30


def test_few_tokens_in_common_are_not_worth_a_copy():
    pool = PrefixPool(KVCache, max_kept=5, max_bytes=1 << 30)
    pool.give_back(put(pool, range(50)))
    assert pool.take([*range(7), 99, 98], "").token_ids == []
    assert pool.take([*range(8), 99, 98], "").token_ids == list(range(8))


def test_a_cache_that_mostly_serves_is_cut_and_one_that_hardly_does_is_copied():
    pool = PrefixPool(KVCache, max_kept=5, max_bytes=1 << 30)
    kept = put(pool, range(40))
    pool.give_back(kept)
    copied = pool.take([*range(15), 99], "")
    assert copied.cache is not kept.cache
    cut = pool.take([*range(30), 99], "")
    assert cut.cache is kept.cache
    assert (copied.token_ids, cut.token_ids) == (list(range(15)), list(range(30)))
    assert isinstance(cut, Holding)


@pytest.mark.parametrize("new_cache", [KVCache, "arena"], ids=["own buffers", "arena"])
def test_of_an_open_request_only_what_is_in_place_is_copied(arena, new_cache):
    pool = PrefixPool(
        arena.new_cache if new_cache == "arena" else new_cache, max_kept=5, max_bytes=1 << 30
    )
    open_one = pool.take(range(20), "")
    write(open_one.cache, 20)
    open_one.token_ids = list(range(12))
    open_one.cache.keep([*range(9), 15, 16, 17])  # rows that a branch left behind others
    other = pool.take([*range(12), 99], "")
    assert other.token_ids == list(range(9))
    assert open_one.cache.num_in_place == 9  # nothing was moved for somebody else
    pool.give_back(open_one)
    assert len(pool.take([*range(12), 98], "").token_ids) == 12


def test_what_is_given_back_amid_a_change_is_kept_after_it():
    made, pool = [], None

    def new_cache():
        if pool is not None and len(made) == 2:  # as when garbage is collected there
            pool.give_back(made[0])
            assert made[0] in pool._open
        return KVCache()

    pool = PrefixPool(new_cache, max_kept=5, max_bytes=1 << 30)
    for start in (0, 100):
        made.append(put(pool, range(start, start + 20)))  # noqa: PERF401 - each looks at made
    pool.take([*range(500, 520)], "")
    assert pool._idle == [made[0]]
    assert made[1] in pool._open


def test_giving_back_waits_for_nobody():
    pool = PrefixPool(KVCache, max_kept=5, max_bytes=1 << 30)
    holding = put(pool, range(20))
    with pool._change():
        other = threading.Thread(target=pool.give_back, args=(holding,))
        other.start()
        other.join(30)
        assert not other.is_alive()
        assert pool.num_idle == 0
    assert pool.num_idle == 1


SLOT_BYTES = 2 * 4 * 8


@pytest.fixture
def arena(monkeypatch):
    """Room for 100 tokens, in caches of 20 at first."""
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 20)
    return Arena(StateLayout(1, 1, 4, torch.float64, torch.device("cpu")), 101)


def keep(pool, number):
    """Keep some prompts of 20 tokens that have nothing in common."""
    for i in range(number):
        pool.give_back(put(pool, range(100 * i, 100 * i + 20)))
    assert pool.num_idle == number


def kept(pool):
    return [holding.token_ids[0] // 100 for holding in pool._idle]


def pool_over(arena, kept_slots):
    return PrefixPool(arena.new_cache, max_kept=8, max_bytes=kept_slots * SLOT_BYTES)


@pytest.mark.parametrize("prompt", [[7, 7, 7], [0, 7, 7]], ids=["nothing shared", "its first"])
@pytest.mark.parametrize(("room", "left"), [(20, [0, 1, 2, 3]), (21, [2, 3]), (60, [3])])
def test_idle_caches_make_room_before_an_arena_grows(arena, room, left, prompt):
    pool = pool_over(arena, 90)
    keep(pool, 4)
    holding = pool.take(prompt, "", room=room)
    assert (holding.token_ids, holding.num_settled) == ([], 0)
    assert (arena.version, holding.cache.capacity) == (0, room)
    assert kept(pool) == left


def test_an_arena_grows_where_what_may_be_kept_wants_it(arena):
    pool = pool_over(arena, 200)
    keep(pool, 4)
    pool.take([7, 7, 7], "", room=40)
    assert (arena.version, pool.num_idle) == (1, 4)


def test_nothing_is_dropped_in_vain(arena):
    pool = pool_over(arena, 90)
    keep(pool, 4)
    pool.take([7, 7, 7], "", room=150)
    assert (arena.version, pool.num_idle) == (1, 4)


def test_what_is_copied_from_is_not_dropped(arena):
    pool = pool_over(arena, 90)
    keep(pool, 4)
    copied = pool.take([*range(8), 500], "", room=40)
    assert copied.token_ids == list(range(8))
    assert copied.cache.buffers[0][0, 0, :8, 0].tolist() == list(range(8))
    assert 0 in kept(pool)
    assert arena.version == 0


def test_an_answer_that_outgrows_its_room_drops_idle_caches_too(arena):
    pool = pool_over(arena, 90)
    keep(pool, 4)
    holding = put(pool, [*range(900, 920)])
    fill(holding.cache, 20)
    assert (arena.version, holding.cache.capacity) == (0, 40)
    assert len(kept(pool)) == 2


def test_a_cache_that_is_used_again_gives_its_slots_back_first(arena):
    pool = PrefixPool(arena.new_cache, max_kept=1, max_bytes=90 * SLOT_BYTES)
    keep(pool, 1)
    holding = pool.take([7, 7, 7], "", room=100)
    assert (arena.version, holding.cache.capacity) == (0, 100)


def test_tokens_are_the_same_in_an_arena_that_is_short_of_room(monkeypatch):
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 16)
    target = static_target()
    target.arena.__dict__.update(Arena(target.arena.layout, 400).__dict__)
    engine = Engine(target, prefill_chunk=16, kept_bytes=300 * target.arena.layout.slot_bytes)
    start, idle = random_prompt(30, 1), []
    for turn in range(12):
        prompt = [*start[turn % 3 :], *random_prompt(40, 2 + turn % 5)]
        expected = generate(tiny_model("llama"), prompt, 20)
        request = Request(prompt, max_new_tokens=20)
        assert decode(engine, request, Cheat(prompt, expected, turn)) == expected
        idle.append(engine.pool.num_idle)
    assert target.arena.version == 0
    assert max(idle) > 1
