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
    select_drafts_jointly,
)


def chain(probs):
    return DraftTree.chain(range(len(probs) + 1), [1.0, *accumulate(probs, mul)])


def select_alone(tree, cost_seconds, rows_per_node=1):
    return select_drafts_jointly([tree], cost_seconds, [rows_per_node])[0]


def test_rows_are_used_while_they_pay():
    tree = chain([0.9] * 8)
    assert len(select_alone(tree, lambda rows: 1.0)) == 9
    assert len(select_alone(tree, lambda rows: float(rows))) == 1
    assert len(select_alone(tree, lambda rows: 1.0 if rows <= 4 else 3.0)) == 4
    # Mask tokens count as rows.
    assert len(select_alone(tree, lambda rows: 1.0 if rows <= 9 else 9.0, rows_per_node=3)) == 3


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
        best = select_alone(tree, costs.__getitem__)
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


@pytest.mark.parametrize(
    ("every", "win", "loss", "least", "most"),
    [
        (8, (4, 3.0), (0, -0.3), 600, 600),  # pays on average
        (6, (1, 0.5), (0, -0.5), 1, 299),  # costs more than it adds
        (700, (-1, -0.9), (-1, -0.9), 1, 90),  # tokens cut by a stop are no gain
    ],
)
def test_drafting_stays_enabled_if_it_pays_on_average(every, win, loss, least, most):
    controller, asked = SpeculationController(), 0
    for step in range(600):
        if controller.next_length(64):
            asked += 1
            controller.record(*(win if step % every == 0 else loss))
    assert least <= asked <= most


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


def chain_of(*probs):
    return DraftTree.chain(range(len(probs) + 1), [1.0, *probs])


@pytest.mark.parametrize(
    ("drafts", "cost", "options", "kept"),
    [
        ([(0.9, 0.8, 0.7), (0.3, 0.2), ()], lambda rows: 30.0 + rows, {}, [3, 2, 0]),
        ([(0.9, 0.8, 0.7), (0.3, 0.2), ()], lambda rows: 2.0 + rows, {}, [3, 0, 0]),
        ([(0.9, 0.8, 0.7), (0.3, 0.2), ()], float, {}, [0, 0, 0]),
        ([(0.9, 0.8, 0.7), (0.85, 0.2)], lambda rows: 1.0, {"max_rows": 4}, [1, 1]),
        ([(0.3,)], lambda rows: 1.0 + 0.25 * rows, {}, [1]),
        # Tokens expected elsewhere raise the cost of more rows.
        ([(0.3,)], lambda rows: 1.0 + 0.25 * rows, {"expected_elsewhere": 9.0}, [0]),
    ],
)
def test_a_shared_budget_goes_to_the_likeliest_draft_tokens(drafts, cost, options, kept):
    trees = [chain_of(*probs) for probs in drafts]
    found = select_drafts_jointly(trees, cost, [1] * len(trees), **options)
    assert [tree.num_drafts for tree in found] == kept
