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
    strict = AnswerMemory(embed, min_similarity=0.9)
    strict.add("ferry leaves seven", "At seven.")
    assert found(strict, "ferry leaves") == []
    assert found(strict, "ferry leaves seven") == ["At seven."]


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
    assert memory.similar("ferry") == []
    assert calls == [], "nothing is remembered, so nothing is embedded"
    memory.add("ferry", "old")
    memory.add("ferry", "new")
    assert calls == [["ferry"]]
    assert found(memory, "ferry") == ["new"]
    found(memory, "moon")
    assert memory.stats() == AnswerMemoryStats(1, 5 + 3 + 4 * len(WORDS), 0, 1, 2)


def test_nothing_of_one_namespace_is_found_in_another():
    memory = AnswerMemory(embed)
    for question, answer in (("", "a"), ("q", ""), (" \n", "a"), ("q", "\t")):  # not remembered
        memory.add(question, answer)
    assert memory.stats().entries == 0
    memory.add("ferry", "mine", "a")
    memory.add("ferry", "theirs", "b")
    assert [found(memory, "ferry", name) for name in ("a", "b", "")] == [["mine"], ["theirs"], []]
    memory.forget("a")
    assert [found(memory, "ferry", name) for name in ("a", "b", "")] == [[], ["theirs"], []]
    memory.clear()
    assert memory.stats().entries == memory.stats().num_bytes == 0


def test_the_least_recently_used_is_evicted():
    memory = AnswerMemory(embed, max_bytes=1024)
    for question in ("moon 0", "cheese 1", "seven 2"):
        memory.add(question, "x" * 200)
    found(memory, "moon")
    memory.add("ferry 3", "x" * 200)
    memory.add("returns 4", "é" * 100)
    memory.add("ferry 5", "x" * 2000)  # can never fit, so it drives nothing out
    kept = [word for word in WORDS if found(memory, word)]
    assert kept == ["ferry", "seven", "returns", "moon"]
    assert memory.stats().evictions == 1
    assert memory.stats().num_bytes <= 1024
    exact = AnswerMemory(embed, max_bytes=1024)
    size = 1024 - 4 * len(WORDS) - len("ferry")
    exact.add("ferry", "x" * size)
    assert exact.stats().num_bytes == 1024
    exact.add("ferry", "x" * (size + 1))
    assert exact.stats().entries == 0


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1, 1e200])
def test_vectors_have_length_one_whatever_their_scale(scale):
    vector = unit_vector(np.array([[3.0, 4.0]]) * scale)
    assert vector.dtype == np.float32
    assert vector == pytest.approx([0.6, 0.8], abs=1e-3)


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
        (np.ones((1, 4)), "a vector of 4 numbers, but one of 3 before"),
    ],
)
def test_an_embedder_that_gives_no_vector_is_refused(returned, message):
    answers = iter([np.ones((1, 3)), returned])
    memory = AnswerMemory(lambda texts: next(answers))
    memory.add("one", "a")
    with pytest.raises(ConfigurationError, match=message):
        memory.add("question", "answer")
    assert memory.stats().entries == 1


def test_limits_that_cannot_work_are_refused():
    for settings in ({"max_bytes": 1023}, {"min_similarity": 1.5}, {"min_similarity": np.nan}):
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            AnswerMemory(embed, **settings)
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
    first = threading.Thread(target=memory.add, args=("slow moon", "cheese"))
    first.start()
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
    first.join()
    assert found(memory, "moon") == ["cheese"]
