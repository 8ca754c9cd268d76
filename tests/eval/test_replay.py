"""Replayed answers: what a model that gave them would have accepted, of any drafter."""

from __future__ import annotations

import numpy as np
from fakes import RandomDrafter

from eval.data import FITTED, Recorded
from eval.experiments import replay
from eval.experiments.drafting import behind_others, full_history
from eval.experiments.replay import (
    ObservedDrafter,
    ReplayedDrafter,
    Tally,
    variants,
)
from eval.papers import lookahead
from eval.papers.bench import counts_of, replay_rows
from eval.papers.lookahead import (
    AskedSplit,
    branches,
    leaves,
    mixed,
    split_rows,
    trie_point,
)
from ragaccel.decoding import Context, DraftTree, Reference
from ragaccel.drafting import (
    CopyDrafter,
    History,
    TrieDrafter,
)

EOS = 1
PASSAGE = tuple(range(20, 60))
# A recorded answer that is copied whole.
COPIED = Recorded((0, *PASSAGE, 5), (Reference(PASSAGE),), (Reference(PASSAGE),), (*PASSAGE, EOS))


def tally_of(decoder, recorded=COPIED):
    tally = Tally()
    decoder.replay(recorded, tally)
    return tally


def test_a_copied_answer_takes_few_passes_and_a_new_one_a_pass_a_token():
    copied = tally_of(ReplayedDrafter(CopyDrafter, 31))
    assert copied.tokens == len(PASSAGE) + 1
    assert copied.passes <= 4
    new = Recorded((0, 5), (), (), (*range(70, 90), EOS))
    assert tally_of(ReplayedDrafter(CopyDrafter, 31), new).passes == 21


def test_nonsense_is_never_accepted_by_mistake():
    tally = tally_of(ReplayedDrafter(lambda: RandomDrafter(3, 60), 64))
    assert tally.tokens == len(PASSAGE) + 1
    assert tally.passes + tally.accepted == tally.tokens


def test_what_was_replayed_is_remembered_by_those_that_remember():
    history = History()
    decoder = ReplayedDrafter(lambda: TrieDrafter(past=history), 64, past=history)
    new = Recorded((0, 5), (), (), (*range(70, 90), EOS))
    first, second = tally_of(decoder, new), tally_of(decoder, new)
    assert first.passes == 21
    assert second.passes < 12


def test_a_history_is_bounded_as_that_of_a_namespace():
    run = replay.replayed_drafters(4 * 4096)["ours_64_history"]
    for _ in range(20):
        tally_of(run)
    assert 0 < run.past.num_requests < 20
    assert run.past.max_bytes == 4096


def make_history():
    """A past in which 80 to 85 were followed by 86 in a prompt and by 87 in an answer."""
    history = History()
    history.add([50, *range(80, 86), 86, 51], [52, *range(80, 86), 87, 53])
    return history


def sources_of(drafter, context):
    tree = drafter.draft(context, 16)
    return {origins[0].source for origins in tree.origins[1:]}


def test_a_source_that_is_left_out_is_not_copied_from():
    token_ids = [0, 7, 8, 30, 31, 5, 7, 8]
    made = variants(make_history(), 16)
    for name, source in (("reference", "reference"), ("prompt", "prompt")):
        for variant, is_there in (("full", True), (f"no_{name}", False)):
            drafter = made[variant]
            context = Context(token_ids, [Reference((7, 8, 30, 31))])
            if name == "prompt":
                context = Context(token_ids)
            assert (source in sources_of(drafter, context)) is is_there
    for name in ("full", "no_output"):
        context = Context([0, 2, 3])
        made[name].draft(context, 16)
        context.token_ids += [60, 61, 62, 60, 61]
        assert ("output" in sources_of(made[name], context)) is (name == "full")
    for name, source in (("no_past_prompt", "past prompt"), ("no_past_answer", "past answer")):
        assert source in sources_of(made["full"], Context([0, *range(80, 86)]))
        assert source not in sources_of(made[name], Context([0, *range(80, 86)]))


def test_ideas_are_taken_out_one_at_a_time():
    made = variants(make_history(), 16)
    assert "frequent" in sources_of(made["full"], Context([0, 40, 41, 42]))
    context = Context([0, 40, 41, 42])
    assert "frequent" not in sources_of(variants(None, 16)["no_frequent"], context)
    assert np.all(made["no_beyond"].match_weights.beyond == 1.0)
    assert np.all(made["no_support"].match_weights.support == 1.0)
    assert made["one_branch"].draft(Context([0, 7, 8, 30, 7, 8]), 16).is_chain
    calibration = made["no_calibration"].calibration
    calibration.learn(None, None, None)
    assert np.all(calibration.odds == 1.0)
    assert "no_successors" not in variants(None, 16)


def test_prompts_stand_behind_those_of_others():
    rows = [Recorded((i, i, i), (), (), (9, 1)) for i in (2, 3, 4)]
    assert behind_others(rows, 5)[0].prompt_ids == (4, 4, 2, 2, 2)
    assert behind_others(rows, 100)[1].prompt_ids == (4, 4, 4, 2, 2, 2, 3, 3, 3)
    assert behind_others(rows, 2)[0].prompt_ids == (2, 2)


def test_a_history_is_filled_by_shuffled_prompts():
    rows = [Recorded((*range(2, 40),), (), (), (50, 1)), COPIED]
    assert full_history(iter(rows), 60).num_requests == 1
    history = full_history(iter(rows), 500)
    assert 500 <= len(history.suffix_array().token_ids) < 600
    assert history.num_requests > 2


NEW = Recorded((0, 5), (), (), (*range(70, 90), EOS))


def test_a_request_knows_those_before_it_only_where_memory_grows():
    point = [trie_point(16, 8)]
    (cold,) = replay_rows([NEW, NEW], point)
    (grown,) = replay_rows([NEW, NEW], point, History())
    # Nothing is carried over where it is cold, corrections of chances neither.
    assert [tally.passes for tally in cold] == [21, 21]
    assert [tally.passes for tally in grown] < [21, 9]
    assert counts_of(cold)["passes"] == 42


TREE = DraftTree((9, 1, 4, 3, 2), (-1, 0, 0, 1, 1), (1.0, 0.6, 0.3, 0.1, 0.5), ((),) * 5)


def cut(rows):
    return [list(branch.token_ids) for branch in branches(TREE, rows)]


def test_branches_are_whole_and_a_shared_prefix_is_paid_for_in_each():
    assert leaves(TREE) == [4, 3, 2]
    assert cut(5) == [[9, 1, 2], [9, 1, 3], [9, 4]]
    assert cut(4) == [[9, 1, 2], [9, 1, 3]]
    assert cut(3) == [[9, 1, 2], [9, 1]]
    assert cut(1) == [[9, 1]]
    assert cut(0) == []


def row(number, passage=None, start=70):
    """A row of its own prompt, and of a passage that it may share."""
    apart = (Reference((900 + (number if passage is None else passage),)),)
    return Recorded((0, number), apart, apart, (*range(start, start + 20), EOS))


ROWS = [row(number, passage=number // 2) for number in range(20)]


def test_who_warms_shares_no_passage_with_who_is_asked():
    sets = split_rows(ROWS, 4, 20)
    assert len(sets.asked) == 4
    assert len(sets.others) <= 14  # at least two shared theirs with one that is asked
    texts = {part.token_ids for one in sets.asked for part in one.apart}
    assert all(part.token_ids not in texts for one in sets.others for part in one.apart)
    assert sets == split_rows(ROWS, 4, 20)
    assert sets.asked != ROWS[:4]
    assert len(split_rows(ROWS, 100, 20).asked) == 10
    other = AskedSplit([], [ROWS[0], row(50)])
    assert mixed([other, AskedSplit([], [row(60)])], [ROWS[1]]) == [row(60), row(50)]


def test_rows_that_our_drafter_was_fitted_to_warm_and_are_not_asked():
    sets = split_rows(ROWS, 10, 6)
    assert sorted(one.prompt_ids for one in sets.asked) == [one.prompt_ids for one in ROWS[:6]]
    assert len(sets.others) == 14
    assert sets.others != ROWS[6:]
    assert min(rows.start for rows in FITTED.values() if rows.start) == lookahead.MAY_ASK


def test_outcomes_are_those_of_the_verify_passes():
    watched, tally = ObservedDrafter(TrieDrafter()), Tally()
    ReplayedDrafter(lambda: watched, 16).replay(COPIED, tally)
    seen = [token for source in watched.draft_tokens.values() for token in source]
    assert 0 < sum(came for _, came in seen) <= tally.accepted
    assert all(0.0 <= prob <= 1.0 for prob, _ in seen)
