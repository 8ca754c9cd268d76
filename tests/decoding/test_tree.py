import math

import pytest

from ragaccel.decoding import (
    DraftTree,
    MalformedTreeError,
    Origin,
    attach_masks,
    check_tree,
    graft,
    keep_likeliest,
    likeliest_chain,
    merge,
)

A, B = Origin("a", 1), Origin("b", 2)


def tree(tokens=(7, 1, 2), parents=(-1, 0, 0), probs=(1.0, 0.5, 0.4), origins=None):
    return DraftTree(tokens, parents, probs, origins or ((),) * len(tokens))


def test_chain_knows_its_shape():
    chain = DraftTree.chain([7, 1, 2], [1.0, 0.5, 0.25])
    assert chain.parents == (-1, 0, 1)
    assert chain.depths() == [0, 1, 2]
    assert chain.is_chain
    assert not tree().is_chain
    assert (len(chain), chain.num_drafts, chain.path(2)) == (3, 2, [0, 1, 2])
    assert len(keep_likeliest(tree(), 0)) == 1
    for own in (chain, DraftTree.chain([7])):
        assert likeliest_chain(own) is own


def test_merge_unites_origins_and_keeps_the_best_estimate():
    left = DraftTree.chain([7, 1, 2], [1.0, 0.5, 0.4], [(), (A,), (A,)])
    right = DraftTree.chain([7, 1, 3], [1.0, 0.8, 0.1], [(), (B,), (B,)])
    union = merge([left, right], 9)
    assert union.token_ids == (7, 1, 2, 3)
    assert union.parents == (-1, 0, 1, 1)
    assert union.path_probs == (1.0, 0.8, 0.4, 0.1)
    assert union.origins == ((), (B, A), (A,), (B,))


def test_merge_keeps_the_likeliest_nodes_as_a_tree():
    union = merge(
        [DraftTree.chain([7, 1, 2], [1.0, 0.5, 0.4]), tree((7, 5), (-1, 0), (1.0, 0.45))], 2
    )
    assert union.token_ids == (7, 1, 5)
    check_tree(union, 7, 2)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([], "one common root"),
        ([DraftTree.chain([1]), DraftTree.chain([2])], "one common root"),
        ([attach_masks(tree(), (9,), [0])], "merge first, then call attach_masks"),
    ],
)
def test_trees_that_cannot_be_merged_are_refused(trees, message):
    with pytest.raises(ValueError, match=message):
        merge(trees, 4)


@pytest.mark.parametrize(
    ("parents", "probs", "kept"),
    [
        ((-1, 0, 0), (1.0, 0.5, 0.4), (0, 1)),
        ((-1, 0, 0), (1.0, 0.4, 0.5), (0, 2)),
        ((-1, 0, 0, 2, 3), (1.0, 0.5, 0.3, 0.2, 0.1), (0, 2, 3, 4)),  # 0.6 tokens, not 0.5
        ((-1, 0, 0, 2, 1), (1.0, 0.4, 0.3, 0.05, 0.0), (0, 1)),
        ((-1, 0, 1, 1, 2), (1.0, 0.9, 0.4, 0.4, 0.3), (0, 1, 2, 4)),
        ((-1, 0, 0), (1.0, 0.0, 0.0), (0,)),
    ],
)
def test_of_a_tree_the_branch_is_kept_that_is_likely_to_go_furthest(parents, probs, kept):
    tokens = tuple(range(7, 7 + len(parents)))
    origins = tuple((Origin("a", node),) for node in range(len(parents)))
    chain = likeliest_chain(DraftTree(tokens, parents, probs, origins))
    assert chain.is_chain
    assert chain.token_ids == tuple(tokens[node] for node in kept)
    assert chain.path_probs == tuple(probs[node] for node in kept)
    assert chain.origins == tuple(origins[node] for node in kept)
    check_tree(chain, 7, len(parents))


def test_masks_are_attached_in_chains_under_chosen_nodes():
    masked = attach_masks(tree(), (90, 91), [0, 2])
    assert masked.token_ids == (7, 1, 2, 90, 91, 90, 91)
    assert masked.parents == (-1, 0, 0, 0, 3, 2, 5)
    assert (masked.num_masks, masked.num_drafts) == (4, 2)
    assert [masked.masks_under(node) for node in range(3)] == [[3, 4], [], [5, 6]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "expected a DraftTree, got NoneType"),
        (tree((), (), (), ()), "at least 1, got 0"),
        (tree(parents=(-1, 0)), "one common length"),
        (tree((8, 1, 2)), "last token of the context"),
        (tree(parents=(0, 0, 0)), "last token of the context"),
        (tree((7, 1, 2, 3), (-1, 0, 0, 0), (1.0,) * 4), "exceed the budget of 2"),
        (tree((7, 1, 1)), "repeats token 1 under node 0"),
        (tree(parents=(-1, 2, 0)), "node 1 has parent 2"),
        (tree(parents=(-1, 0, -1)), "node 2 has parent -1"),
        (tree((7, -3, 2)), "negative token id"),
        (tree(probs=(0.1, 0.5, 0.1)), "node 1 has path_prob"),
        (tree(probs=(1.0, math.nan, 0.1)), "node 1 has path_prob"),
        (attach_masks(tree(), (9,), [0]), "holds mask tokens"),
    ],
)
def test_malformed_trees_are_named(bad, message):
    with pytest.raises(MalformedTreeError, match=message):
        check_tree(bad, 7, 2)


def test_graft_keeps_the_path_to_a_node():
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 0, 2), (1.0, 0.3, 0.6, 0.5), ((),) * 4)
    branch = DraftTree((3, 7, 8), (-1, 0, 0), (1.0, 0.5, 0.25), ((),) * 3)
    found = graft(tree, 2, branch)
    assert found.token_ids == (1, 3, 7, 8)
    assert found.parents == (-1, 0, 1, 1)
    assert found.path_probs == (1.0, 0.6, 0.3, 0.15)
    check_tree(found, 1, 3)
    assert graft(tree, 0, DraftTree.chain([1, 9])).token_ids == (1, 9)
