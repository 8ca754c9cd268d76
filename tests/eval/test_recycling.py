"""Token Recycling, which ours is compared with."""

import random

import numpy as np
from fakes import ScriptedVerifier

from eval.decoders import Adjacency, RecyclingDrafter
from ragaccel.decoding import Context, Request, Session, check_tree
from ragaccel.drafting import ROW_BYTES, WIDTH, CopyDrafter


def cycle(context):
    """A target model that says 1, 2, 3, 4, 1, … whatever came before."""
    return context[-1] % 4 + 1


def decode(drafter, next_token=cycle):
    request = Request((1,), max_new_tokens=40)
    verifier = ScriptedVerifier(next_token, max_rows=65)
    session = Session(verifier, drafter, request, token_budget=16)
    for _ in session:
        pass
    return session.result()


def test_what_the_model_said_after_a_token_is_drafted_again():
    drafter = RecyclingDrafter()
    first = decode(drafter)
    assert first.stats.acceptance_length > 2
    again = decode(drafter)
    assert again.token_ids == first.token_ids
    assert again.stats.verify_passes < first.stats.verify_passes
    assert set(again.stats.accepted_by_source) == {"recycled"}


def test_next_likeliest_tokens_are_drafted_as_branches():
    adjacency = Adjacency()
    adjacency.learn(np.array([5], np.int32), np.array([[6, 7, 8]], np.int32))
    adjacency.learn(np.array([6], np.int32), np.array([[9, -1, -1]], np.int32))
    tree = RecyclingDrafter(adjacency).draft(Context([5]), 10)
    check_tree(tree, 5, 10)
    assert tree.token_ids[1] == 6
    assert {tree.token_ids[n] for n in range(len(tree)) if tree.parents[n] == 0} == {6, 7, 8}
    assert tree.token_ids[tree.parents.index(1)] == 9
    assert RecyclingDrafter(adjacency).draft(Context([99]), 10).token_ids == (99,)


def test_the_latest_ranking_counts_most():
    adjacency = Adjacency()
    for ranked in ([6, 7], [6, 7], [8, 7]):
        adjacency.learn(np.array([5], np.int32), np.array([ranked], np.int32))
    assert RecyclingDrafter(adjacency).draft(Context([5]), 1).token_ids == (5, 8)


def test_the_table_is_bounded():
    adjacency = Adjacency(max_bytes=20 * ROW_BYTES)
    rng = np.random.default_rng(0)
    for _ in range(100):
        adjacency.learn(
            rng.integers(0, 500, 8, dtype=np.int32), rng.integers(0, 500, (8, 8), dtype=np.int32)
        )
    assert adjacency.table.token_ids.shape == (20, WIDTH)
    assert np.all(np.diff(adjacency.table.counts, axis=1) <= 0), "the commonest first"


def test_text_without_any_pattern_is_decoded_as_well():
    def next_token(context):
        return random.Random(str(context)).randrange(50)

    plain = decode(CopyDrafter(), next_token)
    assert decode(RecyclingDrafter(), next_token).token_ids == plain.token_ids
