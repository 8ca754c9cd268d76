import random
from itertools import accumulate
from operator import mul

import pytest

from ragaccel.decode.budget import worth_verifying
from ragaccel.decode.tree import DraftTree, check_tree


def chain(probs):
    return DraftTree.chain(range(len(probs) + 1), [1.0, *accumulate(probs, mul)])


def test_free_rows_are_all_used_and_dear_ones_not():
    tree = chain([0.9] * 8)
    assert len(worth_verifying(tree, lambda rows: 1.0)) == 9
    assert len(worth_verifying(tree, lambda rows: float(rows))) == 1


def test_a_step_in_the_cost_is_not_crossed_for_little():
    tree = chain([0.9] * 8)
    assert len(worth_verifying(tree, lambda rows: 1.0 if rows <= 4 else 3.0)) == 4


def test_probes_are_counted_as_rows():
    tree = chain([0.9] * 8)
    assert len(worth_verifying(tree, lambda rows: 1.0 if rows <= 9 else 9.0, rows_per_node=3)) == 3


@pytest.mark.parametrize("seed", range(50))
def test_no_other_width_gives_more_tokens_a_second(seed):
    rng = random.Random(seed)
    n = rng.randrange(1, 20)
    parents = (-1, *(rng.randrange(i) for i in range(1, n)))
    probs = [1.0]
    for parent in parents[1:]:
        probs.append(probs[parent] * rng.random())
    tree = DraftTree(tuple(range(n)), parents, tuple(probs), ((),) * n)
    costs = list(accumulate(rng.random() for _ in range(n + 1)))
    best = worth_verifying(tree, costs.__getitem__)
    check_tree(best, 0, n)
    rates = [sum(sorted(probs, reverse=True)[:rows]) / costs[rows] for rows in range(1, n + 1)]
    assert sum(best.path_probs) / costs[len(best)] == pytest.approx(max(rates))
