import torch
from hypothesis import given, strategies as st

from ragaccel.decoding import DraftTree, attach_masks
from ragaccel.engine import (
    AttentionMasks,
    KVCache,
    ancestor_matrix,
    causal_rows,
    concat_rows,
    is_plain,
    tree_rows,
)

CPU = torch.device("cpu")


def filled(length):
    """A cache that claims to hold so many tokens."""
    cache = KVCache()
    cache.begin(length)
    cache.keep(range(length))
    return cache


def mask_of(rows, window=None):
    return AttentionMasks(torch.float32, CPU).make(rows, rows.spans[0], window)


def tree_of(parents):
    n = len(parents)
    return DraftTree(tuple(range(10, 10 + n)), tuple(parents), (1.0,) * n, ((),) * n)


@st.composite
def any_parents(draw):
    n = draw(st.integers(1, 70))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, n))]


@given(any_parents())
def test_a_node_sees_exactly_its_path(parents):
    tree = tree_of(parents)
    matrix = ancestor_matrix(parents)
    for node in range(len(tree)):
        assert matrix[node].nonzero()[0].tolist() == tree.path(node)


@given(any_parents(), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 40)))
def test_masks_hide_other_branches_and_what_lies_outside_the_window(parents, start, window):
    tree = tree_of(parents)
    rows = tree_rows(tree, filled(start), CPU)
    mask = mask_of(rows, window)
    depths = tree.depths()
    assert rows.positions[0].tolist() == [start + depth for depth in depths]
    for node in range(len(tree)):
        path = tree.path(node)
        seen = [(slot, slot) for slot in range(start)]
        seen += [(start + other, start + depths[other]) for other in path]
        limit = window or 10**6
        expected = [slot for slot, at in seen if start + depths[node] - at < limit]
        assert (mask[node] == 0).nonzero()[:, 0].tolist() == expected
        assert bool(((mask[node] == 0) | torch.isneginf(mask[node])).all())


def test_a_run_is_causal():
    mask = mask_of(causal_rows([1, 2, 3], filled(2), CPU))
    assert (mask == 0).tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


def test_a_chain_needs_no_ancestor_matrix():
    rows = tree_rows(DraftTree.chain([1, 2, 3]), filled(5), CPU)
    assert rows.spans[0].sees is None
    assert rows.is_mask is None
    assert rows.positions.tolist() == [[5, 6, 7]]


def test_plain_attention_is_used_only_where_it_is_right():
    one, run, first = (
        causal_rows(tokens, filled(start), CPU).spans[0]
        for tokens, start in (([1], 7), ([1, 2], 7), ([1, 2], 0))
    )
    assert is_plain(one)
    assert is_plain(first)
    assert not is_plain(run)
    assert is_plain(one, window=8)
    assert not is_plain(one, window=7)
    assert not is_plain(tree_rows(tree_of([-1, 0, 0]), filled(0), CPU).spans[0])


def test_mask_rows_are_marked():
    tree = attach_masks(DraftTree.chain([1, 2]), [90, 91], [0, 1])
    rows = tree_rows(tree, filled(3), CPU)
    assert rows.is_mask.tolist() == [False] * 2 + [True] * 4


def test_positions_never_pass_what_the_model_has():
    chain, tree = DraftTree.chain([1] * 5), tree_of([-1, 0, 0, 1])
    assert tree_rows(chain, filled(6), CPU, 8).positions.tolist() == [[6, 7, 7, 7, 7]]
    assert tree_rows(tree, filled(6), CPU, 8).positions.tolist() == [[6, 7, 7, 7]]


def test_batched_sequences_do_not_attend_to_each_other():
    first, second = filled(3), filled(0)
    tree = attach_masks(tree_of([-1, 0, 0]), [90], [1])
    parts = [tree_rows(tree, first, CPU), causal_rows([5, 6], second, CPU)]
    rows = concat_rows(parts)
    assert rows.token_ids.tolist() == [[10, 11, 12, 90, 5, 6]]
    assert rows.positions.tolist() == [[3, 4, 4, 5, 0, 1]]
    assert [(span.cache, span.first, span.num_rows, span.start) for span in rows.spans] == [
        (first, 0, 4, 3),
        (second, 4, 2, 0),
    ]
    assert rows.is_mask.tolist() == [False] * 3 + [True] + [False] * 2
    sees = rows.sees()
    assert not sees[:4, 4:].any()
    assert not sees[4:, :4].any()
    assert sees[4:, 4:].tolist() == [[True, False], [True, True]]
    assert torch.equal(sees[:4, :4], rows.spans[0].sees)
    assert rows.attended == 7
