"""The pool of kept prefixes by itself: what is kept once, cut, copied."""

import torch

from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.prefixes import Holding, PrefixPool


@torch.inference_mode()
def fill(cache, length):
    cache.begin(length)
    states = torch.arange(length, dtype=torch.float64)[None, None, :, None].expand(1, 1, -1, 4)
    cache.write(0, states, states)
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
