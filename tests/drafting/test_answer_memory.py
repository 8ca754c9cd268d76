import dataclasses
import threading

import numpy as np
import pytest

from ragaccel.drafting import AnswerMemory, AnswerMemoryStats, unit_vector
from ragaccel.errors import ConfigurationError

WORDS = ["ferry", "seven", "leaves", "returns", "moon", "cheese"]


def embed(texts):
    """Embed a text by counting words."""
    return np.array([[text.count(word) for word in WORDS] for text in texts], np.float32) + 0.01


def found(memory, question, namespace="", k=2):
    return [one.answer for one in memory.similar(question, namespace, k)]


def test_the_most_similar_questions_answer_first():
    memory = AnswerMemory(embed)
    memory.add("ferry leaves seven", "At seven.")
    memory.add("ferry leaves", "Daily.")
    memory.add("moon cheese", "No.")
    best, second = memory.similar("ferry leaves")
    assert (best.question, best.answer) == ("ferry leaves", "Daily.")
    assert best.similarity == pytest.approx(1)
    assert second.answer == "At seven."
    assert 0.6 <= second.similarity < best.similarity
    assert found(memory, "ferry leaves", k=1) == ["Daily."]
    assert found(memory, "ferry leaves", k=9) == ["Daily.", "At seven."]
    with pytest.raises(dataclasses.FrozenInstanceError):
        best.answer = "x"


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1, 1e200])
def test_vectors_have_length_one_whatever_their_scale(scale):
    vector = unit_vector(np.array([[3.0, 4.0]]) * scale)
    assert vector.dtype == np.float32
    assert vector == pytest.approx([0.6, 0.8], abs=1e-3)


def test_what_is_not_similar_enough_is_not_found():
    memory = AnswerMemory(embed, min_similarity=0.9)
    memory.add("ferry leaves seven", "At seven.")
    assert found(memory, "ferry leaves") == []
    assert found(memory, "ferry leaves seven") == ["At seven."]


def test_of_equally_similar_ones_the_newer_comes_first():
    memory = AnswerMemory(embed)
    for number in range(37):
        memory.add(f"ferry {number}", f"answer {number}")
    assert found(memory, "ferry", k=3) == ["answer 36", "answer 35", "answer 34"]
    memory.add("ferry 3", "answer 3 again")
    assert found(memory, "ferry", k=2) == ["answer 3 again", "answer 36"]


def test_the_same_question_has_one_answer_and_is_embedded_once():
    calls = []
    memory = AnswerMemory(lambda texts: calls.append(texts) or embed(texts))
    memory.add("ferry", "old")
    memory.add("ferry", "new")
    assert calls == [["ferry"]]
    assert found(memory, "ferry") == ["new"]
    assert memory.stats().entries == 1
    assert memory.stats().num_bytes == len("ferry") + len("new") + 4 * len(WORDS)


@pytest.mark.parametrize(("question", "answer"), [("", "a"), ("q", ""), (" \n", "a"), ("q", "\t")])
def test_blank_ones_are_not_remembered(question, answer):
    memory = AnswerMemory(embed)
    memory.add(question, answer)
    assert memory.stats().entries == 0
    assert memory.similar("") == []


def test_nothing_of_one_namespace_is_found_in_another():
    memory = AnswerMemory(embed)
    memory.add("ferry", "mine", "a")
    memory.add("ferry", "theirs", "b")
    assert found(memory, "ferry", "a") == ["mine"]
    assert found(memory, "ferry", "b") == ["theirs"]
    assert found(memory, "ferry") == []
    memory.forget("a")
    assert found(memory, "ferry", "a") == []
    assert found(memory, "ferry", "b") == ["theirs"]
    memory.clear()
    assert memory.stats().entries == memory.stats().num_bytes == 0


def test_the_least_recently_used_is_evicted():
    def filled():
        memory = AnswerMemory(embed, max_bytes=1024)
        memory.add("moon 0", "x" * 200)
        memory.add("cheese 1", "x" * 200)
        memory.add("seven 2", "x" * 200)
        found(memory, "moon")
        memory.add("ferry 3", "x" * 200)
        memory.add("returns 4", "é" * 100)
        return memory

    memory = filled()
    assert [key.question for key in memory._entries] == [
        "seven 2",
        "moon 0",
        "ferry 3",
        "returns 4",
    ]
    assert list(memory._entries) == list(filled()._entries)
    assert memory.stats().evictions == 1
    assert memory.stats().num_bytes <= 1024
    memory.add("ferry 5", "x" * 2000)
    assert memory.stats().entries == 4, "what can never fit drives nothing out"


def test_stats_count_hits_and_misses():
    memory = AnswerMemory(embed)
    memory.similar("ferry")
    memory.add("ferry", "a")
    memory.similar("ferry")
    memory.similar("moon")
    assert memory.stats() == AnswerMemoryStats(1, 5 + 1 + 4 * len(WORDS), 0, 1, 2)


def test_where_nothing_is_remembered_nothing_is_embedded():
    def never(texts):
        raise AssertionError

    assert AnswerMemory(never).similar("ferry") == []


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.zeros((1, 3)), "zeros"),
        (np.full((1, 3), np.nan), "NaN or infinite"),
        (np.array([[1.0, np.inf]]), "NaN or infinite"),
        (np.ones(3), r"shape \(3,\)"),
        (np.ones((2, 3)), r"shape \(2, 3\)"),
        (np.ones((1, 0)), r"shape \(1, 0\)"),
        (np.ones((1, 1, 3)), r"shape \(1, 1, 3\)"),
        (np.array([["a"]]), "type <U1"),
        (None, r"shape \(\)"),
        ([[1.0], [1.0, 2.0]], r"array \[N, D\]"),
    ],
)
def test_an_embedder_that_gives_no_vector_is_refused(returned, message):
    memory = AnswerMemory(lambda texts: returned)
    with pytest.raises(ConfigurationError, match=message):
        memory.add("question", "answer")
    assert memory.stats().entries == 0


def test_an_embedder_that_changes_its_dimension_is_refused():
    sizes = iter([3, 4])
    memory = AnswerMemory(lambda texts: np.ones((1, next(sizes))))
    memory.add("one", "a")
    with pytest.raises(ConfigurationError, match="a vector of 4 numbers, but one of 3 before"):
        memory.similar("two")


@pytest.mark.parametrize(
    "settings",
    [{"max_bytes": 10}, {"min_similarity": 1.5}, {"min_similarity": float("nan")}],
)
def test_bounds_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        AnswerMemory(embed, **settings)


def test_less_than_one_answer_cannot_be_asked_for():
    with pytest.raises(ConfigurationError, match="k must be 1"):
        AnswerMemory(embed).similar("ferry", k=0)


def test_threads_share_it_and_none_waits_for_an_embedder():
    inside, go_on = threading.Event(), threading.Event()

    def slow(texts):
        if texts == ["slow moon"]:
            inside.set()
            assert go_on.wait(30)
        return embed(texts)

    memory = AnswerMemory(slow)
    frontier = threading.Thread(target=memory.add, args=("slow moon", "cheese"))
    frontier.start()
    assert inside.wait(30)
    threads = [
        threading.Thread(target=lambda n=n: [memory.add(f"ferry {n} {i}", "x") for i in range(30)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.stats().entries == 120
    go_on.set()
    frontier.join()
    assert found(memory, "moon") == ["cheese"]
