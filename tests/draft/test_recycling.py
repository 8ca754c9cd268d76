import random
import threading

import numpy as np
import pytest
from fakes import RandomDrafter, ScriptedVerifier

from ragaccel.decode.context import Context
from ragaccel.decode.request import Reference, Request
from ragaccel.decode.session import Session
from ragaccel.decode.tree import check_tree
from ragaccel.draft.copying import CopyDrafter
from ragaccel.draft.mixture import Mixture
from ragaccel.draft.recycling import Adjacency, RecyclingDrafter
from ragaccel.draft.successors import ROW_BYTES, WIDTH, no_successors, with_pairs
from ragaccel.errors import ConfigurationError


def cycle(context):
    """A target model that says 1, 2, 3, 4, 1, … whatever came before."""
    return context[-1] % 4 + 1


def decode(drafter, next_token=cycle, prompt=(1,), num=40, references=()):
    request = Request(tuple(prompt), tuple(references), max_new_tokens=num)
    verifier = ScriptedVerifier(next_token, max_rows=65)
    session = Session(verifier, drafter, request, token_budget=16)
    for _ in session:
        pass
    return session.result()


def test_what_the_model_said_after_a_token_is_guessed_again():
    drafter = RecyclingDrafter()
    first = decode(drafter)
    assert first.stats.acceptance_length > 2
    again = decode(drafter)
    assert again.token_ids == first.token_ids
    assert again.stats.verify_passes < first.stats.verify_passes
    assert set(again.stats.accepted_by_source) == {"recycled"}


def test_runner_ups_are_guessed_as_branches():
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


def test_the_table_is_bounded_and_can_be_cleared():
    adjacency = Adjacency(max_bytes=20 * ROW_BYTES)
    rng = np.random.default_rng(0)
    for _ in range(100):
        adjacency.learn(
            rng.integers(0, 500, 8, dtype=np.int32), rng.integers(0, 500, (8, 8), dtype=np.int32)
        )
    assert adjacency.num_rows == 20
    assert adjacency.table.token_ids.shape == (20, WIDTH)
    assert np.all(np.diff(adjacency.table.counts, axis=1) <= 0), "the commonest first"
    adjacency.clear()
    assert adjacency.num_rows == 0
    with pytest.raises(ConfigurationError, match="row"):
        Adjacency(10)
    with pytest.raises(ConfigurationError, match="branch_length"):
        RecyclingDrafter(branch_length=0)


def test_a_mixture_guesses_what_its_drafters_guess():
    passage = Reference((1, 30, 31, 32))
    adjacency = Adjacency()
    adjacency.learn(np.array([1], np.int32), np.array([[40, 41]], np.int32))
    mixture = Mixture(CopyDrafter(), RecyclingDrafter(adjacency))
    tree = mixture.draft(Context([1], [passage]), 12)
    check_tree(tree, 1, 12)
    assert {30, 40} <= {tree.token_ids[n] for n in range(len(tree)) if tree.parents[n] == 0}
    assert mixture.num_runner_ups == RecyclingDrafter.num_runner_ups
    assert len(mixture.draft(Context([1], [passage]), 2)) == 3


def test_mixtures_that_make_no_sense_are_refused():
    probing = RandomDrafter(1, 9)
    probing.probe_ids = (3,)
    with pytest.raises(ConfigurationError, match="at least one"):
        Mixture()
    with pytest.raises(ConfigurationError, match="probes"):
        Mixture(probing, probing)
    assert Mixture(CopyDrafter(), probing).probe_ids == (3,)


def test_text_without_any_pattern_is_decoded_as_well():
    def next_token(context):
        return random.Random(str(context)).randrange(50)

    plain = decode(CopyDrafter(), next_token)
    assert decode(RecyclingDrafter(), next_token).token_ids == plain.token_ids


def test_learning_beside_drafting_never_makes_a_malformed_tree():
    adjacency, stop = Adjacency(), threading.Event()
    rng = np.random.default_rng(0)

    def learn():
        while not stop.is_set():
            ranked = rng.integers(0, 6, (6, 8), dtype=np.int32)
            adjacency.learn(np.arange(6, dtype=np.int32), ranked)

    writer = threading.Thread(target=learn)
    writer.start()
    try:
        drafter = RecyclingDrafter(adjacency)
        for number in range(2000):
            check_tree(drafter.draft(Context([number % 6]), 20), number % 6, 20)
    finally:
        stop.set()
        writer.join()


def test_a_pair_that_is_said_for_ever_stays_a_share_of_all():
    table, pair = no_successors(), np.array([3, 4, 3, 4], np.int32)
    for _ in range(20_000):
        table = with_pairs(table, pair, np.ones(4) * 0.37, 10)
    assert np.all(table.counts.sum(axis=1) <= table.totals * (1 + 1e-9))
    assert np.all(np.isfinite(table.counts))
