"""Suffix arrays, compared with plain loops."""

import random

import numpy as np
import pytest
from seeds import each_seed

from ragaccel.decoding import Context, Reference
from ragaccel.drafting import (
    CONTEXT,
    MAX_GAP,
    MAX_MATCH,
    OUTPUT,
    PROMPT,
    REFERENCE,
    SORT_DEPTH,
    History,
    RequestText,
    empty_bigrams,
    empty_suffix_array,
    insertion_rank,
    match_beyond,
    match_length,
    with_bigrams,
)


def random_text(seed, size, vocab=3):
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(size)]


def contexts_in_order(suffix_array):
    """The contexts of all positions in their order; a boundary ends a context."""
    found = []
    for position in suffix_array.positions[: suffix_array.num_positions].tolist():
        context = suffix_array.token_ids[position - SORT_DEPTH : position][::-1].tolist()
        found.append(context[: context.index(-1) + 1] if -1 in context else context)
    return found


@each_seed(20)
def test_positions_stay_sorted_as_the_answer_grows(seed):
    context = Context(random_text(seed, 40), [Reference(tuple(random_text(seed + 100, 30)))])
    text = RequestText(context)
    sizes = [3] * 10 if seed else [2000]  # more than the initial capacity
    for size in sizes:
        gained = random_text(seed + len(context.token_ids), size)
        context.token_ids += gained
        assert list(text.advance()) == gained
    suffix_array = text.suffix_array
    contexts = contexts_in_order(suffix_array)
    assert contexts == sorted(contexts)
    assert suffix_array.num_positions == 29 + 39 + sum(sizes)
    assert set(suffix_array.kinds[text.output_start : text.end].tolist()) == {OUTPUT}
    assert suffix_array.token_ids[text.text_start : text.end].tolist() == context.token_ids


@each_seed(20)
def test_the_positions_next_to_a_context_are_its_longest_matches(seed):
    history = History()
    for part in range(3):
        history.add(random_text(seed * 9 + part, 30), random_text(seed * 7 + part, 20))
    suffix_array = history.suffix_array()
    wanted = np.array([-1] * CONTEXT + random_text(seed + 50, 12), np.int32)
    at = insertion_rank(suffix_array, wanted, len(wanted))
    lengths = [
        match_length(suffix_array.token_ids, position, wanted, len(wanted))
        for position in suffix_array.positions[: suffix_array.num_positions]
    ]
    capped = [min(length, SORT_DEPTH) for length in lengths]
    assert max(capped) == max(capped[max(0, at - 1) : at + 1])
    left, right = capped[:at], capped[at:]
    assert left[-1:] == [max(left)] if left else True
    assert right[:1] == [max(right)] if right else True


def test_a_match_ends_at_a_difference_a_boundary_or_its_limit():
    token_ids = np.array([-1] * CONTEXT + [5, 6, 7, 8, 9], np.int32)
    context = np.array([-1] * CONTEXT + [4, 6, 7, 8], np.int32)
    assert match_length(token_ids, CONTEXT + 4, context, CONTEXT + 4) == 3
    assert match_length(token_ids, CONTEXT + 3, token_ids, CONTEXT + 3) == 3
    long = np.array([-1] * CONTEXT + [1] * 60, np.int32)
    assert match_length(long, CONTEXT + 50, long, CONTEXT + 40) == MAX_MATCH


@pytest.mark.parametrize(
    ("earlier", "now", "agreed"),
    [
        ([1, 2, 3, 4, 9], [1, 2, 3, 4, 8], 4),  # one token substituted
        ([1, 2, 3, 4], [1, 2, 3, 4, 8], 4),  # one inserted
        ([1, 2, 3, 4, 9], [1, 2, 3, 4], 4),  # one deleted
        ([1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 8, 8], 0),  # two
        (list(range(20)), [*range(19), 99], MAX_GAP),
        ([1, 2, 3, 4, -1], [1, 2, 3, 4, 8], 0),  # a boundary ends the text
    ],
)
def test_agreement_continues_beyond_one_changed_token(earlier, now, agreed):
    token_ids = np.array([-1] * CONTEXT + earlier, np.int32)
    context = np.array([-1] * CONTEXT + now, np.int32)
    assert match_beyond(token_ids, len(token_ids), context, len(context)) == agreed


def test_a_reference_in_the_prompt_is_searched_once_under_its_own_kind():
    inside = Reference((3, 4, 5, 6), passage_id="a")
    apart = Reference((7, 8, 9), passage_id="b")
    text = RequestText(Context([1, 2, 3, 4, 5, 6, 2], [inside, apart]))
    suffix_array = text.suffix_array
    known = suffix_array.token_ids[CONTEXT : text.end].tolist()
    assert known == [7, 8, 9, -1, 1, 2, 3, 4, 5, 6, 2]
    kinds = suffix_array.kinds[CONTEXT : text.end].tolist()
    assert kinds == [REFERENCE] * 4 + [PROMPT] * 2 + [REFERENCE] * 4 + [PROMPT]
    assert suffix_array.kinds[text.end] == OUTPUT
    origins = [text.origin(kinds[i], 2, CONTEXT + i) for i in (1, 5, 7)]
    assert [(o.source, o.passage_id, o.offset) for o in origins] == [
        ("reference", "b", 1), ("prompt", "", 1), ("reference", "a", 1),
    ]  # fmt: skip


def test_nothing_is_found_in_no_text():
    suffix_array = empty_suffix_array()
    assert insertion_rank(suffix_array, np.array([-1] * CONTEXT + [1], np.int32), CONTEXT + 1) == 0


def test_a_pair_that_repeats_forever_keeps_a_bounded_share():
    table, pair = empty_bigrams(), np.array([3, 4, 3, 4], np.int32)
    for _ in range(5_000):
        table = with_bigrams(table, pair, np.ones(4) * 0.37, 10)
    assert np.all(table.counts.sum(axis=1) <= table.totals * (1 + 1e-9))
    assert np.all(table.totals < 1 << 13)
