import random
import time

import pytest
from hypothesis import given, settings, strategies as st

from ragaccel.answer import (
    TOKEN_PATTERN,
    Highlighter,
    Segment,
    cited_numbers,
    copied_spans,
    segments,
)
from ragaccel.passage import Passage

LAMP = "The lamp burns rapeseed oil. Its keeper trims the wick at dusk, and again at midnight."
TIDE = "At spring tide the water rises 4.7 metres. The lamp burns rapeseed oil all night long."


def passages(*texts):
    return [Passage(f"p{i}", text) for i, text in enumerate(texts, start=1)]


def brute_force(text, given):
    """The inclusion-maximal qualifying runs, by looking at every pair of tokens."""
    tokens = TOKEN_PATTERN.findall(text)
    starts = [0]
    for token in tokens:
        starts.append(starts[-1] + len(token))
    others = [TOKEN_PATTERN.findall(passage.text) for passage in given]
    held = set()
    for other in others:
        for i in range(len(other)):
            for j in range(i + 1, len(other) + 1):
                held.add(tuple(other[i:j]))
    runs = []
    for i in range(len(tokens)):
        for j in range(i + 1, len(tokens) + 1):
            run = tokens[i:j]
            if run[0].isspace() or run[-1].isspace() or tuple(run) not in held:
                continue
            weight = sum(not token.isspace() for token in run)
            if any(map(str.isalnum, "".join(run))) and (weight >= 5 or starts[j] - starts[i] >= 24):
                runs.append((starts[i], starts[j]))
    return [r for r in runs if not any(o != r and o[0] <= r[0] and r[1] <= o[1] for o in runs)]


@pytest.mark.parametrize(
    ("text", "passage", "copied"),
    [
        ("It says: The lamp burns rapeseed oil. [1]", LAMP, ["The lamp burns rapeseed oil."]),
        # short runs and rows of punctuation do not count, 24 characters are enough
        ("a lamp burns oil", LAMP, []),
        ("|---|---|---|---|---|---|---|", "|---|---|---|---|---|---|", []),
        (
            "see github.com/example/house",
            "at github.com/example/house",
            ["github.com/example/house"],
        ),
        # runs end at the boundaries of words
        ("it costs about 4.70 euros a day", "it costs about 4.7 euros a week", []),
        ("they can't have been here before", "they can have been here", []),
        ("one two three four fivefold", "one two three four five", []),
        ("one two three four five fold", "one two three four fives", []),
        ("答えは東京タワーです", "高い東京タワーで", ["東京タワーで"]),
        ("", LAMP, []),
        (LAMP, "   ", []),
    ],
)
def test_what_is_copied(text, passage, copied):
    spans = copied_spans(text, passages(passage))
    assert [text[span.start : span.end] for span in spans] == copied
    assert [passage[span.passage_start : span.passage_end] for span in spans] == copied


def test_of_equal_passages_the_cited_one_is_named_then_the_last_one_then_the_best():
    same = passages("zzz", LAMP, TIDE)
    assert copied_spans("The lamp burns rapeseed oil [3].", same)[0].passage_number == 3
    assert copied_spans("The lamp burns rapeseed oil.", same)[0].passage_number == 2
    both = "At spring tide the water rises 4.7 metres. So: The lamp burns rapeseed oil."
    assert [s.passage_number for s in copied_spans(both, same)] == [3, 2]
    both = "At spring tide the water rises 4.7 metres. So: The lamp burns rapeseed oil"
    assert [s.passage_number for s in copied_spans(both, same)] == [3, 3]


words = st.sampled_from(
    ["the", "lamp", "oil", "a", "1,000", "don't", "x.y", "é", "東", "京", "Straße"]
)
glue = st.sampled_from([" ", "  ", "\n", ". ", ", ", "-", "'", "", "[1] ", "“", "."])
prose = st.lists(st.tuples(words, glue), max_size=25).map(
    lambda pairs: "".join(word + mark for word, mark in pairs)
)


@settings(max_examples=300, deadline=None)
@given(prose, st.lists(prose, max_size=3), st.data())
def test_spans_are_the_maximal_runs_of_a_brute_force_search(text, others, data):
    if others and data.draw(st.booleans()):  # make copying likely
        source = data.draw(st.sampled_from(others))
        cut = data.draw(st.integers(0, len(source)))
        text = text + source[cut:] + data.draw(prose)
    given_passages = passages(*others)
    spans = copied_spans(text, given_passages)
    assert [(s.start, s.end) for s in spans] == brute_force(text, given_passages)
    for span in spans:
        passage = given_passages[span.passage_number - 1]
        assert passage.passage_id == span.passage_id
        assert passage.text[span.passage_start : span.passage_end] == text[span.start : span.end]


@settings(max_examples=300, deadline=None)
@given(prose, st.lists(prose, max_size=3), st.data())
def test_streamed_marks_are_those_of_the_whole_answer(text, others, data):
    if others:
        source = data.draw(st.sampled_from(others))
        text += source + data.draw(st.sampled_from(["", " [2]", ". [1, 3] so", " [x", " ("]))
        text += source[data.draw(st.integers(0, len(source))) :]
    highlighter = Highlighter(passages(*others))
    shown = []
    at = 0
    while at < len(text):
        size = data.draw(st.integers(1, 9))
        shown += highlighter.feed(text[at : at + size])
        at += size
    shown += highlighter.finish()
    assert "".join(piece.text for piece in shown) == text
    whole = segments(text, copied_spans(text, passages(*others)))
    streamed, expected = (
        [piece.passage_number for piece in pieces for _ in piece.text] for pieces in (shown, whole)
    )
    assert streamed == expected


def test_streamed_marks_wait_for_the_citation_where_passages_hold_the_same():
    both = passages(LAMP, TIDE)
    same = "The lamp burns rapeseed oil"
    highlighter = Highlighter(both)
    assert highlighter.feed(f"{same} ") == []
    shown = [*highlighter.feed("[2"), *highlighter.feed("] and so on ")]
    assert shown[0] == Segment(same, 2)
    assert highlighter.feed(LAMP)[-1].passage_number == 1


def test_streamed_marks_lag_by_a_few_words_only():
    highlighter = Highlighter(passages(LAMP))
    shown = ""
    for i, letter in enumerate(LAMP):
        shown += "".join(piece.text for piece in highlighter.feed(letter))
        assert i - len(shown) <= 40
    assert highlighter.feed("") == []


def test_segments_cover_the_text_and_never_overlap():
    text = "At spring tide the water rises 4.7 metres. The lamp burns rapeseed oil all day."
    overlapping = passages(TIDE[:70], TIDE[20:])
    spans = copied_spans(text, overlapping)
    assert len(spans) == 2
    assert spans[0].end > spans[1].start
    pieces = segments(text, spans)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.passage_number for piece in pieces] == [1, 2, 0]
    assert segments("own words", []) == [Segment("own words")]
    assert segments("", []) == []


def test_citations_are_read_from_the_text():
    text = "One [2]. Two [1, 3] and [1-2], not x[1] nor [0] nor [12] nor [text]."
    assert cited_numbers(text, 3) == [2, 1, 3]
    passage = "The mole was built in 1861 [2] and lengthened."  # with brackets of its own
    assert cited_numbers(f"{passage} [1]", 2, copied_spans(passage, passages(passage))) == [1]


def test_twenty_long_passages_take_milliseconds():
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(800)]
    long = [" ".join(rng.choices(vocabulary, k=330)) for _ in range(20)]
    text = long[3][100:500] + " indeed " + long[8][900:1300] + " and so on."
    given_passages, seconds = passages(*long), []
    for _ in range(5):
        began = time.perf_counter()
        assert len(copied_spans(text, given_passages)) == 2
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.05
