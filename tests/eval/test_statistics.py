"""Ratios, intervals and the figures of retrieval, against cases worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from eval.experiments import rag, retrieval
from eval.experiments.answers import contains, exact_match, f1, is_verbatim, words_of
from eval.experiments.cost import seconds_of
from eval.experiments.generation import cost
from eval.experiments.replay import bins_of, figures
from eval.experiments.retrieval import (
    hit,
    ndcg,
    recall,
    reciprocal_rank,
)
from eval.experiments.speed import summarize, summarize_set
from eval.measure import bootstrap_interval, middle_95, paired_ratio, resampled_means
from eval.report.tables import follows
from ragaccel import Answer, Passage


def row(decoder, example, decode, prefill=1.0, tokens=10, passes=10, turn=0):
    return {
        "example": example,
        "round": turn,
        "decoder": decoder,
        "tokens": tokens,
        "answer_hash": "h",
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "passes": passes,
        "rows": 2 * passes,
        "draft_tokens": passes,
        "accepted_tokens": tokens - passes,
        "stages": {"draft": 0.1, "verify": decode - 0.2, "model": decode - 0.3},
        "forcing_seconds": 0.01,
    }


def test_ratios_are_paired_within_rounds():
    theirs = {("a", 0): 10.0, ("a", 1): 1.0, ("b", 0): 4.0, ("c", 0): 8.0, ("only", 0): 1.0}
    ours = {("a", 0): 20.0, ("a", 1): 2.0, ("b", 0): 12.0, ("c", 0): 8.0}
    ratio = paired_ratio(ours, theirs)
    assert (ratio.value, ratio.worst, ratio.examples) == (2.0, 1.0, 3)
    assert ratio.low <= ratio.value <= ratio.high
    with pytest.raises(ValueError, match="both sides"):
        paired_ratio(ours, {("z", 0): 1.0})


def test_intervals_hold_the_median_and_shrink_with_more_examples():
    few, many = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0] * 40
    for values in (few, many):
        low, high = bootstrap_interval(values)
        assert low <= 3.0 <= high
        assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval(many)[1] - bootstrap_interval(many)[0] < 2.0
    low, high = bootstrap_interval(list(range(101)))  # by order statistics from 40 to 60
    assert abs(low - 40) <= 2 >= abs(high - 60)
    assert bootstrap_interval([2.5] * 9) == (2.5, 2.5)


def test_summaries_tell_decoding_from_the_whole():
    rows = [
        row("ours", "a", 1.0, passes=2),
        row("ours_plain", "a", 2.0),
        row("generate", "a", 4.0),
        row("ours", "b", 1.0, passes=3),
        row("ours_plain", "b", 2.0),
        row("generate", "b", 4.0),
    ]
    lookup = [row("generate_lookup", example, 2.5, prefill=2.0) for example in "ab"]
    over = summarize([*rows, *lookup])["ours"]
    assert (over["ratio_lookup"], over["end_to_end"]["ratio_lookup"]) == (2.5, 2.25)
    ours = summarize(rows)["ours"]
    assert "ratio_lookup" not in ours
    assert (ours["tokens_per_second"], ours["ratio"], ours["ratio_generate"]) == (10.0, 2.0, 4.0)
    assert ours["end_to_end"]["tokens_per_second"] == 5.0
    assert ours["end_to_end"]["ratio"] == 1.5
    assert ours["acceptance_length"] == 4.0
    assert ours["seconds"]["other"] == pytest.approx(0.2)
    assert ours["identical_to_generate"] == 1.0


def test_answers_are_compared_within_their_round():
    told = {"ours": "ab", "ours_plain": "aa", "generate": "ab"}
    rows = [
        row(name, "a", 1.0, turn=turn) | {"answer_hash": answer}
        for name, answers in told.items()
        for turn, answer in enumerate(answers)
    ]
    found = {name: one["identical_to_generate"] for name, one in summarize(rows).items()}
    assert found == {"ours": 1.0, "ours_plain": 0.5, "generate": 1.0}


def test_efficiency_is_the_share_of_what_passes_promise():
    rows = [
        row("ours", "a", 1.0, passes=2) | {"rows_of_each": [1, 4]},
        row("ours_plain", "a", 3.0) | {"rows_of_each": [1] * 10},
        row("generate", "a", 3.0) | {"stages": {"model": 3.0}},
    ]
    costs = {1: 0.5, 2: 0.75, 8: 2.25}  # so that 4 rows take 1.25
    assert seconds_of([1, 4, 8, 99], costs) == pytest.approx([0.5, 1.25, 2.25, 2.25])
    figures = summarize(rows, costs)
    assert figures["ours"]["efficiency"] == pytest.approx(3.0 / (5.0 * (1.0 + 0.4) / 2))
    assert figures["ours"]["efficiency_harmonic"] == pytest.approx(3.0 / (5.0 * 0.5 / 0.875))
    assert "efficiency" not in figures["ours_plain"] | figures["generate"]
    assert "efficiency" not in summarize(rows)["ours"]


def test_sets_are_summed_up_by_pairs():
    def row(decoder, example, seconds, rows):
        stages = {"draft": 0.1, "verify": seconds}
        return {
            "example": example, "decoder": decoder, "tokens": 4, "decode_seconds": seconds,
            "passes": len(rows), "rows": sum(rows), "rows_of_each": rows, "stages": stages,
        }  # fmt: skip

    rows = [
        row("ours_tree", "a", 4.0, [2, 1, 1]), row("ours_plain", "a", 4.0, [1] * 4),
        row("ours_plain", "b", 4.0, [1] * 4), row("ours_tree", "b", 5.0, [1] * 4),
        row("ours_tree", "alone", 9.0, [1] * 4),
    ]  # fmt: skip
    figures = summarize_set(rows, "ours_tree", {1: 1.0, 2: 1.5})
    assert figures["requests"] == 2
    assert figures["ratio"] == pytest.approx(0.9)
    assert figures["ratio_worst"] == 0.8
    assert figures["acceptance_length"] == pytest.approx(8 / 7)
    assert figures["rows_per_pass"] == pytest.approx(8 / 7)
    assert figures["modelled"] == pytest.approx((3.5 + 4 + 0.2) / 8)
    assert figures["modelled_worst"] == pytest.approx(4.1 / 4)


def test_costs_are_by_token():
    def row(tokens, decode, passes, prefill):
        seconds = {"decode_seconds": decode, "prefill_seconds": prefill}
        return {"tokens": tokens, "passes": passes, **seconds}

    rows = {
        "ours_exact": {("a", 0): row(10, 6.0, 6, 1.0), ("b", 0): row(20, 9.0, 9, 3.0)},
        "ours_tree": {("a", 0): row(20, 8.0, 10, 1.0), ("b", 0): row(20, 6.0, 5, 1.0)},
    }
    figures = cost(rows, "ours_exact", "ours_tree")
    assert figures["decode_seconds"] == pytest.approx(1.5)
    assert figures["prefill_seconds"] == pytest.approx(2.0)
    assert figures["passes"] == pytest.approx((15 / 30) / (15 / 40))


def test_figures_of_one_question_are_those_worked_out_by_hand():
    ranks = [2, 5, 11]  # of four relevant passages, one not found at all
    assert hit(ranks, 4) == 1.0
    assert hit(ranks, 4, depth=1) == 0.0
    assert hit(ranks, 4, depth=2) == 1.0
    assert recall(ranks, 4) == 0.5
    assert recall(ranks, 4, depth=11) == 0.75
    assert reciprocal_rank(ranks, 4) == 0.5
    assert reciprocal_rank([11], 1) == 0.0
    assert reciprocal_rank([11], 1, depth=11) == 1 / 11
    gained = 1 / math.log2(3) + 1 / math.log2(6)
    best = 1 + 1 / math.log2(3) + 1 / math.log2(4) + 1 / math.log2(5)
    assert ndcg(ranks, 4) == pytest.approx(gained / best)
    assert ndcg([1], 1) == 1.0
    assert ndcg([3], 1) == 0.5


def test_answers_are_compared_without_case_marks_and_articles():
    assert words_of("The  Keeper's lamp, an (oil) lamp!") == ["keepers", "lamp", "oil", "lamp"]
    assert exact_match("the Amity.", "Amity") == 1.0
    assert exact_match("Amity Bergen", "Bergen Amity") == 0.0
    assert exact_match("another", "other") == 0.0  # an article inside a word is none


def test_f1_counts_words_as_often_as_they_stand():
    assert f1("oil oil lamp", "oil lamp lamp") == pytest.approx(2 / 3)
    assert f1("the keeper trims the wick", "wick") == pytest.approx(2 * (1 / 3) / (1 / 3 + 1))
    assert f1("wick", "boat") == 0.0
    assert f1("", "boat") == f1("the", "boat") == 0.0
    assert f1("the", "a") == 1.0


def test_an_answer_is_contained_as_whole_words_in_order():
    assert contains("It was built in 1874, of granite.", "in 1874") == 1.0
    assert contains("It was built in 1874.", "1874 in") == 0.0
    assert contains("It was built in 18745.", "1874") == 0.0
    assert contains("1874", "in 1874") == 0.0


def test_what_belongs_together_is_drawn_together():
    values = [0.0] * 50 + [1.0] * 50
    alone = middle_95(resampled_means(values, range(100)))
    together = middle_95(resampled_means(values, [0] * 50 + [1] * 50))
    assert together == (0.0, 1.0)
    assert alone == pytest.approx((0.4, 0.6), abs=0.03)
    uneven = resampled_means([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"])
    assert set(uneven.round(2)) == {0.0, 0.75, 1.0}


ANSWERS = {
    "answers": [
        {"answer": "It burns colza oil. [1]", "expected": "It burns colza oil.",
         "words": "colza oil", "right": True, "retrieved": True, "cited": True},
        {"answer": "Boats come on Monday.", "expected": "The bell is bronze.",
         "words": "bronze", "right": False, "retrieved": False, "cited": True},
        {"answer": "The passages do not tell.", "expected": None,
         "words": None, "right": True, "retrieved": False, "cited": False},
    ],
    "groups": ["a", "b", "c"],
}  # fmt: skip


def test_figures_are_of_the_ranks_and_gains_of_their_differences():
    asked = {
        "set": "x",
        "passages": 9,
        "relevant": [1, 1],
        "groups": ["a", "b"],
        "ranks": {"fused": [[1], [2]], "dense": [[2], []], "text": [[1], [2]]},
    }
    figures = retrieval.search_figures(asked)
    assert figures["modes"]["fused"]["mrr@10"][0] == 0.75
    assert figures["modes"]["dense"]["mrr@10"][0] == 0.25
    assert figures["modes"]["dense"]["hit@1"][0] == 0.0
    assert figures["fused_over"]["dense"]["mrr@10"] == [0.5, 0.5, 0.5]
    assert figures["fused_over"]["text"]["ndcg@10"] == [0.0, 0.0, 0.0]


def test_answers_are_scored_without_citations_and_refusals_apart():
    figures = retrieval.answer_figures(ANSWERS)
    assert figures["questions"] == 2
    assert figures["answer"]["contains"][0] == 0.5
    assert figures["answer"]["exact"][0] == 0.0
    assert figures["answer"]["f1"][0] == pytest.approx(2 * 2 / 6 / 2, abs=1e-4)
    assert figures["quotation"]["contains"] == [1.0, 1.0, 1.0]
    assert figures["answer_when_found"]["contains"] == [1.0, 1.0, 1.0]
    assert (figures["found"], figures["refused"], figures["unanswerable"]) == (1, 1, 1)
    assert figures["right"][0] == 0.5
    assert figures["cited"][0] == 1.0


def test_an_answer_is_verbatim_if_a_file_that_it_cites_has_its_text(tmp_path):
    (tmp_path / "lamp.txt").write_text("The lamp [3] burns\n    colza oil. It is old.\n")
    (tmp_path / "bell.txt").write_text("The bell is bronze.\n")
    passages = tuple(Passage(name, "", path=f"{name}.txt") for name in ("lamp", "bell"))

    def verbatim(text):
        return is_verbatim(Answer(text, (), "stop", None, None, passages), tmp_path)

    assert verbatim("The lamp burns colza oil. [1]")
    assert verbatim("The bell is bronze. [1] [2]")
    assert not verbatim("The lamp burns whale oil. [1]")
    assert not verbatim("The bell is bronze. [1]")  # another file has it
    assert not verbatim("The bell is bronze.")
    assert not verbatim("[2]")


def test_an_answer_that_says_something_else_than_plain_decoding_is_not_the_same_text():
    def row(name, example, said):
        seconds = {"first_token_seconds": 1.0, "total_seconds": 2.0, "stages": {"rest": 2.0}}
        place = {"decoder": name, "example": example, "round": 0, "text_hash": said}
        return {**place, **seconds, "tokens": 4, "passes": 2, "prompt_tokens": 9}

    said = {"generate": "ab", "bare_plain": "ab", "bare": "ax", "bare_again": "xx"}
    rows = [row(name, at, hashes[at]) for name, hashes in said.items() for at in (0, 1)]
    figures = rag.compare(rows)
    assert {name: found["same_text"] for name, found in figures.items()} == {
        **{"generate": 2, "bare_plain": 2},
        **{"bare": 1, "bare_again": 0},
    }


def draft_tokens(bias=0.0, num=20_000):
    rng = random.Random(1)
    probs = [rng.random() for _ in range(num)]
    return [(min(1.0, prob + bias), rng.random() < prob) for prob in probs]


def test_honest_chances_have_no_error_and_others_have_theirs():
    honest, boastful = figures(draft_tokens()), figures(draft_tokens(bias=0.2))
    assert honest["calibration_error"] < 0.02
    assert boastful["calibration_error"] == pytest.approx(0.18, abs=0.03)
    assert honest["below_constant"] > 0.2
    assert boastful["log_loss"] > honest["log_loss"]


def test_bins_hold_as_many_each_and_all_together():
    bins = bins_of(draft_tokens(num=1003))
    assert sum(num for _, _, num in bins) == 1003
    assert max(num for _, _, num in bins) - min(num for _, _, num in bins) <= 1
    assert [estimate for estimate, _, _ in bins] == sorted(estimate for estimate, _, _ in bins)
    assert bins_of([(0.5, True)]) == [(0.5, 1.0, 1)]
    alike = [(0.5, number % 2 == 0) for number in range(40)]
    assert bins_of(alike) == [(0.5, 0.5, 4)] * 10


def test_the_signs_of_quotes_are_weighed_by_what_was_right_and_few_mislead():
    from eval.experiments.answers import (
        Quote,
        cross_validated,
        curve_of,
        fit_least,
        fit_signs,
        shown_shares,
    )  # fmt: skip
    from ragaccel.quotes import QuoteSigns

    draw = random.Random(0)
    quotes = []
    for _ in range(600):  # what is right depends on the relevance, and on nothing else
        for kind, high in (("answerable", 1.0), ("near miss", 0.6), ("off topic", 0.3)):
            relevance = draw.random() * high
            right = kind == "answerable" and relevance > 0.5 + 0.1 * draw.random()
            signs = QuoteSigns(relevance, draw.random())
            quotes.append(Quote(kind, right, signs))
    quotes += [Quote("answerable", False, None)] * 10
    weights, bias = fit_signs(quotes)
    assert weights[0] > 5 * abs(weights[1])
    assert bias < 0
    judged = cross_validated(quotes)
    curve = curve_of(judged)
    least = fit_least(curve, lost=0.1)
    shares = shown_shares(judged, least)
    assert shares["right"] > 0.3
    assert shares["off topic"] <= 0.05
    assert fit_least(curve, lost=0.0) < least < fit_least(curve, lost=0.5)
    assert shown_shares(judged, 0.0)["off topic"] == 1.0
    lost = [point["lost"] for point in curve]
    assert lost[0] == 0.0
    assert lost == sorted(lost)
    assert lost[-1] > 0.1


def test_the_weight_of_the_choice_is_that_which_people_chose_by():
    from eval.experiments.answers import Quote, fit_choice

    draw, weight = random.Random(0), 3.0
    quotes = []
    for _ in range(1500):
        features = [(-draw.expovariate(0.7), draw.random()) for _ in range(draw.randint(2, 5))]
        likely = [math.exp(chance + weight * relevance) for chance, relevance in features]
        (gold,) = draw.choices(range(len(features)), likely)
        quotes.append(Quote("answerable", True, None, features, gold))
    assert fit_choice(quotes) == pytest.approx(weight, rel=0.15)


def test_speed_that_follows_steps_is_told_by_their_correlation():
    def grid(*pairs):
        return {"grid": [{"tokens_per_pass": steps, "ratio": over} for steps, over in pairs]}

    assert "over 3 points their correlation is 1.00" in follows(grid((1, 1), (2, 1.5), (3, 2)))
    assert "-1.00" in follows(grid((1, 3), (2, 2), (3, 1)))
    assert follows(grid((2, 1), (2, 1.5))) == follows(grid((2, 1))) == ""
    assert follows({"grid": [{"tokens_per_pass": 2.0}]}) == ""
