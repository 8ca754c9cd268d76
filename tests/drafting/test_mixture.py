import pytest
from fakes import RandomDrafter

from ragaccel.decoding import Context, Drafter, DraftTree, Reference, check_tree
from ragaccel.drafting import CopyDrafter, Mixture
from ragaccel.errors import ConfigurationError


class Ranking(Drafter):
    """Drafts one token, and requests the model's next likeliest tokens."""

    num_alternatives = 7

    def draft(self, context, budget):
        return DraftTree.chain([context.token_ids[-1], 40][: budget + 1])


def test_a_mixture_drafts_what_its_drafters_draft():
    passage = Reference((1, 30, 31, 32))
    mixture = Mixture(CopyDrafter(), Ranking())
    tree = mixture.draft(Context([1], [passage]), 12)
    check_tree(tree, 1, 12)
    assert {30, 40} <= {tree.token_ids[n] for n in range(len(tree)) if tree.parents[n] == 0}
    assert mixture.num_alternatives == Ranking.num_alternatives
    assert len(mixture.draft(Context([1], [passage]), 2)) == 3


def test_mixtures_that_make_no_sense_are_refused():
    probing = RandomDrafter(1, 9)
    probing.mask_ids = (3,)
    with pytest.raises(ConfigurationError, match="at least one"):
        Mixture()
    with pytest.raises(ConfigurationError, match="mask tokens"):
        Mixture(probing, probing)
    assert Mixture(CopyDrafter(), probing).mask_ids == (3,)
