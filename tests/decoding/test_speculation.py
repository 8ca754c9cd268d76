import random
from itertools import accumulate
from operator import mul

import pytest

from ragaccel.decoding import (
    INITIAL_LENGTH,
    MAX_DISABLED_STEPS,
    MAX_MISSES,
    DraftTree,
    SpeculationController,
    check_tree,
    select_drafts,
    select_drafts_jointly,
)


def chain(probs):
    return DraftTree.chain(range(len(probs) + 1), [1.0, *accumulate(probs, mul)])


def test_rows_are_used_while_they_pay():
    tree = chain([0.9] * 8)
    assert len(select_drafts(tree, lambda rows: 1.0)) == 9
    assert len(select_drafts(tree, lambda rows: float(rows))) == 1
    assert len(select_drafts(tree, lambda rows: 1.0 if rows <= 4 else 3.0)) == 4
    # Mask tokens count as rows.
    assert len(select_drafts(tree, lambda rows: 1.0 if rows <= 9 else 9.0, rows_per_node=3)) == 3


def test_no_other_draft_length_gives_more_tokens_per_second():
    for seed in range(50):
        rng = random.Random(seed)
        n = rng.randrange(1, 20)
        parents = (-1, *(rng.randrange(i) for i in range(1, n)))
        probs = [1.0]
        for parent in parents[1:]:
            probs.append(probs[parent] * rng.random())
        tree = DraftTree(tuple(range(n)), parents, tuple(probs), ((),) * n)
        costs = list(accumulate(rng.random() for _ in range(n + 1)))
        best = select_drafts(tree, costs.__getitem__)
        check_tree(best, 0, n)
        rates = [sum(sorted(probs, reverse=True)[:rows]) / costs[rows] for rows in range(1, n + 1)]
        assert sum(best.path_probs) / costs[len(best)] == pytest.approx(max(rates))


def lose(controller, times, gain=-0.5):
    for _ in range(times):
        controller.record(0, gain)


def test_drafting_is_disabled_after_losses_and_tried_again():
    controller = SpeculationController()
    lose(controller, MAX_MISSES)
    assert controller.next_length(64) > 0, "an answer may begin with words of its own"
    lose(controller, 99, -0.9)
    rest = 0
    while controller.next_length(64) == 0:
        rest += 1
    assert rest == MAX_DISABLED_STEPS
    controller.record(3, 2.5)  # it paid
    assert controller.next_length(64) > 0
    for _ in range(3):
        controller.record(3, 2.5)
    lose(controller, 1)
    assert controller.next_length(64) > 0


@pytest.mark.parametrize("loss", [0.002, 0.02, 0.1, 0.4])
def test_retries_cost_about_one_percent_of_plain_decoding(loss):
    controller, passes, lost = SpeculationController(), 0, 0.0
    lose(controller, 400, -loss)
    for _ in range(2_000):
        passes += 1
        if controller.next_length(64):
            lost += loss
            lose(controller, 1, -loss)
    assert lost / passes <= 0.013


def test_drafting_that_pays_on_average_stays_enabled():
    controller = SpeculationController()
    for step in range(600):
        assert controller.next_length(64) > 0
        controller.record(4 if step % 8 == 0 else 0, 3.0 if step % 8 == 0 else -0.3)


def test_the_draft_length_follows_what_was_worth_verifying():
    controller = SpeculationController()
    assert controller.next_length(64) == INITIAL_LENGTH
    for _ in range(4):
        controller.record_length(controller.next_length(64), controller.next_length(64))
    assert controller.next_length(64) == 64
    for _ in range(9):
        controller.record_length(1, controller.next_length(64))
    assert 1 < controller.next_length(64) < INITIAL_LENGTH
    assert controller.next_length(3) == 3


def test_a_small_budget_does_not_raise_the_draft_length():
    controller = SpeculationController()
    for _ in range(50):
        controller.record_length(4, controller.next_length(4))
    assert controller.next_length(64) <= INITIAL_LENGTH


def test_drafting_that_costs_more_than_it_adds_is_disabled():
    controller, asked = SpeculationController(), 0
    for step in range(600):
        if controller.next_length(64):
            asked += 1
            adds = step % 6 == 0
            controller.record(int(adds), 0.5 if adds else -0.5)
    assert asked < 300


def test_a_token_cut_by_a_stop_is_no_gain():
    controller = SpeculationController()
    for _ in range(99):
        controller.record(-1, -0.9)
    assert controller.next_length(64) == 0


def chain_of(*probs):
    return DraftTree.chain(range(len(probs) + 1), [1.0, *probs])


def test_a_shared_budget_goes_to_the_likeliest_draft_tokens():
    trees = [chain_of(0.9, 0.8, 0.7), chain_of(0.3, 0.2), chain_of()]
    found = select_drafts_jointly(trees, lambda rows: 30.0 + rows, [1, 1, 1])
    assert [tree.num_drafts for tree in found] == [3, 2, 0]
    found = select_drafts_jointly(trees, lambda rows: 2.0 + rows, [1, 1, 1])
    assert [tree.num_drafts for tree in found] == [3, 0, 0]
    found = select_drafts_jointly(trees, float, [1, 1, 1])
    assert [tree.num_drafts for tree in found] == [0, 0, 0]


def test_a_shared_pass_has_no_more_rows_than_it_may():
    trees = [chain_of(0.9, 0.8, 0.7), chain_of(0.85, 0.2)]
    found = select_drafts_jointly(trees, lambda rows: 1.0, [1, 1], max_rows=4)
    assert [tree.num_drafts for tree in found] == [1, 1]


def test_tokens_expected_elsewhere_raise_the_cost_of_more_rows():
    trees, cost = [chain_of(0.3)], (lambda rows: 1.0 + 0.25 * rows)
    assert select_drafts_jointly(trees, cost, [1])[0].num_drafts == 1
    found = select_drafts_jointly(trees, cost, [1], expected_elsewhere=9.0)
    assert found[0].num_drafts == 0
