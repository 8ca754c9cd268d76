"""The sentence splitter: exact, ordered spans; Markdown, code and tables kept whole."""

import pytest
from hypothesis import given, strategies as st

from ragaccel.passage import is_heading, sentence_spans, split_sentences

PIECES = [
    "The lamp burns. ", "It costs 3.5 EUR. ", "Dr. Smith", "\n", "\n\n", "# Head\n", "- item\n",
    "1. First\n", "```\ncode x = 1\n\nmore\n```\n", "| a | b |\n", "|---|---|\n", "a", ".", "! ",
    "Name: Ada\n", "你好。", "  ", "e.g. this", "```", "=====\n", "—", "🙂", "\t", "No. 5", "\r\n",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=30).map("".join)


@given(texts)
def test_spans_are_exact_ordered_and_trimmed(text):
    position = 0
    for start, end in sentence_spans(text):
        assert position <= start < end <= len(text)
        assert text[start:end] == text[start:end].strip()
        position = end


@given(texts)
def test_no_word_is_lost(text):
    covered = "".join(split_sentences(text))
    assert [c for c in covered if c.isalnum()] == [c for c in text if c.isalnum()]


@given(texts)
def test_no_fragment_stands_alone(text):
    sentences = split_sentences(text)
    if len(sentences) > 1:
        assert min(map(len, sentences)) > 2


def test_prose():
    text = (
        "Some prose, hard wrapped over\ntwo lines as e.g. Dr. Smith does. Then another! It costs"
        ' 3.5 EUR. "Quoted." Next? Yes.'
    )
    assert split_sentences(text) == [
        "Some prose, hard wrapped over\ntwo lines as e.g. Dr. Smith does.",
        "Then another!",
        "It costs 3.5 EUR.",
        '"Quoted."',
        "Next?",
        "Yes.",
    ]


def test_markdown_structure_ends_sentences():
    text = (
        "# Title\nIntro without a stop\n\n## Next one\n1. Mix. Stir.\n2. Bake\n- item one,\n  long"
    )
    assert split_sentences(text) == [
        "# Title",
        "Intro without a stop",
        "## Next one",
        "1. Mix.",
        "Stir.",
        "2. Bake",
        "- item one,\n  long",
    ]


def test_code_stays_whole_and_a_long_block_is_cut_at_blank_lines():
    short = "Run this:\n\n```bash\npip install x\n\npip check\n```\nThen go on."
    assert split_sentences(short)[1] == "```bash\npip install x\n\npip check\n```"
    long = (
        "```\n" + "\n\n".join(f"value_{i} = compute({i}) + {'x' * 60}" for i in range(12)) + "\n```"
    )
    assert len(split_sentences(long)) == 12


def test_table_rows_and_the_rule_below_the_head():
    text = "| a | b |\n|---|---|\n| one | 1 |\n| two | 2 |"
    assert split_sentences(text) == ["| a | b |\n|---|---|", "| one | 1 |", "| two | 2 |"]


def test_short_lines_are_sentences_and_rules_are_none():
    assert split_sentences("Name: Ada Lovelace\nBorn: 1815\n\n---\n\nTail") == [
        "Name: Ada Lovelace",
        "Born: 1815",
        "Tail",
    ]
    assert split_sentences("Setext title\n=====\nBody follows.") == [
        "Setext title\n=====",
        "Body follows.",
    ]


def test_scripts_without_spaces_between_sentences():
    assert split_sentences("我们来了。你们好吗？") == ["我们来了。", "你们好吗？"]


def test_nothing_yields_nothing():
    assert split_sentences("") == split_sentences(" \n ") == []
    assert split_sentences("a") == ["a"]


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        ("# Ropes\nThey are long.", ["# Ropes"]),
        ("Ropes\n=====\n\nThey are long.", ["Ropes\n====="]),
        ("Nora Pell (1934-2018)\n\nNora Pell swam.", ["Nora Pell (1934-2018)"]),
        ("Keep in mind\n\n- one rope\n- two boats\n\nGo on.", ["Keep in mind"]),
        ("She swam.\n\nEdda Lorne", ["Edda Lorne"]),
        ("It is short.\n\nThat is all\nthere is.", []),
        ("Bring these:\n\n| rope | 20 m |\n", []),
        ("The last words stand alone", []),
    ],
)
def test_headings_say_nothing_themselves(text, headings):
    assert [text[s:e] for s, e in sentence_spans(text) if is_heading(text, s, e)] == headings
