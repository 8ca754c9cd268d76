"""The rules of other engines, each on examples made by hand."""

from __future__ import annotations

import pytest

from eval.data import Recorded
from eval.experiments.peers import AfterFirstToken, count, replayed
from eval.experiments.replay import Tally
from eval.peer_drafters import (
    ArcticSuffix,
    LlamaCppNgramMod,
    LlamaCppNgramSimple,
    OursAsChain,
    SglangNgram,
    VllmNgram,
)
from ragaccel.decoding import Context
from ragaccel.drafting import TrieDrafter

LONG = list(range(100, 190))


def drafted(drafter, prompt, budget=16, answer=()):
    context = Context(prompt)
    context.token_ids += answer
    return list(drafter.draft(context, budget).token_ids[1:])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((1, 1), [7, 8, 2, 3]),  # the first place of 3
        ((1, 2), [4, 5, 2, 3]),  # the first place of 2 3, not the later one
        ((1, 5), [4, 5, 2, 3]),  # 1 2 3 occurs nowhere before: the longest that does
        ((3, 5), []),
    ],
)
def test_vllm_continues_the_first_place_of_its_longest_match(lengths, expected):
    prompt = [3, 7, 8, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3]
    assert drafted(VllmNgram(*lengths), prompt, budget=4) == expected


def test_vllm_does_not_match_the_last_tokens_with_themselves():
    assert drafted(VllmNgram(1, 3), [1, 2, 3]) == []
    assert drafted(VllmNgram(1, 3), [9, 9, 9]) == [9]


def test_llamacpp_simple_continues_the_last_place_if_enough_follows():
    prompt = [0, 1, 2, 30, 31, 1, 2, 40, 41, 42, 1, 2]
    assert drafted(LlamaCppNgramSimple(2), prompt, budget=2) == [40, 41]
    assert drafted(LlamaCppNgramSimple(3), prompt, budget=3) == []  # no three tokens match
    near = [0, 1, 2, 30, 31, 32, 33, 1, 2, 40, 1, 2]  # what is near is too short to copy
    assert drafted(LlamaCppNgramSimple(2), near, budget=2) == [40, 1]
    assert drafted(LlamaCppNgramSimple(2), [*near[:-3], 1, 2], budget=2) == []


def test_llamacpp_simple_ignores_a_match_at_the_very_beginning():
    assert drafted(LlamaCppNgramSimple(2), [1, 2, 3, 4, 5, 6, 7, 1, 2], budget=2) == []


def test_llamacpp_mod_follows_what_came_last_after_a_run_of_tokens():
    prompt = [1, 2, 30, 31, 9, 1, 2, 40, 41, 42, 1, 2]
    mod = LlamaCppNgramMod(2, 1, has_history=False)
    assert drafted(mod, prompt, budget=3) == [40, 41, 42]
    assert drafted(LlamaCppNgramMod(2, 9, has_history=False), [*prompt, 50], budget=16) == []


@pytest.mark.parametrize("has_history", [False, True])
def test_llamacpp_mod_shares_its_table_between_requests_only_with_history(has_history):
    mod = LlamaCppNgramMod(2, 1, has_history=has_history)
    drafted(mod, [1, 2, 30, 31, 32])
    assert (drafted(mod, [8, 8, 1, 2]) == [30, 31, 32]) is has_history


def test_llamacpp_mod_empties_its_table_after_five_failures():
    mod = LlamaCppNgramMod(2, 1, has_history=True)
    answer = [token for new in range(200, 208) for token in (5, 6, new)]
    for prompt in (LONG, [5, 6, 70, 71, 72]):
        known = drafted(mod, LONG[:2], budget=3)
        count(replayed(mod, 16), Recorded(tuple(prompt), (), (), (*answer, 1)), Tally())
    assert known == LONG[2:5]
    assert drafted(mod, LONG[:2]) == []


def test_sglang_drafts_from_earlier_outputs_and_not_from_the_prompt():
    prompt, answer = [1, 2, 3, *LONG[:30]], [50, 51, 52, 53]
    assert drafted(SglangNgram(has_history=True), [*prompt, 1, 2]) == []
    shared, apart = SglangNgram(has_history=True), SglangNgram(has_history=False)
    for drafter in (shared, apart):
        drafted(drafter, prompt)
        drafter.add(prompt, answer)
    assert drafted(shared, [7, 50, 51]) == [52, 53]
    assert drafted(apart, [7, 50, 51]) == []
    entered = SglangNgram(has_history=False, enters_prompt=True)
    assert drafted(entered, [*prompt, 1, 2], budget=3) == [3, *LONG[:2]]


def test_sglang_grows_a_tree_newest_and_longest_match_first():
    drafter = SglangNgram(has_history=True)
    for text in ([1, 2, 30], [1, 2, 31], [9, 2, 32]):
        drafter.add(text, ())
    context = Context([1, 2])
    tree = drafter.draft(context, 16)
    # Behind "1 2" its two continuations, the newer first; behind "2" alone also the third.
    assert tree.token_ids == (2, 31, 30, 32)
    assert tree.parents == (-1, 0, 0, 0)
    assert drafter.draft(context, 1).token_ids == (2, 31)


def test_suffix_decoding_drafts_no_more_tokens_than_match():
    pytest.importorskip("arctic_inference.suffix_decoding")
    prompt = [*LONG, 1, 2, *LONG[3:6]]
    assert drafted(ArcticSuffix(has_history=False), prompt) == LONG[6:9]
    kept, apart = ArcticSuffix(has_history=True), ArcticSuffix(has_history=False)
    for drafter in (kept, apart):
        drafted(drafter, [5, 6])
        drafter.add([5, 6], LONG)
    assert drafted(kept, [7, *LONG[3:6]]) == LONG[6:9]
    assert drafted(apart, [7, *LONG[3:6]]) == []


def test_our_chain_is_the_trie_drafters_cut_where_it_becomes_unlikely():
    prompt = [0, *LONG, 5, *LONG[:4]]
    whole = TrieDrafter(16, mode="one").draft(Context(prompt), 16)
    cut = sum(whole.path_probs) / len(whole)
    chain = OursAsChain(cut, 16).draft(Context(prompt), 16)
    assert 1 < len(chain) < len(whole)
    assert chain.token_ids == whole.token_ids[: len(chain)]
    assert whole.path_probs[len(chain) - 1] >= cut > whole.path_probs[len(chain)]


def test_the_pass_over_the_prompt_does_not_count():
    copied = Recorded((0, *LONG[:20], 5), (), (), (*LONG[:20], 1))
    tally = Tally()
    count(replayed(VllmNgram(1, 5), 19), copied, tally)
    assert (tally.tokens, tally.passes) == (
        20,
        1,
    )  # the prompt gives the first, one step the others
    assert len(AfterFirstToken(VllmNgram(1, 1)).draft(Context([4, 4]), 8)) == 1
