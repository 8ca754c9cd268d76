"""SPACE's drafters over scripted targets: drafts, mask positions and what they learn."""

import pytest
from fakes import RandomDrafter, RecordingVerifier, ScriptedVerifier, decode_plainly

from ragaccel.decoding import (
    Context,
    Drafter,
    DraftTree,
    Reference,
    Request,
    SampledTokens,
    Session,
    accept_tree,
    allocate,
    attach_masks,
    check_tree,
)
from ragaccel.drafting import (
    INITIAL_VALUE,
    CopyDrafter,
    Ending,
    Mixture,
    PaperSpaceDrafter,
    SpaceCalibration,
    SpaceDrafter,
    TrieDrafter,
    best_first_tree,
    predictions_after,
)
from ragaccel.errors import ConfigurationError

MASKS = (90, 91, 92)


def wander(text):
    """An endless text with a long period."""
    return (7 * text[-1] + 3 * len(text) + sum(text[-3:])) % 89


def run(verifier, drafter, request, token_budget=None):
    session = Session(verifier, drafter, request, token_budget=token_budget)
    list(session)
    return session.result()


def test_the_paper_mode_has_k_candidates_and_a_group_under_each():
    verifier, request = RecordingVerifier(wander), Request((1, 2), max_new_tokens=30)
    result = run(verifier, PaperSpaceDrafter(MASKS), request, token_budget=3)
    assert list(result.token_ids) == list(decode_plainly(wander, request)[0])
    first, second = verifier.trees[:2]
    assert (first.num_drafts, first.num_masks) == (0, 3)  # no candidates yet
    assert (len(second), second.num_drafts, second.num_masks) == (16, 3, 12)
    assert second.parents[:4] == (-1, 0, 1, 2)
    for node in range(4):
        assert [second.token_ids[mask] for mask in second.masks_under(node)] == list(MASKS)
    # All three candidates are right, so that a pass emits four tokens.
    assert result.stats.accepted_by_source == {"space": result.stats.accepted_tokens}
    assert result.stats.verify_passes == 1 + 8


def test_what_is_read_stands_under_the_accepted_leaf():
    chain, rows = DraftTree.chain([1, 2, 3]), [[(10 * node, 1.0)] for node in range(6)]
    tree = attach_masks(chain, (90, 91), [0, 1, 2])
    sampled = SampledTokens([2, 7, 7, *[0] * 6], mask_predictions=rows)
    acceptance = accept_tree(tree, sampled)  # 2 is right, 3 is not: the leaf is node 1
    assert predictions_after(acceptance) == [[(20, 1.0)], [(30, 1.0)]]
    assert predictions_after(acceptance.cut(1)) == [[(0, 1.0)], [(10, 1.0)]]
    bare = SampledTokens([2, 7, 7, 0, 0], mask_predictions=rows[:2])
    silent = SampledTokens([2, 7, 7, *[0] * 6])  # of a verifier without mask predictions
    for nothing in (
        None,
        acceptance.cut(0),
        accept_tree(attach_masks(chain, (90, 91), [0]), bare),
        accept_tree(tree, silent),
    ):
        assert predictions_after(nothing) == []


def test_a_tree_takes_the_likeliest_first():
    chances = [[(5, 0.6), (6, 0.3)], [(7, 0.5), (8, 0.1)]]
    tree = best_first_tree(1, chances, 4)
    assert tree.token_ids == (1, 5, 6, 7, 7)
    assert tree.parents == (-1, 0, 0, 1, 2)
    assert tree.path_probs == pytest.approx((1.0, 0.6, 0.3, 0.3, 0.15))
    assert best_first_tree(1, chances, 0).token_ids == (1,)
    assert best_first_tree(1, [], 5).token_ids == (1,)
    assert best_first_tree(1, [[(5, 0.9), (5, 0.8)]], 5).token_ids == (1, 5)


def test_mask_tokens_are_attached_only_where_they_pay():
    request = Request((1, 2), max_new_tokens=60)
    free, dear = (
        RecordingVerifier(wander),
        RecordingVerifier(wander, cost_seconds=lambda rows: 1.0 + 2.0 * rows),
    )
    run(free, SpaceDrafter(MASKS), request)
    run(dear, SpaceDrafter(MASKS), request)
    assert all(tree.num_masks for tree in free.trees[:-1])
    assert not any(tree.num_masks for tree in dear.trees[3:])
    slow = RecordingVerifier(wander)  # passes with mask tokens alone are
    slow.mask_seconds = lambda: 9.0
    run(slow, SpaceDrafter(MASKS), request)
    assert not any(tree.num_masks for tree in slow.trees)
    some = RecordingVerifier(wander, cost_seconds=lambda rows: 1.0 + 0.12 * rows)
    run(some, Mixture(RandomDrafter(3, 89), SpaceDrafter(MASKS)), request)
    probing = [tree for tree in some.trees if tree.num_masks]
    assert probing
    assert all(tree.num_masks < 3 * (1 + tree.num_drafts) for tree in probing if tree.num_drafts)


def test_a_small_pass_has_mask_tokens_or_draft_tokens():
    verifier, request = RecordingVerifier(wander, max_rows=4), Request((1, 2), max_new_tokens=31)
    result = run(verifier, SpaceDrafter(MASKS), request)
    assert result.token_ids == decode_plainly(wander, request)[0]
    assert [tree.num_drafts for tree in verifier.trees[:4]] == [0, 1, 0, 1]
    assert verifier.largest_tree == 4
    assert result.stats.verify_passes < 25


def test_a_pass_has_no_mask_tokens_while_drafting_is_disabled():
    class Wrong(RecordingVerifier):
        def predictions_at(self, tree):
            return [[(88, 0.9)] for _ in super().predictions_at(tree)]

    verifier = Wrong(lambda text: 1 + len(text) % 80, cost_seconds=lambda rows: 1.0 + 0.2 * rows)
    run(verifier, SpaceDrafter(MASKS), Request((1, 2), max_new_tokens=200))
    assert sum(len(tree) for tree in verifier.trees) < 1.6 * len(verifier.trees)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("drafter", [SpaceDrafter, PaperSpaceDrafter])
def test_mask_tokens_are_attached_only_where_a_draft_token_may_follow(drafter, length):
    verifier, left = RecordingVerifier(wander), length
    session = Session(verifier, drafter(MASKS), Request((1, 2), max_new_tokens=length))
    for step in session:
        tree = verifier.trees[-1]
        hung = [node for node in range(1 + tree.num_drafts) if tree.masks_under(node)]
        # after the node and its next token there is room for a draft token and one more
        assert all(left - tree.depths()[node] - 1 >= 2 for node in hung)
        left -= len(step.token_ids)
    assert left == 0


def test_gains_follow_where_decoding_may_end():
    drafter = SpaceDrafter(MASKS)
    drafter.calibration.values[:] = [1.0, 2.0, 0.5]
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 1, 0), (1.0, 0.6, 0.4, 0.1), ((),) * 4)
    found = drafter.mask_gains(Context([1]), tree)
    assert found == pytest.approx([0.3 * 1.0, 0.2 * 2.0, 0.4 * 0.5, 0.1 * 0.5])


def test_a_mixture_judges_the_merged_tree():
    drafter = SpaceDrafter(MASKS)
    context, tree = Context([1]), DraftTree.chain([1, 2, 3], [1.0, 0.7, 0.2])
    mixture = Mixture(CopyDrafter(), drafter)
    assert mixture.mask_gains(context, tree) == drafter.mask_gains(context, tree)
    assert mixture.selects_masks
    for plain in (Mixture(CopyDrafter()), Mixture(CopyDrafter(), PaperSpaceDrafter(MASKS))):
        assert not plain.selects_masks
        assert plain.mask_gains(context, tree) == [1.0] * 3


@pytest.mark.parametrize(
    ("drafters", "rows", "masks"),
    [
        ([SpaceDrafter(MASKS), PaperSpaceDrafter(MASKS), CopyDrafter()], 64, [0, 3, 3]),
        ([SpaceDrafter(MASKS) for _ in range(4)], 11, [0, 0, 3, 3]),
    ],
)
def test_several_sessions_share_the_rows_for_mask_tokens(drafters, rows, masks):
    request = Request((1, 2), max_new_tokens=40)
    sessions = [Session(ScriptedVerifier(wander), drafter, request) for drafter in drafters]
    for session in sessions:
        session.draft()
    trees = allocate(sessions, lambda rows: 1.0, rows)
    assert sum(map(len, trees)) <= rows
    assert sorted(tree.num_masks for tree in trees) == masks


@pytest.mark.parametrize("max_rows", [4, 5, 8, 14])
def test_rows_that_are_shared_are_not_more_of_one_session(max_rows):
    request = Request((1, 2), max_new_tokens=40)
    sessions = [
        Session(ScriptedVerifier(wander, max_rows=max_rows), drafter, request)
        for drafter in (Mixture(RandomDrafter(2, 89), SpaceDrafter(MASKS)), SpaceDrafter(MASKS))
    ]
    for session in sessions:
        session.mask_predictions = [[(5, 0.5), (6, 0.4)], [(7, 0.5), (8, 0.5)]]
    for _ in range(20):
        for session in sessions:
            session.draft()
        trees = allocate(sessions, lambda rows: 1.0 + 0.01 * rows, 256)
        assert max(map(len, trees)) <= max_rows


def test_chances_follow_the_outcomes():
    calibration = SpaceCalibration()
    assert calibration.chance(0, 0, 0.5) == pytest.approx(0.5)
    calibration.learn([[(5, 0.5)], [(6, 0.5)]], [4, 6])
    assert calibration.chance(1, 0, 0.5) < 0.5, "by its rank alone: the token before it was wrong"
    assert calibration.state()["by_depth"][1] == 0.0
    for _ in range(400):
        calibration.learn([[(5, 0.5)], [(6, 0.5)]], [5, 9])
    assert calibration.chance(0, 0, 0.5) > 0.8
    assert calibration.chance(1, 0, 0.5) < 0.4
    assert 0.0 < calibration.chance(0, 0, 0.0) < calibration.chance(0, 0, 1.0) < 1.0
    calibration.clear()
    assert calibration.chance(0, 0, 0.5) == pytest.approx(0.5)


def test_values_follow_what_was_added_and_come_back():
    calibration = SpaceCalibration()
    for _ in range(200):
        calibration.record(Ending.ROOT, 3)
        calibration.record(Ending.END, 0)
    assert calibration.values[Ending.ROOT] > 2.5
    assert calibration.values[Ending.END] < 0.2
    assert calibration.values[Ending.INNER] == pytest.approx(INITIAL_VALUE)
    for _ in range(500):
        calibration.decay()
    assert calibration.values == pytest.approx([INITIAL_VALUE] * 3, abs=0.05)


def test_what_was_learned_is_kept():
    calibration, other = SpaceCalibration(), SpaceCalibration()
    calibration.learn([[(5, 0.5), (6, 0.2)]], [6])
    calibration.record(Ending.INNER, 2)
    other.restore(calibration.state())
    assert other.values == calibration.values
    assert other.chance(0, 1, 0.3) == calibration.chance(0, 1, 0.3) > 0.3
    other.restore({})
    assert other.chance(0, 1, 0.3) == pytest.approx(0.3)


def test_the_first_draft_tokens_come_with_the_prompt():
    class MaskPredictingVerifier(RecordingVerifier):
        def predict_masks(self, mask_ids):
            self.asked = tuple(mask_ids)

        def prefill(self, request):
            super().prefill(request)
            text, shown = list(request.prompt_ids), []
            for _ in self.asked:
                text.append(self.next_token(text))
                shown.append([(text[-1], 0.7)])
            self.mask_predictions = shown

    verifier, request = MaskPredictingVerifier(wander), Request((1, 2), max_new_tokens=30)
    result = run(verifier, SpaceDrafter(MASKS), request, token_budget=3)
    assert verifier.asked == MASKS
    assert result.token_ids == decode_plainly(wander, request)[0]
    assert verifier.trees[0].num_drafts == 3
    paper = RecordingVerifier(wander)  # the paper's drafter requests none
    paper.predict_masks = lambda mask_ids: pytest.fail("asked")
    run(paper, PaperSpaceDrafter(MASKS), request, token_budget=3)
    single = RecordingVerifier(wander)  # an answer of one token has no room for a draft token
    single.predict_masks = lambda mask_ids: pytest.fail("asked")
    run(single, SpaceDrafter(MASKS), Request((1, 2), max_new_tokens=1))


class Sequel(Drafter):
    """Continues draft tokens by a table."""

    def __init__(self, after):
        self.after = after

    def draft(self, context, budget):
        return DraftTree.chain(context.token_ids[-1:])

    def draft_after(self, context, drafted, budget):
        tokens = self.after.get(tuple(drafted), [])[:budget]
        return DraftTree.chain([drafted[-1], *tokens], [0.5**i for i in range(1 + len(tokens))])


def test_other_drafters_continue_from_the_mask_predictions():
    drafter = Mixture(Sequel({(5,): [8, 9], (5, 6): [7]}), SpaceDrafter(MASKS))
    context = Context([1])
    context.mask_predictions = [[(5, 0.8), (4, 0.05)], [(6, 0.5)]]
    tree = drafter.draft(context, 6)
    paths = {tuple(tree.token_ids[i] for i in tree.path(node)) for node in range(len(tree))}
    assert {(1, 5, 8), (1, 5, 8, 9), (1, 5, 6, 7), (1, 4)} <= paths
    probs = {tree.token_ids[i]: tree.path_probs[i] for i in range(len(tree))}
    assert probs[8] == pytest.approx(0.4)
    assert probs[7] == pytest.approx(0.2)
    assert len(drafter.draft(context, 2)) == 3


def test_a_trie_continues_from_a_draft_token():
    trie = TrieDrafter()
    context = Context([1, 2, 3, 4, 5, 6, 7, 8, 9, 2])
    plain = trie.draft(context, 8)
    found = trie.draft_after(context, [6], 8)
    assert found.token_ids[:4] == (6, 7, 8, 9)
    assert trie.draft_after(context, [], 8).token_ids == plain.token_ids
    assert trie.draft(context, 8).token_ids == plain.token_ids  # nothing was changed
    assert trie.draft_after(context, [5, 77], 8).token_ids[0] == 77


# Mixtures of other drafters.


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


def test_drafters_that_make_no_sense_are_refused():
    probing = RandomDrafter(1, 9)
    probing.mask_ids = (3,)
    for make, message in (
        (lambda: SpaceDrafter(()), "mask_ids"),
        (lambda: PaperSpaceDrafter(()), "mask_ids"),
        (Mixture, "at least one"),
        (lambda: Mixture(probing, probing), "mask tokens"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make()
    assert Mixture(CopyDrafter(), probing).mask_ids == (3,)
