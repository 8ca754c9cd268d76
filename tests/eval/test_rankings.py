"""The figures of retrieval and of answers, against cases worked out by hand and scikit-learn."""

import math
import random

import pytest

from eval.data import Question
from eval.experiments.answers import contains, exact_match, f1, words_of
from eval.experiments.retrieval import (
    METRICS,
    choose,
    gain,
    hit,
    ndcg,
    ranks_of,
    recall,
    reciprocal_rank,
)
from eval.measure import middle_95, resampled_means, spread


def test_ranks_are_places_from_one():
    assert ranks_of({"b", "d", "z"}, ["a", "b", "c", "d"]) == [2, 4]
    assert ranks_of({"z"}, ["a"]) == []


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


def test_more_relevant_passages_than_places_can_still_be_found_perfectly():
    assert ndcg(range(1, 11), 25) == pytest.approx(1.0)
    assert recall(range(1, 11), 25) == 0.4


def test_nothing_found_and_nothing_to_find_are_worth_nothing():
    for metric in METRICS.values():
        assert metric([], 3) == metric([], 0) == 0.0


def test_discounted_gain_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = random.Random(1)
    for _ in range(50):
        relevant = [rng.random() < 0.3 for _ in range(30)]
        if not any(relevant):
            continue
        ranks = [rank for rank, is_relevant in enumerate(relevant, 1) if is_relevant]
        falling = [[-float(rank) for rank in range(30)]]
        theirs = metrics.ndcg_score([relevant], falling, k=10)
        assert ndcg(ranks, sum(relevant)) == pytest.approx(theirs)


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


def test_intervals_agree_with_scipys_bootstrap():
    stats = pytest.importorskip("scipy.stats")
    np = pytest.importorskip("numpy")
    rng = random.Random(2)
    values = [rng.random() for _ in range(60)]
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(5)
    ).confidence_interval
    mean, low, high = spread(values, range(60))
    assert mean == pytest.approx(sum(values) / 60, abs=1e-4)
    assert (low, high) == pytest.approx(tuple(theirs), abs=0.006)
    with pytest.raises(ValueError, match="nothing to average"):
        spread([], [])


def halves(num=40):
    questions = [Question("?", frozenset(), f"article {i}") for i in range(num)]
    return {"set": questions}, [question.is_held_out for question in questions]


def test_settings_are_chosen_by_one_half_and_judged_by_the_other():
    questions, held_out = halves()
    assert 10 < sum(held_out) < 30
    worth = {
        "library": {"set": [0.5] * 40},
        "lucky": {"set": [0.2 if kept else 0.9 for kept in held_out]},
        "good": {"set": [0.8 if kept else 0.6 for kept in held_out]},
    }
    assert choose(worth, questions) == "lucky"
    lost = gain(worth["lucky"], worth["library"], questions)
    assert lost["sets"]["set"] == pytest.approx([-0.3, -0.3, -0.3])
    assert lost["mean"] == pytest.approx([-0.3, -0.3, -0.3])


def test_an_article_is_on_one_side_whatever_is_asked_about_it():
    for article in ("Hob Reef", "Wether Holm", "Gannet Ledge"):
        asked = [Question("?" * n, frozenset({f"p{n}"}), article) for n in range(9)]
        assert len({question.is_held_out for question in asked}) == 1


def test_a_small_set_counts_as_much_as_a_large_one():
    large, _ = halves(80)
    small = [Question("?", frozenset(), f"other {i}") for i in range(12)]
    questions = {**large, "small": small}
    worth = {
        "for the large": {"set": [0.6] * 80, "small": [0.0] * 12},
        "for the small": {"set": [0.5] * 80, "small": [0.3] * 12},
    }
    assert choose(worth, questions) == "for the small"
    gained = gain(worth["for the small"], worth["for the large"], questions)
    assert gained["mean"][0] == pytest.approx(0.1)


def test_too_few_questions_to_judge_by_are_refused():
    same = [Question("?", frozenset(), "one article")] * 5
    with pytest.raises(ValueError, match="few: too few questions"):
        choose({"any": {"few": [1.0] * 5}}, {"few": same})
