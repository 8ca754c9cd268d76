"""The trie drafter: trees of the likeliest branches, from this request and past ones."""

import json
import math
import os
import random
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from seeds import each_seed

from ragaccel.decoding import Context, Reference, check_tree
from ragaccel.drafting import (
    ANSWER_WEIGHT,
    CONTEXT,
    Calibration,
    History,
    RequestText,
    TrieDrafter,
    backoff_shares,
    match_beyond,
    match_length,
    trie,
)
from ragaccel.drafting.expansion import (
    MAX_BEYOND_MATCH,
    MAX_MATCHES,
    MAX_PAST_MATCHES,
    MIN_CLEAR_MATCH,
    MIN_SAME_QUESTION,
    OUTPUT,
    PAST_ANSWER,
    PROMPT,
    TIE_BREAK,
    default_match_weights,
    new_scores,
    score_candidates,
)  # fmt: skip
from ragaccel.errors import ConfigurationError

PASSAGE = Reference(tuple(range(100, 160)), 1.0, "p1")


def random_text(rng, size, vocab=4):
    return [rng.randrange(vocab) for _ in range(size)]


def branches(tree):
    leaves = set(range(len(tree))) - set(tree.parents)
    return sorted([tree.token_ids[node] for node in tree.path(leaf)[1:]] for leaf in leaves)


@each_seed(60)
def test_trees_are_trees_the_likeliest_first(seed):
    rng = random.Random(seed)
    history = History()
    for _ in range(rng.randrange(4)):
        history.add(random_text(rng, rng.randrange(1, 50)), random_text(rng, rng.randrange(30)))
    references = [Reference(tuple(random_text(rng, rng.randrange(40)))) for _ in range(3)]
    context = Context(random_text(rng, rng.randrange(1, 60)), references)
    drafter = TrieDrafter(past=history, mode=rng.choice(["hierarchical", "parallel", "one"]))
    for _ in range(4):
        budget = rng.randrange(1, 70)
        tree = drafter.draft(context, budget)
        check_tree(tree, context.token_ids[-1], budget)
        assert list(tree.path_probs) == sorted(tree.path_probs, reverse=True)
        assert len(tree) - 1 <= 64
        assert max(tree.depths()) <= 24
        context.token_ids += random_text(rng, rng.randrange(1, 4))


def test_equal_prefixes_share_nodes_and_longer_contexts_go_first():
    one, other = Reference((1, 2, 3, 4, 5)), Reference((9, 2, 3, 6, 7))
    tree = TrieDrafter().draft(Context([8, 1, 2], [one, other]), 6)
    assert tree.token_ids[1] == 3
    children = [tree.token_ids[n] for n in range(1, len(tree)) if tree.parents[n] == 1]
    assert children[:2] == [4, 6]
    assert len([n for n in range(len(tree)) if (tree.token_ids[n], tree.parents[n]) == (3, 0)]) == 1


def test_the_papers_modes_differ_in_where_branches_split():
    texts = [Reference((1, 2, *tail)) for tail in ((3, 4, 5), (3, 6, 7), (8, 9, 10))]

    def draft(mode):
        return TrieDrafter(mode=mode).draft(Context([1, 2], texts), 12)

    assert draft("one").is_chain
    parallel = draft("parallel")
    assert parallel.parents.count(0) > 1
    assert all(parallel.parents.count(node) <= 1 for node in range(1, len(parallel)))
    hierarchical = draft("hierarchical")
    third = hierarchical.token_ids.index(3)
    assert hierarchical.parents.count(third) > 1


@each_seed(20)
def test_a_smaller_tree_is_the_likelier_part_of_a_larger_one(seed, monkeypatch):
    monkeypatch.setattr(trie, "PRIOR", 1.0)  # every node is expanded
    rng = random.Random(seed)
    prompt = random_text(rng, 50)
    trees = [TrieDrafter().draft(Context(prompt), budget) for budget in range(1, 65)]
    for small, large in pairwise(trees):
        assert small.path_probs == pytest.approx(large.path_probs[: len(small)])


def test_branches_are_no_longer_and_trees_no_larger_than_asked():
    context = Context([1, 100, 101], [PASSAGE])
    tree = TrieDrafter(decoding_length=5, branch_length=2).draft(context, 60)
    assert len(tree) == 6
    assert max(tree.depths()) == 2
    assert TrieDrafter().draft(context, 0).token_ids == (101,)
    for settings in ({"decoding_length": 0}, {"branch_length": 0}, {"mode": "sideways"}):
        with pytest.raises(ConfigurationError):
            TrieDrafter(**settings)


def test_a_copy_resumes_after_a_changed_word():
    text = [*range(200, 230)]
    answer = [*text[:10], 999]  # 210 was replaced
    tree = TrieDrafter(decoding_length=4).draft(Context([5, *answer], [Reference(tuple(text))]), 4)
    assert 211 not in tree.token_ids, "nothing matches yet"
    context = Context([5, 211, 300, 6, *answer, 211], [Reference(tuple(text))])
    tree = TrieDrafter(decoding_length=4).draft(context, 4)
    assert tree.token_ids[1] == 212, "what agrees beyond the changed word decides"


def test_the_first_of_equal_matches_is_continued():
    for text in ([1, 7, 30, 2, 7, 20, 3, 7, 10], [1, 7, 10, 2, 7, 20, 3, 7, 30]):
        tree = TrieDrafter(mode="one").draft(Context([*text, 4, 7]), 1)
        assert tree.token_ids[1] == text[2]


def test_a_past_answer_is_not_copied_because_its_prompt_ended_alike():
    template = [90, 91, 92, 93]
    history = History()
    mixed = [token for other in range(1000, 1040) for token in (50, other)]
    history.add([*mixed, *template], [50, 60, 61])
    tree = TrieDrafter(mode="one", past=history).draft(
        Context([4, 50, 70, 71, 5, 6, *template, 50]), 2
    )
    assert tree.token_ids == (50, 70, 71)
    question = [*range(20, 30), *template]
    history.add(question, [50, 60, 61])
    tree = TrieDrafter(mode="one", past=history).draft(Context([4, 50, 70, 71, *question, 50]), 2)
    assert tree.token_ids == (50, 60, 61), "the same question again"


def test_origins_say_where_a_draft_token_comes_from():
    history = History()
    mixed = [token for other in range(1000, 1400) for token in (50 + other % 2, other)]
    history.add([*mixed, *range(38, 52)], [52, 53])
    context = Context([1, 100], [PASSAGE])
    drafter = TrieDrafter(past=history)
    tree = drafter.draft(context, 3)
    assert tree.origins[0] == ()
    assert (tree.origins[1][0].source, tree.origins[1][0].passage_id) == ("reference", "p1")
    assert (tree.origins[1][0].match_length, tree.origins[1][0].offset) == (1, 1)
    for said, drafted, source in ((50, 51, "past prompt"), (51, 52, "past answer")):
        context.token_ids += [*range(38, 1 + said)]
        tree = drafter.draft(context, 60)
        assert tree.origins[tree.token_ids.index(drafted)][0].source == source


def test_a_request_keeps_the_history_it_began_with():
    history, drafter_context = History(), Context([1, 2])
    drafter = TrieDrafter(past=history)
    drafter.draft(drafter_context, 8)
    history.add([1, 2], [40, 41])
    drafter_context.token_ids += [1, 2]
    assert 40 not in drafter.draft(drafter_context, 60).token_ids
    assert 40 in drafter.draft(Context([1, 2]), 60).token_ids


def plain_scores(request, history, context, end, match_weights, shares):
    """What `score_candidates` computes, by comparing all positions."""
    weights, longest, support = {}, [0, 0], [0, 0]
    for number, suffix_array in enumerate((request, history.suffix_array())):
        found = []
        asked = not number or longest[0] < MIN_CLEAR_MATCH
        for position in suffix_array.positions[: suffix_array.num_positions * asked].tolist():
            length = match_length.py_func(suffix_array.token_ids, position, context, end)
            longest[number] = max(longest[number], min(1, length))
            whole, behind = length, suffix_array.kinds[position - length : position]
            if suffix_array.kinds[position] == PAST_ANSWER and whole < MIN_SAME_QUESTION:
                length = int(sum(behind == PAST_ANSWER))  # what reaches into the prompt is ignored
            if length > number:  # a single token of the past is counted below
                longest[number] = max(longest[number], length)
                found.append((length, whole, position))
        support[number] = sum(length == longest[number] for length, *_ in found)
        assert len(found) <= (MAX_MATCHES, MAX_PAST_MATCHES)[number]
        for length, whole, position in found:
            kind = suffix_array.kinds[position]
            beyond = match_beyond.py_func(
                suffix_array.token_ids, position - whole, context, end - whole
            )
            weight = match_weights.length[kind, length]
            weight *= match_weights.beyond[number, min(length, MAX_BEYOND_MATCH), beyond]
            if not number and kind != OUTPUT:
                weight *= 1 - TIE_BREAK * position / len(suffix_array.token_ids)
            token = int(suffix_array.token_ids[position])
            weights[token] = weights.get(token, 0.0) + weight
    backoff = math.prod(match_weights.backoff[i, longest[i]] for i in (0, 1))
    backoff *= math.prod(match_weights.support[i, round(math.log2(support[i] + 1))] for i in (0, 1))
    total = backoff + sum(weights.values())
    following, new = plain_bigrams(history, int(context[end - 1]))
    seen = sum(following.values())
    part = backoff / (seen + match_weights.frequency[2] * new) if seen else 0.0
    for token, times in following.items():
        weights[token] = weights.get(token, 0.0) + part * times
    left = backoff - part * seen
    return left, total, {token: w + left * shares[token] for token, w in weights.items()}


def plain_bigrams(history, last):
    """Count the tokens that followed the last one in past requests."""
    suffix_array, following = history.suffix_array(), {}
    for position in range(CONTEXT + 1, len(suffix_array.token_ids)):
        token = int(suffix_array.token_ids[position])
        if token >= 0 and suffix_array.token_ids[position - 1] == last:
            times = ANSWER_WEIGHT if suffix_array.kinds[position] == PAST_ANSWER else 1
            following[token] = following.get(token, 0) + times
    return following, len(following)


@each_seed(30)
def test_scores_come_from_every_position_that_matches(seed):
    rng = random.Random(seed)
    history, match_weights = History(), default_match_weights()
    history.add(random_text(rng, 15), random_text(rng, 12))
    references = [Reference(tuple(random_text(rng, 8)))]
    text = RequestText(Context(random_text(rng, 18), references))
    shares, scores = backoff_shares(text, history, match_weights), new_scores()
    context = text.suffix_array.token_ids[: text.end].copy()
    left, total, count = score_candidates(
        text.suffix_array, history.suffix_array(), history.bigrams(), context, text.end,
        match_weights, shares, scores,
    )  # fmt: skip
    expected = plain_scores(text.suffix_array, history, context, text.end, match_weights, shares)
    assert (left, total) == pytest.approx(expected[:2])
    got = dict(zip(scores.token_ids[:count].tolist(), scores.weights[:count].tolist(), strict=True))
    assert got == pytest.approx(expected[2])


SCENARIO = """
import json, random
from ragaccel.decoding import Context, Reference
from ragaccel.drafting import History, TrieDrafter
rng = random.Random(3)
text = lambda n: [rng.randrange(6) for _ in range(n)]
history = History(2048)
for _ in range(12): history.add(text(30), text(20))
context = Context(text(60), [Reference(tuple(text(30)))])
drafter, trees = TrieDrafter(decoding_length=24, past=history), []
for _ in range(6):
    tree = drafter.draft(context, 24)
    trees.append([tree.token_ids, tree.parents, [round(p, 9) for p in tree.path_probs]])
    context.token_ids += text(3)
print(json.dumps(trees))
"""


@pytest.mark.slow
def test_the_uncompiled_functions_draft_the_same_trees():
    def run(**variables):
        done = subprocess.run(
            [sys.executable, "-c", SCENARIO],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables},
        )
        return json.loads(done.stdout)

    compiled = run()
    assert run(NUMBA_DISABLE_JIT="1") == compiled
    assert len(compiled) == 6


def test_corrections_follow_what_came_true():
    calibration = Calibration()
    drafter = TrieDrafter(calibration=calibration)
    rng = random.Random(0)

    def follow(token, times):
        for _ in range(times):
            context = Context([*range(20), *range(10)])
            drafter.draft(context, 8)
            context.token_ids += [token()]
            drafter.draft(context, 1)

    follow(lambda: 500 + rng.randrange(400), 200)  # texts that never continue as before
    lowered = calibration.odds[PROMPT, 8, 0]
    assert lowered < 0.5
    before = TrieDrafter().draft(Context([*range(20), *range(10)]), 1).path_probs[1]
    assert drafter.draft(Context([*range(20), *range(10)]), 1).path_probs[1] < before
    follow(lambda: 10, 400)  # and then always do
    assert calibration.odds[PROMPT, 8, 0] > lowered
    calibration.clear()
    assert np.all(calibration.odds == 1.0)


def test_odds_follow_from_the_corrections():
    calibration, state = Calibration(), Calibration().state()
    state["by_source"][1], state["by_length"][1, 2], state["by_depth"][1, 3] = 2.0, 0.5, -0.25
    state["by_depth"][1, 4] = 3.0
    assert np.all(calibration.odds == 1), "a state does not share its arrays"
    calibration.restore(state)
    assert calibration.odds[1, 2, 3] == pytest.approx(np.exp(2.25))
    assert calibration.odds[1, 2, 4] == pytest.approx(np.exp(3)), "bounded"
    assert calibration.odds[0, 2, 3] == 1
    again = calibration.state()
    assert all(np.array_equal(again[name], array) for name, array in state.items())
    state["by_depth"][1, 4] = 4.0
    with pytest.raises(ValueError, match="by_depth"):
        calibration.restore(state)
    assert calibration.odds[1, 2, 4] == pytest.approx(np.exp(3)), "it is left as it was"
